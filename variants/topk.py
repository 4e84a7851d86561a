"""Each query attends to its `keep` highest-scoring visible keys only; on ties exactly `keep` are kept, lowest index first.

    out = softmax(s restricted to top(s)) v,    s = q k^T / (T sqrt(D))

Paper   Gupta et al. 2021, arXiv:2106.06899. Differs: the mask comes before the selection, and ties are settled.
Time    O(L S D)      Memory  O(L keep), and SCORES scores at a time (or those of one query)
Masks   all, applied BEFORE the selection.     Equals `standard` at keep >= S.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from core import Attention, AttentionConfig, AttentionOutput, Mask, Spec, functional, register, tunable


@register("topk")
class TopK(Attention):
    """softmax(s restricted to top(s)) v."""

    spec = Spec(
        causal=True, padding=True, pairs=True, cross=True, decode=True, convex=True,
        keys_per_query="keep", equals_standard_when={"keep": 10**9, "temperature": 1.0}, time=2, memory=1,
    )  # fmt: skip

    class Config(AttentionConfig):
        """keep: keys kept by each query. temperature: T."""

        keep: int = tunable(8, low=1, high=64, log=True, ge=1)
        temperature: float = tunable(1.0, low=0.1, high=1.0, log=True, ge=1e-8)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, need_weights: bool) -> AttentionOutput:
        self.backend_used = "math"
        scale = 1.0 / (self.config.temperature * math.sqrt(q.shape[-1]))
        if not need_weights:
            found, outs = functional.pieces(q, k.shape[-2], functional.score_bound(q.device, functional.SCORES)), []
            for (batch, rows), *parts in functional.batch_parts(found, q, k, v):
                # A view each: torch.compile takes no function of one's own that is given the same tensor twice.
                views = (part.view_as(part) for part in parts)
                outs.append(_Kept.apply(*views, mask.of_batch(batch), self.config.keep, scale, rows))
            return AttentionOutput(torch.cat(outs), None)
        visible = mask.visible(q.shape[-2], k.shape[-2], q.device)
        scores = functional.scaled_scores(q, k, self.config.temperature)
        kept = _among_highest(scores.detach(), visible, self.config.keep)
        weights = functional.masked_softmax(scores, kept)
        return AttentionOutput(functional.average(weights, v), weights.to(q.dtype))


def _among_highest(scores: Tensor, visible: Tensor | None, keep: int) -> Tensor:
    """The `keep` highest visible entries of each row, and among equals the lowest indices: bool like scores."""
    shown = scores if visible is None else scores.masked_fill(~visible, -math.inf)
    # torch.topk breaks ties differently by length, so only its threshold is used, never its indices.
    threshold = shown.topk(min(keep, scores.shape[-1]), dim=-1).values[..., -1:]
    above, equal = shown > threshold, shown == threshold
    room = keep - above.sum(-1, keepdim=True, dtype=torch.int32)
    kept = above | (equal & (equal.cumsum(-1, dtype=torch.int32) <= room))
    kept = kept | shown.isnan()  # what is no number compares with nothing, and must not vanish
    return kept if visible is None else kept & visible


def _highest(scores: Tensor, keep: int) -> tuple[Tensor, Tensor]:
    """Values and indices of the `keep` highest entries of each row, and among equals those of the lowest indices."""
    values, index = scores.topk(keep, dim=-1)
    threshold = values[..., -1:]
    tied = ((scores >= threshold).sum(-1, keepdim=True, dtype=torch.int32) > keep) & (threshold > -math.inf)
    if not torch.compiler.is_compiling() and scores.device.type == "cpu" and not tied.any():
        return values, index
    S = scores.shape[-1]
    rank = torch.where(_among_highest(scores, None, keep), S - torch.arange(S, device=scores.device), 0)
    index = torch.where(scores.isnan(), rank + S, rank).topk(keep, dim=-1).indices
    return scores.gather(-1, index), index


class _Kept(torch.autograd.Function):
    """The fast path: weights and indices of the kept keys are all that backward needs beside the inputs."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Mask, keep: int, scale: float, rows: int) -> Tensor:
        dtype, kept, places = functional.accumulate_dtype(q.dtype), [], []
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        wide_k, wide_v = k.to(dtype), v.to(dtype)
        L, S = q.shape[-2], k.shape[-2]
        for chunk in functional.query_chunks(L, S, mask.causal, rows):
            (start, stop, limit), visible = chunk, chunk.visible(mask, L, S, q.device)
            scores = (q[:, :, start:stop].to(dtype) * scale) @ wide_k[:, :, :limit].transpose(-2, -1)
            if visible is not None:
                scores = scores.masked_fill_(~visible, -math.inf)
            values, index = _highest(scores, min(keep, limit))
            weights = functional.masked_softmax(values, values != -math.inf)
            out[:, :, start:stop] = _spread(weights, index, limit) @ wide_v[:, :, :limit]
            kept += [weights, index.int()]
            places.append((start, stop, limit))
        ctx.save_for_backward(q, k, v, *kept)
        ctx.scale, ctx.places = scale, places
        return out

    @staticmethod
    @functional.backward_alone
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, *kept = ctx.saved_tensors
        dtype = functional.accumulate_dtype(q.dtype)
        wide_q, wide_k, wide_v, grad = q.to(dtype), k.to(dtype), v.to(dtype), grad.to(dtype)
        to_q, to_k, to_v = torch.empty_like(q), torch.zeros_like(wide_k), torch.zeros_like(wide_v)
        for (start, stop, limit), weights, index in zip(ctx.places, kept[::2], kept[1::2], strict=True):
            index, given = index.long(), grad[:, :, start:stop]
            to_v[:, :, :limit] += _spread(weights, index, limit).transpose(-2, -1) @ given
            to_weights = (given @ wide_v[:, :, :limit].transpose(-2, -1)).gather(-1, index)
            to_scores = _spread(torch._softmax_backward_data(to_weights, weights, -1, weights.dtype), index, limit)
            to_q[:, :, start:stop] = to_scores @ wide_k[:, :, :limit] * ctx.scale
            to_k[:, :, :limit] += to_scores.transpose(-2, -1) @ (wide_q[:, :, start:stop] * ctx.scale)
        return to_q, to_k.to(k.dtype), to_v.to(v.dtype), None, None, None, None


def _spread(values: Tensor, index: Tensor, S: int) -> Tensor:
    """(B, H, rows, keep) at their places among S keys, 0 elsewhere."""
    return values.new_zeros(*values.shape[:-1], S).scatter_(-1, index, values)
