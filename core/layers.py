"""Multi-head attention around any mechanism: projections, grouped key/value heads, dropout, checkpointing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recompute

from core.attention import Attention
from core.cache import LayerCache
from core.errors import ConfigError, MaskError, ShapeError
from core.mask import Mask
from core.positions import Rotary
from core.registry import build


class MultiHeadAttention(nn.Module):
    """Projections around one mechanism, (B, L, C) -> (B, L, C).

    Args:
        model_dim: C. num_heads must divide it.
        num_heads: query heads H, of head_dim C / H.
        num_kv_heads: key/value heads, which must divide H; None: H. Query head h uses head h // (H / Hkv).
        variant: the mechanism's registered name; config: its settings.
        dropout: on the projected output, in training only.
        bias: in the projections.
        rotary: rotate queries and keys by their position.
        checkpoint: keep no activation of the attention for backward, recompute it (training only).

    Raises:
        ConfigError: sizes that do not divide, with both numbers; a setting that the variant refuses.
        UnknownNameError: no such variant.
    """

    def __init__(
        self,
        model_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        variant: str = "standard",
        config: Mapping[str, Any] | None = None,
        dropout: float = 0.0,
        bias: bool = True,
        rotary: bool = False,
        checkpoint: bool = False,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_heads(model_dim, num_heads, num_kv_heads)
        if not 0.0 <= dropout < 1.0:
            raise ConfigError(f"dropout: must be in [0, 1), got {dropout}")
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = model_dim // num_heads
        self.dropout = dropout
        self.checkpoint = checkpoint
        # The projections come first, so that two variants start with the same ones under one seed.
        self.in_proj = nn.Linear(model_dim, (num_heads + 2 * num_kv_heads) * self.head_dim, bias=bias)
        self.out_proj = nn.Linear(model_dim, model_dim, bias=bias)
        self.rotary = Rotary(self.head_dim) if rotary else None
        self.attention: Attention = build(variant, num_heads=num_heads, head_dim=self.head_dim, **dict(config or {}))

    def forward(self, x: Tensor, context: Tensor | None = None, mask: Mask | None = None) -> Tensor:
        """Attend from x to x, or to the context.

        Args:
            x: (B, L, C).
            context: (B, S, C), for cross-attention.
            mask: over (L, S); causal with a context is refused, since the two have no common order.

        Raises:
            MaskError, ShapeError: what the mechanism refuses.
        """
        mask = Mask() if mask is None else mask
        if context is not None and mask.causal:
            raise MaskError("causal with a context: the positions of x and context are not comparable; leave causal out")
        q, k, v = self.project(x, context)
        if self.checkpoint and self.training:
            out = recompute(self._attend, q, k, v, mask, use_reentrant=False)
        else:
            out = self._attend(q, k, v, mask)
        return self._output(out)

    def decode(self, x: Tensor, cache: LayerCache | None, keys: Tensor | None = None) -> tuple[Tensor, LayerCache]:
        """The causal forward, in pieces: new tokens (B, n, C) -> their outputs (B, n, C) and the cache for the next.

        Args:
            cache: None to begin.
            keys: bool (B, n), False for padding among the new tokens (left padding of shorter prompts).
        """
        length = 0 if cache is None else cache.length
        q, k, v = self.project(x, None, offset=length)
        out, state = self.attention.step(q, k, v, None if cache is None else cache.state, keys)
        return self._output(out), LayerCache(state, length + x.shape[1])

    def project(self, x: Tensor, context: Tensor | None = None, offset: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, H, L, D), keys and values (B, Hkv, S, D), rotated where the layer is rotary."""
        C = self.out_proj.in_features
        for name, tensor in (("x", x), ("context", context)):
            if tensor is not None and (tensor.dim() != 3 or tensor.shape[-1] != C):
                raise ShapeError(f"{name}: must be (B, length, {C}), got shape {tuple(tensor.shape)}")
        sizes = [self.num_heads * self.head_dim] + [self.num_kv_heads * self.head_dim] * 2
        if context is None:
            q, k, v = self.in_proj(x).split(sizes, dim=-1)
        else:
            weight, bias = self.in_proj.weight, self.in_proj.bias
            q = F.linear(x, weight[: sizes[0]], None if bias is None else bias[: sizes[0]])
            kv = F.linear(context, weight[sizes[0] :], None if bias is None else bias[sizes[0] :])
            k, v = kv.split(sizes[1:], dim=-1)
        q, k, v = (rearrange(part, "b l (h d) -> b h l d", d=self.head_dim) for part in (q, k, v))
        if self.rotary is not None:
            q, k = self.rotary(q, offset), self.rotary(k, offset)
        return q, k, v

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        return self.attention(q, k, v, mask).out

    def _output(self, out: Tensor) -> Tensor:
        return F.dropout(self.out_proj(rearrange(out, "b h l d -> b l (h d)")), self.dropout, self.training)


def check_heads(model_dim: int, num_heads: int, num_kv_heads: int) -> None:
    """Refuse sizes that do not divide: a silent floor would drop channels.

    Raises:
        ConfigError: with both numbers.
    """
    for name, size in (("model_dim", model_dim), ("num_heads", num_heads), ("num_kv_heads", num_kv_heads)):
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ConfigError(f"{name}: must be an integer of at least 1, got {size!r}")
    if model_dim % num_heads:
        raise ConfigError(f"model_dim {model_dim} is not divisible by num_heads {num_heads}")
    if num_heads % num_kv_heads:
        raise ConfigError(f"num_heads {num_heads} is not divisible by num_kv_heads {num_kv_heads}")
