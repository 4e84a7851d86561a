"""Mathematics that at least two files use unchanged. Not a drawer for anything else."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of softmax and of running sums: float32, or float64 where the input is."""
    return torch.promote_types(dtype, torch.float32)


def scaled_scores(q: Tensor, k: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
    """q.k / (temperature * sqrt(D)), (B, H, L, D) x (B, H, S, D) -> (B, H, L, S).

    The product is taken in float32 or wider, so that what fits float16 as input does not overflow.
    """
    dtype = accumulate_dtype(q.dtype)
    return (q.to(dtype) / (temperature * math.sqrt(q.shape[-1]))) @ k.to(dtype).transpose(-2, -1)


def masked_softmax(scores: Tensor, visible: Tensor | None) -> Tensor:
    """Softmax over the last axis among visible entries; hidden entries are exactly 0, and so is a row without any.

    Args:
        scores: (..., L, S), in the dtype that the sum shall be taken in.
        visible: bool, broadcastable to scores, True = may attend; None where nothing hides.
    """
    if visible is None:
        return scores.softmax(-1)
    # A row of nothing but -inf would give NaN, forward and backward: such rows keep their finite scores, and go to 0 after.
    hidden = ~visible
    fill = hidden & visible.any(-1, keepdim=True)
    return scores.masked_fill(fill, -math.inf).softmax(-1).masked_fill(hidden, 0.0)


def average(weights: Tensor, v: Tensor) -> Tensor:
    """weights @ v, summed in the weights' dtype and returned in that of v: (B, H, L, S) x (B, H, S, Dv)."""
    return (weights @ v.to(weights.dtype)).to(v.dtype)


def both_visible(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """The AND of two visibilities, where None hides nothing."""
    if a is None or b is None:
        return b if a is None else a
    return a & b


def window_visible(L: int, S: int, window: int, causal: bool, device: torch.device, num_global: int = 0) -> Tensor:
    """A sliding window of exactly `window` keys, the query's own included, and leading global tokens: bool (L, S).

    Query i stands at p = S-L+i. Causal: 0 <= p-j < window. Two-sided: -((window-1)//2) <= j-p <= window//2. The first
    `num_global` tokens are seen by all and see all; causality itself is the mask's business.
    """
    position = torch.arange(S - L, S, device=device).unsqueeze(1)
    ahead = torch.arange(S, device=device) - position
    left = window - 1 if causal else (window - 1) // 2
    near = (ahead >= -left) & (ahead <= (0 if causal else window // 2))
    if num_global == 0:
        return near
    return near | (torch.arange(S, device=device) < num_global) | (position < num_global)


def chunks(length: int, size: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of consecutive chunks that cover 0..length; the last may be short."""
    if 0 < length <= size:  # said apart, so that a compiler need not fix the length
        return iter([(0, length)])
    return ((start, min(start + size, length)) for start in range(0, length, size))
