"""The peak memory of a training step, before it is run: the step is taken on tensors that have shapes, but no data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from core.contract.measure import Cost
from experiments.config import Run
from experiments.measure import MIB
from experiments.model import build_model
from experiments.schema import Constraint
from experiments.tasks import Batch
from experiments.train import autocast, forward_loss
from experiments.worker import make_task

TOLERANCE = 1.15  # how far a prediction may be off


def peak_mb(run: Run, device: str = "cpu") -> float | None:
    """What `memory/peak_mb` of this run will be, in MiB; None where it cannot be told.

    That is: on CUDA, whose kernels are others; for a compiled model; and where the step needs data to go on.
    """
    if device != "cpu" or run.train.compile:
        return None
    try:
        return _step(run) / MIB
    except Exception:  # a mechanism that looks at its data, or needs what such tensors cannot do
        return None


def foresee(run: Run, device: str, constraints: Sequence[Constraint]) -> str | None:
    """The constraint that this run would break, in words; None where nothing is foreseen."""
    limits = [c.max for c in constraints if c.metric == "memory/peak_mb" and c.max is not None]
    predicted = peak_mb(run, device) if limits else None
    if predicted is None or predicted <= TOLERANCE * min(limits):
        return None
    limit = f"{TOLERANCE:g} times the constraint of {min(limits):g}"
    return f"predicted memory/peak_mb {predicted:,.1f}, which is above {limit}"


def _step(run: Run) -> int:
    task = make_task(run)
    batch = task.batch("train", 0, 0)
    fake = FakeTensorMode()
    inputs, targets, keys = (None if x is None else fake.from_tensor(x) for x in (batch.inputs, batch.targets, batch.keys))
    assert inputs is not None
    assert targets is not None
    with torch.random.fork_rng(devices=[]), fake, _WithoutAnswers():
        model = build_model(run, task, 0, "cpu").train()
        resident = sum(buffer.nbytes for buffer in model.buffers())
        for parameter in model.parameters():  # AdamW keeps two numbers for each, and a count of steps in float32
            resident += 3 * parameter.nbytes + 4
        with Cost() as cost:
            for _ in range(min(run.train.accumulate, 2)):  # the second finds the gradients of the first
                with autocast(run.train.precision, "cpu"):
                    total, _ = forward_loss(model, task, Batch(inputs, targets, keys))[1:]
                (total / 1.0).backward()
    return resident + cost.peak


class _WithoutAnswers(TorchDispatchMode):
    """A question about data, such as "is any of these tied?", is answered with 0 or no: there is none."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 0.0 if args[0].is_floating_point() else False if args[0].dtype == torch.bool else 0
        return func(*args, **(kwargs or {}))
