"""Attention without a softmax: a positive feature map of queries and keys makes it a sum that can be carried along.

    out_i = phi(q_i) (sum_j phi(k_j) v_j^T) / phi(q_i) (sum_j phi(k_j)),    j over the visible keys

phi: elu(x) + 1; relu(x) + 1e-3; taylor, for which phi(q).phi(k) = 1 + s + s^2 / 2 with s = q.k / sqrt(D).

Paper   Katharopoulos et al. 2020, arXiv:2006.16236 (elu); Arora et al. 2024, arXiv:2402.18668 (taylor).
Time    O(L D Dv), causal in blocks      Memory  O(L); decoding keeps D x (Dv + 1) sums a head
Masks   causal and padding (after the feature map, in numerator and denominator); no pairs.     Never equals `standard`.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from core import Attention, AttentionConfig, AttentionOutput, Mask, ShapeError, Spec, register, tunable
from core.attention import expand_heads
from core.functional import accumulate_dtype, average, no_autocast
from core.running_sums import FeatureMap, Sums, causal_average, no_sums


class LinearState(NamedTuple):
    """Running sums of phi(k) [v, 1]: (B, H, features, Dv + 1), float32 or wider, whatever the number of tokens seen."""

    sums: Tensor

    @property
    def nbytes(self) -> int:
        return self.sums.nbytes


@register("linear")
class Linear(Attention):
    """phi(q) (sum phi(k) v^T) / phi(q) (sum phi(k))."""

    spec = Spec(causal=True, padding=True, cross=True, decode=True, convex=True, time=1, memory=1)

    class Config(AttentionConfig):
        """feature_map: phi, strictly positive in every product."""

        feature_map: Literal["elu", "relu", "taylor"] = tunable("elu", choices=["elu", "relu", "taylor"])

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, need_weights: bool) -> AttentionOutput:
        self.backend_used = "math"
        L, S, phi, wide = q.shape[-2], k.shape[-2], MAPS[self.config.feature_map], accumulate_dtype(q.dtype)
        keys = None if mask.keys is None else mask.keys.to(q.device)
        if need_weights:
            visible = mask.visible(L, S, q.device)
            products = phi.map(q.to(wide)) @ phi.map(k.to(wide)).transpose(-2, -1)
            weights = products if visible is None else products.masked_fill(~visible, 0.0)
            weights = _divide(weights, weights.sum(-1, keepdim=True))
            return AttentionOutput(average(weights, v), weights.to(q.dtype))
        if not mask.causal:
            sums, features = _sums(phi, k, v, keys), phi.map(q.to(wide))
            return AttentionOutput(_divide(features @ sums.products, features @ sums.features).to(q.dtype), None)
        if L > S:  # the first queries stand before every key
            keys = F.pad(q.new_ones(len(q), S, dtype=torch.bool) if keys is None else keys, (L - S, 0), value=False)
            k, v = F.pad(k, (0, 0, L - S, 0)), F.pad(v, (0, 0, L - S, 0))
        before = no_sums(k, v, phi)
        if S > L:
            first, keys = (None, None) if keys is None else keys.split([S - L, L], dim=1)
            (old_k, k), (old_v, v) = (x.split([S - L, L], dim=2) for x in (k, v))
            before = _sums(phi, old_k, old_v, first)
        return AttentionOutput(causal_average(q, k, v, phi, before, keys)[0], None)

    def step(self, q: Tensor, k: Tensor, v: Tensor, state: Any, keys: Tensor | None = None) -> tuple[Tensor, Any]:
        """As the base, but what is kept has a constant size."""
        self._check_step(q, k, v, keys)
        keys = None if keys is None else keys.to(k.device)
        if keys is not None:
            k, v = (x.masked_fill(~keys[:, None, :, None], 0.0) for x in (k, v))
        k, v, phi = expand_heads(k, q.shape[1]), expand_heads(v, q.shape[1]), MAPS[self.config.feature_map]
        with no_autocast(q.device.type):
            nothing = torch.cat(no_sums(k, v, phi), dim=-1)
            sums = nothing if state is None else state.sums
            if sums.shape != nothing.shape:
                raise ShapeError(f"linear: state holds {tuple(sums.shape)}, must be {tuple(nothing.shape)}")
            out, after = causal_average(q, k, v, phi, Sums(sums[..., :-1], sums[..., -1:]), keys)
        return out, LinearState(torch.cat(after, dim=-1))


def _sums(phi: FeatureMap, k: Tensor, v: Tensor, keys: Tensor | None) -> Sums:
    features = phi.map(k.to(wide := accumulate_dtype(k.dtype)))
    features = features if keys is None else features.masked_fill(~keys[:, None, :, None], 0.0)
    return Sums(features.transpose(-2, -1) @ v.to(wide), features.sum(-2).unsqueeze(-1))


def _divide(numerator: Tensor, denominator: Tensor) -> Tensor:
    """0 where nothing is visible; the denominator is positive everywhere else."""
    return numerator / denominator.masked_fill(denominator == 0, 1.0)


def _elu(x: Tensor) -> Tensor:
    # elu(x) + 1 is exp(x) below 0; written so, and bounded, it neither rounds nor underflows to a zero denominator.
    return x.clamp(-40.0, 0.0).exp_() + x.relu()


def _taylor(x: Tensor) -> Tensor:
    x = x / x.shape[-1] ** 0.25
    return torch.cat([torch.ones_like(x[..., :1]), x, (x.unsqueeze(-1) * x.unsqueeze(-2)).flatten(-2) / math.sqrt(2)], dim=-1)


def _taylor_gradient(x: Tensor, features: Tensor, grad: Tensor) -> Tensor:
    D = x.shape[-1]
    _, first, second = grad.split([1, D, D * D], dim=-1)
    second = second.unflatten(-1, (D, D))
    both = ((second + second.transpose(-2, -1)) @ x.unsqueeze(-1)).squeeze(-1)
    return first / D**0.25 + both / math.sqrt(2 * D)


MAPS = {
    "elu": FeatureMap(_elu, lambda x, features, grad: features.clamp(max=1.0).mul_(grad)),
    "relu": FeatureMap(lambda x: x.relu() + 1e-3, lambda x, features, grad: grad.masked_fill(x <= 0, 0.0)),
    "taylor": FeatureMap(_taylor, _taylor_gradient),
}
