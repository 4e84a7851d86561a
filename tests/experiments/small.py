"""Small configurations, sweeps and tasks that the unit tests share."""

from pathlib import Path
from typing import Any

import experiments  # noqa: F401  its environment must stand before torch is loaded
import variants  # noqa: F401  registers the house's mechanisms
from experiments import config, strict_yaml
from experiments.sweep import Sweep, load
from experiments.tasks import Task, tasks

ROOT = Path(__file__).parents[2]
COPY = {"name": "copy", "length": 3, "vocab": 5}
HEAD = "name: small\nbase:\n  task: {name: copy, length: 3, vocab: 5}\n"  # three lines


def run_of(
    attention: dict[str, Any] | None = None,
    task: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    train: dict[str, Any] | None = None,
) -> config.Run:
    """A complete configuration of a few hundred parameters."""
    return config.Run(
        task=task or COPY,
        model=config.Model(**{"model_dim": 8, "num_layers": 2, "num_heads": 2, **(model or {})}),
        attention=attention or {"variant": "standard"},
        train=config.Train(**{"steps": 6, "batch_size": 4, "schedule": "constant", **(train or {})}),
    )


def task_of(run: config.Run) -> Task:
    """The task of a configuration."""
    cls = tasks.get(run.task["name"])
    settings = {key: value for key, value in run.task.items() if key != "name"}
    return cls(cls.Config(**settings), run.train.batch_size)


def sweep_of(folder: Path, text: str, *overrides: str) -> Sweep:
    """A sweep from the text of its file, `s.yaml`."""
    path = folder / "s.yaml"
    path.write_text(text)
    return load(path, overrides)


def read(text: str) -> Any:
    """Data of YAML text."""
    return strict_yaml.parse(text, "f").data
