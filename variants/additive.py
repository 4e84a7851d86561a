"""Each score is a small network of query and key: a learned vector on the tanh of their projected sum.

    out = softmax(e) v,    e_ij = w . tanh(W_q q_i + W_k k_j),    W_q, W_k (D, hidden_dim) and w (hidden_dim) learned by each head

Paper   Bahdanau et al. 2014, arXiv:1409.0473. Differs: several heads, on projected queries and keys.
Time    O(L S hidden_dim)      Memory  O(L), and FEATURES sums under the tanh at a time (or those of one query)
Masks   all.          Never equals `standard`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from core import Attention, AttentionConfig, AttentionOutput, Mask, Spec, register, tunable
from core.functional import accumulate_dtype, average, in_chunks, masked_softmax, weights_in_chunks

FEATURES = 2**22  # 16 MiB in float32


@register("additive")
class Additive(Attention):
    """softmax(w . tanh(W_q q + W_k k)) v."""

    spec = Spec(causal=True, padding=True, pairs=True, cross=True, decode=True, convex=True, time=2, memory=1)

    class Config(AttentionConfig):
        """hidden_dim: width of the network that scores a pair."""

        hidden_dim: int = tunable(32, low=8, high=32, log=True, ge=1)

    def __init__(self, num_heads: int, head_dim: int, config: Any) -> None:
        super().__init__(num_heads, head_dim, config)
        self.query = nn.Parameter(torch.randn(num_heads, head_dim, config.hidden_dim) / math.sqrt(head_dim))
        self.key = nn.Parameter(torch.randn(num_heads, head_dim, config.hidden_dim) / math.sqrt(head_dim))
        self.score = nn.Parameter(torch.randn(num_heads, config.hidden_dim, 1) / math.sqrt(config.hidden_dim))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, need_weights: bool) -> AttentionOutput:
        self.backend_used = "math"
        dtype, S = accumulate_dtype(q.dtype), k.shape[-2]
        queries, keys = q.to(dtype) @ self.query.to(dtype), k.to(dtype) @ self.key.to(dtype)
        bound = FEATURES // self.config.hidden_dim
        if not need_weights:
            return AttentionOutput(in_chunks(self._attend, queries, keys, v, mask, bound), None)
        if torch.is_grad_enabled():
            weights = self._weigh(queries, keys, mask.visible(q.shape[-2], S, q.device))
        else:  # whoever only looks at the weights need not hold the features of all of them
            weights = weights_in_chunks(self._weigh, queries, keys, mask, max(bound // (len(q) * self.num_heads * S), 1))
        return AttentionOutput(average(weights, v), weights.to(q.dtype))

    def _attend(self, queries: Tensor, keys: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
        return average(self._weigh(queries, keys, visible), v)

    def _weigh(self, queries: Tensor, keys: Tensor, visible: Tensor | None) -> Tensor:
        features = (queries.unsqueeze(-2) + keys.unsqueeze(-3)).tanh()  # (B, H, rows, keys, hidden_dim)
        scores = (features @ self.score.to(features.dtype).unsqueeze(1)).squeeze(-1)
        return masked_softmax(scores, visible)
