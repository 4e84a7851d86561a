"""A folder with a `core`, `variants` or `experiments` of the person's own: ours are used, or one line says why not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.experiments.conftest import ROOT, TINY, environment

MODULE = (sys.executable, "-m", "experiments")
SCRIPT = (str(Path(sys.executable).parent / "experiments"),)  # what the installer made
NAMES = ("core", "variants", "experiments")
# Whoever imports it leaves a trace.
THEIRS = "import pathlib\nwith pathlib.Path({trace!r}).open('a') as file:\n    file.write(__name__ + '\\n')\n"


def called(folder: Path, call: tuple[str, ...], *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*call, *arguments],
        cwd=folder,
        env={**environment(), **settings},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def shadow(folder: Path, name: str, kind: str) -> Path:
    """A module, a package, or a folder with no `__init__.py` whose files have the names of ours."""
    text = THEIRS.format(trace=str(folder / "trace"))
    if kind == "module":
        found = folder / f"{name}.py"
        found.write_text(text)
        return found
    found = folder / name
    found.mkdir()
    (found / "data.yaml").write_text("a: 1\n")
    files = ["__init__.py"] if kind == "package" else [file.name for file in (ROOT / name).glob("[a-z]*.py")]
    for file in files:
        (found / file).write_text(text)
    return found


def trace(folder: Path) -> list[str]:
    return (folder / "trace").read_text().split() if (folder / "trace").exists() else []


@pytest.mark.parametrize("kind", ["module", "package"])
@pytest.mark.parametrize("name", ["core", "variants"])
class TestBesideOurs:
    def test_by_python_m_it_is_said(self, name: str, kind: str, tmp_path: Path) -> None:
        found = shadow(tmp_path, name, kind)
        done = called(tmp_path, (sys.executable, "-X", "importtime", "-m", "experiments"), "list", "--json")
        assert (done.returncode, done.stdout) == (2, "")
        said = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
        assert said == [
            f"error: Python finds {found} as '{name}', in place of {ROOT / name}; rename it, or run the installed command "
            "`experiments`, which does not look into the working directory"
        ]
        assert "torch" not in {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
        assert trace(tmp_path) == []

    def test_the_installed_command_takes_ours(self, name: str, kind: str, tmp_path: Path) -> None:
        shadow(tmp_path, name, kind)
        done = called(tmp_path, SCRIPT, "list", "--json")
        assert done.returncode == 0, done.stderr
        assert len(json.loads(done.stdout)["variants"]) >= 6
        assert trace(tmp_path) == []

    def test_through_the_path_of_the_environment_it_is_said(self, name: str, kind: str, tmp_path: Path) -> None:
        found = shadow(tmp_path, name, kind)
        done = called(tmp_path, SCRIPT, "list", "--json", PYTHONPATH=".")
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == (
            f"error: Python finds {found} as '{name}', in place of {ROOT / name}; "
            f"rename it, or take {tmp_path} out of PYTHONPATH\n"
        )


class TestExperiments:
    def test_a_package_is_said(self, tmp_path: Path) -> None:
        """Python begins in theirs, and comes to our `__main__` where theirs has none."""
        found = shadow(tmp_path, "experiments", "package")
        for call, settings, way in (
            (MODULE, {}, "run the installed command `experiments`"),
            (SCRIPT, {"PYTHONPATH": "."}, f"take {tmp_path} out of PYTHONPATH"),
        ):
            done = called(tmp_path, call, "list", "--json", **settings)
            assert (done.returncode, done.stdout) == (2, "")
            assert done.stderr.startswith(f"error: Python finds {found} as 'experiments', in place of {ROOT / 'experiments'}; ")
            assert way in done.stderr
            assert len(done.stderr.splitlines()) == 1

    @pytest.mark.parametrize("kind", ["module", "package"])
    def test_where_python_runs_theirs_the_installed_command_takes_ours(self, kind: str, tmp_path: Path) -> None:
        found = shadow(tmp_path, "experiments", kind)
        if kind == "package":
            (found / "__main__.py").write_text("print('theirs')")
        theirs = called(tmp_path, MODULE, "list", "--json")
        assert theirs.returncode == 0
        assert "variants" not in theirs.stdout
        assert trace(tmp_path)
        (tmp_path / "trace").unlink()
        done = called(tmp_path, SCRIPT, "list", "--json")
        assert done.returncode == 0, done.stderr
        assert len(json.loads(done.stdout)["variants"]) >= 6
        assert trace(tmp_path) == []


def finished(done: subprocess.CompletedProcess[str]) -> bool:
    return done.returncode == 0 and json.loads(done.stdout)["complete"] == 3


@pytest.mark.parametrize("call", [MODULE, SCRIPT], ids=["python -m", "installed"])
def test_folders_of_data_do_not_matter(call: tuple[str, ...], tmp_path: Path) -> None:
    """Many keep their sweeps in a folder `experiments`; without `__init__.py` it is a package only where there is no other."""
    for name in NAMES:
        shadow(tmp_path, name, "folder")
    (tmp_path / "tiny.yaml").write_text(TINY)
    done = called(tmp_path, call, "run", "tiny.yaml", "seeds=[0]", "--json")
    assert finished(done), done.stderr
    assert trace(tmp_path) == []


@pytest.mark.parametrize("kind", ["module", "package"])
def test_workers_take_ours_as_well(kind: str, tmp_path: Path) -> None:
    """The fork server is a `python -c`, which by itself looks into the working directory first."""
    for name in NAMES:
        shadow(tmp_path, name, kind)
    (tmp_path / "tiny.yaml").write_text(TINY)
    done = called(tmp_path, SCRIPT, "run", "tiny.yaml", "seeds=[0]", "--json")
    assert finished(done), done.stderr
    assert trace(tmp_path) == []
