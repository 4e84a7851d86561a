"""`new`: what it writes can be run as it stands."""

import os
import subprocess
import sys

import pytest

from core.contract import check
from core.registry import load_plugin, variants
from experiments import templates
from experiments.config import Job
from experiments.errors import InputError
from experiments.worker import run_job
from tests.experiments.small import ROOT, run_of


@pytest.fixture
def written(tmp_path):
    return templates.write("my_attention", tmp_path)


def test_two_files_are_written(written, tmp_path):
    assert written == [tmp_path / "my_attention.py", tmp_path / "test_my_attention.py"]
    assert len(written[0].read_text().splitlines()) < 45  # one screen
    assert "{" not in written[1].read_text()


def test_the_new_variant_keeps_every_rule_and_trains(written):
    load_plugin(written[0])
    try:
        result = check("my_attention")
        assert result.ok, str(result)
        events = []
        run = run_of({"variant": "my_attention", "temperature": 0.5})
        run_job(Job("0/0", "train", (run,), plugins=(str(written[0]),)), events.append, lambda: False)
        assert events[-1]["state"] == "finished"
        same = run_of({"variant": "temperature", "temperature": 0.5, "learn": "none"})
        expected = []
        run_job(Job("0/0", "train", (same,)), expected.append, lambda: False)
        assert events[-1]["values"]["val/loss"] == pytest.approx(expected[-1]["values"]["val/loss"], abs=1e-5)
    finally:
        variants._classes.pop("my_attention", None)


def test_its_test_passes(written, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_my_attention.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "passed" in done.stdout


def test_its_style_is_that_of_the_house(written):
    done = subprocess.run([sys.executable, "-m", "ruff", "check", "--config", str(ROOT / "pyproject.toml"), *map(str, written)])
    assert done.returncode == 0


@pytest.mark.parametrize(
    "name", ["MyAttention", "my-attention", "1st", "", "my__attention", "../up", "a.b", "é", "my attention", "_a"]
)
def test_names_that_no_file_can_have(tmp_path, name):
    with pytest.raises(InputError, match=r"a name must be lower snake case, such as my_attention$"):
        templates.write(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_names_that_are_taken(tmp_path):
    with pytest.raises(InputError, match="new topk: this name is taken by a variant"):
        templates.write("topk", tmp_path)
    (tmp_path / "test_mine.py").write_text("kept")
    with pytest.raises(InputError, match=r"new mine: test_mine\.py is there already"):
        templates.write("mine", tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["test_mine.py"]
    assert (tmp_path / "test_mine.py").read_text() == "kept"


def test_a_folder_that_cannot_be_written(tmp_path):
    with pytest.raises(InputError, match=r"mine\.py cannot be written \(No such file or directory\)"):
        templates.write("mine", tmp_path / "nowhere")
