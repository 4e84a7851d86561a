"""Softmax attention with a fused kernel behind one function: math | sdpa | xformers; `auto` chooses.

An explicit choice that cannot serve the call raises with its reason; it never falls back.
"""

from __future__ import annotations

import importlib.util
import math
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from core.errors import BackendError
from core.functional import average, both_visible, masked_softmax, scaled_scores, window_sides, window_visible
from core.mask import Mask

Backend = Literal["auto", "math", "sdpa", "xformers"]


class Window(NamedTuple):
    """A sliding window, as `window_visible` has it."""

    size: int
    num_global: int = 0


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    *,
    temperature: float = 1.0,
    backend: Backend = "auto",
    window: int | None = None,
    num_global: int = 0,
) -> tuple[Tensor, str]:
    """softmax(q k^T / (temperature sqrt(D)), among visible keys) v, and the name of the kernel that computed it.

    `auto` is sdpa, but for half precision on CUDA with padding, a window, or causality over more keys than queries: there sdpa
    would hold L x S, and xformers is taken if one of its kernels serves the call (with gradients, if they are needed).

    Args:
        q, k, v: (B, H, L, D), (B, H, S, D), (B, H, S, Dv).
        window, num_global: what a sliding window leaves, as `window_visible` has it; None: all.

    Returns:
        out (B, H, L, Dv) and one of "math", "sdpa", "xformers".

    Raises:
        BackendError: an explicit backend cannot serve this call.
        ImportError: xformers was asked for and is not installed.
    """
    L, S = q.shape[-2], k.shape[-2]
    scale = 1.0 / (temperature * math.sqrt(q.shape[-1]))
    near = None if window is None else Window(window, num_global)
    if backend == "xformers" or (backend == "auto" and _sdpa_would_hold_pairs(q, k, mask, near)):
        inputs, refusal = _ask_xformers(q, k, v, mask, near, scale)
        if inputs is not None:
            return _run_xformers(inputs, q, v), "xformers"
        if backend == "xformers" and refusal is not None:
            raise refusal
    # SDPA aligns `is_causal` top-left, so it serves only a square; every other mask goes in as visibility.
    if backend != "math" and mask.causal and mask.keys is None and mask.pairs is None and window is None and L == S:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale), "sdpa"
    visible = _visible(q, k, mask, near)
    if backend == "math":
        return average(masked_softmax(scaled_scores(q, k, temperature), visible), v), "math"
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale), "sdpa"


def _visible(q: Tensor, k: Tensor, mask: Mask, window: Window | None) -> Tensor | None:
    L, S = q.shape[-2], k.shape[-2]
    near = None if window is None else window_visible(L, S, window.size, mask.causal, q.device, window.num_global)
    return both_visible(mask.visible(L, S, q.device), near)


def _sdpa_would_hold_pairs(q: Tensor, k: Tensor, mask: Mask, window: Window | None) -> bool:
    """Whether `auto` asks xformers: where it has a kernel without L x S and torch has none."""
    if q.device.type != "cuda" or q.dtype not in (torch.float16, torch.bfloat16) or torch.compiler.is_compiling():
        return False
    if (
        mask.pairs is not None
        or (mask.keys is not None and (mask.causal or window is not None))
        or (window and window.num_global)
    ):
        return False  # xformers would hold L x S as well
    return mask.keys is not None or window is not None or (mask.causal and q.shape[-2] < k.shape[-2])


class XformersInputs(NamedTuple):
    """A call as xformers wants it.

    Args:
        query, key, value: (B, length, H, D); with padding all rows one after another, (1, sum of lengths, H, D).
        bias: what hides: None, one of xformers' own masks, or a tensor (B, H, L, S).
        blind: bool, broadcastable to (B, H, L, 1): queries that see nothing; what the kernel gives for them is no number of
            theirs. None: there are none.
        scale: of the scores.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Any
    blind: Tensor | None
    scale: float


def xformers_inputs(q: Tensor, k: Tensor, v: Tensor, mask: Mask, window: Window | None, scale: float) -> XformersInputs:
    """The call in xformers' layout, with the mask class that says the same as ours; a tensor where none does."""
    from xformers.ops.fmha import attn_bias as masks

    (B, _, L, _), S = q.shape, k.shape[-2]
    query, key, value = (x.transpose(1, 2) for x in (q, k, v))
    whole = window is not None and window.num_global > 0
    if mask.pairs is None and mask.keys is None and not whole and (L <= S or not mask.causal):
        bias: Any = None
        if mask.causal:
            bias = masks.LowerTriangularFromBottomRightMask()
            bias = bias if window is None else bias.make_local_attention(window.size)
        elif window is not None:
            left, right = window_sides(window.size, causal=False)
            bias = masks.LocalAttentionFromBottomRightMask(window_left=left, window_right=right)
        return XformersInputs(query, key, value, bias, None, scale)
    visible = _visible(q, k, mask, window)
    assert visible is not None  # there are keys, pairs or a window, or queries before every key
    visible = visible if visible.dim() == 4 else visible[None, None]
    blind = ~visible.any(-1, keepdim=True)
    if mask.pairs is None and mask.keys is not None and not mask.causal and window is None:
        keep = mask.keys.to(q.device)
        keep = keep | (~keep.any(-1, keepdim=True) & (torch.arange(S, device=q.device) == 0))  # no block may be empty
        packed = masks.BlockDiagonalMask.from_seqlens([L] * B, keep.sum(-1).tolist(), device=q.device)
        return XformersInputs(query.flatten(0, 1)[None], key[keep][None], value[keep][None], packed, blind, scale)
    return XformersInputs(query, key, value, aligned_bias(visible | blind, q, S), blind, scale)


def aligned_bias(visible: Tensor, q: Tensor, S: int) -> Tensor:
    """0 where visible (4-D) and -inf elsewhere, (B, H, L, S) in the dtype of q, as xformers' kernels read it.

    Rows start at multiples of 8 numbers: cut from a wider tensor, and expanded over batch and heads; a copy would undo both.
    """
    (B, H, L, _), (b, h, _, _) = q.shape, visible.shape
    wide = torch.zeros(b, h, L, -(-S // 8) * 8, dtype=q.dtype, device=q.device)
    return wide[..., :S].masked_fill_(~visible, -math.inf).expand(B, H, L, S)


def _ask_xformers(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, window: Window | None, scale: float
) -> tuple[XformersInputs | None, Exception | None]:
    """The inputs, if a kernel of xformers serves them; else why none does."""
    if q.device.type != "cuda":
        return None, BackendError(f"backend xformers: needs tensors on a CUDA device, got {q.device}; use auto, sdpa or math")
    if importlib.util.find_spec("xformers") is None:
        return None, ImportError("backend xformers: the package is not installed; pip install xformers")

    inputs = xformers_inputs(q, k, v, mask, window, scale)
    refusal = unserved_by_xformers(inputs, torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)))
    return (inputs, None) if refusal is None else (None, BackendError(f"backend xformers: {refusal}"))


def unserved_by_xformers(inputs: XformersInputs, gradients: bool) -> str | None:
    """Why no kernel of the installed xformers serves these inputs, in its own words; None where one does."""
    from xformers.ops import fmha

    asked = fmha.Inputs(inputs.query, inputs.key, inputs.value, inputs.bias, p=0.0, scale=inputs.scale)
    asked.normalize_bmhk()
    for what, kernels in (("forward", fmha.ALL_FW_OPS), ("backward", fmha.ALL_BW_OPS if gradients else [])):
        reasons = {kernel.NAME: kernel.not_supported_reasons(asked) for kernel in kernels}
        if reasons and all(reasons.values()):
            words = "; ".join(f"{name}: {', '.join(why)}" for name, why in reasons.items())
            return f"no {what} kernel serves {asked.query.dtype}, head dim {asked.query.shape[-1]}: {words}"
    return None


def _run_xformers(inputs: XformersInputs, q: Tensor, v: Tensor) -> Tensor:
    from xformers.ops import memory_efficient_attention

    out = memory_efficient_attention(inputs.query, inputs.key, inputs.value, attn_bias=inputs.bias, scale=inputs.scale)
    return from_xformers(out, inputs, q, v)


def from_xformers(out: Tensor, inputs: XformersInputs, q: Tensor, v: Tensor) -> Tensor:
    """What xformers gives for these inputs, as (B, H, L, Dv), 0 in rows that see nothing."""
    B, H, L, _ = q.shape
    out = out.reshape(B, L, H, v.shape[-1]).transpose(1, 2)
    return out if inputs.blind is None else out.masked_fill(inputs.blind, 0.0)
