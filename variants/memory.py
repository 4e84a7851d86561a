"""Beside the sequence each head has `num_slots` learned key/value slots, which every query sees: a memory for what always holds.

    out = softmax([s, t]) [v; V],    s = q k^T / (T sqrt(D)),    t = q K^T / (T sqrt(D)),    K, V learned by each head

Weights cover the sequence only, so a row sums to less than 1. A query that sees no key of the sequence gives 0: slots do not
count.

Paper   Sukhbaatar et al. 2019, arXiv:1907.01470. Differs: no positions, and the slots are not scaled by sqrt(D) and
        sqrt(num_slots); the feed-forward layers stay.
Time    O(L (S + num_slots) D)      Memory  O(L) with a fused kernel, which takes causality alone; else SCORES pairs at a time
Masks   all.          Equals `standard` at num_slots = 0.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core import Attention, AttentionConfig, AttentionOutput, Mask, ShapeError, Spec, register, tunable
from core.backends import dense_attention
from core.functional import MIN_QUERIES, SCORES, average, in_chunks, masked_softmax, scaled_scores


@register("memory")
class Memory(Attention):
    """softmax([s, t]) [v; V]."""

    spec = Spec(
        causal=True, padding=True, pairs=True, cross=True, decode=True,
        equals_standard_when={"num_slots": 0, "temperature": 1.0}, time=2, memory=1,
    )  # fmt: skip

    class Config(AttentionConfig):
        """num_slots: slots of each head. temperature: T, of keys and slots alike."""

        num_slots: int = tunable(16, low=1, high=64, log=True, ge=0)
        temperature: float = tunable(1.0, low=0.1, high=1.0, log=True, ge=1e-8)

    def __init__(self, num_heads: int, head_dim: int, config: Any) -> None:
        super().__init__(num_heads, head_dim, config)
        shape = num_heads, config.num_slots, head_dim
        self.keys = nn.Parameter(torch.randn(shape) / math.sqrt(head_dim))
        self.values = nn.Parameter(torch.randn(shape) / math.sqrt(max(config.num_slots, 1)))

    def _check(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> None:
        super()._check(q, k, v, mask)
        if v.shape[-1] != self.head_dim:
            raise ShapeError(f"memory: values must have the head dim of the slots, {self.head_dim}, got {v.shape[-1]}")

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, need_weights: bool) -> AttentionOutput:
        L, S, slots = q.shape[-2], k.shape[-2], self.config.num_slots
        if need_weights:
            visible = mask.visible(L, S, q.device)
            keys, values, beside = self._beside(k, self.keys), self._beside(v, self.values), _seen_beside(visible, slots)
            self.backend_used, weights = "math", masked_softmax(scaled_scores(q, keys, self.config.temperature), beside)
            empty = None if visible is None else ~visible.any(-1, keepdim=True)
            out, weights = average(weights, values), weights[..., slots:].to(q.dtype)
            if empty is not None:  # where the sequence shows nothing, the slots say nothing
                out, weights = out.masked_fill(empty, 0.0), weights.masked_fill(empty, 0.0)
            return AttentionOutput(out, weights)
        if mask.causal and mask.keys is None and mask.pairs is None and L == S:
            # With as many queries before the first the causal kernel shows every slot to all that count.
            parts = F.pad(q, (0, 0, slots, 0)), self._beside(k, self.keys), self._beside(v, self.values)
            out, self.backend_used = dense_attention(*parts, Mask(causal=True), temperature=self.config.temperature)
            return AttentionOutput(out[:, :, slots:], None)
        # Elsewhere a kernel is given what is visible as pairs, of which only so many are made at a time.
        shown = mask.visible(L, S, q.device, (0, 1))
        rows = L if shown is None and not mask.causal else max(SCORES // (len(q) * S), MIN_QUERIES)
        return AttentionOutput(in_chunks(self._attend, q, k, v, mask, rows=rows), None)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
        parts = q, self._beside(k, self.keys), self._beside(v, self.values)
        seen = Mask(pairs=_seen_beside(visible, self.config.num_slots))
        out, self.backend_used = dense_attention(*parts, seen, temperature=self.config.temperature)
        return out if visible is None else out.masked_fill(~visible.any(-1, keepdim=True), 0.0)

    def _beside(self, x: Tensor, slots: Tensor) -> Tensor:
        """Slots (H, num_slots, D) before x (B, H, S, D)."""
        return torch.cat([slots.to(x.dtype).expand(len(x), -1, -1, -1), x], dim=2)


def _seen_beside(visible: Tensor | None, slots: int) -> Tensor | None:
    return None if visible is None else F.pad(visible, (slots, 0), value=True)
