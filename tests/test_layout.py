"""How the house is built: which file may import which. Files are listed as they are found, so that new ones are held too."""

import ast
import importlib
from pathlib import Path

import pytest

import core
import variants as variants_package

ROOT = Path(__file__).parents[1]
ORDER = ["core", "variants", "experiments", "tests"]  # each may import itself and what stands before it
FILES = sorted(file for package in ORDER for file in (ROOT / package).rglob("*.py") if "__pycache__" not in file.parts)
VARIANTS = sorted(file for file in (ROOT / "variants").glob("*.py") if file.stem != "__init__")
EXPERIMENTS = [file for file in FILES if file.is_relative_to(ROOT / "experiments")]

# Libraries that one file of `experiments` has for itself, and folders or files that may not know them at all.
ONLY = {"optuna": {"search"}, "mlflow": {"tracking"}, "ray": {"executors.ray"}}
DRIVER = {"study", "search", "tracking", "executors", "store"}
WORKER = {"worker", "train", "measure", "model", "tasks"}
MEETING = {"config", "errors", "seeding"}  # what both sides may import


def name_of(file):
    """core/mask.py -> core.mask, core/__init__.py -> core."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(file):
    """Dotted names that a file imports anywhere, in functions too; `from a import b` gives a and a.b."""
    package = name_of(file) if file.name == "__init__.py" else name_of(file).rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(file.read_text(), str(file))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join([*parents[: len(parents) - node.level + 1], *([base] if base else [])])
            found.add(base)
            found.update(f"{base}.{alias.name}" for alias in node.names)
        elif (
            isinstance(node, ast.Call)
            and node.args
            and isinstance(node.args[0], ast.Constant)
            and isinstance(node.args[0].value, str)
            and (getattr(node.func, "attr", None) or getattr(node.func, "id", None)) in ("import_module", "__import__")
        ):
            found.add(node.args[0].value)
    return found


def tops(file):
    return {name.split(".")[0] for name in imports(file)}


def within(file):
    """Where a file stands in `experiments`: its first folder or its stem."""
    return file.relative_to(ROOT / "experiments").with_suffix("").parts[0]


def known(file):
    """The parts of `experiments` that a file imports."""
    parts = {name.split(".")[1] for name in imports(file) if name.startswith("experiments.")}
    return {part for part in parts if (ROOT / "experiments" / part).is_dir() or is_file(part)}


def is_file(part):
    return (ROOT / "experiments" / f"{part}.py").is_file()


def test_files_are_found():
    assert {"core.mask", "variants.standard", "tests.test_layout"} <= {name_of(file) for file in FILES}


def test_imports_are_found():
    found = imports(ROOT / "core" / "backends.py")
    assert {"torch", "core.mask.Mask", "xformers.ops"} <= {*found, *tops(ROOT / "core" / "backends.py")}


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_imports_point_down(file):
    own = file.relative_to(ROOT).parts[0]
    above = set(ORDER[ORDER.index(own) + 1 :])
    assert not tops(file) & above


@pytest.mark.parametrize("file", VARIANTS, ids=name_of)
def test_no_variant_knows_another(file):
    others = {f"variants.{other.stem}" for other in VARIANTS} - {name_of(file)}
    assert not {name for name in imports(file) if any(f"{name}.".startswith(f"{other}.") for other in others)}
    assert "variants" not in imports(file)


@pytest.mark.parametrize("file", [file for file in FILES if name_of(file).split(".")[0] in ("core", "variants")], ids=name_of)
def test_mathematics_knows_no_experiment(file):
    assert not tops(file) & {"optuna", "mlflow", "ray", "typer", "rich", "matplotlib", "yaml", "sqlite3"}


@pytest.mark.parametrize("file", EXPERIMENTS, ids=name_of)
def test_each_library_has_one_file(file):
    for library, files in ONLY.items():
        if name_of(file).removeprefix("experiments.") not in files:
            assert library not in tops(file)


@pytest.mark.parametrize("file", [file for file in EXPERIMENTS if within(file) in WORKER], ids=name_of)
def test_the_worker_does_not_know_the_driver(file):
    assert not known(file) & DRIVER


@pytest.mark.parametrize("file", [file for file in EXPERIMENTS if within(file) in MEETING], ids=name_of)
def test_where_both_sides_meet_neither_is_known(file):
    assert not known(file) & (DRIVER | WORKER - {"tasks"})


@pytest.mark.parametrize("file", [file for file in EXPERIMENTS if within(file) in ("report", "figures")], ids=name_of)
def test_reports_know_no_tracking(file):
    assert not known(file) & {"tracking", "search", "study"}
    assert "mlflow" not in tops(file)


def test_experiments_import_in_one_direction():
    """A file imports only files below it, so there is no circle. A folder counts as one file, save for the files in it."""
    edges = {}
    for file in EXPERIMENTS:
        name = name_of(file)
        edges[name] = {
            other
            for other in (name_of(each) for each in EXPERIMENTS)
            if other not in (name, "experiments") and other in imports(file)
        }
    done, trail = set(), []

    def visit(name):
        assert name not in trail, " -> ".join([*trail, name])
        if name in done:
            return
        trail.append(name)
        for other in edges[name]:
            visit(other)
        trail.pop()
        done.add(name)

    for name in edges:
        visit(name)


@pytest.mark.parametrize("file", VARIANTS, ids=name_of)
def test_a_variant_is_one_small_file_of_its_name(file):
    registered = {name for name in core.names() if core.get(name).__module__ == name_of(file)}
    assert registered == {file.stem}
    assert (ROOT / "tests" / "variants" / f"test_{file.stem}.py").is_file()
    assert len(file.read_text().splitlines()) <= 120
    assert importlib.import_module(name_of(file)).__doc__


def test_the_package_registers_every_file():
    assert {file.stem for file in VARIANTS} <= set(core.names())
    assert variants_package.__doc__


@pytest.mark.parametrize(
    "file", [file for file in FILES if name_of(file).split(".")[0] != "tests" and file.read_text().strip()], ids=name_of
)
def test_every_module_says_what_it_is(file):
    assert ast.get_docstring(ast.parse(file.read_text()))
