"""A house mechanism whose library is not installed is listed with the pip command, and spoils no other."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.experiments.conftest import ROOT, TINY, Command

NEEDY = '''\
"""Needs a library that nobody has."""

from core import Attention, AttentionOutput, Spec, register
from core.registry import require

absent = require("a_package_that_is_missing", extra="needy")


@register("needy")
class Needy(Attention):
    spec = Spec(causal=True)

    def attend(self, q, k, v, mask, need_weights):
        return AttentionOutput(absent.attend(q, k, v), None)
'''
REASON = "a_package_that_is_missing is not installed; pip install 'attention-experiments[needy]'"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the three packages, with one mechanism more."""
    folder = tmp_path_factory.mktemp("checkout")
    for package in ("core", "variants", "experiments"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "variants" / "needy.py").write_text(NEEDY)
    (folder / "tiny.yaml").write_text(TINY.replace("linear]", "needy]"))
    (folder / "thief.py").write_text(
        NEEDY.replace('absent = require("a_package_that_is_missing", extra="needy")', "absent = None")
    )
    return folder


def child(script: str, folder: Path) -> list[str]:
    """What a fresh interpreter prints in a folder."""
    done = subprocess.run([sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_it_is_listed_as_broken_and_the_others_are_there(command: Command, checkout: Path) -> None:
    done = command("list", "--json", folder=checkout)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["broken"] == [{"kind": "variant", "name": "needy", "source": "variants.needy", "reason": REASON}]
    assert {entry["name"] for entry in found["variants"]} == {path.stem for path in (ROOT / "variants").glob("[a-z]*.py")}


@pytest.mark.parametrize(
    ("arguments", "place"),
    [
        (("check", "needy"), ""),
        (("show", "tiny.yaml"), "tiny.yaml:7: parameters.attention.variant: "),
        (("run", "tiny.yaml"), "tiny.yaml:7: parameters.attention.variant: "),
    ],
)
def test_using_it_is_one_line_with_the_pip_command(
    arguments: tuple[str, ...], place: str, command: Command, checkout: Path
) -> None:
    done = command(*arguments, folder=checkout)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {place}{REASON}\n")
    assert not (checkout / ".experiments").exists()


def test_the_name_stays_that_of_the_house(command: Command, checkout: Path) -> None:
    """With the library installed, the same name would be another mechanism."""
    done = command("check", "thief.py", folder=checkout)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert f"variant 'needy' is taken by variants.needy ({REASON})" in done.stderr
    assert "this name is taken" in command("new", "needy", folder=checkout).stderr


def test_building_it_raises_its_own_error_each_time(checkout: Path) -> None:
    script = """
import core, variants
errors = []
for call in (lambda: core.build("needy", num_heads=1, head_dim=1), lambda: core.get("needy")) * 2:
    try:
        call()
    except ImportError as error:
        errors.append(error)
depth, trace = 0, errors[-1].__traceback__
while trace:
    depth, trace = depth + 1, trace.tb_next
print(len(errors), type(errors[0]).__name__, errors[0].name, isinstance(errors[0], ValueError), depth)
print(errors[0])
print("needy" in core.names())
"""
    first, *rest = child(script, checkout)
    assert first == "4 MissingExtraError a_package_that_is_missing False 3"
    assert rest == [REASON, "False"]


def test_the_extras_of_the_house() -> None:
    """Without the library that it requires, each file of the house is broken, and all the others are there."""
    for file in (ROOT / "variants").glob("[a-z]*.py"):
        for library, extra in re.findall(r'require\("([\w.]+)", extra="(\w+)"\)', file.read_text()):
            script = f"""
import sys
sys.modules[{library!r}] = None
import core, variants
from core.registry import variants as registry
print({file.stem!r} in core.names(), len(core.names()), *registry.broken)
print(registry.broken[{file.stem!r}].reason)
"""
            others = len(list((ROOT / "variants").glob("[a-z]*.py"))) - 1
            reason = f"{library} is not installed; pip install 'attention-experiments[{extra}]'"
            assert child(script, ROOT) == [f"False {others} {file.stem}", reason]
