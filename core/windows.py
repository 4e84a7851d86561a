"""Softmax attention within a sliding window, in blocks: time and memory grow with the length, not with its square.

A block of BLOCK queries is multiplied with the strip of keys that its windows cover, and with the global keys. Blocks are taken
in groups of at most SCORES scores, so what is alive beside inputs and output is bounded; backward computes the scores again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from core.backends import Backend, dense_attention
from core.functional import accumulate_dtype, backward_alone, pad_rows, score_bound, window_sides
from core.mask import Mask

BLOCK = 32  # smaller blocks waste fewer products at the edges of a window, larger ones multiply faster
SCORES = 2**19  # 2 MiB in float32


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    window: int,
    num_global: int = 0,
    temperature: float = 1.0,
    backend: Backend = "auto",
) -> tuple[Tensor, str]:
    """softmax(q k^T / (temperature sqrt(D)), within the window and among visible keys) v, and what computed it.

    Args:
        q, k, v: (B, H, L, D), (B, H, S, D), (B, H, S, Dv); L == S unless the mask is causal.
        window, num_global: as `window_visible` has them.
        backend: auto: blocks; another: that kernel, which is given L x S pairs where it has no window of its own.

    Returns:
        out (B, H, L, Dv) and "blocks"; or the name of the dense kernel that was asked for, or that serves because every query
        sees all that the mask shows.

    Raises:
        BackendError: an explicit backend cannot serve this call.
    """
    if backend != "auto":
        return dense_attention(q, k, v, mask, temperature=temperature, backend=backend, window=window, num_global=num_global)
    L, S = q.shape[-2], k.shape[-2]
    left, right = window_sides(window, mask.causal)
    if left >= S - 1 and (mask.causal or right >= S - 1):
        return dense_attention(q, k, v, mask, temperature=temperature)
    blind = max(L - S, 0)  # these stand before every key
    full = min(max(num_global - max(S - L, 0), 0), L - blind)  # these see all
    rest = blind + full
    outs = []
    if blind:
        outs.append(torch.zeros_like(q[:, :, :blind, :1]).expand(-1, -1, -1, v.shape[-1]))
    if full:
        rows = Mask(pairs=mask.visible(L, S, q.device, (blind, rest)))
        outs.append(dense_attention(q[:, :, blind:rest], k, v, rows, temperature=temperature)[0])
    if rest < L:
        keys = None if mask.keys is None else mask.keys.to(q.device)
        pairs = None if mask.pairs is None else mask.pairs.to(q.device).expand(*mask.pairs.shape[:-2], L, S)[..., rest:, :]
        shape = _Shape(L - rest, S, left, right, mask.causal, min(num_global, S), 1.0 / (temperature * math.sqrt(q.shape[-1])))
        # A view each: torch.compile takes no function of one's own that is given the same tensor twice.
        outs.append(_Blocks.apply(q[:, :, rest:], k.view_as(k), v.view_as(v), keys, pairs, shape))
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=2), "blocks"


class _Shape(NamedTuple):
    """What the blocks of one call look like. Query i stands at S - L + i; L <= S."""

    L: int
    S: int
    left: int
    right: int
    causal: bool
    num_global: int
    scale: float

    @property
    def before(self) -> int:
        """Keys of a strip before its block: whole blocks, so that strips lie at multiples of BLOCK."""
        return -(-self.left // BLOCK) * BLOCK

    @property
    def width(self) -> int:
        """Keys of a strip."""
        return self.before + BLOCK + -(-self.right // BLOCK) * BLOCK


class _Group(NamedTuple):
    """Some blocks of some heads of some batch rows, as batches of matrices (N, BLOCK, D) and (N, keys, D)."""

    batch: slice
    heads: slice
    start: int  # first block
    stop: int

    def queries(self, x: Tensor) -> Tensor:
        """Blocks of x (B, H, L, D), the last one filled up with zeros."""
        rows = x[self.batch, self.heads, self.start * BLOCK : self.stop * BLOCK]
        rows = pad_rows(rows, 0, (self.stop - self.start) * BLOCK - rows.shape[-2])
        return rows.to(accumulate_dtype(x.dtype)).unflatten(-2, (-1, BLOCK)).flatten(0, 2)

    def place(self, shape: _Shape) -> tuple[int, int, int, int]:
        """First and last key of the group's strips, cut to 0..S, and how many were cut on both sides."""
        start = self.start * BLOCK + shape.S - shape.L - shape.before
        stop = start + (self.stop - self.start - 1) * BLOCK + shape.width
        return max(start, 0), min(stop, shape.S), max(-start, 0), max(stop - shape.S, 0)

    def keys(self, x: Tensor, shape: _Shape) -> Tensor:
        """Global keys and strips of x (B, H, S, D), side by side; a view where it can be."""
        first, last, front, back = self.place(shape)
        strip = pad_rows(x[self.batch, self.heads, first:last].to(accumulate_dtype(x.dtype)), front, back)
        strips = strip.unfold(-2, shape.width, BLOCK).transpose(-1, -2)
        if shape.num_global:
            whole = x[self.batch, self.heads, None, : shape.num_global].to(strips.dtype)
            strips = torch.cat([whole.expand(-1, -1, strips.shape[2], -1, -1), strips], dim=-2)
        return strips.flatten(0, 2)

    def hidden(self, shape: _Shape, keys: Tensor | None, pairs: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor]:
        """What the softmax leaves out, bool broadcastable to (rows, heads, blocks, BLOCK, keys), and the rows that see nothing.

        Of those rows nothing is left out: they stay finite, and whoever asks sets them to 0.
        """
        block = torch.arange(self.start, self.stop, device=device)[:, None, None] * BLOCK
        row = torch.arange(BLOCK, device=device)[:, None]
        offset = torch.arange(shape.width, device=device) - shape.before
        near = (offset - row >= -shape.left) & (offset - row <= shape.right)
        key = block + offset + (shape.S - shape.L)  # (blocks, 1, keys of a strip)
        visible = near & (key >= shape.num_global) & (key < shape.S)
        if shape.num_global:
            whole = torch.arange(shape.num_global, device=device)
            seen = whole <= block + row + (shape.S - shape.L) if shape.causal else (whole >= 0).expand(len(block), BLOCK, -1)
            visible = torch.cat([seen, visible], dim=-1)
            key = torch.cat([whole.expand(len(block), 1, -1), key], dim=-1)
        key, place = key.clamp(0, shape.S - 1), (block + row).clamp(max=shape.L - 1)
        if keys is not None:
            visible = visible & keys[self.batch][:, key][:, None]
        if pairs is not None:
            given = pairs if pairs.dim() == 4 else pairs[None, None]
            batch = self.batch if len(given) > 1 else slice(None)
            visible = visible & given[batch, self.heads if given.shape[1] > 1 else slice(None)][:, :, place, key]
        blind = ~visible.any(-1, keepdim=True)
        return ~(visible | blind), blind

    def weights(self, queries: Tensor, keys: Tensor, hidden: Tensor) -> Tensor:
        """Softmax of the scaled scores, (N, BLOCK, keys)."""
        scores = torch.bmm(queries, keys.transpose(1, 2))
        self.split(scores).masked_fill_(hidden, -math.inf)
        return scores.softmax(-1)

    def split(self, x: Tensor) -> Tensor:
        """(N, ...) -> (rows, heads, blocks, ...)."""
        return x.unflatten(0, (-1, self.heads.stop - self.heads.start, self.stop - self.start))


def _groups(B: int, H: int, shape: _Shape, device: torch.device) -> Iterator[_Group]:
    """Groups of at most SCORES scores (or of one block) that cover everything."""
    blocks, each = -(-shape.L // BLOCK), BLOCK * (shape.num_global + shape.width)
    if torch.compiler.is_compiling():  # a graph without loops serves every length
        yield _Group(slice(0, B), slice(0, H), 0, blocks)
        return
    bound = score_bound(device, SCORES)
    span = min(blocks, max(bound // each, 1))
    heads = min(H, max(bound // (each * span), 1)) if span == blocks else 1
    rows = min(B, max(bound // (each * span * heads), 1)) if heads == H else 1
    for b in range(0, B, rows):
        for start in range(0, blocks, span):
            for h in range(0, H, heads):
                batch, some = slice(b, min(b + rows, B)), slice(h, min(h + heads, H))
                yield _Group(batch, some, start, min(start + span, blocks))


def _hiding(q: Tensor, shape: _Shape, keys: Tensor | None, pairs: Tensor | None) -> Iterator[tuple[_Group, Tensor, Tensor]]:
    """The groups, each with what is hidden in it and which of its rows are blind; made once for heads that share it."""
    same = pairs is None or pairs.dim() == 2 or pairs.shape[1] == 1
    place: Any = None
    for group in _groups(q.shape[0], q.shape[1], shape, q.device):
        if not same or place != (group.batch.start, group.start):
            hidden, blind = group.hidden(shape, keys, pairs, q.device)
            place = group.batch.start, group.start
        yield group, hidden, blind


class _Blocks(torch.autograd.Function):
    """out of the blocks; nothing but the inputs is kept for backward."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, keys: Tensor | None, pairs: Tensor | None, shape: _Shape) -> Tensor:
        ctx.save_for_backward(q, k, v, keys, pairs)
        ctx.shape = shape
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        for group, hidden, blind in _hiding(q, shape, keys, pairs):
            weights = group.weights(group.queries(q) * shape.scale, group.keys(k, shape), hidden)
            part = group.split(torch.bmm(weights, group.keys(v, shape))).masked_fill(blind, 0.0)
            _put(out, group, part)
        return out

    @staticmethod
    @backward_alone
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, keys, pairs = ctx.saved_tensors
        shape: _Shape = ctx.shape
        to_q, to_k, to_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for group, hidden, blind in _hiding(q, shape, keys, pairs):
            queries, strips = group.queries(q) * shape.scale, group.keys(k, shape)
            weights = group.weights(queries, strips, hidden)
            given = group.split(group.queries(grad)).masked_fill(blind, 0.0).flatten(0, 2)
            to_weights = torch.bmm(given, group.keys(v, shape).transpose(1, 2))
            to_scores = torch._softmax_backward_data(to_weights, weights, -1, weights.dtype)
            del to_weights
            _put(to_q, group, group.split(torch.bmm(to_scores, strips) * shape.scale))
            _add(to_k, group, shape, to_scores, queries)
            _add(to_v, group, shape, weights, given)
        return to_q, to_k, to_v, None, None, None


def _put(whole: Tensor, group: _Group, part: Tensor) -> None:
    """part (rows, heads, blocks, BLOCK, D) in its place of whole (B, H, L, D)."""
    place = whole[group.batch, group.heads, group.start * BLOCK : group.stop * BLOCK]
    place.copy_(part.flatten(2, 3)[:, :, : place.shape[2]])


def _add(whole: Tensor, group: _Group, shape: _Shape, weights: Tensor, rows: Tensor) -> None:
    """weights^T rows, (N, BLOCK, keys)^T x (N, BLOCK, D), added to the keys of whole (B, H, S, D) that they belong to."""
    split, blocks = shape.num_global, group.stop - group.start
    if split:
        part = torch.bmm(weights[..., :split].transpose(1, 2), rows)
        whole[group.batch, group.heads, :split] += group.split(part).sum(2).to(whole.dtype)
    strips = rows.new_zeros(len(rows) // blocks, (blocks - 1) * BLOCK + shape.width, rows.shape[-1])
    for offset in range(0, shape.width, BLOCK):
        part = weights[..., split + offset : split + offset + BLOCK].transpose(1, 2)
        place = strips[:, offset : offset + blocks * BLOCK].unflatten(1, (blocks, BLOCK))
        if len(place) == 1:  # one batch of matrices, into which a product can be added
            place[0].baddbmm_(part, rows)
        else:
            place += torch.bmm(part, rows).view(place.shape)
    first, last, front, _ = group.place(shape)
    strips = strips[:, front : front + last - first]
    whole[group.batch, group.heads, first:last] += strips.unflatten(0, (-1, group.heads.stop - group.heads.start)).to(whole.dtype)
