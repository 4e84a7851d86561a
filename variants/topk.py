"""Each query attends to its `keep` highest-scoring visible keys only; on ties exactly `keep` are kept, lowest index first.

    out = softmax(s restricted to top(s)) v,    s = q k^T / (T sqrt(D))

Paper   Gupta et al. 2021, arXiv:2106.06899. Differs: no chunks yet, so the scores of all pairs are alive at once.
Time    O(L S D)      Memory  O(L S)
Masks   all, applied BEFORE the selection.     Equals `standard` at keep >= S.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from core import Attention, AttentionConfig, AttentionOutput, Mask, Spec, register, tunable
from core.functional import average, both_visible, masked_softmax, scaled_scores


@register("topk")
class TopK(Attention):
    """softmax(s restricted to top(s)) v."""

    spec = Spec(
        causal=True, padding=True, pairs=True, cross=True, decode=True, convex=True,
        keys_per_query="keep", equals_standard_when={"keep": 10**9, "temperature": 1.0}, time=2, memory=2,
    )  # fmt: skip

    class Config(AttentionConfig):
        """keep: keys kept by each query. temperature: T."""

        keep: int = tunable(8, low=1, high=64, log=True, ge=1)
        temperature: float = tunable(1.0, low=0.1, high=1.0, log=True, ge=1e-8)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, need_weights: bool) -> AttentionOutput:
        self.backend_used = "math"
        visible = mask.visible(q.shape[-2], k.shape[-2], q.device)
        scores = scaled_scores(q, k, self.config.temperature)
        if self.config.keep < k.shape[-2]:
            visible = both_visible(visible, self._select(scores.detach(), visible))
        weights = masked_softmax(scores, visible)
        return AttentionOutput(average(weights, v), weights.to(q.dtype) if need_weights else None)

    def _select(self, scores: Tensor, visible: Tensor | None) -> Tensor:
        """The `keep` highest entries of each row, and among equals the lowest indices: bool like scores."""
        if visible is not None:
            scores = scores.masked_fill(~visible, -math.inf)
        # torch.topk breaks ties differently by length, so only its threshold is used, never its indices.
        threshold = scores.topk(self.config.keep, dim=-1).values[..., -1:]
        above, equal = scores > threshold, scores == threshold
        room = self.config.keep - above.sum(-1, keepdim=True, dtype=torch.int32)
        kept = above | (equal & (equal.cumsum(-1, dtype=torch.int32) <= room))
        return kept | scores.isnan()  # what is no number compares with nothing, and must not vanish
