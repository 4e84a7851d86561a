"""What README.md shows is run: every command, every file, and the tree."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

import core
import variants  # noqa: F401
from experiments import sweep as sweeps
from experiments.resolve import Resolver
from tests.experiments.conftest import ROOT, Command, start

README = (ROOT / "README.md").read_text()


def blocks(text: str, language: str) -> list[str]:
    """Fenced blocks of one language."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.S | re.M)
    return [block for name, block in fenced if name == language]


def commands(text: str) -> list[str]:
    """Every `$ python -m experiments …` of a document, without its remark."""
    lines = [line for block in blocks(text, "console") for line in block.splitlines()]
    found = [line.removeprefix("$ ").split("  #")[0].split(" # ")[0].strip() for line in lines if line.startswith("$ ")]
    return [line for line in found if line.startswith("python -m experiments")]


def write_files(folder: Path) -> None:
    """The files that it shows, under the names in their first lines, and the sweeps."""
    for language in ("python", "yaml"):
        for block in blocks(README, language):
            name = block.split("\n", 1)[0].removeprefix("# ").strip()
            if name.endswith((".py", ".yaml")):
                (folder / name).write_text(block)
    (folder / "sweeps").symlink_to(ROOT / "sweeps")


def test_it_shows_commands_and_files() -> None:
    verbs = {line.split()[3] for line in commands(README)}
    assert verbs >= {"run", "show", "list", "check", "ui", "schema"}
    assert "python -m experiments new" in README


def test_every_command_runs_as_shown(command: Command, tmp_path: Path) -> None:
    write_files(tmp_path)
    for line in dict.fromkeys(commands(README)):
        arguments = shlex.split(line)[3:]
        if arguments[0] == "run" and "--dry-run" not in arguments:  # as shown, but shorter
            arguments += ["base.train.steps=3", "seeds=[0]"]
        if arguments[0] == "ui":
            server = start(tmp_path, *arguments, "--port", "5617")
            try:
                assert server.stdout is not None
                assert "http://127.0.0.1:5617" in server.stdout.readline()
            finally:
                server.terminate()
                server.communicate(timeout=30)
            continue
        done = command(*arguments)
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        assert done.stdout


def test_the_sweep_file_shown_is_sound(tmp_path: Path) -> None:
    write_files(tmp_path)
    sweep = sweeps.load(tmp_path / "mine.yaml")
    Resolver(sweep).check()
    assert sweep.trials == 1 + 2 * (1 + 2 + 1)  # the baseline; two head counts of standard, of topk at two sizes, of linear


def tree_of(text: str) -> set[str]:
    """The Python files that the tree of README.md names, as paths."""
    (tree,) = [block for block in blocks(text, "") if "core/" in block and "variants/" in block]
    paths, parents = set(), {}
    for line in tree.splitlines():
        match = re.match(r"( *)(\S+)", line)
        assert match is not None
        depth, name = len(match[1]), match[2]
        parents[depth] = name
        if name.endswith(".py"):
            paths.add("".join(parents[level] for level in sorted(parents) if level < depth) + name)
        parents = {level: parent for level, parent in parents.items() if level <= depth}
    return paths


@pytest.mark.parametrize("package", ["core", "variants", "experiments"])
def test_the_tree_names_every_file_and_no_other(package: str) -> None:
    files = {str(path.relative_to(ROOT)) for path in (ROOT / package).rglob("*.py") if path.name != "__init__.py"}
    assert {path for path in tree_of(README) if path.startswith(package)} == files


@pytest.mark.parametrize("name", core.names())
def test_the_table_of_mechanisms_names_every_setting_and_its_default(name: str) -> None:
    (row,) = [line for line in README.splitlines() if line.startswith(f"| `{name}` |")]
    fields = core.get(name).Config.model_fields
    shown = dict(re.findall(r"`(\w+)` \(([^),]+)", row.split("|")[3]))
    assert shown == {field: "none" if info.default is None else str(info.default) for field, info in fields.items()}
