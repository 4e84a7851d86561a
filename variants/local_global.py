"""Each query attends to a window of `window` keys around it, and to the first `num_global` tokens, which also see all.

    out = softmax(s restricted to window and globals) v,    s = q k^T / (T sqrt(D))

Query i stands at p = S-L+i. Causal: 0 <= p-j < window. Two-sided: -((window-1)//2) <= j-p <= window//2. Under causality a
global token still sees only its past.

Paper   Beltagy et al. 2020, arXiv:2004.05150. Differs: globals share the projections; one window for all heads.
Time    O(L (window + num_global) D)      Memory  O(L) beside a bounded number of scores
Masks   all.          Equals `standard` at window >= 2 S.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from core import Attention, AttentionConfig, AttentionOutput, KeyValueState, Mask, Spec, register, tunable
from core.backends import Backend
from core.functional import average, both_visible, masked_softmax, scaled_scores, window_visible
from core.windows import window_attention


@register("local_global")
class LocalGlobal(Attention):
    """softmax(s restricted to window and globals) v."""

    spec = Spec(
        causal=True, padding=True, pairs=True, decode=True, positional=True, convex=True,
        equals_standard_when={"window": 10**9, "temperature": 1.0}, time=1, memory=1,
    )  # fmt: skip

    class Config(AttentionConfig):
        """window: keys in a window, the query's own included. num_global: leading tokens that see and are seen by all.

        temperature: T. backend: auto works in blocks; math and sdpa hold L x S, xformers has a window of its own.
        """

        window: int = tunable(128, low=1, high=256, log=True, ge=1, le=10**12)
        num_global: int = tunable(0, low=0, high=4, ge=0, le=10**12)
        temperature: float = tunable(1.0, low=0.1, high=1.0, log=True, ge=1e-8)
        backend: Backend = "auto"

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, need_weights: bool) -> AttentionOutput:
        L, S, config = q.shape[-2], k.shape[-2], self.config
        if not need_weights:
            settings = config.window, config.num_global, config.temperature, config.backend
            out, self.backend_used = window_attention(q, k, v, mask, *settings)
            return AttentionOutput(out, None)
        self.backend_used = "math"
        pattern = window_visible(L, S, config.window, mask.causal, q.device, config.num_global)
        visible = both_visible(mask.visible(L, S, q.device), pattern)
        weights = masked_softmax(scaled_scores(q, k, config.temperature), visible)
        return AttentionOutput(average(weights, v), weights.to(q.dtype))

    def step(self, q: Tensor, k: Tensor, v: Tensor, state: Any, keys: Tensor | None = None) -> tuple[Tensor, KeyValueState]:
        """As the base, but without globals only the last window - 1 tokens are kept."""
        out, state = super().step(q, k, v, state, keys)
        reach = self.config.window - 1
        if self.config.num_global == 0 and state.k.shape[2] > reach:
            start = state.k.shape[2] - reach
            keys = None if state.keys is None else state.keys[:, start:]
            state = KeyValueState(state.k[:, :, start:].clone(), state.v[:, :, start:].clone(), keys)
        return out, state
