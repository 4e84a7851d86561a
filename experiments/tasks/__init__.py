"""What a model is asked to do: the Task interface, its registry, and the house's own tasks (one a file, file name == name)."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from core.attention import AttentionConfig
from core.registry import Registry

Split = Literal["train", "val", "test"]
Sums = tuple[Tensor, Tensor]
IGNORE = -100  # a target that does not count


class TaskConfig(AttentionConfig):
    """Base of a task's settings: no conversion between types, no unknown key."""


class Batch(NamedTuple):
    """inputs (B, L) int64, targets (B, L) int64 with IGNORE where nothing is asked, keys bool (B, L) or None: no padding."""

    inputs: Tensor
    targets: Tensor
    keys: Tensor | None = None


class Task:
    """One task. A plugin sets `Config`, and defines `batch`, `vocab_size` and `seq_len`.

    Args:
        config: an instance of the class's own Config.
        batch_size: sequences a batch.

    Raises:
        ValueError: settings that cannot be served (a missing corpus, say), in one line.
    """

    name: ClassVar[str] = ""
    Config: ClassVar[type[TaskConfig]] = TaskConfig
    kind: ClassVar[Literal["decoder", "encoder", "classifier", "encoder_decoder"]] = "decoder"
    vocab_size: int
    seq_len: int

    def __init__(self, config: Any, batch_size: int) -> None:
        self.config = config
        self.batch_size = batch_size

    def batch(self, split: Split, seed: int, step: int) -> Batch:
        """The batch of one step: a pure function, so that every variant sees the same data and a resumed run goes on.

        Args:
            split: for "val" and "test", steps 0 .. eval_batches(split) - 1 are the whole evaluation, the same for any seed.
        """
        raise NotImplementedError(f"{type(self).__name__} must define batch")

    def eval_batches(self, split: Split) -> int:
        """Batches in one evaluation; 0 where the split is empty. Override it so that the set does not depend on batch_size."""
        return 8

    def loss(self, output: Tensor, batch: Batch) -> Sums:
        """Summed cross-entropy in float32 and the number of counted targets. output: (B, L, vocab_size)."""
        total = F.cross_entropy(output.float().flatten(0, -2), batch.targets.flatten(), ignore_index=IGNORE, reduction="sum")
        return total, (batch.targets != IGNORE).sum()

    def metrics(self, output: Tensor, batch: Batch) -> dict[str, Sums]:
        """Further figures as (sum, count), which are added up over an evaluation before they are divided."""
        counted = batch.targets != IGNORE
        return {"accuracy": (((output.argmax(-1) == batch.targets) & counted).sum(), counted.sum())}

    def describe(self) -> dict[str, Any]:
        """What a reader must know of the data: sizes, and `digest` where the data come from a file."""
        return {"vocab_size": self.vocab_size, "seq_len": self.seq_len}


tasks: Registry[Task] = Registry("task", Task, "attention_tasks")
register_task = tasks.register


def generator(seed: int) -> torch.Generator:
    """A CPU generator, so that data are the same on every device."""
    return torch.Generator().manual_seed(seed)


for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
