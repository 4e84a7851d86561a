"""The null baseline: each query takes the plain mean of the visible values, whatever the scores.

    out_i = mean of v_j over visible j

Every comparison carries it: a mechanism that does not beat it has learned nothing from its scores.
Time    O(L S D)      Memory  O(L S)
Masks   all.          Equals `standard` with all scores equal.
"""

from __future__ import annotations

from torch import Tensor

from core import Attention, AttentionOutput, Mask, Spec, register
from core.functional import accumulate_dtype, average, masked_softmax


@register("uniform")
class Uniform(Attention):
    """out_i = mean of v_j over visible j."""

    spec = Spec(
        causal=True, padding=True, pairs=True, cross=True, decode=True, convex=True, time=2, memory=2,
    )  # fmt: skip

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, need_weights: bool) -> AttentionOutput:
        self.backend_used = "math"
        L, S = q.shape[-2], k.shape[-2]
        scores = q.new_zeros(1, 1, L, S, dtype=accumulate_dtype(q.dtype))
        weights = masked_softmax(scores, mask.visible(L, S, q.device)).expand(*q.shape[:-1], S)
        return AttentionOutput(average(weights, v), weights.to(q.dtype) if need_weights else None)
