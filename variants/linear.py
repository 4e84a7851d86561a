"""Attention without a softmax: a positive feature map of queries and keys makes it a sum that can be carried along.

    out_i = phi(q_i) (sum_j phi(k_j) v_j^T) / phi(q_i) (sum_j phi(k_j)),    j over the visible keys

phi: elu(x) + 1; relu(x) + 1e-3; taylor, for which phi(q).phi(k) = 1 + s + s^2 / 2 with s = q.k / sqrt(D).

Paper   Katharopoulos et al. 2020, arXiv:2006.16236 (elu); Arora et al. 2024, arXiv:2402.18668 (taylor).
Time    O(L D Dv), causal in chunks of CHUNK      Memory  O(L); decoding keeps D x (Dv + 1) sums a head
Masks   causal and padding (after the feature map, in numerator and denominator); no pairs.     Never equals `standard`.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from core import Attention, AttentionConfig, AttentionOutput, Mask, ShapeError, Spec, register, tunable
from core.attention import expand_heads, no_autocast
from core.functional import accumulate_dtype, average

CHUNK = 64


class LinearState(NamedTuple):
    """Running sums of phi(k) [v, 1]: (B, H, features, Dv + 1), float32 or wider."""

    sums: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes held, whatever the number of tokens seen."""
        return self.sums.nbytes


@register("linear")
class Linear(Attention):
    """phi(q) (sum phi(k) v^T) / phi(q) (sum phi(k))."""

    spec = Spec(causal=True, padding=True, cross=True, decode=True, convex=True, time=1, memory=1)

    class Config(AttentionConfig):
        """feature_map: phi, strictly positive in every product."""

        feature_map: Literal["elu", "relu", "taylor"] = tunable("elu", choices=["elu", "relu", "taylor"])

    def features(self, x: Tensor) -> Tensor:
        """(B, H, L, D) -> (B, H, L, features), in float32 or wider."""
        x = x.to(accumulate_dtype(x.dtype))
        if self.config.feature_map == "elu":
            # elu(x) + 1 is exp(x) below 0; written so, and bounded, it neither rounds nor underflows to a zero denominator.
            return torch.where(x > 0, x + 1, x.clamp(-40.0, 0.0).exp())
        if self.config.feature_map == "relu":
            return x.relu() + 1e-3
        x = x / x.shape[-1] ** 0.25
        square = (x.unsqueeze(-1) * x.unsqueeze(-2)).flatten(-2) / math.sqrt(2)
        return torch.cat([torch.ones_like(x[..., :1]), x, square], dim=-1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, need_weights: bool) -> AttentionOutput:
        self.backend_used = "math"
        L, S = q.shape[-2], k.shape[-2]
        q_features, k_features = self.features(q), self.features(k)
        if need_weights:
            visible = mask.visible(L, S, q.device)
            products = q_features @ k_features.transpose(-2, -1)
            products = products if visible is None else products.masked_fill(~visible, 0.0)
            weights = _divide(products, products.sum(-1, keepdim=True))
            return AttentionOutput(average(weights, v), weights.to(q.dtype))
        if mask.keys is not None:
            k_features = k_features.masked_fill(~mask.keys.to(k.device)[:, None, :, None], 0.0)
        values = _with_ones(v)
        if not mask.causal:
            sums = q_features @ (k_features.transpose(-2, -1) @ values)
            return AttentionOutput(_divide(sums[..., :-1], sums[..., -1:]).to(q.dtype), None)
        if L > S:  # the first queries stand before every key
            k_features, values = F.pad(k_features, (0, 0, L - S, 0)), F.pad(values, (0, 0, L - S, 0))
        start = max(S - L, 0)
        state = k_features[..., :start, :].transpose(-2, -1) @ values[..., :start, :]
        out, _ = _causal(q_features, k_features[..., start:, :], values[..., start:, :], state)
        return AttentionOutput(out.to(q.dtype), None)

    def step(self, q: Tensor, k: Tensor, v: Tensor, state: Any, keys: Tensor | None = None) -> tuple[Tensor, Any]:
        """As the base, but what is kept has a constant size."""
        self._check_step(q, k, v, keys)
        if keys is not None:
            hidden = ~keys.to(k.device)[:, None, :, None]
            k, v = k.masked_fill(hidden, 0.0), v.masked_fill(hidden, 0.0)
        k_features, values = self.features(expand_heads(k, q.shape[1])), _with_ones(expand_heads(v, q.shape[1]))
        if keys is not None:
            k_features = k_features.masked_fill(hidden, 0.0)
        with no_autocast(q.device.type):
            sums = k_features[..., :0, :].transpose(-2, -1) @ values[..., :0, :]
            if state is not None and state.sums.shape != sums.shape:
                raise ShapeError(f"linear: state holds {tuple(state.sums.shape)}, must be {tuple(sums.shape)}")
            out, sums = _causal(self.features(q), k_features, values, sums if state is None else state.sums)
        return out.to(q.dtype), LinearState(sums)


def _with_ones(v: Tensor) -> Tensor:
    """[v, 1] in float32 or wider, so that one product gives numerator and denominator."""
    return F.pad(v.to(accumulate_dtype(v.dtype)), (0, 1), value=1.0)


def _divide(numerator: Tensor, denominator: Tensor) -> Tensor:
    """0 where nothing is visible; the denominator is positive everywhere else."""
    return numerator / denominator.masked_fill(denominator == 0, 1.0)


def _causal(q: Tensor, k: Tensor, values: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Features (B, H, L, F) and [v, 1] of the same L tokens after `state` (B, H, F, Dv + 1) -> out and the new state."""
    L, tail = q.shape[-2], -q.shape[-2] % CHUNK
    q, k, values = (F.pad(x, (0, 0, 0, tail)).unflatten(-2, (-1, CHUNK)) for x in (q, k, values))
    sums = torch.cat([state.unsqueeze(2), k.transpose(-2, -1) @ values], dim=2).cumsum(2)
    out = q @ sums[:, :, :-1] + (q @ k.transpose(-2, -1)).tril() @ values
    out = _divide(out[..., :-1], out[..., -1:]).flatten(2, 3)[:, :, :L]
    return out, sums[:, :, -1]
