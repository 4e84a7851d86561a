"""Broken variants, one fault each, none registered: the contract suite must catch each by the rule that names its kind."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from core import Attention, AttentionConfig, AttentionOutput, Mask, Spec, tunable
from core.attention import expand_heads

CLAIMS = {"causal": True, "padding": True, "pairs": True, "cross": True, "decode": True, "convex": True}
FAULTS: list[tuple[str, type[Attention]]] = []


def caught_by(rule: str) -> Callable[[type[Attention]], type[Attention]]:
    """Class decorator: this fault must fail this rule."""

    def add(cls: type[Attention]) -> type[Attention]:
        FAULTS.append((rule, cls))
        return cls

    return add


class Sound(Attention):
    """Standard attention without a fault, in parts that the faults below replace."""

    spec = Spec(**CLAIMS, equals_standard_when={})

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        dtype = torch.promote_types(q.dtype, torch.float32)
        return q.to(dtype) @ k.to(dtype).mT / math.sqrt(q.shape[-1])

    def visible(self, q: Tensor, k: Tensor, mask: Mask) -> Tensor:
        L, S = q.shape[-2], k.shape[-2]
        visible = mask.visible(L, S, q.device)
        return torch.ones(1, 1, L, S, dtype=torch.bool, device=q.device) if visible is None else visible

    def weigh(self, scores: Tensor, visible: Tensor) -> Tensor:
        lowest = torch.finfo(scores.dtype).min
        return (scores.masked_fill(~visible, lowest).softmax(-1) * visible).to(scores.dtype)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, need_weights: bool) -> AttentionOutput:
        weights = self.weigh(self.scores(q, k), self.visible(q, k, mask))
        return AttentionOutput((weights @ v.to(weights.dtype)).to(q.dtype), weights.to(q.dtype) if need_weights else None)


class SoundTopK(Sound):
    """Top-k without a fault."""

    spec = Spec(**CLAIMS, keys_per_query="keep", equals_standard_when={"keep": 1000})

    class Config(AttentionConfig):
        keep: int = tunable(3, low=1, high=8, ge=1)

    def ranks(self, scores: Tensor, visible: Tensor) -> Tensor:
        return scores.masked_fill(~visible, -math.inf).argsort(dim=-1, descending=True, stable=True)

    def weigh(self, scores: Tensor, visible: Tensor) -> Tensor:
        kept = self.ranks(scores.detach(), visible)[..., : self.config.keep]
        return super().weigh(scores, visible & torch.zeros_like(scores, dtype=torch.bool).scatter(-1, kept, True))


class SoundTemperature(Sound):
    """Temperature without a fault."""

    spec = Spec(**CLAIMS, equals_standard_when={"temperature": 1.0})

    class Config(AttentionConfig):
        temperature: float = tunable(1.0, low=0.5, high=2.0, gt=0)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return super().scores(q, k) / self.config.temperature


# inputs


@caught_by("shapes_and_dtypes")
class WideOutput(Sound):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, need_weights: bool) -> AttentionOutput:
        out, weights = super().attend(q, k, v, mask, need_weights)
        return AttentionOutput(out.to(torch.promote_types(q.dtype, torch.float32)), weights)


@caught_by("shapes_and_dtypes")
class AlwaysWeights(Sound):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, need_weights: bool) -> AttentionOutput:
        return super().attend(q, k, v, mask, True)


@caught_by("heads_are_interleaved")
class TiledHeads(Sound):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None, need_weights: bool = False) -> Any:
        repeat = q.shape[1] // k.shape[1] if k.shape[1] and q.shape[1] % k.shape[1] == 0 else 1
        return super().forward(q, k.repeat(1, repeat, 1, 1), v.repeat(1, repeat, 1, 1), mask, need_weights)


@caught_by("unclaimed_is_refused")
class IgnoresUnclaimed(Sound):
    spec = Spec(causal=True, convex=True)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None, need_weights: bool = False) -> Any:
        return super().forward(q, k, v, Mask(causal=bool(mask and mask.causal)), need_weights)


@caught_by("bad_input_is_refused")
class BroadcastsBatch(Sound):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None, need_weights: bool = False) -> Any:
        B = len(q)
        k, v = (x.expand(B, -1, -1, -1) if x.dim() == 4 and len(x) == 1 else x for x in (k, v))
        return super().forward(q, k, v, mask, need_weights)


@caught_by("inputs_unchanged")
class ScalesInPlace(Sound):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        q /= math.sqrt(q.shape[-1])
        return q.to(torch.float64) @ k.to(torch.float64).mT


@caught_by("memory_layout")
class ReadsStorageOrder(Sound):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        B, H, L, D = q.shape
        return super().scores(q.as_strided((B, H, L, D), (H * L * D, L * D, D, 1)), k)


@caught_by("follows_device")
class PositionsOnCPU(Sound):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        scores = super().scores(q, k)
        return scores @ torch.eye(k.shape[-2], dtype=scores.dtype)


@caught_by("shapes_and_dtypes")
class BareSqueeze(Sound):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, need_weights: bool) -> AttentionOutput:
        out, weights = super().attend(q, k, v, mask, need_weights)
        return AttentionOutput(out.squeeze(), weights)


@caught_by("inputs_unchanged")
class HidesInTheMask(Sound):
    def visible(self, q: Tensor, k: Tensor, mask: Mask) -> Tensor:
        visible = super().visible(q, k, mask).clone()
        if mask.keys is not None:
            mask.keys.logical_and_(visible.any(-2)[:, 0])
            mask.keys[:, 0] = False
        return visible


@caught_by("inputs_unchanged")
class ZeroesValuesInPlace(Sound):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, need_weights: bool) -> AttentionOutput:
        result = super().attend(q, k, v, mask, need_weights)
        with torch.no_grad():
            v.mul_(0.5)
        return result


@caught_by("memory_layout")
class ViewsOnly(Sound):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        B, H, L, D = q.shape
        return super().scores(q.view(B * H, L, D).view(B, H, L, D), k)


@caught_by("follows_device")
class RootAsTensor(Sound):
    """sqrt(D) as a tensor of its own, on the CPU and in float32."""

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        dtype = torch.promote_types(q.dtype, torch.float32)
        return q.to(dtype) @ k.to(dtype).mT / torch.sqrt(torch.tensor(q.shape[-1], dtype=torch.float32))


@caught_by("follows_device")
class IndexOnCPU(Sound):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, need_weights: bool) -> AttentionOutput:
        out, weights = super().attend(q, k, v, mask, need_weights)
        return AttentionOutput(out[:, :, torch.arange(q.shape[-2])], weights)


@caught_by("follows_device")
class WrongOnCUDAOnly(Sound):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        scores = super().scores(q, k)
        return scores + torch.zeros(k.shape[-2]) if q.is_cuda else scores


@caught_by("follows_device")
class TensorThatIsNoBuffer(Sound):
    def __init__(self, num_heads: int, head_dim: int, config: Any) -> None:
        super().__init__(num_heads, head_dim, config)
        self.channels = torch.ones(head_dim)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return super().scores(q * self.channels.to(q.dtype), k)


# masks


@caught_by("single_key_returns_value")
class SoftmaxPlusOne(Sound):
    def weigh(self, scores: Tensor, visible: Tensor) -> Tensor:
        exponentials = scores.exp() * visible
        return exponentials / (1 + exponentials.sum(-1, keepdim=True))


@caught_by("single_key_returns_value")
class CausalExcludesSelf(Sound):
    def visible(self, q: Tensor, k: Tensor, mask: Mask) -> Tensor:
        return super().visible(q, k, mask).tril(q.shape[-2] * 0 - 1) if mask.causal else super().visible(q, k, mask)


@caught_by("no_future_leak")
class FutureValues(Sound):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, need_weights: bool) -> AttentionOutput:
        return super().attend(q, k, v - 1e-3 * v.mean(-2, keepdim=True), mask, need_weights)


@caught_by("no_future_leak")
class KeySum(Sound):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return super().scores(q, k / (1 + k.abs().sum(-2, keepdim=True)))


@caught_by("no_future_leak")
class FutureGradient(Sound):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, need_weights: bool) -> AttentionOutput:
        out, weights = super().attend(q, k, v, mask, need_weights)
        total = v.sum(-2, keepdim=True).to(out.dtype)
        return AttentionOutput(out + total - total.detach(), weights)


class TopLeft(Sound):
    def visible(self, q: Tensor, k: Tensor, mask: Mask) -> Tensor:
        rest = super().visible(q, k, Mask(keys=mask.keys, pairs=mask.pairs))
        return rest & torch.ones_like(rest).tril() if mask.causal else rest


caught_by("no_future_leak")(TopLeft)
caught_by("causal_is_bottom_right")(TopLeft)


@caught_by("no_future_leak")
class CausalWindowPlusAhead(Sound):
    """The two-sided window of W keys, used under causality with one key ahead."""

    spec = Spec(**{**CLAIMS, "cross": False, "decode": False}, positional=True)

    def visible(self, q: Tensor, k: Tensor, mask: Mask) -> Tensor:
        rest = super().visible(q, k, Mask(keys=mask.keys, pairs=mask.pairs))
        return rest & torch.ones_like(rest).tril(1).triu(-1)


@caught_by("no_future_leak")
class OneAhead(Sound):
    def visible(self, q: Tensor, k: Tensor, mask: Mask) -> Tensor:
        rest = super().visible(q, k, Mask(keys=mask.keys, pairs=mask.pairs))
        L, S = q.shape[-2], k.shape[-2]
        return rest & torch.ones(L, S, dtype=torch.bool, device=q.device).tril(S - L + 1) if mask.causal else rest


@caught_by("no_future_leak")
class GlobalSeesAll(Sound):
    """The first token is global, and forgets that causality binds it too."""

    spec = Spec(**{**CLAIMS, "cross": False, "decode": False}, positional=True)

    def visible(self, q: Tensor, k: Tensor, mask: Mask) -> Tensor:
        first = torch.arange(q.shape[-2], device=q.device)[:, None] == 0
        return super().visible(q, k, mask) | (super().visible(q, k, Mask(keys=mask.keys, pairs=mask.pairs)) & first)


@caught_by("no_future_leak")
class NormalisedOverAllKeys(Sound):
    """The numerator is causal, the denominator is not."""

    spec = Spec(causal=True, cross=True)

    def weigh(self, scores: Tensor, visible: Tensor) -> Tensor:
        return scores.softmax(-1) * visible


@caught_by("no_future_leak")
class StatisticOverTheSequence(Sound):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        spread = k.to(torch.promote_types(k.dtype, torch.float32)).square().mean((-2, -1), keepdim=True)
        return super().scores(q, k) / (1 + spread)


@caught_by("no_future_leak")
class SelectsBeforeCausality(SoundTopK):
    spec = Spec(causal=True, cross=True, decode=True)

    def ranks(self, scores: Tensor, visible: Tensor) -> Tensor:
        return scores.argsort(dim=-1, descending=True, stable=True)


class ChunkForgetsOffset(Sound):
    """Chunks of 64 queries, each causal as if it were the first."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, need_weights: bool) -> AttentionOutput:
        if need_weights or not mask.causal or mask.keys is not None or mask.pairs is not None:
            return super().attend(q, k, v, mask, need_weights)
        outs = []
        for start in range(0, q.shape[-2], 64):
            part = q[..., start : start + 64, :]
            outs.append(super().attend(part, k, v, mask, False).out)
        return AttentionOutput(torch.cat(outs, -2), None)


caught_by("no_future_leak")(ChunkForgetsOffset)
caught_by("fast_path_equals_plain")(ChunkForgetsOffset)


@caught_by("padding_equals_removal")
class PaddingInDenominator(Sound):
    def weigh(self, scores: Tensor, visible: Tensor) -> Tensor:
        return scores.softmax(-1) * visible


@caught_by("padding_equals_removal")
class PaddingInMean(Sound):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, need_weights: bool) -> AttentionOutput:
        visible = self.visible(q, k, mask)
        weights = (visible / k.shape[-2]).to(torch.promote_types(q.dtype, torch.float32))
        weights = weights.expand(*q.shape[:-1], k.shape[-2])
        return AttentionOutput((weights @ v.to(weights.dtype)).to(q.dtype), weights.to(q.dtype) if need_weights else None)


@caught_by("padding_equals_removal")
class NormalisedByPaddedLength(Sound):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return super().scores(q, k) * math.log(k.shape[-2] + 1)


@caught_by("padding_equals_removal")
class SpreadsNaN(Sound):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None, need_weights: bool = False) -> Any:
        mask = mask or Mask()
        self._check(q, k, v, mask)
        k, v = expand_heads(k, q.shape[1]), expand_heads(v, q.shape[1])
        return self.attend(q, k, v, mask, need_weights)


class FiniteFill(Sound):
    def weigh(self, scores: Tensor, visible: Tensor) -> Tensor:
        return scores.masked_fill(~visible, -1e4).softmax(-1) * visible


caught_by("padding_equals_removal")(FiniteFill)
caught_by("rows_stand_alone")(FiniteFill)


class ZeroFill(Sound):
    """Hidden scores become 0, which is not low."""

    def weigh(self, scores: Tensor, visible: Tensor) -> Tensor:
        return (scores * visible).softmax(-1)


caught_by("padding_equals_removal")(ZeroFill)
caught_by("pairs_hide")(ZeroFill)
caught_by("no_future_leak")(ZeroFill)


@caught_by("padding_equals_removal")
class PaddingInSelection(SoundTopK):
    def ranks(self, scores: Tensor, visible: Tensor) -> Tensor:
        return scores.argsort(dim=-1, descending=True, stable=True)


@caught_by("padding_equals_removal")
class PaddingHidesQueries(Sound):
    """`keys` laid on the axis of queries."""

    def visible(self, q: Tensor, k: Tensor, mask: Mask) -> Tensor:
        if mask.keys is None or q.shape[-2] != k.shape[-2]:
            return super().visible(q, k, mask)
        return super().visible(q, k, Mask(mask.causal, None, mask.pairs)) & mask.keys[:, None, :, None]


@caught_by("padding_equals_removal")
class CausalForgetsPadding(Sound):
    def visible(self, q: Tensor, k: Tensor, mask: Mask) -> Tensor:
        return super().visible(q, k, Mask(causal=True, pairs=mask.pairs) if mask.causal else mask)


@caught_by("pairs_hide")
class PairsTransposed(Sound):
    def visible(self, q: Tensor, k: Tensor, mask: Mask) -> Tensor:
        pairs = mask.pairs
        if pairs is not None and pairs.shape[-1] == pairs.shape[-2]:
            pairs = pairs.mT
        return super().visible(q, k, Mask(mask.causal, mask.keys, pairs))


class Windowed(Sound):
    """A sliding window without a fault."""

    spec = Spec(**{**CLAIMS, "cross": False}, positional=True)

    class Config(AttentionConfig):
        window: int = tunable(4, low=1, high=64, log=True, ge=1)

    def bounds(self, causal: bool) -> tuple[int, int]:
        window = self.config.window
        return (window - 1, 0) if causal else ((window - 1) // 2, window // 2)

    def visible(self, q: Tensor, k: Tensor, mask: Mask) -> Tensor:
        L, S = q.shape[-2], k.shape[-2]
        back, front = self.bounds(mask.causal)
        ahead = torch.arange(S, device=q.device) - torch.arange(S - L, S, device=q.device)[:, None]
        return super().visible(q, k, mask) & (ahead >= -back) & (ahead <= front)


@caught_by("window_is_exact")
class WindowOfOneMore(Windowed):
    def bounds(self, causal: bool) -> tuple[int, int]:
        back, front = super().bounds(causal)
        return back + causal, front


@caught_by("window_is_exact")
class WindowOfOneLess(Windowed):
    def bounds(self, causal: bool) -> tuple[int, int]:
        back, front = super().bounds(causal)
        return max(back - causal, 0), front


@caught_by("window_is_exact")
class WindowOnTheOtherSide(Windowed):
    """Of an even window the further key lies behind instead of ahead."""

    def bounds(self, causal: bool) -> tuple[int, int]:
        back, front = super().bounds(causal)
        return (back, front) if causal else (front, back)


@caught_by("window_is_exact")
class WindowWithoutItself(Windowed):
    spec = Spec(**{**CLAIMS, "cross": False, "convex": False}, positional=True)

    def visible(self, q: Tensor, k: Tensor, mask: Mask) -> Tensor:
        L, S = q.shape[-2], k.shape[-2]
        return super().visible(q, k, mask) & ~torch.eye(S, dtype=torch.bool, device=q.device)[S - L :]


@caught_by("window_is_exact")
class WindowOnEachSide(Windowed):
    def bounds(self, causal: bool) -> tuple[int, int]:
        return (self.config.window - 1, 0) if causal else (self.config.window // 2, self.config.window // 2)


@caught_by("pairs_hide")
class PairsReplaceKeys(Sound):
    def visible(self, q: Tensor, k: Tensor, mask: Mask) -> Tensor:
        return super().visible(q, k, mask if mask.pairs is None else Mask(mask.causal, None, mask.pairs))


@caught_by("pairs_hide")
class PairsOfFirstHead(Sound):
    def visible(self, q: Tensor, k: Tensor, mask: Mask) -> Tensor:
        visible = super().visible(q, k, mask)
        return visible if visible.dim() == 2 else visible[:, :1]


@caught_by("empty_row_is_zero")
class EmptyRowNaN(Sound):
    def weigh(self, scores: Tensor, visible: Tensor) -> Tensor:
        return scores.masked_fill(~visible, -math.inf).softmax(-1)


@caught_by("empty_row_is_zero")
class EmptyRowUniform(Sound):
    def weigh(self, scores: Tensor, visible: Tensor) -> Tensor:
        return scores.masked_fill(~visible, torch.finfo(scores.dtype).min).softmax(-1)


@caught_by("empty_row_is_zero")
class EmptyRowGradientNaN(Sound):
    def weigh(self, scores: Tensor, visible: Tensor) -> Tensor:
        bias = torch.zeros_like(scores).masked_fill(~visible, -math.inf)
        return (scores + bias).softmax(-1).nan_to_num(0.0)


# values


@caught_by("batch_independence")
class BatchMixing(Sound):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        scores = super().scores(q, k)
        return scores / scores.detach().abs().amax().clamp(min=1e-3)


@caught_by("batch_independence")
class SumsAlongTheBatch(Sound):
    """A running sum on the wrong axis."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, need_weights: bool) -> AttentionOutput:
        out, weights = super().attend(q, k, v, mask, need_weights)
        return AttentionOutput(out.cumsum(0), weights)


class NormalisedByBatch(Sound):
    """Batch normalisation of the keys: in training, a statistic over batch and sequence."""

    spec = Spec(**{**CLAIMS, "padding": False, "pairs": False})

    def __init__(self, num_heads: int, head_dim: int, config: Any) -> None:
        super().__init__(num_heads, head_dim, config)
        self.norm = torch.nn.BatchNorm1d(head_dim, affine=False, momentum=0.0)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return super().scores(q, self.norm(k.flatten(0, 2)).view(k.shape))


caught_by("batch_independence")(NormalisedByBatch)
caught_by("no_future_leak")(NormalisedByBatch)


@caught_by("no_future_leak")
class LeaksFromSecondBlock(Sound):
    """Blocks of 128: from the second on a row sees its whole block."""

    def visible(self, q: Tensor, k: Tensor, mask: Mask) -> Tensor:
        visible = super().visible(q, k, mask)
        L, S = q.shape[-2], k.shape[-2]
        if not mask.causal or mask.keys is not None or mask.pairs is not None or L != S or L <= 128:
            return visible
        block = torch.arange(S, device=q.device) // 128
        return visible | ((block[:, None] == block) & (block > 0))


@caught_by("batch_independence")
class MaskOfFirstRow(Sound):
    def visible(self, q: Tensor, k: Tensor, mask: Mask) -> Tensor:
        return super().visible(q, k, Mask(mask.causal, None if mask.keys is None else mask.keys[:1], mask.pairs))


@caught_by("weights_match_output")
class WeightsNotNormalised(Sound):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, need_weights: bool) -> AttentionOutput:
        out, weights = super().attend(q, k, v, mask, need_weights)
        return AttentionOutput(out, None if weights is None else weights * 2)


@caught_by("weights_match_output")
class WeightsAveragedOverHeads(Sound):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, need_weights: bool) -> AttentionOutput:
        out, weights = super().attend(q, k, v, mask, need_weights)
        return AttentionOutput(out, None if weights is None else weights.mean(1, keepdim=True).expand_as(weights))


@caught_by("rows_stand_alone")
class TransposesWhereSquare(Sound):
    """Takes k for transposed already where S == D."""

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return super().scores(q, k.mT) if k.shape[-1] == k.shape[-2] else super().scores(q, k)


@caught_by("rows_stand_alone")
class CausalDropsPairs(Sound):
    def visible(self, q: Tensor, k: Tensor, mask: Mask) -> Tensor:
        return super().visible(q, k, Mask(True) if mask.causal and mask.keys is None else mask)


@caught_by("rows_stand_alone")
class KeysAllTrueDropTheMask(Sound):
    def visible(self, q: Tensor, k: Tensor, mask: Mask) -> Tensor:
        return super().visible(q, k, Mask() if mask.keys is not None and bool(mask.keys.all()) else mask)


@caught_by("rows_stand_alone")
class SingleQueryIgnoresMasks(Sound):
    def visible(self, q: Tensor, k: Tensor, mask: Mask) -> Tensor:
        return super().visible(q, k, Mask() if q.shape[-2] == 1 < k.shape[-2] else mask)


@caught_by("rows_stand_alone")
class HeadsTakenForBatch(Sound):
    """Padding laid on the heads where there are as many as batch rows."""

    def visible(self, q: Tensor, k: Tensor, mask: Mask) -> Tensor:
        if mask.keys is None or len(q) != q.shape[1]:
            return super().visible(q, k, mask)
        return super().visible(q, k, Mask(mask.causal, None, mask.pairs)) & mask.keys[None, :, None, :]


@caught_by("rows_stand_alone")
class OnlineSoftmaxForgetsToRescale(Sound):
    """Blocks of 128 keys, each with its own maximum; what was summed before is not brought to the new one."""

    def weigh(self, scores: Tensor, visible: Tensor) -> Tensor:
        parts, lowest = [], torch.finfo(scores.dtype).min
        for start in range(0, scores.shape[-1], 128):
            block = scores[..., start : start + 128].masked_fill(~visible[..., start : start + 128], lowest)
            parts.append((block - block.amax(-1, keepdim=True)).exp() * visible[..., start : start + 128])
        whole = torch.cat(parts, -1)
        return whole / whole.sum(-1, keepdim=True).clamp(min=1e-30)


@caught_by("weights_match_output")
class WeightsBeforeSelection(SoundTopK):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, need_weights: bool) -> AttentionOutput:
        out, weights = super().attend(q, k, v, mask, need_weights)
        if weights is not None:
            weights = Sound.weigh(self, self.scores(q, k), self.visible(q, k, mask)).to(q.dtype)
        return AttentionOutput(out, weights)


@caught_by("weights_match_output")
class WeightsDetached(Sound):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, need_weights: bool) -> AttentionOutput:
        out, weights = super().attend(q, k, v, mask, need_weights)
        return AttentionOutput(out, None if weights is None else weights.detach())


@caught_by("fast_path_equals_plain")
class TailLost(Sound):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, need_weights: bool) -> AttentionOutput:
        whole = k.shape[-2] // 64 * 64
        if need_weights or whole in (0, k.shape[-2]):
            return super().attend(q, k, v, mask, need_weights)
        visible = self.visible(q, k, mask)
        weights = self.weigh(self.scores(q, k[..., :whole, :]), visible[..., :whole])
        return AttentionOutput((weights @ v[..., :whole, :].to(weights.dtype)).to(q.dtype), None)


@caught_by("fast_path_equals_plain")
class SumsAlongTheHeads(Sound):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, need_weights: bool) -> AttentionOutput:
        out, weights = super().attend(q, k, v, mask, need_weights)
        return AttentionOutput(out if need_weights else out.cumsum(1) - out.cumsum(1)[:, :1], weights)


@caught_by("fast_path_equals_plain")
class SecondChunkDropsMask(Sound):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, need_weights: bool) -> AttentionOutput:
        if need_weights or q.shape[-2] <= 128 or mask.causal:
            return super().attend(q, k, v, mask, need_weights)
        head = super().attend(q, k, v, mask, False).out[..., :128, :]
        return AttentionOutput(torch.cat([head, super().attend(q[..., 128:, :], k, v, Mask(), False).out], -2), None)


@caught_by("equals_standard")
class RootOfValueDim(Sound):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, need_weights: bool) -> AttentionOutput:
        return super().attend(q * math.sqrt(q.shape[-1] / v.shape[-1]), k, v, mask, need_weights)


@caught_by("equals_standard")
class NoRootOfDim(Sound):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return super().scores(q, k) * math.sqrt(q.shape[-1])


@caught_by("temperature_divides_scores")
class TemperatureMultiplied(SoundTemperature):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return Sound.scores(self, q, k) * self.config.temperature


@caught_by("temperature_divides_scores")
class TemperatureSquared(SoundTemperature):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return Sound.scores(self, q, k) / self.config.temperature**2


@caught_by("temperature_divides_scores")
class TemperatureAfterSoftmax(SoundTemperature):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return Sound.scores(self, q, k)

    def weigh(self, scores: Tensor, visible: Tensor) -> Tensor:
        weights = super().weigh(scores, visible) / self.config.temperature
        return weights / weights.sum(-1, keepdim=True).clamp(min=1e-30)


@caught_by("temperature_divides_scores")
class TemperatureMultipliedUnclaimed(TemperatureMultiplied):
    spec = Spec(**CLAIMS)


@caught_by("keys_per_query")
class DroppedScoresAreZero(SoundTopK):
    def weigh(self, scores: Tensor, visible: Tensor) -> Tensor:
        kept = self.ranks(scores.detach(), visible)[..., : self.config.keep]
        return Sound.weigh(self, torch.zeros_like(scores).scatter(-1, kept, scores.gather(-1, kept)), visible)


@caught_by("keys_per_query")
class SelectsBeforeMask(SoundTopK):
    def ranks(self, scores: Tensor, visible: Tensor) -> Tensor:
        return scores.argsort(dim=-1, descending=True, stable=True)


@caught_by("keys_per_query")
class KeepsAllTies(SoundTopK):
    def weigh(self, scores: Tensor, visible: Tensor) -> Tensor:
        fixed = scores.detach().masked_fill(~visible, -math.inf)
        lowest = fixed.topk(min(self.config.keep, scores.shape[-1]), dim=-1).values[..., -1:]
        return Sound.weigh(self, scores, visible & (fixed >= lowest))


@caught_by("keys_per_query")
class HighestIndexWins(SoundTopK):
    def ranks(self, scores: Tensor, visible: Tensor) -> Tensor:
        return scores.shape[-1] - 1 - super().ranks(scores.flip(-1), visible.flip(-1))


@caught_by("keys_per_query")
class WindowOneWider(Sound):
    spec = Spec(**{**CLAIMS, "cross": False}, positional=True, keys_per_query="window")

    class Config(AttentionConfig):
        window: int = tunable(3, low=1, high=8, ge=1)

    def visible(self, q: Tensor, k: Tensor, mask: Mask) -> Tensor:
        L, S = q.shape[-2], k.shape[-2]
        ahead = torch.arange(S, device=q.device) - torch.arange(S - L, S, device=q.device)[:, None]
        return super().visible(q, k, mask) & (ahead >= -self.config.window) & (ahead <= 0)


# modes


@caught_by("same_in_every_mode")
class ForgetsPaddingInTraining(Sound):
    def visible(self, q: Tensor, k: Tensor, mask: Mask) -> Tensor:
        return super().visible(q, k, Mask(mask.causal, None, mask.pairs) if self.training else mask)


@caught_by("same_in_every_mode")
class DropsWeightsInTraining(Sound):
    def weigh(self, scores: Tensor, visible: Tensor) -> Tensor:
        return torch.nn.functional.dropout(super().weigh(scores, visible), 0.1, self.training)


@caught_by("same_in_every_mode")
class FusedWithoutGradientsDropsPadding(Sound):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, need_weights: bool) -> AttentionOutput:
        if torch.is_grad_enabled() or need_weights or mask.pairs is not None or q.shape[-2] != k.shape[-2]:
            return super().attend(q, k, v, mask, need_weights)
        return AttentionOutput(torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=mask.causal), None)


@caught_by("same_in_every_mode")
class RunsUnderAutocast(Sound):
    """Leaves out what the base class does: autocast narrows the products."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None, need_weights: bool = False) -> Any:
        self._check(q, k, v, mask or Mask())
        if not q.numel() or not k.shape[2]:
            return super().forward(q, k, v, mask, need_weights)
        k, v = expand_heads(k, q.shape[1]), expand_heads(v, q.shape[1])
        return self.attend(q, k, v, mask or Mask(), need_weights)


@caught_by("same_in_every_mode")
class KeepsScaleWithoutGradients(Sound):
    """What a call without gradients has computed from a parameter stays, also when the parameter has moved."""

    def __init__(self, num_heads: int, head_dim: int, config: Any) -> None:
        super().__init__(num_heads, head_dim, config)
        self.growth = torch.nn.Parameter(torch.zeros(1))
        self.kept: Tensor | None = None

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        scale = self.growth.exp()
        if not torch.is_grad_enabled():
            self.kept = scale = scale if self.kept is None else self.kept
        return super().scores(q, k) * scale


# numbers


@caught_by("gradcheck_float64")
class GradientCut(Sound):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return super().scores(q, k.detach())


@caught_by("gradcheck_float64")
class GradientDoubled(Sound):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        scores = super().scores(q, k)
        return 2 * scores - scores.detach()


@caught_by("gradcheck_float64")
class RoundsToFloat32(Sound):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return super().scores(q.float(), k.float()).to(q.dtype)


@caught_by("gradients_finite")
class RootOfZero(Sound):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return super().scores(q, k) * q.square().sum(-1, keepdim=True).sqrt().to(torch.float32)


@caught_by("half_precision_no_overflow")
class HalfOverflow(Sound):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT / math.sqrt(q.shape[-1])


@caught_by("half_precision_no_overflow")
class MinusBillion(Sound):
    def weigh(self, scores: Tensor, visible: Tensor) -> Tensor:
        return scores.masked_fill(~visible, -1e9).softmax(-1) * visible

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return (q / q.shape[-1] ** 0.5) @ k.mT


@caught_by("low_precision_is_close")
class HalfSums(Sound):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, need_weights: bool) -> AttentionOutput:
        weights = self.weigh(self.scores(q, k), self.visible(q, k, mask)).to(q.dtype)
        total = torch.zeros_like(v[..., :1, :]).expand(*q.shape[:-1], -1)
        for j in range(k.shape[-2]):
            total = total + weights[..., j : j + 1] * v[..., j : j + 1, :]
        return AttentionOutput(total.to(q.dtype), weights if need_weights else None)


# state


@caught_by("evaluation_is_deterministic")
class RandomInEvaluation(Sound):
    def weigh(self, scores: Tensor, visible: Tensor) -> Tensor:
        return super().weigh(scores + 1e-6 * torch.rand_like(scores), visible)


@caught_by("evaluation_is_deterministic")
class DropoutInEvaluation(Sound):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, need_weights: bool) -> AttentionOutput:
        out, weights = super().attend(q, k, v, mask, need_weights)
        return AttentionOutput(torch.nn.functional.dropout(out, 0.1), weights)


@caught_by("evaluation_is_deterministic")
class RemembersLength(Sound):
    longest = 0

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        self.longest = max(self.longest, k.shape[-2])
        return super().scores(q, k) * math.log(self.longest + 1)


@caught_by("evaluation_is_deterministic")
class KeepsFirstMask(Sound):
    def visible(self, q: Tensor, k: Tensor, mask: Mask) -> Tensor:
        key = (q.shape[-2], k.shape[-2], mask.causal)
        self.cache: dict[Any, Tensor] = getattr(self, "cache", {})
        return self.cache.setdefault(key, super().visible(q, k, mask))


@caught_by("module_copies")
class KeepsGraph(Sound):
    last: Tensor | None = None

    def weigh(self, scores: Tensor, visible: Tensor) -> Tensor:
        self.last = super().weigh(scores, visible)
        return self.last


@caught_by("module_copies")
class HoldsFunction(Sound):
    def __init__(self, num_heads: int, head_dim: int, config: Any) -> None:
        super().__init__(num_heads, head_dim, config)
        self.scale = lambda x: x / math.sqrt(head_dim)


@caught_by("decode_equals_forward")
class DecodeOffByOne(Sound):
    def step(self, q: Tensor, k: Tensor, v: Tensor, state: Any, keys: Tensor | None = None) -> tuple[Tensor, Any]:
        if state is not None and state.k.shape[2] > 2:
            state = type(state)(state.k[:, :, 1:], state.v[:, :, 1:], None if state.keys is None else state.keys[:, 1:])
        return super().step(q, k, v, state, keys)


@caught_by("module_copies")
class ParameterOfFirstCall(Sound):
    scale: Tensor | None = None

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = torch.nn.Parameter(torch.randn(1, dtype=q.dtype).exp())
        return super().scores(q, k) * self.scale


@caught_by("decode_equals_forward")
class DecodeSeesFirstKeyOnly(Sound):
    """A single new token, aligned top-left."""

    def step(self, q: Tensor, k: Tensor, v: Tensor, state: Any, keys: Tensor | None = None) -> tuple[Tensor, Any]:
        out, following = super().step(q, k, v, state, keys)
        if state is not None and q.shape[2] == 1:
            out = self(q, following.k[:, :, :1], following.v[:, :, :1], Mask()).out
        return out, following


@caught_by("decode_equals_forward")
class DecodeForgetsPadding(Sound):
    def step(self, q: Tensor, k: Tensor, v: Tensor, state: Any, keys: Tensor | None = None) -> tuple[Tensor, Any]:
        return super().step(q, k, v, state, None)


class Tokens(NamedTuple):
    """A decoding state that says nothing about its size."""

    k: Tensor
    v: Tensor
    keys: Tensor


@caught_by("decode_equals_forward")
class StateWithoutSize(Sound):
    def step(self, q: Tensor, k: Tensor, v: Tensor, state: Any, keys: Tensor | None = None) -> tuple[Tensor, Any]:
        keys = torch.ones(k.shape[0], k.shape[2], dtype=torch.bool) if keys is None else keys
        if state is not None:
            k, v, keys = (torch.cat([a, b], dim) for a, b, dim in zip(state, (k, v, keys), (2, 2, 1), strict=True))
        return self(q, k, v, Mask(True, keys)).out, Tokens(k, v, keys)


@caught_by("decode_equals_forward")
class StateChangedInPlace(Sound):
    def step(self, q: Tensor, k: Tensor, v: Tensor, state: Any, keys: Tensor | None = None) -> tuple[Tensor, Any]:
        out, following = super().step(q, k, v, state, keys)
        if state is not None:
            state.v[:, :, -1] *= 0.5
        return out, following


# costs


@caught_by("costs_as_claimed")
class ClaimsLinearTime(Sound):
    spec = Spec(**CLAIMS, time=1)


@caught_by("costs_as_claimed")
class ClaimsLinearMemory(Sound):
    spec = Spec(**CLAIMS, time=2, memory=1)


@caught_by("costs_as_claimed")
class ClaimsMoreTimeThanItTakes(Sound):
    spec = Spec(causal=True, convex=False, time=2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, need_weights: bool) -> AttentionOutput:
        if need_weights:
            return super().attend(q, k, v, mask, True)
        return AttentionOutput(v.clone(), None)
