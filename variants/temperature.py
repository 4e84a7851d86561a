"""Standard attention whose scores are divided by a temperature: below 1 it is sharper, above 1 flatter.

    out = softmax(q k^T / (T sqrt(D))) v,    T fixed, learned, or learned per head

A learned T is LOW (HIGH / LOW)^sigmoid(p), so it is positive and bounded by construction; it starts at `temperature`.

Time    O(L S D)      Memory  O(L) with a fused kernel
Masks   all.          Equals `standard` at T = 1.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from pydantic import model_validator
from torch import Tensor, nn

from core import Attention, AttentionConfig, AttentionOutput, Mask, Spec, register, tunable
from core.backends import dense_attention
from core.functional import accumulate_dtype, average, masked_softmax, scaled_scores

LOW, HIGH = 0.01, 100.0


@register("temperature")
class Temperature(Attention):
    """softmax(q k^T / (T sqrt(D))) v."""

    spec = Spec(
        causal=True, padding=True, pairs=True, cross=True, decode=True, convex=True,
        equals_standard_when={"temperature": 1.0, "learn": "none"}, time=2, memory=1,
    )  # fmt: skip

    class Config(AttentionConfig):
        """temperature: T, or where a learned T starts. learn: none, one T shared by the heads, or one a head."""

        temperature: float = tunable(1.0, low=0.1, high=1.0, log=True, ge=1e-8)
        learn: Literal["none", "shared", "per_head"] = tunable("none", choices=["none", "shared", "per_head"])

        @model_validator(mode="after")
        def _start_within_bounds(self) -> Any:
            if self.learn != "none" and not LOW < self.temperature < HIGH:
                raise ValueError(f"a learned temperature must start between {LOW} and {HIGH}, got {self.temperature}")
            return self

    def __init__(self, num_heads: int, head_dim: int, config: Any) -> None:
        super().__init__(num_heads, head_dim, config)
        if config.learn != "none":
            share = math.log(config.temperature / LOW) / math.log(HIGH / LOW)
            count = num_heads if config.learn == "per_head" else 1
            self.position = nn.Parameter(torch.full((count, 1, 1), math.log(share / (1 - share))))

    def temperature(self) -> Tensor:
        """The learned temperature now, (H or 1, 1, 1), between LOW and HIGH."""
        return LOW * (HIGH / LOW) ** torch.sigmoid(self.position.to(accumulate_dtype(self.position.dtype)))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, need_weights: bool) -> AttentionOutput:
        learned = self.config.learn != "none"
        # A learned temperature is folded into q; in float16 that could overflow, so there the scores are widened instead.
        if need_weights or (learned and q.dtype == torch.float16):
            self.backend_used = "math"
            temperature = self.temperature().to(accumulate_dtype(q.dtype)) if learned else self.config.temperature
            visible = mask.visible(q.shape[-2], k.shape[-2], q.device)
            weights = masked_softmax(scaled_scores(q, k, temperature), visible)
            return AttentionOutput(average(weights, v), weights.to(q.dtype) if need_weights else None)
        if learned:
            # Times the reciprocal: the gradient of a quotient would hold two tensors of the size of q more.
            sharpness = self.temperature().to(accumulate_dtype(q.dtype)).reciprocal()
            out, self.backend_used = dense_attention((q * sharpness).to(q.dtype), k, v, mask)
        else:
            out, self.backend_used = dense_attention(q, k, v, mask, temperature=self.config.temperature)
        return AttentionOutput(out, None)
