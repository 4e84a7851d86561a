"""Each query attends to the fewest keys whose weights together reach `mass`; sharp rows keep few keys, flat rows many.

    out = softmax(s restricted to top(p, mass)) v,    p = softmax(s),    s = q k^T / (T sqrt(D))

Paper   Holtzman et al. 2020, arXiv:1904.09751 (nucleus sampling), here as a selection of keys. Of equal weights the lowest index
        goes first; a mass within 1e-6 of `mass` has reached it, so that 9 equal keys of 10 are 0.9.
Time    O(L S D + L S log S)      Memory  O(L), and SCORES scores at a time (or those of one query)
Masks   all, applied BEFORE the selection.     Equals `standard` at mass = 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from core import Attention, AttentionConfig, AttentionOutput, Mask, Spec, register, tunable
from core.functional import SCORES, average, both_visible, in_chunks, masked_softmax, scaled_scores

ROUNDING = 1e-6


@register("top_p")
class TopP(Attention):
    """softmax(s restricted to the fewest keys that reach `mass`) v."""

    spec = Spec(
        causal=True, padding=True, pairs=True, cross=True, decode=True, convex=True,
        equals_standard_when={"mass": 1.0, "temperature": 1.0}, time=2, memory=1,
    )  # fmt: skip

    class Config(AttentionConfig):
        """mass: share of the softmax to keep, 1 keeps all. temperature: T."""

        mass: float = tunable(0.9, low=0.5, high=1.0, gt=0.0, le=1.0)
        temperature: float = tunable(1.0, low=0.1, high=1.0, log=True, ge=1e-8)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, need_weights: bool) -> AttentionOutput:
        self.backend_used = "math"
        S = k.shape[-2]
        if not need_weights:
            return AttentionOutput(in_chunks(self._attend, q, k, v, mask, SCORES), None)
        weights = self._weigh(q, k, mask.visible(q.shape[-2], S, q.device))
        return AttentionOutput(average(weights, v), weights.to(q.dtype))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
        return average(self._weigh(q, k, visible), v)

    def _weigh(self, q: Tensor, k: Tensor, visible: Tensor | None) -> Tensor:
        scores = scaled_scores(q, k, self.config.temperature)
        if self.config.mass < 1.0:
            visible = both_visible(visible, self._select(masked_softmax(scores.detach(), visible)))
        return masked_softmax(scores, visible)

    def _select(self, weights: Tensor) -> Tensor:
        """The fewest entries of each row that reach the mass, highest first and among equals the lowest index: bool."""
        ranked, order = weights.sort(dim=-1, descending=True, stable=True)
        before = ranked.cumsum(-1) - ranked  # what the keys ranked higher hold together
        kept = torch.zeros_like(weights, dtype=torch.bool).scatter(-1, order, before < self.config.mass - ROUNDING)
        return kept | weights.isnan()  # what is no number compares with nothing, and must not vanish
