"""Predict the next character (or byte) of a real text.

The stream is cut into train, validation and test before any window is made. Training draws windows at random; an evaluation
goes once through the whole stream of its split, in windows that touch and do not overlap.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from experiments.seeding import derive
from experiments.tasks import IGNORE, Batch, Split, Task, TaskConfig, generator, register_task

REFERENCE = "python-docs"


@register_task("text")
class Text(Task):
    """Next-token prediction on a text file, or on the reference text inside every CPython (`pydoc_data.topics`)."""

    class Config(TaskConfig):
        """corpus: python-docs or a path. tokens: what a token is. split: shares of train, validation and test."""

        corpus: str = REFERENCE
        seq_len: int = Field(128, ge=1)
        tokens: Literal["characters", "bytes"] = "characters"
        split: list[float] = Field([0.8, 0.1, 0.1], min_length=3, max_length=3)

        @model_validator(mode="after")
        def _shares(self) -> Any:
            if min(self.split) < 0 or abs(sum(self.split) - 1) > 1e-6:
                raise ValueError(f"split must be three shares that add up to 1, got {self.split}")
            return self

    def __init__(self, config: Any, batch_size: int) -> None:
        super().__init__(config, batch_size)
        text = read_corpus(config.corpus)
        if config.tokens == "bytes":
            stream = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()
            self.vocab_size = 256
        else:
            alphabet = {character: index for index, character in enumerate(sorted(set(text)))}
            stream = torch.tensor([alphabet[character] for character in text])
            self.vocab_size = len(alphabet)
        self.seq_len = config.seq_len
        self.digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        first = round(len(stream) * config.split[0])
        second = first + round(len(stream) * config.split[1])
        self.streams: dict[str, Tensor] = dict(zip(("train", "val", "test"), stream.tensor_split((first, second)), strict=True))
        for split in ("train", "val"):
            if len(self.streams[split]) <= self.seq_len:
                raise ValueError(
                    f"corpus {config.corpus}: {split} has {len(self.streams[split])} tokens, "
                    f"which must be more than seq_len {self.seq_len}"
                )

    def batch(self, split: Split, seed: int, step: int) -> Batch:
        stream, length = self.streams[split], self.seq_len
        if split == "train":
            draw = generator(derive("text", seed, step))
            starts = torch.randint(len(stream) - length, (self.batch_size,), generator=draw)
            windows = stream[starts[:, None] + torch.arange(length + 1)]
            return Batch(windows[:, :-1], windows[:, 1:])
        first = step * self.batch_size * length
        piece = stream[first : first + self.batch_size * length + 1]
        rows = -(-(len(piece) - 1) // length)
        inputs = torch.zeros(rows * length, dtype=torch.long)
        targets = torch.full((rows * length,), IGNORE)
        inputs[: len(piece) - 1], targets[: len(piece) - 1] = piece[:-1], piece[1:]
        return Batch(inputs.view(rows, length), targets.view(rows, length))

    def eval_batches(self, split: Split) -> int:
        return -(-max(len(self.streams[split]) - 1, 0) // (self.batch_size * self.seq_len))

    def describe(self) -> dict[str, Any]:
        sizes = {split: len(stream) for split, stream in self.streams.items()}
        return {"corpus": self.config.corpus, "digest": self.digest, **super().describe(), **sizes}


def read_corpus(corpus: str) -> str:
    """The text of a corpus by name or path.

    Raises:
        ValueError: no such file, a file that is not UTF-8, or an empty one.
    """
    if corpus == REFERENCE:
        from pydoc_data.topics import topics

        return "\n".join(topics[name] for name in sorted(topics))
    try:
        path = Path(corpus).expanduser()
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"corpus {corpus}: cannot be read ({error.strerror}), from {Path.cwd()}") from None
    except RuntimeError as error:  # ~name of nobody
        raise ValueError(f"corpus {corpus}: cannot be read ({error})") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"corpus {corpus}: is not UTF-8 text (byte {error.start})") from None
    if not text:
        raise ValueError(f"corpus {corpus}: is empty")
    return text
