"""What a rule works with: one variant at one config and seed, inputs whose axes all differ, and a plain reference."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from core.attention import Attention, AttentionConfig, AttentionOutput
from core.mask import Mask
from core.registry import make_config

TIGHT = 1e-9  # float64 probes on values of order 1: far above rounding, far below any fault
TRAINED = 0.1  # parameters are moved by this from where they start, as training would


class ViolationError(AssertionError):
    """The variant breaks the rule; the message is the witness."""


class NotClaimedError(Exception):
    """The Spec claims nothing that this rule is about; the message is the reason."""


def claim(claimed: bool, what: str) -> None:
    """Leave the rule where the Spec does not claim `what`."""
    if not claimed:
        raise NotClaimedError(f"the Spec does not claim {what}")


def demand(condition: bool, witness: str) -> None:
    """The variant breaks the rule unless the condition holds."""
    if not condition:
        raise ViolationError(witness)


AXES = {4: "b, h, i, d", 3: "b, h, i", 2: "i, d", 1: "i"}


def largest(difference: Tensor) -> tuple[float, tuple[int, ...]]:
    """The largest entry and its index; NaN counts as infinite."""
    if difference.numel() == 0:
        return 0.0, ()
    size = difference.detach().abs().nan_to_num(nan=math.inf, posinf=math.inf)
    place = torch.unravel_index(size.argmax(), size.shape)
    return float(size.max()), tuple(int(axis) for axis in place)


def near(got: Tensor, want: Tensor, what: str, tolerance: float = TIGHT) -> None:
    """Demand that two tensors agree within `tolerance`, absolutely, and relative to `want` where that is above 1."""
    demand(got.shape == want.shape, f"{what}: shape {tuple(got.shape)} instead of {tuple(want.shape)}")
    scale = want.detach().abs().clamp(min=1.0)
    size, place = largest((got.detach() - want.detach()) / scale)
    axes = AXES.get(got.dim(), "index")
    demand(size <= tolerance, f"{what}: differs by {size:.2g} at ({axes}) = {place}")


def leaves(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Copies that ask for gradients."""
    return tuple(tensor.detach().clone().requires_grad_() for tensor in tensors)


def gradients(output: Tensor, inputs: Sequence[Tensor], direction: Tensor) -> list[Tensor]:
    """d (output . direction) / d inputs, zeros where the output does not depend on an input."""
    asked = [one for one in inputs if one.requires_grad]  # a parameter may be frozen
    if not output.requires_grad or not asked:
        return [torch.zeros_like(one) for one in inputs]
    grads = torch.autograd.grad((output * direction).sum(), asked, retain_graph=True, allow_unused=True)
    found = {id(one): grad for one, grad in zip(asked, grads, strict=True) if grad is not None}
    return [found.get(id(one), torch.zeros_like(one)) for one in inputs]


def same_gradients(got: Tensor, want: Tensor, inputs: dict[str, Tensor], direction: Tensor, where: str, against: str) -> None:
    """Demand that two outputs have the same gradients by each of the named inputs."""
    tensors = list(inputs.values())
    pairs = zip(inputs, gradients(got, tensors, direction), gradients(want, tensors, direction), strict=True)
    for name, one, other in pairs:
        near(one, other, f"{where}: gradient of {name} {against}")


def visibility(mask: Mask, B: int, H: int, L: int, S: int) -> Tensor:
    """Who may attend to what, written out: bool (B, H, L, S). Shares no code with `Mask.visible`."""
    visible = torch.ones(B, H, L, S, dtype=torch.bool)
    if mask.causal:
        for i in range(L):
            visible[:, :, i, max(S - L + i + 1, 0) :] = False
    if mask.keys is not None:
        for b in range(B):
            visible[b] &= mask.keys[b]
    if mask.pairs is not None:
        visible &= mask.pairs.expand(B, H, L, S)
    return visible


def reference(q: Tensor, k: Tensor, v: Tensor, mask: Mask, temperature: float = 1.0) -> AttentionOutput:
    """Standard attention by its definition; k and v have the heads of q."""
    B, H, L, D = q.shape
    scores = torch.einsum("bhid,bhjd->bhij", q, k) / (temperature * math.sqrt(D))
    visible = visibility(mask, B, H, L, k.shape[2])
    highest = scores.detach().masked_fill(~visible, -1e300).amax(-1, keepdim=True)
    exponentials = torch.where(visible, scores - highest, 0.0).exp() * visible
    weights = exponentials / exponentials.sum(-1, keepdim=True).clamp(min=1e-300)
    return AttentionOutput(torch.einsum("bhij,bhjd->bhid", weights, v), weights)


class Subject:
    """A variant at one config and seed. Every rule gets one of its own, so that none depends on what ran before."""

    def __init__(self, variant: type[Attention], config: AttentionConfig, seed: int, salt: str, first: bool = True) -> None:
        self.variant = variant
        self.config = config
        self.seed = seed
        self.first = first  # of the cases that a rule is run on
        self.spec = variant.spec
        self.sizes = ""
        self.measured: list[Any] = []  # what a rule measured, for the report card
        self.generator = torch.Generator().manual_seed(zlib.crc32(f"{salt} {seed}".encode()))
        self._value_dim: int | None = None

    def module(
        self, H: int = 4, D: int = 8, dtype: torch.dtype = torch.float64, config: Any = None, trained: bool = True, shift: int = 0
    ) -> Attention:
        """A fresh module in evaluation mode; the same one each time for the same arguments."""
        torch.manual_seed(self.seed + shift)
        module = self.variant(H, D, self.config if config is None else config).eval()
        if trained:
            with torch.no_grad():
                for parameter in module.parameters():
                    if parameter.is_floating_point():
                        parameter.add_(torch.randn_like(parameter), alpha=TRAINED)
        return module.to(dtype)

    def exactly(self, settings: dict[str, Any]) -> AttentionConfig:
        """This config with other values for some settings.

        Raises:
            ConfigError: they do not go together.
        """
        return make_config(self.variant, {**self.config.model_dump(), **settings})

    def numbers_do_not_matter(self) -> None:
        """Leave the rule but at the first settings, and where a setting that is no number differs from its default."""
        default, here = make_config(self.variant, {}).model_dump(), self.config.model_dump()
        choices = [name for name, value in default.items() if isinstance(value, (str, bool, type(None)))]
        if not self.first and all(here[name] == default[name] for name in choices):
            raise NotClaimedError("run at the first settings, and at other choices: numbers do not matter here")

    def with_settings(self, settings: dict[str, Any]) -> AttentionConfig:
        """This config with other values for some settings; the default with them where the two do not go together."""
        try:
            return self.exactly(settings)
        except ValueError:
            return make_config(self.variant, dict(settings))

    @property
    def temperature(self) -> float:
        """The config's temperature where it has one, else 1. Probes scale q by it where scores must stay moderate."""
        value = getattr(self.config, "temperature", 1.0)
        return min(1.0, value) if isinstance(value, float) and value > 0 else 1.0

    @property
    def fewest_heads(self) -> int:
        """1, or more where the variant refuses that: what costs most is probed on as few heads as there can be."""
        for H in (1, 2):
            try:
                self.module(H)
            except ValueError:
                continue
            return H
        return 4

    @property
    def value_dim(self) -> int:
        """Dv for D = 8: another size, unless the variant refuses that."""
        if self._value_dim is None:
            q, v = torch.ones(1, 4, 1, 8, dtype=torch.float64), torch.ones(1, 4, 1, 5, dtype=torch.float64)
            try:
                self.module()(q, q, v)
                self._value_dim = 5
            except ValueError:
                self._value_dim = 8
        return self._value_dim

    def draw(self, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        """Normal numbers."""
        return torch.randn(*shape, dtype=torch.float64, generator=self.generator).to(dtype)

    def draw_bool(self, *shape: int, share: float = 0.6) -> Tensor:
        """True with this probability."""
        return torch.rand(*shape, generator=self.generator) < share

    def qkv(
        self, B: int = 3, H: int = 4, Hkv: int | None = None, L: int = 7, S: int | None = None, D: int = 8,
        Dv: int | None = None, dtype: torch.dtype = torch.float64,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Normal q, k, v. S None: L; Hkv None: H; Dv None: another size than D where the variant allows it."""
        S, Hkv, Dv = L if S is None else S, H if Hkv is None else Hkv, self.value_dim if Dv is None else Dv
        groups = "" if Hkv == H else f" Hkv{Hkv}"
        self.sizes = f"B{B} H{H}{groups} L{L} S{S} D{D} Dv{Dv}"
        return (
            self.draw(B, H, L, D, dtype=dtype),
            self.draw(B, Hkv, S, D, dtype=dtype),
            self.draw(B, Hkv, S, Dv, dtype=dtype),
        )

    def masks(self, B: int, H: int, L: int, S: int) -> list[tuple[str, Mask]]:
        """Every kind of mask that the variant claims at these lengths, and combinations; each with its name."""
        spec = self.spec
        keys = self.draw_bool(B, S)
        flat, full = self.draw_bool(L, S), self.draw_bool(B, H, L, S)
        masks = []
        for causal in (False, True):
            if causal and not spec.causal:
                continue
            if not (spec.decode if causal else spec.cross) and L != S:
                continue
            prefix = "causal " if causal else ""
            masks.append((prefix or "no mask", Mask(causal=causal)))
            if spec.padding:
                masks.append((prefix + "keys", Mask(causal=causal, keys=keys)))
            if spec.pairs:
                masks.append((prefix + "pairs (L, S)", Mask(causal=causal, pairs=flat)))
            if spec.pairs and spec.padding:
                masks.append((prefix + "keys, pairs (B, H, L, S)", Mask(causal=causal, keys=keys, pairs=full)))
        return [(name.strip(), mask) for name, mask in masks]
