"""Scaled dot-product attention: each query averages the values of all visible keys by the softmax of their scores.

    out = softmax(q k^T / sqrt(D)) v

Paper   Vaswani et al. 2017, arXiv:1706.03762.
Time    O(L S D)      Memory  O(L) with a fused kernel; `chunk_size` bounds it where none takes the mask, and
        computes each chunk again in backward
Masks   all.          Unscaled dot product: `temperature` at 1 / sqrt(D).
"""

from __future__ import annotations

from torch import Tensor

from core import Attention, AttentionConfig, AttentionOutput, Mask, Spec, register, tunable
from core.backends import Backend, dense_attention
from core.functional import average, in_chunks, masked_softmax, scaled_scores, weights_in_chunks


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
        rows = self.config.chunk_size
        if need_weights:
            self.backend_used = "math"
            weights = weights_in_chunks(self._weigh, q, k, mask, rows or q.shape[-2])
            return AttentionOutput(average(weights, v), weights.to(q.dtype))
        if rows is None:
            out, self.backend_used = dense_attention(q, k, v, mask, backend=self.config.backend)
            return AttentionOutput(out, None)
        return AttentionOutput(in_chunks(self._attend, q, k, v, mask, rows=rows), None)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
        # The causal offset of a chunk is that of the whole call, so a chunk gets its rows of the whole visibility.
        out, self.backend_used = dense_attention(q, k, v, Mask(pairs=visible), backend=self.config.backend)
        return out

    def _weigh(self, q: Tensor, k: Tensor, visible: Tensor | None) -> Tensor:
        return masked_softmax(scaled_scores(q, k), visible)
