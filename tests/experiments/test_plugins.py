"""Plugins that misbehave, at the command line: one line and exit 2, and nothing on standard output that a machine cannot read."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from core import registry
from experiments import cli
from experiments.tasks import tasks
from tests.core.packages import package, variant_module
from tests.experiments.conftest import TINY, Command

Called = Callable[..., tuple[int, str, str]]


@pytest.fixture
def called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Called]:
    """Run a verb in this process, which has torch loaded: (exit code, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)
    kept = [(kind, dict(kind._classes), dict(kind.broken), set(kind._tried)) for kind in (registry.variants, tasks)]

    def call(*arguments: str) -> tuple[int, str, str]:
        output, code = os.dup(1), 0
        monkeypatch.setattr(sys, "argv", ["experiments", *arguments])
        try:
            cli.main()
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        finally:
            sys.stdout.flush()
            os.dup2(output, 1)
            os.close(output)
        if cli._stdout != 1:
            os.close(cli._stdout)
            cli._stdout = 1
        return code, *capfd.readouterr()

    yield call
    for kind, classes, broken, tried in kept:
        kind._classes, kind.broken, kind._tried = classes, broken, tried


TWO_NAMES_ONE_CLASS = variant_module("first_name").replace("@register", '@register("second_name")\n@register')
SAME_NAME_TWICE = variant_module("same_name") + variant_module("same_name").replace("class SameName", "class Other")
SETTINGS = "    class Config(AttentionConfig):\n        {}\n\n    def attend"


def with_settings(line: str) -> str:
    """A variant with one setting."""
    text = variant_module("odd_settings").replace("from core import", "from core import AttentionConfig, tunable,")
    return text.replace("    def attend", SETTINGS.format(line))


# name -> (content, what the line must hold)
FAULTS: dict[str, tuple[str | bytes, str]] = {
    "leaves": ("import sys; sys.exit('no\\nlicence')", "it exits on import (SystemExit no licence)"),
    "leaves_content": ("raise SystemExit(0)", "it exits on import (SystemExit 0)"),
    "raises": ("raise RuntimeError('two\\nlines')", "RuntimeError: two lines"),
    "raises_no_exception": ("class Odd(BaseException): pass\nraise Odd('strange')", "Odd: strange"),
    "is_cancelled": ("import asyncio; raise asyncio.CancelledError", "CancelledError:"),
    "skips": ("import pytest; pytest.importorskip('not_installed_anywhere')", "Skipped: could not import"),
    "cannot_say": (
        "class Odd(Exception):\n    def __str__(self): return self.absent\nraise Odd",
        "Odd: (its message cannot be shown)",
    ),
    "says_no_text": ("raise OSError('\\udcff')", "OSError: ?"),
    "needs_more": ("import not_installed_anywhere", "ModuleNotFoundError: No module named 'not_installed_anywhere'"),
    "prints_and_raises": ("import os; print('hello'); os.system('echo hello'); raise OSError('after')", "OSError: after"),
    "moves_and_raises": ("import os; os.chdir('/'); raise RuntimeError('after')", "RuntimeError: after"),
    "of_the_house": (variant_module("standard"), "variant 'standard' is taken by variants.standard.Standard; Standard in "),
    "two_names": (TWO_NAMES_ONE_CLASS, "variant 'second_name': FirstName is registered as 'first_name' already"),
    "same_name": (SAME_NAME_TWICE, "variant 'same_name' is taken by SameName in "),
    "bad_name": (variant_module("x").replace("'x'", "'Not-A-Name'"), "variant name must be lower snake case"),
    "no_class": ("from core import register\n@register('no_class')\ndef f(): ...", "must be a subclass of Attention"),
    "no_settings": (
        variant_module("no_settings").replace("    def attend", "    Config = dict\n\n    def attend"),
        "variant 'no_settings': Config must be a subclass of AttentionConfig",
    ),
    "no_default": (
        with_settings("width: int"),
        "variant 'odd_settings': every setting of Config needs a valid default: width: Field required",
    ),
    "refused_default": (with_settings("width: int = tunable(0, low=1, high=4, ge=1)"), "width: Input should be greater than"),
    "syntax": ("x = (\n", "'(' was never closed"),
    "not_utf8": ("x = 'é'".encode("latin-1"), "utf-8"),
    "null_bytes": (b"\0\0", "null bytes"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_faulty_plugin_is_one_line_and_exit_2_by_every_way_in(name: str, called: Called, tmp_path: Path) -> None:
    content, words = FAULTS[name]
    path = tmp_path / f"{name}.py"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    (tmp_path / "tiny.yaml").write_text(TINY)
    (tmp_path / "with.yaml").write_text(TINY + f"plugins: [{name}.py]\n")
    for arguments in (
        ("list", "--plugin", f"{name}.py"),
        ("check", f"{name}.py"),
        ("check", "standard", "--plugin", f"{name}.py"),
        ("show", "with.yaml"),
        ("run", "with.yaml"),
        ("run", "tiny.yaml", "--plugin", f"{name}.py", "--dry-run"),
    ):
        code, out, err = called(*arguments, "--json")
        assert (code, out) == (2, ""), (arguments, err)
        *said, line = err.splitlines()
        assert set(said) <= {"hello"}, arguments
        assert line.startswith("error: "), arguments
        assert f"{name}.py" in line
        assert words in line, (arguments, line)
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted([path.name, "tiny.yaml", "with.yaml"])
    assert Path.cwd() == tmp_path


def test_a_folder_is_no_plugin(called: Called, tmp_path: Path) -> None:
    (tmp_path / "mine.py").mkdir()
    (tmp_path / "with.yaml").write_text(TINY + "plugins: [mine.py]\n")
    for arguments, words in (
        (("list", "--plugin", "mine.py"), "plugin mine.py: is a folder; name a Python file in it"),
        (("check", "mine.py"), "plugin mine.py: is a folder"),
        (("show", "with.yaml"), "with.yaml:11: plugins: mine.py: no such file"),
    ):
        code, out, err = called(*arguments, "--json")
        assert (code, out, len(err.splitlines())) == (2, "", 1)
        assert words in err


def test_an_empty_one_spoils_nothing_and_cannot_be_checked(called: Called, tmp_path: Path) -> None:
    (tmp_path / "empty.py").write_text("")
    code, out, _ = called("list", "--json", "--plugin", "empty.py")
    assert code == 0
    assert json.loads(out)["variants"]
    code, out, err = called("check", "empty.py", "--json")
    assert (code, out) == (2, "")
    assert err == "error: empty.py: registers no variant (write @register(...) above its class)\n"


def test_files_of_one_name_in_two_folders(called: Called, tmp_path: Path) -> None:
    for folder, name in (("a", "of_a"), ("b", "of_b"), ("c", "of_a")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(variant_module(name))
    code, out, _ = called("list", "--json", "--plugin", "a/mine.py", "--plugin", "b/mine.py")
    assert code == 0
    sources = {entry["name"]: entry["source"] for entry in json.loads(out)["variants"]}
    assert (sources["of_a"], sources["of_b"]) == (str(tmp_path / "a" / "mine.py"), str(tmp_path / "b" / "mine.py"))
    # A second one of the first's name: both files are named.
    code, out, err = called("list", "--json", "--plugin", "a/mine.py", "--plugin", "c/mine.py")
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert f"taken by OfA in {tmp_path}/a/mine.py; OfA in {tmp_path}/c/mine.py needs another name" in err


def test_one_file_may_hold_two_variants(called: Called, tmp_path: Path) -> None:
    (tmp_path / "both.py").write_text(variant_module("one_of_both") + variant_module("other_of_both"))
    code, out, _ = called("check", "both.py", "--json")
    assert code in (0, 1)
    assert [report["variant"] for report in json.loads(out)] == ["one_of_both", "other_of_both"]


LOUD = """
import atexit, os, subprocess, sys, warnings
import torch
from core import Attention, AttentionOutput, Spec, register
from core.functional import average, masked_softmax, scaled_scores

def shout():
    print("LOUD")
    os.write(1, b"LOUD\\n")
    subprocess.run(["echo", "LOUD"])
    print("LOUD", file=sys.stderr)
    warnings.warn("LOUD")

shout()
atexit.register(shout)
os.chdir("/")

@register("loud")
class Loud(Attention):
    spec = Spec(causal=True)

    def attend(self, q, k, v, mask, need_weights):
        print("LOUD")
        os.write(1, b"LOUD\\n")
        weights = masked_softmax(scaled_scores(q, k), mask.visible(q.shape[2], k.shape[2], q.device))
        return AttentionOutput(average(weights, v), weights.to(q.dtype) if need_weights else None)
"""


def test_one_that_talks_moves_and_warns_works_and_stays_off_standard_output(command: Command, tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text(LOUD)
    (tmp_path / "tiny.yaml").write_text(TINY.replace("linear]", "loud]") + "plugins: [loud.py]\n")
    for arguments in (
        ("list", "--plugin", "loud.py"),
        ("check", "loud.py"),
        ("show", "tiny.yaml"),
        ("run", "tiny.yaml", "--dry-run"),
        ("run", "tiny.yaml", "seeds=[0]"),
    ):
        done = command(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        json.loads(done.stdout)
        assert "LOUD" in done.stderr
        assert "Traceback" not in done.stderr
    # It went to another folder on its import, and the study did not follow it.
    assert (tmp_path / ".experiments" / "studies" / "tiny" / "study.db").exists()
    assert "LOUD" in (tmp_path / ".experiments" / "studies" / "tiny" / "logs" / "0002-0.log").read_text()


BROKEN_PACKAGE = {
    "good_one": variant_module("good_one"),
    "deep": "def fail():\n    raise LookupError('deep in the package')\n\n\nfail()\n",
}


class TestStrict:
    """The switch for authors: a broken plugin is an error instead of an entry in a list."""

    @pytest.fixture
    def installed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        folder = tmp_path / "installed"
        folder.mkdir()
        package(folder, "some-plugins", "0.1", BROKEN_PACKAGE, {"deep": "deep:Deep", "good_one": "good_one:GoodOne"})
        monkeypatch.setenv("PYTHONPATH", str(folder))
        return folder

    @pytest.mark.parametrize("value", ["", "0"])
    def test_without_it_the_list_is_whole(
        self, value: str, installed: Path, command: Command, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(registry.STRICT, value)
        done = command("list", "--json")
        assert done.returncode == 0, done.stderr
        assert {"good_one", "standard"} <= {entry["name"] for entry in json.loads(done.stdout)["variants"]}
        (broken,) = json.loads(done.stdout)["broken"]
        assert broken["reason"] == "LookupError: deep in the package"

    def test_with_it_list_fails_with_the_own_traceback(
        self, installed: Path, command: Command, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(registry.STRICT, "1")
        done = command("list", "--json")
        assert (done.returncode, done.stdout) == (1, "")
        assert f'File "{installed}/deep.py", line 2, in fail' in done.stderr
        assert "LookupError: deep in the package" in done.stderr
        last = done.stderr.splitlines()[-1]
        assert last.endswith("PluginError: variant 'deep' from some-plugins 0.1 is broken: LookupError: deep in the package")

    def test_every_call_fails_and_none_is_recorded(self, installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.syspath_prepend(installed)
        monkeypatch.setenv(registry.STRICT, "1")
        own: registry.Registry = registry.Registry("variant", registry.Attention, "attention_variants")
        try:
            for _ in range(2):
                with pytest.raises(registry.PluginError, match="deep in the package") as caught:
                    own.names()
                assert isinstance(caught.value.__cause__, LookupError)
            assert not own.broken
        finally:
            registry._registries.remove(own)
            registry.variants.forget("good_one")

    def test_of_a_file_the_traceback_comes_before_the_line(
        self, called: Called, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "deep.py").write_text(BROKEN_PACKAGE["deep"])
        monkeypatch.setenv(registry.STRICT, "1")
        code, out, err = called("check", "deep.py", "--json")
        assert (code, out) == (2, "")
        assert f'File "{tmp_path}/deep.py", line 2, in fail' in err
        assert err.splitlines()[-1] == "error: plugin deep.py: LookupError: deep in the package"
