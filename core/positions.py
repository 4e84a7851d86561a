"""How a model knows where a token stands: learned vectors, or rotated queries and keys."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from core.errors import ConfigError, ShapeError


class LearnedPositions(nn.Module):
    """One learned vector a position.

    Raises:
        ShapeError: more positions than there are vectors.
    """

    def __init__(self, num_positions: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_positions, dim))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, length: int, offset: int = 0) -> Tensor:
        """Vectors of the positions offset .. offset + length - 1, (length, dim)."""
        if offset + length > self.weight.shape[0]:
            raise ShapeError(f"learned positions: made for {self.weight.shape[0]}, got {offset + length}")
        return self.weight[offset : offset + length]


class Rotary(nn.Module):
    """Rotates pairs of channels by an angle that grows with the position, so that scores depend on i-j.

    Paper   Su et al. 2021, arXiv:2104.09864, with the two halves of the channels paired.

    Raises:
        ConfigError: an odd head dim.
    """

    def __init__(self, head_dim: int, base: float = 10_000.0) -> None:
        super().__init__()
        if head_dim % 2:
            raise ConfigError(f"rotary positions: head dim must be even, got {head_dim}")
        self.head_dim = head_dim
        self.base = base

    def forward(self, x: Tensor, offset: int = 0) -> Tensor:
        """Rotate (B, heads, L, D), whose first token stands at position `offset`."""
        half = self.head_dim // 2
        frequency = self.base ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
        position = torch.arange(offset, offset + x.shape[-2], device=x.device, dtype=torch.float32)
        angle = position[:, None] * frequency
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        first, second = x[..., :half], x[..., half:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
