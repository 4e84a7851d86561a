"""What the benchmark can measure: mechanisms on both of their paths, torch's fused attention, and installed peers.

Each is causal, from projected heads (B, H, L, D) to (B, H, L, D). `needs` says how many floating-point operations of matrix
products the mechanism cannot do without, for one head of one sequence, forward and backward together; None: not known.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core import Attention, ConfigError, Mask, UnknownNameError, build, get, names
from core.functional import window_visible
from experiments.errors import InputError
from experiments.strict_yaml import scalar

Call = Callable[[Tensor, Tensor, Tensor], Tensor]
SDPA = "sdpa causal"
PEERS = ("local-attention", "linear-attention-transformer", "x-transformers")
DEFAULT = (
    "standard", "temperature:temperature=0.5", "temperature:learn=per_head", "topk:keep=32", "top_p", "entmax",
    "local_global:window=128", "linear", "additive", "memory", "uniform",
)  # fmt: skip


@dataclass(frozen=True)
class Contender:
    """One thing that is measured.

    Args:
        name: in tables.
        make: H, D, L, device and dtype -> the call and the parameters whose gradients it makes.
        config: its settings, for the record.
        against: names of others that it is compared with, beside SDPA.
        needs: L and D -> operations; see the head of this file.
    """

    name: str
    make: Callable[[int, int, int, torch.device, torch.dtype], tuple[Call, list[nn.Parameter]]]
    config: dict[str, Any]
    against: tuple[str, ...] = ()
    needs: Callable[[int, int], float] | None = None


def chosen(wanted: Sequence[str], plain: bool, peers: bool) -> list[Contender]:
    """SDPA first, then each wanted mechanism with what it is compared with.

    Args:
        wanted: NAME or NAME:setting=value,setting=value; none: DEFAULT, as far as it can be built here.
        plain: beside each its plain path.
        peers: the installed packages.

    Raises:
        InputError: a name or setting that is unknown, or a peer that is not installed.
    """
    found: dict[str, Contender] = {SDPA: Contender(SDPA, _sdpa, {}, needs=lambda L, D: 12 * D * _pairs(L))}
    made = _peers() if peers else {}
    for given in wanted or [one for one in DEFAULT if one.partition(":")[0] in names()]:
        name, config = _parse(given)
        against = []
        label = " ".join([name, *(f"{key}={value}" for key, value in config.items())])
        settings: Any = get(name).Config(**config)
        if name == "local_global":
            dense = Contender(
                f"sdpa dense ({label})", _masked(settings), {"window": settings.window}, needs=_needs(name, settings)
            )
            found[dense.name] = dense
            against.append(dense.name)
        for peer in made.get(name, lambda settings: [])(settings):
            found[peer.name] = peer
            against.append(peer.name)
        if plain:
            slow = Contender(f"{label} (plain)", _variant(name, config, need_weights=True), {"variant": name, **config})
            found[slow.name] = slow
            against.append(slow.name)
        found[label] = Contender(
            label, _variant(name, config), {"variant": name, **config}, tuple(against), _needs(name, settings)
        )
    return list(found.values())


def _parse(given: str) -> tuple[str, dict[str, Any]]:
    name, _, rest = given.partition(":")
    config: dict[str, Any] = {}
    for part in rest.split(",") if rest else []:
        key, equals, value = part.partition("=")
        if not equals or not key:
            raise InputError(f"--variant {given}: must be NAME or NAME:setting=value,setting=value, got {part!r}")
        config[key.strip()] = scalar(value.strip())
    try:
        build(name, num_heads=1, head_dim=8, **config)
    except (UnknownNameError, ConfigError, ImportError) as error:
        raise InputError(f"--variant {given}: {error}") from error
    if not get(name).spec.causal:
        raise InputError(f"--variant {given}: has no causal form, and the benchmark is causal")
    return name, config


def _variant(name: str, config: dict[str, Any], need_weights: bool = False) -> Any:
    def make(H: int, D: int, L: int, device: torch.device, dtype: torch.dtype) -> tuple[Call, list[nn.Parameter]]:
        torch.manual_seed(0)
        module: Attention = build(name, num_heads=H, head_dim=D, **config).to(device=device, dtype=dtype)
        return lambda q, k, v: module(q, k, v, Mask(causal=True), need_weights).out, list(module.parameters())

    return make


def _sdpa(H: int, D: int, L: int, device: torch.device, dtype: torch.dtype) -> tuple[Call, list[nn.Parameter]]:
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), []


def _masked(settings: Any) -> Any:
    """SDPA given the window as L x S pairs, which are made outside of what is measured."""

    def make(H: int, D: int, L: int, device: torch.device, dtype: torch.dtype) -> tuple[Call, list[nn.Parameter]]:
        seen = window_visible(L, L, settings.window, True, device, settings.num_global)
        seen &= torch.ones(L, L, dtype=torch.bool, device=device).tril_()
        scale = 1.0 / (settings.temperature * D**0.5)
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale), []

    return make


def _peers() -> dict[str, Callable[[Any], list[Contender]]]:
    """For a variant, what installed packages have of its kind."""
    for package in PEERS:
        if importlib.util.find_spec(package.replace("-", "_")) is None:
            raise InputError(f"--peers: {package} is not installed; pip install 'attention-experiments[peers]'")

    def local(settings: Any) -> list[Contender]:
        def make(H: int, D: int, L: int, device: torch.device, dtype: torch.dtype) -> tuple[Call, list[nn.Parameter]]:
            from local_attention import LocalAttention

            window = min(settings.window, L)
            module = LocalAttention(window_size=window, causal=True, dim=D, autopad=True, use_rotary_pos_emb=False).to(device)
            return module, []

        return [Contender(f"local-attention window={settings.window}", make, {"package": "local-attention"})]

    def linear(settings: Any) -> list[Contender]:
        def make(H: int, D: int, L: int, device: torch.device, dtype: torch.dtype) -> tuple[Call, list[nn.Parameter]]:
            from linear_attention_transformer.linear_attention_transformer import causal_linear_attn

            return lambda q, k, v: causal_linear_attn(q, k, v, bucket_size=64), []

        name = "linear-attention-transformer bucket=64 (wrong inside a bucket)"
        return [Contender(name, make, {"package": "linear-attention-transformer"})]

    def attend(name: str, **options: Any) -> Contender:
        def make(H: int, D: int, L: int, device: torch.device, dtype: torch.dtype) -> tuple[Call, list[nn.Parameter]]:
            from x_transformers.attend import Attend

            module = Attend(causal=True, heads=H, **options).to(device)
            return lambda q, k, v: module(q, k, v)[0], []

        return Contender(f"x-transformers {name}", make, {"package": "x-transformers", **options})

    return {
        "local_global": local,
        "linear": linear,
        "topk": lambda settings: [attend(f"sparse_topk={settings.keep}", sparse_topk=settings.keep)],
        "standard": lambda settings: [attend("flash", flash=True)],
    }


def _pairs(L: int, window: int | None = None) -> float:
    """Pairs of a query and a key that causality, and a window, leave."""
    W = L if window is None else min(window, L)
    return W * (W + 1) / 2 + (L - W) * W


def _needs(name: str, settings: Any) -> Callable[[int, int], float] | None:
    """Products forward: scores and average, 2 D each a pair; backward: through both and to both of their inputs, 4 of 2 D."""
    if name in ("standard", "temperature"):
        return lambda L, D: 12 * D * _pairs(L)
    if name == "memory":
        return lambda L, D: 12 * D * (_pairs(L) + L * settings.num_slots)
    if name == "local_global" and settings.num_global == 0:
        return lambda L, D: 12 * D * _pairs(L, settings.window)
    if name == "topk":  # every pair has a score, but only kept ones go on
        return lambda L, D: 2 * D * _pairs(L) + 10 * D * _pairs(L, settings.keep)
    if name == "linear":  # each token: a sum of products, and the query's product with it; backward twice as much
        features = {"taylor": lambda D: 1 + D + D * D}.get(settings.feature_map, lambda D: D)
        return lambda L, D: 12 * features(D) * D * L
    if name == "additive":
        return lambda L, D: 3 * ((2 * settings.hidden_dim + 2 * D) * _pairs(L) + 4 * L * D * settings.hidden_dim)
    return None
