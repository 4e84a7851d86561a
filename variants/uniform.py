"""The null baseline: each query takes the plain mean of the visible values, whatever the scores.

    out_i = mean of v_j over visible j

Every comparison carries it: a mechanism that does not beat it has learned nothing from its scores.
Time    O(L S D)      Memory  O(L), and SCORES weights at a time (or those of one query)
Masks   all.          Equals `standard` with all scores equal.
"""

from __future__ import annotations

from torch import Tensor

from core import Attention, AttentionOutput, Mask, Spec, register
from core.functional import SCORES, accumulate_dtype, average, in_chunks, masked_softmax


@register("uniform")
class Uniform(Attention):
    """out_i = mean of v_j over visible j."""

    spec = Spec(
        causal=True, padding=True, pairs=True, cross=True, decode=True, convex=True, time=2, memory=1,
    )  # fmt: skip

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, need_weights: bool) -> AttentionOutput:
        self.backend_used = "math"
        L, S = q.shape[-2], k.shape[-2]
        if not need_weights:
            return AttentionOutput(in_chunks(self._attend, q, k, v, mask, SCORES), None)
        weights = self._weigh(q, k, mask.visible(L, S, q.device)).expand(*q.shape[:-1], S)
        return AttentionOutput(average(weights, v), weights.to(q.dtype))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
        return average(self._weigh(q, k, visible).expand(*q.shape[:-1], -1), v)

    def _weigh(self, q: Tensor, k: Tensor, visible: Tensor | None) -> Tensor:
        return masked_softmax(q.new_zeros(1, 1, q.shape[-2], k.shape[-2], dtype=accumulate_dtype(q.dtype)), visible)
