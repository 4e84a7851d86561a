"""Repeat a random prefix after a separator: needs exact attention at a fixed distance, so it tells mechanisms apart fast."""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field

from experiments.seeding import derive
from experiments.tasks import IGNORE, Batch, Split, Task, TaskConfig, generator, register_task


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
        # An evaluation is the same whatever the seed, and no training seed leads to it.
        stream = (seed, step) if split == "train" else ("held out", step)
        draw = generator(derive("copy", split, *stream))
        prefix = torch.randint(self.config.vocab, (self.batch_size, self.config.length), generator=draw)
        separator = torch.full((self.batch_size, 1), self.config.vocab)
        tokens = torch.cat([prefix, separator, prefix], dim=1)
        targets = tokens[:, 1:].clone()
        targets[:, : self.config.length] = IGNORE
        return Batch(tokens[:, :-1], targets)
