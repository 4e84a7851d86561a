"""The base class of every mechanism: it checks a call against what the mechanism claims, then lets it compute."""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn

from core.cache import KeyValueState
from core.errors import MaskError, ShapeError
from core.functional import no_autocast
from core.mask import Mask


class AttentionOutput(NamedTuple):
    """out (B, H, L, Dv) in the dtype of q; weights (B, H, L, S), None unless asked for."""

    out: Tensor
    weights: Tensor | None


class AttentionConfig(BaseModel):
    """Base of a variant's settings: no conversion between types, no unknown key, no NaN, no change after it is made."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)


@dataclass(frozen=True)
class Spec:
    """What a variant claims. What is not claimed is refused; what is claimed is checked by the contract suite.

    Args:
        causal, padding, pairs: honours `mask.causal`, `mask.keys`, `mask.pairs`.
        cross: serves L != S without causality.
        decode: serves causality with L != S, and `step`.
        positional: the distance i-j or the place matters, so that removing a key elsewhere is no equality.
        convex: rows with a visible key sum to 1, out == weights @ v, a query that sees one key returns its value.
        keys_per_query: the config field that holds the exact number of weights above 0 in a row (or all visible keys).
        equals_standard_when: the settings under which out, weights and gradients equal `standard`; {} as it is; None never.
        time, memory: exponents in the length, of elements written and of peak bytes; None: unknown.
    """

    causal: bool = False
    padding: bool = False
    pairs: bool = False
    cross: bool = False
    decode: bool = False
    positional: bool = False
    convex: bool = False
    keys_per_query: str | None = None
    equals_standard_when: dict[str, Any] | None = None
    time: float | None = None
    memory: float | None = None


class Attention(nn.Module):
    """A mechanism on projected heads. A plugin sets `spec` and `Config`, and defines `attend`.

    Args:
        num_heads: query heads H.
        head_dim: D of queries and keys.
        config: an instance of the class's own `Config`.
    """

    name: ClassVar[str] = ""
    spec: ClassVar[Spec] = Spec()
    Config: ClassVar[type[AttentionConfig]] = AttentionConfig

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # torch.compile keeps 8 compilations of one code object and then refuses (or, without fullgraph, runs eagerly without
        # a word): with a copy of its own, no mechanism uses up what another needs.
        if "forward" not in vars(cls):
            whole = cls.forward
            cls.forward = types.FunctionType(  # type: ignore[method-assign]
                whole.__code__.replace(), whole.__globals__, whole.__name__, whole.__defaults__, whole.__closure__
            )

    def __init__(self, num_heads: int, head_dim: int, config: Any) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.config = config
        self.backend_used: str | None = None  # the kernel of the last forward, for logs

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, need_weights: bool) -> AttentionOutput:
        """The mathematics. Called with checked inputs that have at least one query and one key.

        Args:
            q, k, v: (B, H, L, D), (B, H, S, D), (B, H, S, Dv); k and v are expanded to H heads, and finite where hidden.
            mask: holds only what `spec` claims.
            need_weights: weights (B, H, L, S) are wanted; they carry gradient.

        Returns:
            out in the dtype of q, exactly 0 in rows without a visible key.
        """
        raise NotImplementedError(f"{type(self).__name__} must define attend")

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None, need_weights: bool = False) -> AttentionOutput:
        """Check, expand, attend.

        Args:
            q: (B, H, L, D).
            k: (B, Hkv, S, D), v: (B, Hkv, S, Dv); Hkv divides H, query head h uses key/value head h // (H / Hkv).
            mask: who may attend to what; None: everyone to everything.

        Raises:
            ShapeError: shapes, dtypes or devices that do not fit.
            MaskError: a mask that does not fit, or that this variant does not claim.
        """
        mask = Mask() if mask is None else mask
        self._check(q, k, v, mask)
        H, L, S = q.shape[1], q.shape[2], k.shape[2]
        seen = mask.seen_keys(L, S, q.device)
        if seen is not None:  # weight 0 times NaN is NaN, so what nobody may see must not hold one
            hidden = ~seen[:, None, :, None]
            k, v = k.masked_fill(hidden, 0.0), v.masked_fill(hidden, 0.0)
        k, v = expand_heads(k, H), expand_heads(v, H)
        if S == 0 or L == 0 or q.shape[0] == 0:
            nothing = (q[..., :0].sum(-1, keepdim=True) + k[..., :0].sum() + v[..., :0].sum()).to(q.dtype)
            return AttentionOutput(
                nothing.expand(-1, -1, -1, v.shape[-1]), nothing.expand(-1, -1, -1, S) if need_weights else None
            )
        with no_autocast(q.device.type):
            return AttentionOutput(*self.attend(q, k, v, mask, need_weights))

    def step(self, q: Tensor, k: Tensor, v: Tensor, state: Any, keys: Tensor | None = None) -> tuple[Tensor, Any]:
        """Causal decoding of any number of new tokens; equals the full causal forward.

        Args:
            q, k, v: the new tokens only, (B, H, n, D), (B, Hkv, n, D), (B, Hkv, n, Dv).
            state: what the last step returned; None to begin.
            keys: bool (B, n), False for padding among the new tokens.

        Returns:
            out (B, H, n, Dv) and the new state, whose `nbytes` says what it holds. The old state stays valid.

        Raises:
            MaskError: this variant does not claim decoding.
            ShapeError: new tokens that do not fit each other or the state.
        """
        if not self.spec.decode:
            raise MaskError(f"{self.name}: does not decode step by step (its Spec does not claim it)")
        self._check_step(q, k, v, keys)
        state = KeyValueState(k, v, keys) if state is None else state.extend(k, v, keys)
        return self(q, state.k, state.v, Mask(causal=True, keys=state.keys)).out, state

    def _check_step(self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor | None) -> None:
        """New tokens fit each other: as many queries as keys."""
        self._check(q, k, v, Mask(causal=True, keys=keys))
        if q.shape[2] != k.shape[2]:
            raise ShapeError(f"{self.name}: step takes as many new queries as keys, got {q.shape[2]} and {k.shape[2]}")

    def _check(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> None:
        if not isinstance(mask, Mask):
            hint = "write Mask(pairs=...) or Mask(keys=...)"
            raise MaskError(f"{self.name}: mask must be a Mask, got {type(mask).__name__}; {hint}")
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            if tensor.dim() != 4:
                raise ShapeError(f"{self.name}: {name} must be (B, heads, length, dim), got shape {tuple(tensor.shape)}")
            if not tensor.is_floating_point():
                raise ShapeError(f"{self.name}: {name} must be floating point, got {tensor.dtype}")
        for name, tensor in (("k", k), ("v", v)):
            if tensor.dtype != q.dtype:
                raise ShapeError(f"{self.name}: {name} must have the dtype of q, {q.dtype}, got {tensor.dtype}")
            if tensor.device != q.device:
                raise ShapeError(f"{self.name}: {name} must be on the device of q, {q.device}, got {tensor.device}")
        (B, H, L, D), (_, Hkv, S, _) = q.shape, k.shape
        for what, given, expected in (
            ("heads of q", H, self.num_heads),
            ("head dim of q", D, self.head_dim),
            ("head dim of k", k.shape[3], D),
            ("batch of k", k.shape[0], B),
            ("batch of v", v.shape[0], B),
            ("heads of v", v.shape[1], Hkv),
            ("length S of v", v.shape[2], S),
        ):
            if given != expected:
                raise ShapeError(f"{self.name}: {what} must be {expected}, got {given}")
        if Hkv == 0 or H % Hkv:
            raise ShapeError(f"{self.name}: key/value heads must divide the {H} query heads, got {Hkv}")
        mask.check(B, H, L, S)
        spec = self.spec
        for given, claimed, what in (
            (mask.causal, spec.causal, "a causal mask"),
            (mask.keys is not None, spec.padding, "a padding mask (keys)"),
            (mask.pairs is not None, spec.pairs, "a pair mask (pairs)"),
            (L != S and not mask.causal, spec.cross, "cross-attention"),
            (L != S and mask.causal, spec.decode, "causal attention with L != S"),
        ):
            # Sizes go into a message only once it is needed: a compiler that sees them in a text compiles every length anew.
            if given and not claimed:
                raise MaskError(f"{self.name}: cannot honour {what} (L {L}, S {S}): its Spec does not claim it")


def expand_heads(x: Tensor, num_heads: int) -> Tensor:
    """(B, Hkv, S, D) -> (B, H, S, D), each key/value head repeated for the H / Hkv query heads that use it."""
    repeat = num_heads // x.shape[1]
    return x if repeat == 1 else x.repeat_interleave(repeat, dim=1)
