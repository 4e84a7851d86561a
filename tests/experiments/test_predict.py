"""The memory of a step is foreseen without running it, and agrees with what is then measured."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest
import torch

from core import Attention, AttentionOutput, Mask, Spec, names, register, registry
from experiments.model import build_model
from experiments.predict import TOLERANCE, foresee, peak_mb
from experiments.schema import Constraint
from experiments.train import Trainer
from tests.experiments.conftest import TINY, Command
from tests.experiments.small import run_of, task_of
from tests.experiments.test_study import mlflow_runs

MODEL = {"model_dim": 32, "num_layers": 2, "num_heads": 4}
TASK = {"name": "copy", "length": 40, "vocab": 20}


def measured(run: Any) -> float:
    """`memory/peak_mb` of the second step, as a run measures it."""
    task = task_of(run)
    trainer = Trainer(run, task, build_model(run, task, 0), 0, torch.device("cpu"), lambda step, when, values: None)
    trainer.advance()
    trainer.advance()
    assert trainer.peak_bytes is not None
    return trainer.peak_bytes / 2**20


def check(attention: dict[str, Any], model: dict[str, Any] | None = None, train: dict[str, Any] | None = None) -> None:
    run = run_of(attention, TASK, {**MODEL, **(model or {})}, train)
    predicted = peak_mb(run)
    assert predicted is not None
    assert predicted == pytest.approx(measured(run), rel=0.15)


@pytest.mark.parametrize("variant", names())
def test_every_mechanism(variant: str) -> None:
    check({"variant": variant})


@pytest.mark.parametrize("model", [{"checkpoint": True}, {"positions": "rotary"}, {"tied": True}, {"num_kv_heads": 1}], ids=str)
def test_models(model: dict[str, Any]) -> None:
    check({"variant": "standard"}, model)


@pytest.mark.parametrize("train", [{"accumulate": 3}, {"precision": "bf16"}, {"batch_size": 32}], ids=str)
def test_training(train: dict[str, Any]) -> None:
    check({"variant": "topk", "keep": 4}, {"checkpoint": True}, train)


@pytest.mark.parametrize("attention", [{"chunk_size": 8}, {"backend": "math"}, {"backend": "math", "chunk_size": 8}], ids=str)
def test_settings(attention: dict[str, Any]) -> None:
    check({"variant": "standard", **attention})


def test_what_cannot_be_told_is_unknown() -> None:
    run = run_of()
    assert peak_mb(run, "cuda") is None
    assert peak_mb(run_of(train={"compile": True})) is None


def test_a_mechanism_that_looks_at_its_data_is_unknown() -> None:
    @register("looks")
    class Looks(Attention):
        """Cannot be computed without data."""

        spec = Spec(causal=True)

        def attend(self, q: Any, k: Any, v: Any, mask: Mask, need_weights: bool) -> AttentionOutput:
            return AttentionOutput(v * torch.tensor(v.detach().numpy()).mean(), None)

    try:
        assert peak_mb(run_of({"variant": "looks"})) is None
    finally:
        registry.variants._classes.pop("looks")


def test_random_numbers_are_left_as_they_were() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    peak_mb(run_of())
    assert torch.equal(torch.rand(3), expected)


def test_a_constraint_is_broken_beyond_the_tolerance_only() -> None:
    run = run_of()
    predicted = peak_mb(run)
    assert predicted is not None

    def limit(value: float, metric: str = "memory/peak_mb") -> Any:
        return foresee(run, "cpu", [Constraint(metric=metric, max=value)])

    assert limit(predicted / TOLERANCE * 1.01) is None
    message = limit(predicted / TOLERANCE * 0.99)
    assert message.startswith(f"predicted memory/peak_mb {predicted:,.1f}, which is above 1.15 times the constraint of ")
    assert limit(1e-9, "cost/params") is None
    assert foresee(run, "cpu", []) is None


def test_run_skips_what_show_says_it_will(command: Command, tmp_path: Path) -> None:
    text = TINY.replace("[standard, linear]}", "[standard, linear]}\n  model.model_dim: {values: [16, 128]}")
    text += "constraints: [{metric: memory/peak_mb, max: 0.5}]\n"
    (tmp_path / "tiny.yaml").write_text(text)
    shown = command("show", "tiny.yaml")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.count("`run` will skip it: predicted memory/peak_mb ") == 2
    done = command("run", "tiny.yaml")
    assert done.returncode == 0, done.stderr
    assert "Skipped before they began:" in done.stdout
    assert done.stdout.count("skipped: predicted memory/peak_mb ") == 2
    with sqlite3.connect(tmp_path / ".experiments/studies/tiny/study.db") as db:
        states = dict(db.execute("SELECT state, COUNT(*) FROM runs GROUP BY state").fetchall())
        attempts = db.execute("SELECT SUM(attempts) FROM runs WHERE state = 'skipped'").fetchone()[0]
    db.close()
    assert states == {"finished": 6, "skipped": 4}
    assert attempts == 0
    parent, children, _ = mlflow_runs(tmp_path)
    assert parent.data.tags["trials_skipped"] == "2"
    assert parent.info.status == "FINISHED"
    skipped = [run for run in children if run.data.tags["state"] == "skipped"]
    assert {run.info.status for run in skipped} == {"KILLED"}
    assert {run.data.tags["cause"] for run in skipped} == {"memory"}
    again = command("run", "tiny.yaml")
    assert again.returncode == 0
    assert "trial 1 seed" not in again.stdout


def test_the_price_of_a_start_is_printed(command: Command, tiny: Path) -> None:
    import re

    done = command("run", "tiny.yaml")
    found = re.search(
        r"start-up: ([\d.]+) s until the first step of the first run; ([\d.]+) s a run \(median of 6\)", done.stdout
    )
    assert found is not None, done.stdout
    # 8 s and 0.15 s on a quiet machine (docs/performance.md); here other tests run beside it.
    assert float(found[1]) < 8 * 3
    assert float(found[2]) < 0.15 * 5
