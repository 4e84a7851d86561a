"""Causal attention without a softmax, in blocks: between blocks only sums are carried, so time and memory grow with the length.

    out_i = phi(q_i) . sum_{j <= i} phi(k_j) v_j^T / phi(q_i) . sum_{j <= i} phi(k_j)

Within a block the products of features are taken pair by pair; what came before it is in the sums. Blocks are taken in spans of
at most FEATURES numbers. Kept for backward are the inputs and the sums before each span.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from core.functional import accumulate_dtype, backward_alone, pad_rows, score_bound

BLOCK = 64
FEATURES = 2**17  # of queries, and as many of keys, at a time: 512 KiB in float32


class FeatureMap(NamedTuple):
    """phi and its derivative.

    Args:
        map: (..., D) -> (..., features), without a change of x.
        gradient: x, phi(x) and the gradient of phi(x) -> the gradient of x.
    """

    map: Callable[[Tensor], Tensor]
    gradient: Callable[[Tensor, Tensor, Tensor], Tensor]


class Sums(NamedTuple):
    """sum phi(k) v^T, (B, H, features, Dv), and sum phi(k), (B, H, features, 1); float32 or wider."""

    products: Tensor
    features: Tensor


def no_sums(k: Tensor, v: Tensor, phi: FeatureMap) -> Sums:
    """The sums before the first token of k (B, H, L, D) and v (B, H, L, Dv)."""
    features = phi.map(k.new_zeros(k.shape[-1], dtype=accumulate_dtype(k.dtype))).shape[-1]
    products = k.new_zeros(*k.shape[:2], features, v.shape[-1] + 1, dtype=accumulate_dtype(k.dtype))
    return Sums(products[..., :-1], products[..., -1:])


def causal_average(
    q: Tensor, k: Tensor, v: Tensor, phi: FeatureMap, before: Sums, keys: Tensor | None = None
) -> tuple[Tensor, Sums]:
    """The equation above for tokens that follow those in `before`; 0 where nothing is visible.

    Args:
        q, k, v: (B, H, L, D), (B, H, L, D), (B, H, L, Dv).
        keys: bool (B, L), False hides a key.

    Returns:
        out (B, H, L, Dv) in the dtype of q, and the sums after the last token.
    """
    if q.shape[-2] == 0:
        return q.new_empty(*q.shape[:-1], v.shape[-1]), before
    # A view each: torch.compile takes no function of one's own that is given the same tensor twice.
    out, *after = _Causal.apply(q, k.view_as(k), v.view_as(v), before.products, before.features, keys, phi)
    return out, Sums(*after)


def _spans(q: Tensor, num_features: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of spans of whole blocks; the last may be short."""
    L = q.shape[-2]
    if torch.compiler.is_compiling():  # a graph without loops serves every length
        return iter([(0, L)])
    blocks = max(score_bound(q.device, FEATURES) // (q.shape[0] * q.shape[1] * num_features * BLOCK), 1)
    return ((start, min(start + blocks * BLOCK, L)) for start in range(0, L, blocks * BLOCK))


class _Span:
    """Features and values of a span in blocks, (B, H, blocks, BLOCK, .), filled up with zeros."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor | None, phi: FeatureMap, place: tuple[int, int]) -> None:
        self.start, self.stop = place
        self.x_q, self.x_k = self.cut(q), self.cut(k)
        self.hidden = None if keys is None else ~keys[:, None, self.start : self.stop, None]
        self.phi_q, self.phi_k = phi.map(self.x_q), phi.map(self.x_k)
        if self.hidden is not None:
            self.phi_k = self.phi_k.masked_fill(self.hidden, 0.0)
        self.q, self.k, self.v = self.blocks(self.phi_q), self.blocks(self.phi_k), self.blocks(self.cut(v))

    def cut(self, x: Tensor) -> Tensor:
        return x[:, :, self.start : self.stop].to(accumulate_dtype(x.dtype))

    def blocks(self, x: Tensor) -> Tensor:
        length = self.stop - self.start
        return pad_rows(x, 0, -length % BLOCK).unflatten(-2, (-1, BLOCK))

    def whole(self, x: Tensor) -> Tensor:
        """(B, H, blocks, BLOCK, .) -> (B, H, length, .)."""
        return x.flatten(2, 3)[:, :, : self.stop - self.start]

    def products(self) -> Tensor:
        """phi(q_i) . phi(k_j) within each block, j <= i."""
        return (self.q @ self.k.transpose(-2, -1)).tril_()

    def sums(self, before: Sums) -> tuple[Tensor, Tensor]:
        """The sums before each block and, last, after all: (B, H, blocks + 1, features, .)."""
        products = _running(before.products, self.k.transpose(-2, -1) @ self.v)
        return products, _running(before.features, self.k.sum(-2).unsqueeze(-1))

    def denominator(self, products: Tensor, features: Tensor) -> Tensor:
        """(B, H, blocks, BLOCK, 1), 1 where nothing is visible; positive everywhere else."""
        total = (self.q @ features).add_(products.sum(-1, keepdim=True))
        return total.masked_fill_(total == 0, 1.0)


def _running(start: Tensor, parts: Tensor, backwards: bool = False) -> Tensor:
    """start, start + parts[0], ... along the blocks, (B, H, blocks + 1, ., .); backwards the last is start."""
    if torch.compiler.is_compiling() or parts.device.type != "cpu":  # on a CPU a loop of sums is faster than this
        parts = parts.flip(2) if backwards else parts
        sums = torch.cat([start.unsqueeze(2), parts], dim=2).cumsum(2)
        return sums.flip(2) if backwards else sums
    blocks = parts.shape[2]
    sums = parts.new_empty(*parts.shape[:2], blocks + 1, *parts.shape[3:])
    sums[:, :, blocks if backwards else 0] = start
    for block in reversed(range(blocks)) if backwards else range(blocks):
        here, there = (block + 1, block) if backwards else (block, block + 1)
        torch.add(sums[:, :, here], parts[:, :, block], out=sums[:, :, there])
    return sums


class _Causal(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, products: Tensor, features: Tensor, keys: Tensor | None, phi: FeatureMap
    ) -> tuple[Tensor, Tensor, Tensor]:
        kept: list[Tensor] = []
        before = Sums(products, features)
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        for place in _spans(q, features.shape[-2]):
            kept += before
            span = _Span(q, k, v, keys, phi, place)
            within, (sums, features) = span.products(), span.sums(before)
            numerator = (span.q @ sums[:, :, :-1]).add_(within @ span.v)
            part = numerator.div_(span.denominator(within, features[:, :, :-1]))
            out[:, :, span.start : span.stop] = span.whole(part)
            before = Sums(sums[:, :, -1].clone(), features[:, :, -1].clone())
        ctx.save_for_backward(q, k, v, keys, *kept)
        ctx.phi = phi
        return out, *before

    @staticmethod
    @backward_alone
    def backward(ctx: Any, grad: Tensor, to_products: Tensor, to_features: Tensor) -> Any:
        q, k, v, keys, *kept = ctx.saved_tensors
        to_q, to_k, to_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        places = list(_spans(q, kept[0].shape[-2]))
        for number in reversed(range(len(places))):
            span = _Span(q, k, v, keys, ctx.phi, places[number])
            rows = slice(span.start, span.stop)
            within, (sums, features) = span.products(), span.sums(Sums(*kept[2 * number : 2 * number + 2]))
            sums, features = sums[:, :, :-1], features[:, :, :-1]
            denominator = span.denominator(within, features)
            given = span.blocks(span.cut(grad)).div(denominator)
            to_within, to_phi = given @ span.v.transpose(-2, -1), given @ sums.transpose(-2, -1)
            # What comes through the denominator, minus given . out: of the numerator both parts are here.
            below = (within * to_within).sum(-1, keepdim=True).add_((span.q * to_phi).sum(-1, keepdim=True))
            below = below.div_(denominator).neg_()
            to_within = to_within.add_(below).tril_()
            to_sums = _running(to_products, span.q.transpose(-2, -1) @ given, backwards=True)
            to_counts = _running(to_features, span.q.transpose(-2, -1) @ below, backwards=True)
            to_products, to_features = to_sums[:, :, 0], to_counts[:, :, 0]
            later, counts = to_sums[:, :, 1:], to_counts[:, :, 1:].transpose(-2, -1)
            to_v[:, :, rows] = span.whole((within.transpose(-2, -1) @ given).add_(span.k @ later))
            to_phi = to_phi.add_(to_within @ span.k).add_(below * features.transpose(-2, -1))
            to_q[:, :, rows] = ctx.phi.gradient(span.x_q, span.phi_q, span.whole(to_phi))
            to_phi = (to_within.transpose(-2, -1) @ span.q).add_(span.v @ later.transpose(-2, -1)).add_(counts)
            to_phi = span.whole(to_phi) if span.hidden is None else span.whole(to_phi).masked_fill(span.hidden, 0.0)
            to_k[:, :, rows] = ctx.phi.gradient(span.x_k, span.phi_k, to_phi)
        return to_q, to_k, to_v, to_products, to_features, None, None
