"""Training of one run: steps, schedule, validation, checkpoint. The same for every variant."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from experiments import config, measure
from experiments.model import forward_loss
from experiments.seeding import derive
from experiments.tasks import Batch, Split, Task

MAX_SKIPPED = 10  # steps in a row without a finite gradient
_PROGRESS = ("step", "skipped", "skipped_in_a_row", "order", "peak_bytes", "told")  # what a checkpoint holds beside the states


Record = Callable[[int, int, dict[str, float]], None]


class DivergedError(RuntimeError):
    """The loss, or the gradient for MAX_SKIPPED steps in a row, is no longer a number."""


class StoppedError(RuntimeError):
    """The driver asked for an end; the checkpoint is written."""


def learning_rate(train: config.Train, step: int) -> float:
    """The rate of step 0 <= step < steps: (step + 1) / warmup_steps of lr in warm-up, then the schedule from lr to min_lr."""
    if step < train.warmup_steps:
        return train.lr * (step + 1) / train.warmup_steps
    if train.schedule == "constant":
        return train.lr
    progress = (step - train.warmup_steps) / max(1, train.steps - train.warmup_steps)
    left = 1 - progress if train.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return train.min_lr + (train.lr - train.min_lr) * left


def make_optimizer(model: nn.Module, train: config.Train, fused: bool = True) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only."""
    matrices: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    for parameter in model.parameters():  # a number a head is no matrix, though it may have the axes of one
        (matrices if sum(size > 1 for size in parameter.shape) >= 2 else vectors).append(parameter)
    groups = [{"params": matrices, "weight_decay": train.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=train.lr, betas=(train.beta1, train.beta2), fused=fused
    )


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: str, device: str) -> contextlib.AbstractContextManager[Any]:
    """The context of a forward in this precision."""
    return contextlib.nullcontext() if precision == "fp32" else torch.autocast(device, dtype=DTYPES[precision])


class Trainer:
    """Trains a model on a task.

    Args:
        record: called with (step, milliseconds since 1970, values) for what shall be stored; step counts the steps done. What a
            checkpoint knows is told again when it is gone on from, since the driver may have died before it stored it.
        checkpoint: where to keep the state; None: nowhere. An existing file of this run is gone on from.
        stop: asked before every step; True ends the run with StoppedError after a checkpoint.
        full: measure the memory of the second step and take the digest of the batches; False where only time counts.
    """

    def __init__(
        self,
        run: config.Run,
        task: Task,
        model: nn.Module,
        seed: int,
        device: torch.device,
        record: Record,
        checkpoint: Path | None = None,
        stop: Callable[[], bool] = lambda: False,
        full: bool = True,
    ) -> None:
        self.train, self.task, self.model, self.seed, self.device = run.train, task, model, seed, device
        self.tell, self.checkpoint, self.stop, self.full = record, checkpoint, stop, full
        self.told: list[tuple[int, int, dict[str, float]]] = []
        self.identity = f"{run.hash()}/{seed}"
        self.optimizer = make_optimizer(model, run.train)
        self.dtype = DTYPES[run.train.precision]
        self.scaler = torch.amp.GradScaler("cuda") if run.train.precision == "fp16" else None
        self.step = 0
        self.skipped = 0
        self.skipped_in_a_row = 0
        self.order = ""  # digest of every training batch so far
        self.peak_bytes: int | None = None
        torch.manual_seed(derive("dropout", seed))
        if checkpoint is not None and checkpoint.exists():
            self._restore(checkpoint)

    def autocast(self) -> Any:
        """The context of a forward in this run's precision."""
        return autocast(self.train.precision, self.device.type)

    def record(self, step: int, values: dict[str, float]) -> None:
        """Tell what shall be stored, and remember it for the checkpoint."""
        self.told.append((step, time.time_ns() // 1_000_000, values))
        self.tell(*self.told[-1])

    def fit(self) -> dict[str, float]:
        """Train to the end.

        Returns:
            the last validation's figures.

        Raises:
            DivergedError, StoppedError.
        """
        train = self.train
        every = train.eval_every or max(1, train.steps // 5)
        saved = time.monotonic()
        self.model.train()
        while self.step < train.steps:
            if self.stop():
                self._save()
                raise StoppedError(f"stopped after step {self.step} of {train.steps}")
            self.advance()
            if self.step % every == 0 and self.step < train.steps:
                self.record(self.step, self.evaluate("val"))
            if time.monotonic() - saved >= train.checkpoint_seconds and self.step < train.steps:
                self._save()
                saved = time.monotonic()
        figures = self.evaluate("val")
        self.record(self.step, figures)
        return figures

    def advance(self) -> None:
        """One training step. The second one, when the optimiser has its state, is also the one whose memory is measured."""
        if self.full and self.step == 1 and self.peak_bytes is None:
            with measure.peak_memory(self.device, measure.resident_bytes(self.model, self.optimizer)) as peak:
                self._train_step()
            self.peak_bytes = peak.nbytes
        else:
            self._train_step()

    def _train_step(self) -> None:
        train = self.train
        rate = learning_rate(train, self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        # Every counted target of the step weighs the same, in whichever of its batches it stands: the sums are added up, over a
        # size that keeps them small, and divided by the count at the end.
        total_sum, count_sum, size = 0.0, 0.0, 1.0
        for index in range(train.accumulate):
            batch = self.task.batch("train", self.seed, self.step * train.accumulate + index)
            if self.full:
                self.order = hashlib.sha256(self.order.encode() + batch.inputs.numpy().tobytes()).hexdigest()[:16]
            batch = self.to_device(batch)
            with self.autocast():
                total, count = forward_loss(self.model, self.task, batch)[1:]  # the output is not kept through backward
            if index == 0:
                size = float(count) or 1.0
            loss = total / size
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            total_sum += float(total.detach())
            count_sum += float(count)
        if count_sum == 0:
            raise ValueError(f"task {self.task.name}: counts no target in step {self.step + 1}")
        if count_sum != size:
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(size / count_sum)
        self._update(total_sum / count_sum, rate)

    def _update(self, loss: float, rate: float) -> None:
        train = self.train
        if not math.isfinite(loss):
            raise DivergedError(f"the training loss is {loss} at step {self.step + 1} of {train.steps}")
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
        finite = math.isfinite(float(norm))
        if finite and train.grad_clip is not None:
            clip_grads_with_norm_(parameters, train.grad_clip, norm)
        if self.scaler is not None:
            self.scaler.step(self.optimizer)  # skips by itself where a gradient is not finite
            self.scaler.update()
        elif finite:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.skipped += not finite
        self.skipped_in_a_row = 0 if finite else self.skipped_in_a_row + 1
        if self.skipped_in_a_row >= MAX_SKIPPED:
            raise DivergedError(f"no finite gradient in the {MAX_SKIPPED} steps up to {self.step} of {train.steps}")
        if self.step % train.log_every == 0 or self.step == train.steps:
            values = {"train/loss": loss, "lr": rate}
            if finite:
                values["grad_norm"] = float(norm)
            if self.skipped:
                values["train/skipped_steps"] = float(self.skipped)
            self.record(self.step, values)

    @torch.no_grad()
    def evaluate(self, split: Split) -> dict[str, float]:
        """Figures of a whole split, weighted by token; {} where it is empty.

        Raises:
            DivergedError: the loss is not a number.
        """
        self.model.eval()
        sums: dict[str, float] = {}
        counts: dict[str, float] = {}
        for step in range(self.task.eval_batches(split)):
            batch = self.batch(split, step)
            with self.autocast():
                output, total, count = forward_loss(self.model, self.task, batch)
            for name, (part, number) in {"loss": (total, count), **self.task.metrics(output, batch)}.items():
                sums[name] = sums.get(name, 0.0) + float(part)
                counts[name] = counts.get(name, 0.0) + float(number)
        self.model.train()
        means = {name: sums[name] / counts[name] for name in sums if counts[name]}
        if "loss" in means:
            if not math.isfinite(means["loss"]):
                raise DivergedError(f"the {split} loss is {means['loss']} after step {self.step} of {self.train.steps}")
            if means["loss"] < 700:  # beyond it, exp leaves float64
                means["perplexity"] = math.exp(means["loss"])
        return {f"{split}/{name}": value for name, value in means.items()}

    def batch(self, split: Split, step: int) -> Batch:
        """The task's batch, on the device of the run."""
        return self.to_device(self.task.batch(split, self.seed, step))

    def to_device(self, batch: Batch) -> Batch:
        """The batch on the device of the run."""
        if self.device.type == "cpu":
            return batch
        keys = None if batch.keys is None else batch.keys.to(self.device)
        return Batch(batch.inputs.to(self.device), batch.targets.to(self.device), keys)

    def _save(self, *, finished: bool = False) -> None:
        if self.checkpoint is None:
            return
        state: dict[str, Any] = {"identity": self.identity, "model": self.model.state_dict()}
        state |= {name: getattr(self, name) for name in _PROGRESS}
        if not finished:
            state |= {
                "optimizer": self.optimizer.state_dict(),
                "scaler": None if self.scaler is None else self.scaler.state_dict(),
                "random": torch.get_rng_state(),
                "random_cuda": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None,
            }
        write_whole(self.checkpoint, state)

    def save_weights(self) -> None:
        """What a finished run keeps: its weights, without what only further training needs."""
        self._save(finished=True)

    def _restore(self, path: Path) -> None:
        try:
            state = torch.load(path, map_location=self.device, weights_only=True)
        except Exception as error:  # cut short by the machine: the run begins again
            kept = path.with_suffix(".damaged")
            path.replace(kept)
            print(f"checkpoint {path} cannot be read ({error}); kept as {kept.name}, the run begins again", flush=True)
            return
        if state["identity"] != self.identity:
            raise ValueError(f"checkpoint {path}: belongs to {state['identity']}, not to {self.identity}")
        self.model.load_state_dict(state["model"])
        for name in _PROGRESS:
            setattr(self, name, state[name])
        for record in self.told:
            self.tell(*record)
        if "optimizer" not in state:  # training had ended, only its end was not stored
            return
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])
        torch.set_rng_state(state["random"].cpu())
        if state["random_cuda"] is not None:
            torch.cuda.set_rng_state(state["random_cuda"].cpu(), self.device)


def write_whole(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint so that a reader finds the old one or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
