"""Repeat a random prefix after a separator: needs exact attention at a fixed distance, so it tells mechanisms apart fast."""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from experiments.seeding import derive
from experiments.tasks import IGNORE, Batch, Split, Task, TaskConfig, generator, register_task

HELD_OUT = 256  # sequences in validation, and in test


@register_task("copy")
class Copy(Task):
    """prefix, separator, prefix again; the loss counts the second prefix only."""

    class Config(TaskConfig):
        """length: tokens in the prefix. vocab: different tokens, the separator not counted."""

        length: int = Field(24, ge=1)
        vocab: int = Field(32, ge=2)

    def __init__(self, config: Any, batch_size: int) -> None:
        super().__init__(config, batch_size)
        self.vocab_size = config.vocab + 1
        self.seq_len = 2 * config.length

    def batch(self, split: Split, seed: int, step: int) -> Batch:
        if split == "train":
            prefix = self._draw(derive("copy", split, seed, step), self.batch_size)
        else:  # one held-out set, whatever the seed and the batch size
            prefix = self._draw(derive("copy", split), HELD_OUT)[step * self.batch_size : (step + 1) * self.batch_size]
        separator = torch.full((len(prefix), 1), self.config.vocab)
        tokens = torch.cat([prefix, separator, prefix], dim=1)
        targets = tokens[:, 1:].clone()
        targets[:, : self.config.length] = IGNORE
        return Batch(tokens[:, :-1], targets)

    def eval_batches(self, split: Split) -> int:
        return -(-HELD_OUT // self.batch_size)

    def _draw(self, seed: int, count: int) -> Tensor:
        return torch.randint(self.config.vocab, (count, self.config.length), generator=generator(seed))
