"""Softmax attention with a fused kernel behind one function: math | sdpa | xformers; `auto` chooses.

An explicit choice that cannot serve the call raises with its reason; it never falls back.
"""

from __future__ import annotations

import importlib.util
import math
from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from core.errors import BackendError
from core.functional import average, both_visible, masked_softmax, scaled_scores
from core.mask import Mask

Backend = Literal["auto", "math", "sdpa", "xformers"]


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    *,
    temperature: float = 1.0,
    backend: Backend = "auto",
    pattern: Tensor | None = None,
) -> tuple[Tensor, str]:
    """softmax(q k^T / (temperature sqrt(D)), among visible keys) v, and the name of the kernel that computed it.

    Args:
        q, k, v: (B, H, L, D), (B, H, S, D), (B, H, S, Dv).
        pattern: bool, broadcastable to (B, H, L, S): what the mechanism itself hides, combined with the mask by AND.

    Returns:
        out (B, H, L, Dv) and one of "math", "sdpa", "xformers".

    Raises:
        BackendError: an explicit backend cannot serve this call.
        ImportError: xformers was asked for and is not installed.
    """
    L, S = q.shape[-2], k.shape[-2]
    scale = 1.0 / (temperature * math.sqrt(q.shape[-1]))
    causal_only = mask.causal and mask.keys is None and mask.pairs is None and pattern is None
    if backend == "xformers":
        return _xformers(q, k, v, causal_only, mask, pattern, scale), "xformers"
    if backend == "math":
        visible = both_visible(mask.visible(L, S, q.device), pattern)
        return average(masked_softmax(scaled_scores(q, k, temperature), visible), v), "math"
    # SDPA aligns `is_causal` top-left, so it serves only a square; every other mask goes in as visibility.
    if causal_only and L == S:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale), "sdpa"
    visible = both_visible(mask.visible(L, S, q.device), pattern)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale), "sdpa"


def _xformers(q: Tensor, k: Tensor, v: Tensor, causal_only: bool, mask: Mask, pattern: Tensor | None, scale: float) -> Tensor:
    L, S = q.shape[-2], k.shape[-2]
    if q.device.type != "cuda":
        raise BackendError(f"backend xformers: needs tensors on a CUDA device, got {q.device}; use auto, sdpa or math")
    hides = mask.visible(L, S, q.device) is not None or pattern is not None
    if hides and not causal_only:
        raise BackendError("backend xformers: serves causal or no mask, got padding or pairs; use auto, sdpa or math")
    if importlib.util.find_spec("xformers") is None:
        raise ImportError("backend xformers: the package is not installed; pip install xformers")
    from xformers import ops

    bias = ops.fmha.attn_bias.LowerTriangularFromBottomRightMask() if hides else None
    try:
        # xformers lays heads after length: (B, L, H, D).
        out = ops.memory_efficient_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_bias=bias, scale=scale)
    except NotImplementedError as error:
        reason = " ".join(str(error).split())
        raise BackendError(f"backend xformers: no kernel serves {q.dtype}, head dim {q.shape[-1]}: {reason}") from error
    return out.transpose(1, 2)
