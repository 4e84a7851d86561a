"""docs/plugins.md is run as it stands: every file, every command, the package for real, and its tables against the code."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from core import Spec
from core.contract import RULES
from experiments import sweep as sweeps
from experiments.resolve import Resolver
from tests.experiments.conftest import ROOT, Command, environment

PAGE = (ROOT / "docs" / "plugins.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, flags=re.S | re.M)
FILES = {text.split("\n", 1)[0].removeprefix("# "): text for kind, text in BLOCKS if kind in ("python", "yaml", "toml")}
COMMANDS = [
    line.removeprefix("$ ").split("  #")[0].strip() for kind, text in BLOCKS if kind == "console" for line in text.splitlines()
]
RULE_NAMES = {rule.__name__ for rule in RULES}


def table(heading: str) -> list[list[str]]:
    """The cells of the first table after a heading, without its head."""
    lines = PAGE.split(f"\n{heading}\n", 1)[1].splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("|"))
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[start + 2 :])
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]


def rows_of_rules() -> str:
    """The table of all rules, as it should stand in the page."""
    return "\n".join(f"| `{rule.__name__}` | {inspect.cleandoc(rule.__doc__ or '')} |" for rule in RULES)


def with_rules(page: str) -> str:
    """The page with that table in its place."""
    before, head, rest = page.partition("| rule | what it demands |\n|---|---|\n")
    return before + head + rows_of_rules() + "\n\n" + rest.split("\n\n", 1)[1]


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """A folder with the files of the page."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    call = [sys.executable, *arguments]
    return subprocess.run(call, cwd=folder, env=environment(), capture_output=True, text=True, timeout=240, check=False)


def test_every_block_is_a_file_a_command_or_the_witness() -> None:
    assert sorted(FILES) == ["alibi.py", "alibi.yaml", "one_rule.py", "pyproject.toml", "test_alibi.py"]
    assert {kind for kind, _ in BLOCKS} == {"python", "yaml", "toml", "console", "text"}
    assert [kind for kind, _ in BLOCKS].count("text") == 1
    assert all(text.startswith("$ ") for kind, text in BLOCKS if kind == "console")


def test_the_files_run(page: Path) -> None:
    tested = python(page, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_alibi.py")
    assert tested.returncode == 0, tested.stdout
    assert f"{len(RULES) + 1} passed" in tested.stdout
    one = python(page, "one_rule.py")
    assert one.returncode == 0, one.stderr
    assert one.stdout.startswith("alibi: conforms (1 pass; 1 configs, 3 seeds)")
    sweep = sweeps.load(page / "alibi.yaml", plugins=[str(page / "alibi.py")])
    assert sweep.trials == 4
    Resolver(sweep).check()


def test_their_style_is_that_of_the_house(page: Path) -> None:
    files = [str(page / name) for name in FILES if name.endswith(".py")]
    config = str(ROOT / "pyproject.toml")
    assert python(ROOT, "-m", "ruff", "check", "--config", config, *files).stdout == "All checks passed!\n"
    assert python(ROOT, "-m", "ruff", "format", "--check", "--config", config, *files).returncode == 0


def test_the_witness_is_what_check_says(page: Path, command: Command) -> None:
    text = FILES["alibi.py"]
    assert text.count("mask.visible(L, S, q.device)") == 1
    (page / "alibi.py").write_text(text.replace("mask.visible(L, S, q.device)", "None"))
    done = command("check", "alibi.py")
    assert done.returncode == 1
    (witness,) = [text for kind, text in BLOCKS if kind == "text"]
    assert witness.strip() in [line.strip() for line in done.stdout.splitlines()]


def test_the_commands_run(page: Path, command: Command) -> None:
    """But for those of the package, which has a test of its own."""
    alone = COMMANDS[: COMMANDS.index("python -m pip install .")]
    assert len(alone) == 4
    for line in [*alone, COMMANDS[-1]]:
        words = shlex.split(line)
        settings = {key: value for key, _, value in (word.partition("=") for word in words) if key.isupper()}
        words = words[len(settings) :]
        assert words[:2] == ["python", "-m"]
        if words[2] == "pytest":
            continue  # above
        assert words[2] == "experiments"
        shorter = ["base.train.steps=3", "seeds=[0]"] if words[3] == "run" else []
        with pytest.MonkeyPatch.context() as patch:
            for key, value in settings.items():
                patch.setenv(key, value)
            done = command(*words[3:], *shorter)
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the package of the page is installed, for real and not as editable, and beside it one that is broken."""
    folder, prefix = tmp_path_factory.mktemp("package"), tmp_path_factory.mktemp("prefix")
    broken = tmp_path_factory.mktemp("broken")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    (broken / "pyproject.toml").write_text(
        FILES["pyproject.toml"].replace('"alibi-attention"', '"broken-attention"').replace("alibi", "broken")
    )
    (broken / "broken.py").write_text("import a_package_that_is_missing\n")
    for package in (folder, broken):
        call = [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index"),
            *("--no-deps", "--no-build-isolation", "--prefix", str(prefix), str(package)),
        ]
        done = subprocess.run(call, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stderr
    (found,) = prefix.rglob("site-packages")
    return found


class TestPackage:
    @pytest.fixture(autouse=True)
    def path(self, installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(installed), *filter(None, [os.environ.get("PYTHONPATH")])]))
        (tmp_path / "alibi.yaml").write_text(FILES["alibi.yaml"])

    def test_it_is_listed_and_the_broken_one_is_marked(self, command: Command) -> None:
        done = command("list", "--json")
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        (entry,) = [entry for entry in found["variants"] if entry["name"] == "alibi"]
        assert entry["source"] == "alibi-attention 0.1"
        assert entry["settings"] == {"slope": 0.1}
        assert entry["summary"].startswith("Scores fall with the distance")
        assert {path.stem for path in (ROOT / "variants").glob("[a-z]*.py")} < {one["name"] for one in found["variants"]}
        assert found["broken"] == [
            {
                "kind": "variant",
                "name": "broken",
                "source": "broken-attention 0.1",
                "reason": "ModuleNotFoundError: No module named 'a_package_that_is_missing'",
            }
        ]

    def test_it_is_checked_by_its_name(self, command: Command) -> None:
        done = command("check", "alibi", "--json")
        assert done.returncode == 0, done.stdout + done.stderr
        (report,) = json.loads(done.stdout)
        assert {result["rule"] for result in report["results"]} == RULE_NAMES
        used = command("check", "broken")
        assert used.returncode == 2
        assert used.stderr == (
            "error: variant 'broken' from broken-attention 0.1 is broken: "
            "ModuleNotFoundError: No module named 'a_package_that_is_missing'\n"
        )

    def test_workers_find_it_too(self, command: Command, tmp_path: Path) -> None:
        done = command("run", "alibi.yaml", "base.train.steps=3", "seeds=[0]", "--json")
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert (found["complete"], found["failed_runs"]) == (4, 0)
        assert "checking alibi against the contract suite" in done.stderr
        assert "alibi" in (tmp_path / ".experiments" / "studies" / "alibi" / "report.md").read_text()

    def test_its_tests_need_no_file(self, tmp_path: Path) -> None:
        text = FILES["test_alibi.py"]
        without = re.sub(r"^.*load_plugin.*\n", "", text, flags=re.M)
        assert without.count("\n") == text.count("\n") - 2
        (tmp_path / "test_alibi.py").write_text(without)
        call = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "test_alibi.py"]
        done = python(tmp_path, *call, "-k", "shapes_and_dtypes or equation")
        assert done.returncode == 0, done.stdout
        assert "2 passed" in done.stdout


def test_the_table_of_rules_is_that_of_the_code() -> None:
    if with_rules(PAGE) != PAGE:
        call = "python -m tests.experiments.test_plugins_page"
        pytest.fail(f'docs/plugins.md: "Every rule" should be (`{call}` writes it):\n\n{rows_of_rules()}', pytrace=False)


def test_the_table_of_claims_has_every_field_of_the_spec_and_rules_that_exist() -> None:
    rows = table("## 2. What you claim")
    assert [row[0].strip("`") for row in rows] == [field.name for field in dataclasses.fields(Spec)]
    for field, _, rules in rows:
        named = set(re.findall(r"`(\w+)`", rules))
        assert named, field
        assert named <= RULE_NAMES, field


def test_the_rules_named_where_one_fails_exist() -> None:
    named = {name for row in table("### When a rule fails") for name in re.findall(r"`(\w+_\w+)`", row[0])}
    assert len(named) > 10
    assert named <= RULE_NAMES


if __name__ == "__main__":
    (ROOT / "docs" / "plugins.md").write_text(with_rules(PAGE))
