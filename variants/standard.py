"""Scaled dot-product attention: each query averages the values of all visible keys by the softmax of their scores.

    out = softmax(q k^T / sqrt(D)) v

Paper   Vaswani et al. 2017, arXiv:1706.03762.
Time    O(L S D)      Memory  O(L) with a fused kernel; `chunk_size` bounds it where none takes the mask
Masks   all.          Unscaled dot product: `temperature` at 1 / sqrt(D).
"""

from __future__ import annotations

import torch
from torch import Tensor

from core import Attention, AttentionConfig, AttentionOutput, Mask, Spec, register, tunable
from core.backends import Backend, dense_attention
from core.functional import average, chunks, masked_softmax, scaled_scores


@register("standard")
class Standard(Attention):
    """softmax(q k^T / sqrt(D)) v."""

    spec = Spec(
        causal=True, padding=True, pairs=True, cross=True, decode=True, convex=True,
        equals_standard_when={}, time=2, memory=1,
    )  # fmt: skip

    class Config(AttentionConfig):
        """backend: the kernel. chunk_size: queries handled at a time; None: all."""

        backend: Backend = tunable("auto", choices=["auto", "math", "sdpa"])
        chunk_size: int | None = tunable(None, choices=[None, 64, 256], ge=1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, need_weights: bool) -> AttentionOutput:
        L, S = q.shape[-2], k.shape[-2]
        if need_weights:
            self.backend_used = "math"
            weights = masked_softmax(scaled_scores(q, k), mask.visible(L, S, q.device))
            return AttentionOutput(average(weights, v), weights.to(q.dtype))
        if self.config.chunk_size is None:
            out, self.backend_used = dense_attention(q, k, v, mask, backend=self.config.backend)
            return AttentionOutput(out, None)
        outs = []
        for start, stop in chunks(L, self.config.chunk_size):
            # The causal offset of a chunk is that of the whole call, so the chunk gets its rows of the whole visibility.
            rows = Mask(pairs=mask.visible(L, S, q.device, (start, stop)))
            out, self.backend_used = dense_attention(q[..., start:stop, :], k, v, rows, backend=self.config.backend)
            outs.append(out)
        return AttentionOutput(torch.cat(outs, dim=-2), None)
