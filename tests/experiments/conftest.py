"""Real commands in real folders: every end-to-end test runs `python -m experiments` as a person does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

TINY = """\
name: tiny
base:
  task: {name: copy, length: 4, vocab: 6}
  model: {model_dim: 16, num_layers: 1, num_heads: 2}
  train: {steps: 12, batch_size: 4, lr: 3e-3}
parameters:
  attention.variant: {values: [standard, linear]}
seeds: [0, 1]
baseline: [{attention.variant: uniform}]
budget: {parallel: 2}
"""

Command = Callable[..., subprocess.CompletedProcess[str]]


def environment() -> dict[str, str]:
    """As a newcomer's: no tracking address, a narrow terminal, one thread."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("MLFLOW")}
    return {**kept, "COLUMNS": "80", "PYTHONUNBUFFERED": "1"}


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """`python -m experiments ARGUMENTS` in a folder, in a session of its own, so that its children can be found."""
    command = [sys.executable, "-m", "experiments", *arguments]
    return subprocess.Popen(
        command,
        cwd=folder,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.fixture
def command(tmp_path: Path) -> Command:
    """Run a verb to its end in an empty folder."""

    def run(*arguments: str, folder: Path = tmp_path, timeout: float = 240) -> subprocess.CompletedProcess[str]:
        process = start(folder, *arguments)
        out, err = process.communicate(timeout=timeout)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    return run


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A study of three trials and six runs that takes seconds."""
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    return path
