"""Sparse by itself: alpha-entmax in the place of softmax gives low scores a weight of exactly 0; alpha says how many.

    out = entmax(s) v,    entmax(s) = relu((alpha - 1) s - tau)^(1 / (alpha - 1)),    s = q k^T / sqrt(D)

tau is what makes a row sum to 1. alpha 1 is softmax, 2 is sparsemax. A learned alpha is LOW + (2 - LOW) sigmoid(p), one a head;
it starts at `alpha`.

Paper   Correia et al. 2019, arXiv:1909.00015; the `entmax` package computes it (`pip install 'attention-experiments[entmax]'`).
Time    O(L S D), bisection O(L S) up to 46 times but at 1.5 and 2, where it is O(L S log S)
Memory  O(L), and SCORES scores at a time (or those of one query)
Masks   all.          Equals `standard` at alpha = 1. Not for torch.compile.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from pydantic import model_validator
from torch import Tensor, nn

from core import Attention, AttentionConfig, AttentionOutput, Mask, Spec, register, tunable
from core.functional import (
    SCORES,
    accumulate_dtype,
    average,
    in_chunks,
    masked_softmax,
    scaled_scores,
)
from core.registry import require

entmax = require("entmax", extra="entmax")

LOW = 1.01  # nearer to 1 the exponent 1 / (alpha - 1) magnifies every rounding


@register("entmax")
class Entmax(Attention):
    """entmax(q k^T / sqrt(D)) v."""

    spec = Spec(
        causal=True, padding=True, pairs=True, cross=True, decode=True, convex=True,
        equals_standard_when={"alpha": 1.0, "learn": "none"}, time=2, memory=1,
    )  # fmt: skip

    class Config(AttentionConfig):
        """alpha: 1 softmax, 2 sparsemax, or where a learned one starts. learn: none, or one alpha a head."""

        alpha: float = tunable(1.5, low=1.1, high=2.0, ge=1.0, le=2.0)
        learn: Literal["none", "per_head"] = tunable("none", choices=["none", "per_head"])

        @model_validator(mode="after")
        def _within_bounds(self) -> Any:
            if 1.0 < self.alpha < LOW:
                raise ValueError(f"alpha must be 1 (softmax) or at least {LOW}, got {self.alpha}")
            if self.learn != "none" and not LOW < self.alpha < 2.0:
                raise ValueError(f"a learned alpha must start between {LOW} and 2, got {self.alpha}")
            return self

    def __init__(self, num_heads: int, head_dim: int, config: Any) -> None:
        super().__init__(num_heads, head_dim, config)
        if config.learn != "none":
            share = (config.alpha - LOW) / (2.0 - LOW)
            self.position = nn.Parameter(torch.full((num_heads, 1, 1), math.log(share / (1.0 - share))))

    def alpha(self) -> Tensor:
        """The learned alpha now, (H, 1, 1), between LOW and 2."""
        return LOW + (2.0 - LOW) * torch.sigmoid(self.position.to(accumulate_dtype(self.position.dtype)))

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
        alpha, scores = self.config.alpha, scaled_scores(q, k)
        if alpha == 1.0:
            return masked_softmax(scores, visible)
        if visible is not None:  # a row without a visible key keeps its finite scores, and goes to 0 after
            scores = scores.masked_fill(~visible & visible.any(-1, keepdim=True), -math.inf)
        # Only differences count, and far from 0 they would be lost to rounding.
        scores = scores - scores.detach().amax(-1, keepdim=True)
        halvings = 28 if scores.dtype == torch.float32 else 46  # below the last bit of a threshold between 0 and 1
        if self.config.learn != "none":
            weights = entmax.entmax_bisect(scores, self.alpha().to(scores.dtype), n_iter=halvings)
        elif alpha == 1.5:
            weights = entmax.entmax15(scores)
        elif alpha == 2.0:
            weights = entmax.sparsemax(scores)
        else:
            weights = entmax.entmax_bisect(scores, alpha, n_iter=halvings)
        return weights if visible is None else weights.masked_fill(~visible, 0.0)
