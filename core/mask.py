"""The one mask type of this project: bool, True = may attend."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from core.errors import MaskError


def _check_bool(name: str, mask: object) -> None:
    if not isinstance(mask, Tensor):
        raise MaskError(f"mask {name}: must be a bool tensor, got {type(mask).__name__}")
    if mask.dtype != torch.bool:
        raise MaskError(
            f"mask {name}: must be bool with True = may attend, got {mask.dtype}; "
            "write `mask.bool()` for a 0/1 mask, `mask == 0` for an additive one (0 and -inf)"
        )


@dataclass(frozen=True, eq=False)
class Mask:
    """Who may attend to what. The parts are combined by AND, and so are two masks: `a & b`.

    Args:
        causal: query i, standing at position S-L+i (bottom-right aligned), sees keys 0..S-L+i.
        keys: bool (B, S), False hides a key from every query of its batch row (padding).
        pairs: bool (L, S), or 4-D (B, H, L, S) in which any axis may be 1.

    Raises:
        MaskError: a mask that is not bool, or of another number of axes.
    """

    causal: bool = False
    keys: Tensor | None = None
    pairs: Tensor | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.causal, bool):
            raise MaskError(f"mask causal: must be True or False, got {type(self.causal).__name__}")
        if self.keys is not None:
            _check_bool("keys", self.keys)
            if self.keys.dim() != 2:
                raise MaskError(f"mask keys: must be (B, S), got shape {tuple(self.keys.shape)}")
        if self.pairs is not None:
            _check_bool("pairs", self.pairs)
            if self.pairs.dim() not in (2, 4):
                hint = "; for (B, L, S) write `mask[:, None]`" if self.pairs.dim() == 3 else ""
                raise MaskError(f"mask pairs: must be (L, S) or (B, H, L, S), got shape {tuple(self.pairs.shape)}{hint}")

    def __and__(self, other: Mask) -> Mask:
        keys, pairs = _both("keys", self.keys, other.keys), _both("pairs", self.pairs, other.pairs)
        return Mask(self.causal or other.causal, keys, pairs)

    def of_batch(self, part: slice) -> Mask:
        """The mask of some rows of the batch."""
        keys = None if self.keys is None else self.keys[part]
        pairs = self.pairs if self.pairs is None or self.pairs.dim() == 2 or self.pairs.shape[0] == 1 else self.pairs[part]
        return Mask(self.causal, keys, pairs)

    def check(self, B: int, H: int, L: int, S: int) -> None:
        """Refuse a mask that does not fit (B, H, L, S). Axes of `pairs` may be 1; those of `keys` may not.

        Raises:
            MaskError: naming the axis and both sizes.
        """
        if self.keys is not None and tuple(self.keys.shape) != (B, S):
            raise MaskError(f"mask keys: must be (B, S) = ({B}, {S}), got {tuple(self.keys.shape)}")
        if self.pairs is None:
            return
        shape = tuple(self.pairs.shape)
        if len(shape) == 2:
            if shape != (L, S):
                raise MaskError(f"mask pairs: must be (L, S) = ({L}, {S}), got {shape}")
        elif any(given not in (1, full) for given, full in zip(shape, (B, H, L, S), strict=True)):
            raise MaskError(f"mask pairs: must be (B, H, L, S) = ({B}, {H}, {L}, {S}), each or 1, got {shape}")

    def visible(
        self, L: int, S: int, device: torch.device | str | None = None, rows: tuple[int, int] | None = None
    ) -> Tensor | None:
        """The combined visibility: bool, broadcastable to (B, H, L, S), True = may attend.

        Args:
            L, S: query and key length of the whole call.
            device: where the result is made; by default where the mask's tensors are, else the CPU.
            rows: (start, stop) gives only those queries, so that a kernel in chunks never holds L x S.

        Returns:
            None where nothing hides; this is known by structure, and no data is read.
        """
        start, stop = rows if rows is not None else (0, L)
        parts = []
        if self.causal and start + S - L < S - 1:
            position = torch.arange(start, stop, device=device).unsqueeze(1) + (S - L)
            parts.append(torch.arange(S, device=device) <= position)
        if self.keys is not None:
            parts.append(self.keys.to(device)[:, None, None, :])
        if self.pairs is not None:
            whole = self.pairs.shape[-2] == 1 and L != 1
            parts.append((self.pairs if whole else self.pairs[..., start:stop, :]).to(device))
        if not parts:
            return None
        visible = parts[0]
        for part in parts[1:]:
            visible = visible & part
        # Pairs may have one column for all keys; whoever counts, pads or cuts keys must find all of them.
        return visible.expand(*visible.shape[:-1], S)

    def seen_keys(self, L: int, S: int, device: torch.device | str | None = None) -> Tensor | None:
        """Keys that at least one query of their batch row may see: bool (B or 1, S); None where all are.

        Causality alone hides no key, since the last query sees them all.
        """
        if self.pairs is None:
            return None if self.keys is None else self.keys.to(device)
        visible = self.visible(L, S, device)
        assert visible is not None  # pairs are given
        seen = visible.any(dim=-2)
        return seen.unsqueeze(0) if seen.dim() == 1 else seen.any(dim=1)


def _both(name: str, a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    # Only a 4-D mask has axes that may be 1.
    sizes = zip(reversed(a.shape), reversed(b.shape), strict=False)
    if a.shape != b.shape and (max(a.dim(), b.dim()) == 2 or any(x != y and 1 not in (x, y) for x, y in sizes)):
        raise MaskError(f"mask {name}: cannot combine shape {tuple(a.shape)} with {tuple(b.shape)}")
    return a & b


def mask_from_multihead(
    key_padding_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    *,
    num_heads: int | None = None,
    causal: bool = False,
) -> Mask:
    """A Mask from the bool masks of `torch.nn.MultiheadAttention`, in which True = is ignored.

    Args:
        key_padding_mask: bool (B, S).
        attn_mask: bool (L, S) or (B * num_heads, L, S).
        num_heads: needed for the 3-D form.

    Raises:
        MaskError: a mask that is not bool, or a 3-D one whose first axis num_heads does not divide.
    """
    keys = pairs = None
    if key_padding_mask is not None:
        _check_bool("key_padding_mask", key_padding_mask)
        keys = ~key_padding_mask
    if attn_mask is not None:
        _check_bool("attn_mask", attn_mask)
        pairs = ~attn_mask
        if pairs.dim() == 3:
            if not num_heads or pairs.shape[0] % num_heads:
                raise MaskError(f"attn_mask: first axis {pairs.shape[0]} must be B * num_heads, but num_heads is {num_heads}")
            pairs = pairs.unflatten(0, (-1, num_heads))
    return Mask(causal=causal, keys=keys, pairs=pairs)
