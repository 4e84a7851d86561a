"""Mathematics that at least two files use unchanged. Not a drawer for anything else."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from core.mask import Mask

MIN_QUERIES = 64  # of one row of the batch at a time, as far as the bound allows
SCORES = 2**20  # that a mechanism holds at a time where it takes queries in chunks: 4 MiB in float32


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of softmax and of running sums: float32, or float64 where the input is."""
    return torch.promote_types(dtype, torch.float32)


def no_autocast(device: str) -> contextlib.AbstractContextManager[Any]:
    """Half-precision inputs are widened on purpose in the softmax and in sums; autocast would undo that, backward too."""
    if device in ("cpu", "cuda") and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return contextlib.nullcontext()


def backward_alone(backward: Callable[..., Any]) -> Any:
    """For the backward of a function of one's own: under no autocast, and differentiable only once."""

    @functools.wraps(backward)
    def alone(ctx: Any, *grads: Tensor) -> Any:
        with no_autocast(grads[0].device.type):
            return backward(ctx, *grads)

    return once_differentiable(alone)


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


def window_sides(window: int, causal: bool) -> tuple[int, int]:
    """How many keys a window of `window` keys holds before and after its query's own."""
    return (window - 1, 0) if causal else ((window - 1) // 2, window // 2)


def window_visible(L: int, S: int, window: int, causal: bool, device: torch.device, num_global: int = 0) -> Tensor:
    """A sliding window of exactly `window` keys, the query's own included, and leading global tokens: bool (L, S).

    Query i stands at p = S-L+i. Causal: 0 <= p-j < window. Two-sided: -((window-1)//2) <= j-p <= window//2. The first
    `num_global` tokens are seen by all and see all; causality itself is the mask's business.
    """
    position = torch.arange(S - L, S, device=device).unsqueeze(1)
    ahead = torch.arange(S, device=device) - position
    left, right = window_sides(window, causal)
    near = (ahead >= -left) & (ahead <= right)
    if num_global == 0:
        return near
    return near | (torch.arange(S, device=device) < num_global) | (position < num_global)


def chunks(length: int, size: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of consecutive chunks that cover 0..length; the last may be short."""
    if 0 < length <= size:  # said apart, so that a compiler need not fix the length
        return iter([(0, length)])
    return ((start, min(start + size, length)) for start in range(0, length, size))


def pad_rows(x: Tensor, front: int, back: int) -> Tensor:
    """(..., L, D) -> (..., front + L + back, D), with zeros; x itself where nothing is added, which F.pad would copy."""
    if not torch.compiler.is_compiling() and front == 0 == back:
        return x
    return F.pad(x, (0, 0, front, back))


class Chunk(NamedTuple):
    """Queries start..stop of a call, and the keys 0..limit that causality leaves them."""

    start: int
    stop: int
    limit: int

    def visible(self, mask: Mask, L: int, S: int, device: torch.device) -> Tensor | None:
        """What these queries see of those keys, broadcastable to (B, H, stop - start, limit); None: all of them."""
        visible = mask.visible(L, S, device, (self.start, self.stop))
        return None if visible is None else visible[..., : self.limit]


def query_chunks(L: int, S: int, causal: bool, rows: int) -> Iterator[Chunk]:
    """Chunks of at most `rows` queries that cover L of them; under causality the earlier ones have fewer keys."""
    for start, stop in chunks(L, rows):
        yield Chunk(start, stop, min(max(stop + S - L, 1), S) if causal and stop < L else S)


def score_bound(device: torch.device, bound: int) -> int:
    """How many scores are held at a time: what fits a CPU's cache; a GPU wants fewer and larger pieces."""
    return bound if device.type == "cpu" else 16 * bound


class Piece(NamedTuple):
    """Some rows of the batch, and how many queries of them are taken at a time."""

    batch: slice
    rows: int


def pieces(q: Tensor, S: int, bound: int) -> list[Piece]:
    """Pieces of the batch of q (B, H, L, D) that have, with S keys, at most `bound` scores at a time, or those of one query.

    Of few queries at a time a product would read every key for little, so rather fewer rows of the batch are taken.
    """
    B, H, L, _ = q.shape
    together = min(max(bound // (H * S * min(L, MIN_QUERIES)), 1), B)
    rows = max(bound // (together * H * S), 1)
    return [Piece(slice(start, min(start + together, B)), rows) for start in range(0, B, together)]


def batch_parts(found: list[Piece], *tensors: Tensor) -> Iterator[tuple[Any, ...]]:
    """Each piece with its rows of the batch of each tensor."""
    sizes = [piece.batch.stop - piece.batch.start for piece in found]
    # Split, not sliced: the gradient of each slice would be a tensor as large as the whole.
    return zip(found, *(x.split(sizes) for x in tensors), strict=True)


def weights_in_chunks(
    weigh: Callable[[Tensor, Tensor, Tensor | None], Tensor], q: Tensor, k: Tensor, mask: Mask, rows: int
) -> Tensor:
    """weigh(q, k, visible) for `rows` queries at a time: only what it returns, (B, H, L, S) in all, is L x S."""
    L, S = q.shape[-2], k.shape[-2]
    parts = []
    for chunk in query_chunks(L, S, mask.causal, rows):
        weights = weigh(q[..., chunk.start : chunk.stop, :], k[..., : chunk.limit, :], chunk.visible(mask, L, S, q.device))
        parts.append(F.pad(weights, (0, S - chunk.limit)) if chunk.limit < S else weights)
    return torch.cat(parts, dim=-2) if len(parts) > 1 else parts[0]


def in_chunks(
    attend: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    bound: int = 0,
    rows: int | None = None,
) -> Tensor:
    """attend(q, k, v, visible) for a part of the queries at a time, so that no L x S tensor is alive.

    Of more than one part nothing but the inputs is kept: backward computes each again.

    Args:
        attend: (b, H, rows, D), (b, H, keys, D), (b, H, keys, Dv) and a visibility -> (b, H, rows, Dv). Nothing random.
        q, k, v: (B, H, L, D), (B, H, S, D), (B, H, S, Dv).
        bound: scores at a time, on a CPU.
        rows: queries at a time of the whole batch, in the place of a bound.
    """
    L, S = q.shape[-2], k.shape[-2]
    found = pieces(q, S, score_bound(q.device, bound)) if rows is None else [Piece(slice(0, len(q)), rows)]
    if len(found) == 1 and 0 < L <= found[0].rows:
        return attend(q, k, v, mask.visible(L, S, q.device))

    def attend_chunk(q: Tensor, k: Tensor, v: Tensor, mask: Mask, chunk: Chunk) -> Tensor:
        # What is visible is made here, and again in backward: kept for all chunks it would be an L x S tensor.
        return attend(q, k, v, chunk.visible(mask, L, S, q.device))

    outs = []
    for piece, some_q, some_k, some_v in batch_parts(found, q, k, v):
        parts = []
        for part, chunk in zip(some_q.split(piece.rows, dim=-2), query_chunks(L, S, mask.causal, piece.rows), strict=True):
            inputs = part, some_k[..., : chunk.limit, :], some_v[..., : chunk.limit, :], mask.of_batch(piece.batch), chunk
            parts.append(checkpoint(attend_chunk, *inputs, use_reentrant=False, preserve_rng_state=False))
        outs.append(torch.cat(parts, dim=-2) if len(parts) > 1 else parts[0])
    return torch.cat(outs) if len(outs) > 1 else outs[0]
