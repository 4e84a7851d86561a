"""The command line: verbs, flags and exit codes. Each verb imports what it needs, so that help and typing errors answer at once.

Exit codes: 0 done, 1 something failed, 2 bad input, 130 and 143 interrupted.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from experiments.errors import ExperimentError, InputError

if TYPE_CHECKING:
    from experiments.resolve import Resolver
    from experiments.sweep import Sweep

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Experiments on attention mechanisms: sweeps over variants, heads and temperatures, measured and compared fairly.",
)

File = Annotated[Path, typer.Argument(help="A sweep file.", show_default=False)]
Overrides = Annotated[list[str] | None, typer.Argument(help="key=value, such as base.train.steps=100.", show_default=False)]
Plugin = Annotated[list[str] | None, typer.Option("--plugin", help="A Python file with variants or tasks.", show_default=False)]
Home = Annotated[Path, typer.Option("--home", help="Folder of studies, artifacts and the default MLflow file.")]
Tracking = Annotated[
    str | None, typer.Option("--tracking-uri", help="MLflow's address; else MLFLOW_TRACKING_URI, else HOME/mlflow.db.")
]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
HOME = Path(".experiments")
_stdout = 1  # the descriptor for the document of --json


def main() -> None:
    """Run a verb; a person's mistake is one line on standard error."""
    try:
        if "--json" in sys.argv[1:]:
            _keep_for_json()
        app()
    except ExperimentError as error:
        registry = sys.modules.get("core.registry")  # where it is not loaded, no plugin is
        if registry is not None and registry.strict() and error.__cause__ is not None:
            traceback.print_exception(error.__cause__)
        _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader of a pipe has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(1)


def _keep_for_json() -> None:
    """From now on what a plugin prints, or a child of it, or at its exit, goes to standard error: a machine reads the other."""
    global _stdout
    _stdout = os.dup(1)
    os.dup2(2, 1)


def _print_json(document: Any) -> None:
    with os.fdopen(os.dup(_stdout), "w", encoding="utf-8") as out:
        print(json.dumps(document), file=out)


def _fail(message: str, code: int) -> None:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(code)


def _target(tracking: str | None, home: Path) -> str:
    """The tracking address: flag, environment, or the file in the home folder."""
    given = tracking or os.environ.get("MLFLOW_TRACKING_URI")
    from experiments import tracking as mirror

    return mirror.check_target(given) if given else mirror.default_target(home)


@app.command()
def run(
    file: File,
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, list what would run, write nothing.")] = False,
    new: Annotated[bool, typer.Option("--new", help="Begin a new study; the one of this name is kept beside it.")] = False,
    trials: Annotated[int | None, typer.Option(min=1, help="budget.trials: a total over all invocations.")] = None,
    parallel: Annotated[int | None, typer.Option(min=1, help="budget.parallel: runs at a time.")] = None,
    executor: Annotated[str, typer.Option(help="Where runs go: local.")] = "local",
    plugin: Plugin = None,
    home: Home = HOME,
    tracking_uri: Tracking = None,
    json_output: Json = False,
) -> None:
    """Run a sweep, or go on with it; ends with a table and what it means."""
    from experiments import sweep as sweeps
    from experiments.console import Terminal

    if executor != "local":
        raise InputError(f"--executor {executor}: unknown executor (there are: local)")
    given = list(overrides or [])
    given += [f"budget.{name}={value}" for name, value in (("trials", trials), ("parallel", parallel)) if value is not None]
    sweep = sweeps.load(file, given, plugin or [])
    target = _target(tracking_uri, home)
    terminal = Terminal(sys.stderr if json_output else sys.stdout)
    if dry_run:
        from experiments import resources
        from experiments import show as costs

        resources.devices(sweep), resources.threads(sweep)
        resolver = _resolve(sweep)
        _print_json(costs.plan_json(sweep, resolver)) if json_output else print(costs.plan(sweep, resolver))
        return
    from experiments.executors.local import LocalExecutor

    workers = LocalExecutor()  # its server loads torch while this process does
    resolver = _resolve(sweep)
    from experiments import predict, resources, store, study

    resources.devices(sweep), resources.threads(sweep)  # before anything is moved or written
    if new:
        kept = store.set_aside(store.study_folder(home, sweep.file.name))
        if kept is not None:
            terminal.say(f"the earlier study is kept in {kept}")
    with terminal:
        outcome = study.Study(sweep, resolver, home, target, workers, terminal, predict.foresee).run()
    if json_output:
        _print_json(study.as_json(outcome))
    else:
        print("\n" + outcome.summary)
        print(f"study folder: {outcome.folder}")
        experiment = f"/#/experiments/{outcome.experiment_id}" if outcome.experiment_id else ""
        address = (
            f"{target}{experiment}"
            if target.startswith("http")
            else f"python -m experiments ui --home {home}   (http://127.0.0.1:5000)"
        )
        print(f"compare the runs in MLflow: {address}")
    if not outcome.mirrored:
        print(f"warning: MLflow at {target} has not taken all records; the same command sends them", file=sys.stderr)
    if outcome.interrupted is not None:
        print("interrupted; the same command goes on", file=sys.stderr)
        sys.exit(128 + outcome.interrupted)
    sys.exit(1 if outcome.failed_runs or not outcome.complete else 0)


@app.command()
def show(file: File, overrides: Overrides = None, plugin: Plugin = None, json_output: Json = False) -> None:
    """The resolved sweep, its grid, and what it will cost: parameters, memory, operations, time."""
    from experiments import show as costs
    from experiments import sweep as sweeps

    sweep = sweeps.load(file, list(overrides or []), plugin or [])
    resolver = _resolve(sweep)
    if json_output:
        _print_json(costs.as_json(sweep, resolver))
        return
    print(costs.plan(sweep, resolver))
    print(costs.costs(sweep, resolver))


@app.command(name="list")
def list_(plugin: Plugin = None, json_output: Json = False) -> None:
    """Variants (and broken plugins), tasks, and the metrics that can be an objective."""
    from experiments import inventory

    _load_plugins(plugin or [])
    found = inventory.collect()
    _print_json(found) if json_output else print(inventory.words(found))


@app.command()
def check(
    name: Annotated[str | None, typer.Argument(help="A variant's name, or a plugin file.", show_default=False)] = None,
    all_: Annotated[bool, typer.Option("--all", help="Every variant that can be built.")] = False,
    plugin: Plugin = None,
    json_output: Json = False,
) -> None:
    """The contract suite on a variant: each rule passed or failed, with the reason."""
    import variants  # noqa: F401
    from core import registry
    from core.contract import check as check_variant

    if (name is None) == (not all_):
        raise InputError("check: give the name of a variant, a plugin file, or --all")
    _load_plugins(plugin or [])
    if name is None:
        wanted = registry.names()
    elif name.endswith(".py"):
        wanted = _load_plugins([name])
        if not wanted:
            raise InputError(f"{name}: registers no variant (write @register(...) above its class)")
    else:
        wanted = [name]
        try:
            registry.get(name)
        except (ValueError, ImportError) as error:
            hint = f"; did you mean check {name}.py?" if Path(f"{name}.py").is_file() else ""
            raise InputError(f"{error}{hint}") from error
    reports = []
    for variant in wanted:
        reports.append(check_variant(variant))
        if not json_output:
            print(reports[-1], flush=True)
    if json_output:
        _print_json([report.as_dict() for report in reports])
    sys.exit(0 if all(report.ok for report in reports) else 1)


@app.command()
def bench(
    lengths: Annotated[str, typer.Option(help="Sequence lengths, as 512,1024.")] = "512,1024,2048,4096,8192",
    heads: Annotated[str, typer.Option(help="Numbers of heads, as 1,4.")] = "4",
    variant: Annotated[
        list[str] | None, typer.Option("--variant", help="NAME or NAME:setting=value,...; again for more.", show_default=False)
    ] = None,
    batch: Annotated[int, typer.Option(min=1)] = 1,
    head_dim: Annotated[int, typer.Option(min=1)] = 64,
    rounds: Annotated[int, typer.Option(min=3, help="Samples of each; each round calls everything once.")] = 9,
    limit: Annotated[
        float, typer.Option(min=0.01, help="Seconds that one thing may take at one length; else it is left out.")
    ] = 20.0,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; by default all cores.", show_default=False)] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto.")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    plain: Annotated[bool, typer.Option("--plain/--no-plain", help="Measure plain paths too.")] = True,
    peers: Annotated[bool, typer.Option("--peers", help="Measure installed packages too.")] = False,
    plugin: Plugin = None,
    home: Home = HOME,
    tracking_uri: Tracking = None,
    json_output: Json = False,
) -> None:
    """Time and memory of attention by length, as ratios to torch's fused kernel."""
    from experiments.console import Terminal

    target = _target(tracking_uri, home)
    terminal = Terminal(sys.stderr if json_output else sys.stdout)
    _load_plugins(plugin or [])
    from experiments import bench as benchmark
    from experiments import bench_report, contenders

    settings = benchmark.settings(
        _integers("--lengths", lengths), _integers("--heads", heads), batch, head_dim, rounds, limit, device, dtype, threads
    )
    measured = benchmark.measure(contenders.chosen(variant or [], plain, peers), settings, terminal.say)
    found = bench_report.as_json(measured)
    folder = bench_report.record(measured, found, home, target, terminal.say)
    if json_output:
        _print_json(found)
    else:
        kept = f"kept with a figure in {folder}, and in MLflow (experiment {bench_report.NAME})"
        print("\n".join(["", *bench_report.tables(found), "", kept]))


def _integers(option: str, given: str) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in given.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1 or len(set(found)) < len(found):
        raise InputError(f"{option}: must be different whole numbers above 0 with commas between, got {given!r}")
    return tuple(sorted(found))


@app.command()
def new(name: Annotated[str, typer.Argument(help="Lower snake case, such as my_attention.", show_default=False)]) -> None:
    """Write NAME.py, a variant that passes the contract suite, and test_NAME.py, into the working directory."""
    from experiments import templates

    for path in templates.write(name, Path.cwd()):
        print(f"wrote {path.name}")
    print(f"next: python -m experiments check {name}.py, then name it under `plugins:` in a sweep file")


@app.command()
def ui(
    home: Home = HOME,
    tracking_uri: Tracking = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="On 127.0.0.1.")] = 5000,
    open_: Annotated[bool, typer.Option("--open/--no-open", help="Open a browser.")] = True,
) -> None:
    """The MLflow UI on 127.0.0.1."""
    from experiments import tracking
    from experiments.ui import serve

    target = _target(tracking_uri, home)
    if target == tracking.default_target(home) and not (home / "mlflow.db").exists():
        raise InputError(f"{home}: holds no study yet; run a sweep first, or give --home")
    sys.exit(serve(target, home, port, open_browser=open_ and sys.stdout.isatty()))


@app.command()
def schema() -> None:
    """JSON Schema of sweep files, for editors."""
    from experiments.schema import json_schema

    print(json.dumps(json_schema(), indent=2))


def _resolve(sweep: Sweep) -> Resolver:
    """Ask tasks and variants for their settings, and check every configuration."""
    from experiments.resolve import Resolver

    resolver = Resolver(sweep)
    resolver.check()
    return resolver


def _load_plugins(paths: list[str]) -> list[str]:
    """Import plugin files; the names of the variants that they register."""
    import variants  # noqa: F401
    from core import registry
    from core.errors import PluginError

    before: set[str] = set(registry.names())
    for path in paths:
        try:
            registry.load_plugin(path)
        except PluginError as error:
            raise InputError(str(error)) from error
    return sorted(set(registry.names()) - before)
