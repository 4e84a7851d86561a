"""What decoding keeps between steps."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from core.errors import ShapeError


class KeyValueState(NamedTuple):
    """Keys and values seen so far: k (B, Hkv, S, D), v (B, Hkv, S, Dv), keys bool (B, S) or None where all may be seen."""

    k: Tensor
    v: Tensor
    keys: Tensor | None

    @property
    def nbytes(self) -> int:
        """Bytes held, all sequences of the batch together."""
        return sum(part.nbytes for part in self if part is not None)

    def extend(self, k: Tensor, v: Tensor, keys: Tensor | None) -> KeyValueState:
        """This state followed by new tokens.

        Raises:
            ShapeError: another batch, number of heads or dim than the state holds.
        """
        for name, held, given in (("k", self.k, k), ("v", self.v, v)):
            if held.shape[:2] != given.shape[:2] or held.shape[3] != given.shape[3]:
                raise ShapeError(f"state {name}: holds shape {tuple(held.shape)}, got new tokens {tuple(given.shape)}")
        seen = None
        if self.keys is not None or keys is not None:
            seen = torch.cat([_all_true(self.keys, self.k), _all_true(keys, k)], dim=1)
        return KeyValueState(torch.cat([self.k, k], dim=2), torch.cat([self.v, v], dim=2), seen)


def _all_true(keys: Tensor | None, k: Tensor) -> Tensor:
    return torch.ones(k.shape[0], k.shape[2], dtype=torch.bool, device=k.device) if keys is None else keys


class LayerCache(NamedTuple):
    """The decoding state of one layer: the mechanism's own state and the number of positions consumed."""

    state: Any
    length: int

    @property
    def nbytes(self) -> int:
        """Bytes held, all sequences of the batch together."""
        return self.state.nbytes
