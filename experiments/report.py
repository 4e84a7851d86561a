"""From the store to words and tables: what the study found, what it costs, and what it cannot tell. Knows no MLflow."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments import statistics
from experiments.config import describe, flatten
from experiments.schema import Constraint, Objective
from experiments.statistics import Difference
from experiments.store import RunRow, Trial

COLUMNS = ("peak memory MiB", "tokens/s", "FLOPs/token", "parameters")
_FIGURES = ("memory/peak_mb", "speed/tokens_per_s", "cost/flops_per_token", "cost/params")


@dataclass(frozen=True)
class Line:
    """One configuration in the table; None is unknown."""

    trial: Trial
    values: dict[int, float]  # objective by seed, finished runs only
    figures: dict[str, float]  # means over the finished runs

    @property
    def variant(self) -> str:
        """The mechanism."""
        return str(self.trial.config["attention"]["variant"])

    @property
    def mean(self) -> float:
        """Objective, averaged over seeds."""
        return statistics.mean(list(self.values.values()))

    def violations(self, constraints: Sequence[Constraint]) -> list[str]:
        """The constraints that this configuration breaks, or of which nothing is known."""
        broken = []
        for constraint in constraints:
            value = self.figures.get(constraint.metric)
            if value is None:
                broken.append(f"{constraint.metric} unknown")
            elif constraint.max is not None and value > constraint.max:
                broken.append(f"{constraint.metric} {value:g} > {constraint.max:g}")
            elif constraint.min is not None and value < constraint.min:
                broken.append(f"{constraint.metric} {value:g} < {constraint.min:g}")
        return broken


@dataclass(frozen=True)
class Comparison:
    """The best configuration of a variant against the baseline, on shared seeds."""

    line: Line
    baseline: Line
    difference: Difference


def lines(trials: Sequence[Trial], runs: Sequence[RunRow], objective: Objective) -> list[Line]:
    """Complete trials, best first."""
    table = []
    for trial in trials:
        done = [run for run in runs if run.trial == trial.number and run.state == "finished"]
        values = {run.seed: run.figures[objective.metric] for run in done if objective.metric in run.figures}
        if trial.state != "complete" or not values:
            continue
        names = {name for run in done for name in run.figures}
        figures = {name: statistics.mean([run.figures[name] for run in done if name in run.figures]) for name in names}
        table.append(Line(trial, values, figures))
    return sorted(table, key=lambda line: (line.mean if objective.goal == "minimize" else -line.mean, line.trial.number))


def best_of_each(table: Sequence[Line]) -> list[Line]:
    """The best configuration of each variant, best first."""
    best: dict[str, Line] = {}
    for line in table:
        best.setdefault(line.variant, line)
    return list(best.values())


def comparisons(table: Sequence[Line], baseline: Line | None) -> list[Comparison]:
    """The best of each variant against the baseline; none where there is no baseline.

    The interval is corrected for every configuration that could have been the best, not only for those that are shown.
    """
    found: list[Comparison] = []
    if baseline is None:
        return found
    candidates = [line for line in table if line is not baseline]
    for line in best_of_each(candidates):
        seeds = sorted(line.values.keys() & baseline.values.keys())
        if seeds:
            pairs = [line.values[s] for s in seeds], [baseline.values[s] for s in seeds]
            found.append(Comparison(line, baseline, statistics.paired_difference(*pairs, comparisons=len(candidates))))
    return found


def varied(trials: Sequence[Trial]) -> list[str]:
    """Dotted paths whose values differ between trials, the variant and the heads first."""
    seen: dict[str, set[str]] = {}
    flat = [flatten(trial.config) for trial in trials]
    for path in {path for config in flat for path in config}:
        values = {repr(config[path]) for config in flat if path in config}
        variants = {config["attention.variant"] for config in flat if path in config}
        # A setting that only some variants have is worth a column only where it was varied.
        if len(values) > 1 or path in ("attention.variant", "model.num_heads"):
            seen[path] = variants
    first = ["attention.variant", "model.num_heads", "attention.temperature"]
    return [p for p in first if p in seen] + sorted(p for p in seen if p not in first)


def cells(line: Line, paths: Sequence[str]) -> list[str]:
    """One row of the table, as text: trial, settings, objective, seeds, costs."""
    config = flatten(line.trial.config)
    spread = statistics.deviation(list(line.values.values()))
    quality = number(line.mean, 4) + (f" ± {number(spread, 4)}" if spread is not None else "")
    return [
        str(line.trial.number),
        *(text(config.get(path, "-")) for path in paths),
        quality,
        str(len(line.values)),
        *(number(line.figures.get(name), digits) for name, digits in zip(_FIGURES, (1, 0, 0, 0), strict=True)),
    ]


def headings(paths: Sequence[str], objective: Objective) -> list[str]:
    """The names of the columns."""
    short = [path.rsplit(".", 1)[-1].replace("num_", "") for path in paths]
    return ["trial", *short, f"{objective.metric} (± sd over seeds)", "n", *COLUMNS]


def sentence(comparison: Comparison, objective: Objective) -> str:
    """A comparison in plain words."""
    d, line = comparison.difference, comparison.line
    name = f"{line.variant} (trial {line.trial.number})"
    if d.low is None or d.high is None:
        return f"{name}: {d.mean:+.4f} against {comparison.baseline.variant}; {d.pairs} shared seeds are too few to tell"
    interval = f"{d.mean:+.4f} [{d.low:+.4f}, {d.high:+.4f}]"
    if not d.distinguishable:
        return f"{name}: {interval}: not distinguishable from {comparison.baseline.variant} with {d.pairs} seeds"
    better = (d.mean < 0) == (objective.goal == "minimize")
    return f"{name}: {interval}: {'better' if better else 'worse'} than {comparison.baseline.variant}"


def summary(
    name: str,
    trials: Sequence[Trial],
    runs: Sequence[RunRow],
    objective: Objective,
    constraints: Sequence[Constraint] = (),
    baseline: str | None = None,
    unproven: Mapping[str, str] | None = None,
    folder: str = "",
) -> str:
    """The study as Markdown: answer, table, comparisons, failures, and what it cannot tell.

    Args:
        baseline: the config hash of what every variant is compared with.
        unproven: variants that fail the contract suite, and how; their numbers stand in the table, but do not count.
        folder: the study's folder, where the logs are.
    """
    unproven = unproven or {}
    table = lines(trials, runs, objective)
    finished = sum(run.state == "finished" for run in runs)
    parts = [
        f"# {name}",
        "",
        f"{finished} of {len(runs)} runs have finished, {len(table)} of {len(trials)} trials are complete.",
        "",
    ]
    if table:
        counted = [line for line in table if not line.violations(constraints) and line.variant not in unproven]
        parts += [*_best(counted, trials, objective), ""]
        paths = varied(trials)
        rows = [headings(paths, objective), *(cells(line, paths) for line in table)]
        if constraints or unproven:
            rows[0].append("does not count because")
            for row, line in zip(rows[1:], table, strict=True):
                fault = ["fails the contract"] if line.variant in unproven else []
                row.append("; ".join(fault + line.violations(constraints)))
        parts += markdown(rows)
        parts += ["", "Best of each variant:", ""]
        parts += [f"- {line.variant}: {number(line.mean, 4)} (trial {line.trial.number})" for line in best_of_each(counted)]
        found = comparisons(counted, next((line for line in table if line.trial.config_hash == baseline), None))
        if found:
            parts += ["", f"Difference in {objective.metric} from {found[0].baseline.variant}, best of each variant:", ""]
            parts += [f"- {sentence(comparison, objective)}" for comparison in found]
    else:
        parts += ["No configuration finished.", ""]
    if unproven:
        parts += ["", "Not proven, so that their numbers do not count (python -m experiments check):", ""]
        parts += [f"- {variant}: {fault}" for variant, fault in sorted(unproven.items())]
    failed = [run for run in runs if run.state in ("failed", "lost")]
    if failed:
        by_number = {trial.number: trial for trial in trials}
        parts += ["", "Runs that failed:", ""]
        for run in failed:
            what = describe(by_number[run.trial].assignment)
            parts.append(f"- trial {run.trial} seed {run.seed} ({what}): {run.cause}: {run.message}")
            parts.append(f"  log: {folder}/logs/{log_name(run)}")
    skipped = {run.trial: run for run in runs if run.state == "skipped"}
    if skipped:
        by_number = {trial.number: trial for trial in trials}
        parts += ["", "Skipped before they began:", ""]
        parts += [f"- trial {n} ({describe(by_number[n].assignment)}): {run.message}" for n, run in skipped.items()]
    if table:
        parts += ["", *explanation(table, objective)]
    return "\n".join(parts) + "\n"


def _best(counted: Sequence[Line], trials: Sequence[Trial], objective: Objective) -> list[str]:
    """The answer: which is best, and which others could be as good."""
    if not counted:
        return ["No configuration counts: see the last column."]
    best, others = counted[0], counted[1:]
    flat = flatten(best.trial.config)
    settings = ", ".join(f"{path} {text(flat[path])}" for path in varied(trials) if path in flat)
    seeds = f"{len(best.values)} seed{'s' if len(best.values) != 1 else ''}"
    said = [f"Best {objective.metric}: {number(best.mean, 4)} (trial {best.trial.number}: {settings}; {seeds})."]
    alike = []
    for line in others:
        shared = sorted(line.values.keys() & best.values.keys())
        pairs = [line.values[seed] for seed in shared], [best.values[seed] for seed in shared]
        if not shared or not statistics.paired_difference(*pairs, comparisons=len(others)).distinguishable:
            alike.append(str(line.trial.number))
    if alike:
        said.append(
            f"Not distinguishable from it with these seeds: {len(alike)} of {len(others)} others (trials {', '.join(alike)})."
        )
    elif others:
        said.append("It is distinguishable from every other.")
    return said


def log_name(run: RunRow) -> str:
    """The file of a run's log, below logs/."""
    return f"{run.trial:04d}-{run.seed}.log"


def explanation(table: Sequence[Line], objective: Objective) -> list[str]:
    """What the table means, and what it cannot tell."""
    seeds = max(len(line.values) for line in table)
    said = [
        f"{objective.metric} is the mean over seeds on validation data; ± is the standard deviation over seeds (n of them).",
        "Peak memory is of one training step, parameters and optimiser state included. Tokens/s is of training steps, each",
        "configuration alone on the machine, in turns. FLOPs are forward and backward, parameters are trainable numbers.",
        "Intervals are Student's, of the mean difference over shared seeds, at 95 % for all configurations of the table together",
        "(Bonferroni): with 3 seeds they are wide, and more seeds narrow them fast.",
        "What it cannot tell: the configurations were chosen by the same validation data that rank them, so the best is",
        "flattered; another task, length or budget may rank them otherwise; speed and memory are those of this machine.",
    ]
    if seeds < statistics.MIN_PAIRS:
        said.append(f"Too few seeds ({seeds}) to tell a difference from noise; give at least {statistics.MIN_PAIRS}.")
    return said


def trials_csv(runs: list[RunRow], trials: list[Trial]) -> str:
    """One line a run: its settings, state and figures."""
    by_number = {trial.number: trial for trial in trials}
    settings = sorted({path for trial in trials for path in flatten(trial.config)})
    figures = sorted({name for run in runs for name in run.figures})
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(["trial", "seed", "kind", "state", "cause", "config_hash", *settings, *figures])
    for run in runs:
        trial = by_number[run.trial]
        config = flatten(trial.config)
        row = [run.trial, run.seed, trial.kind, run.state, run.cause or "", trial.config_hash]
        writer.writerow([*row, *(config.get(path, "") for path in settings), *(run.figures.get(name, "") for name in figures)])
    return out.getvalue()


def number(value: float | None, digits: int) -> str:
    """A figure with thousands separators; unknown stays unknown."""
    return "unknown" if value is None else f"{value:,.{digits}f}"


def text(value: Any) -> str:
    """A setting as a person writes it."""
    return "none" if value is None else str(value).replace("|", "\\|")


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns under their headings; the first two to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if i < 2 else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def markdown(rows: list[list[str]]) -> list[str]:
    """A table that also a plain screen shows aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    made = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows]
    return [made[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *made[1:]]
