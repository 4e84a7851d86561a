"""What a mechanism really does and costs, measured: reach, density, elements written, peak bytes, decoding state, seconds."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from core.attention import Attention
from core.contract.subject import Subject, gradients, leaves, visibility
from core.mask import Mask

LENGTH = 300  # of probes of reach and density: longer than the windows that the house draws
SHORT = 256  # costs grow from SHORT to 4 SHORT
HEAD_DIM = 16


@dataclass(frozen=True)
class Measured:
    """One line of the report card.

    Args:
        what: the quantity.
        found: the measured value, with its unit.
        claimed: what the Spec or the config says of it; "" where it says nothing.
        fault: how the two contradict each other; "" where they do not.
    """

    what: str
    found: str
    claimed: str = ""
    fault: str = ""


class Cost(TorchDispatchMode):
    """Counts what runs within it.

    Attributes:
        written: elements written by operations; a fused attention kernel counts the L x S scores that it writes to itself.
        peak: most bytes of tensors alive at once, of those made within. Scratch space inside an operation is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.written = 0
        self.peak = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {one.untyped_storage()._cdata for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        result = func(*args, **(kwargs or {}))
        returns = result if isinstance(result, (tuple, list)) else (result,)
        views = [place.alias_info is not None and not place.alias_info.is_write for place in func._schema.returns]
        for number, one in enumerate(returns):
            if not isinstance(one, Tensor):
                continue
            if not (views[number] if number < len(views) else False):
                self.written += one.numel()
            storage = one.untyped_storage()
            if storage._cdata not in given:
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        if "scaled_dot_product" in func.name():
            q, k = [one for one in args if isinstance(one, Tensor) and one.dim() == 4][("backward" in func.name()) :][:2]
            self.written += q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
        self._alive = {key: held for key, held in self._alive.items() if not held[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._alive.values()))
        return result


def reach(
    module: Attention, subject: Subject, causal: bool, row: int, scales: Sequence[float], L: int = LENGTH
) -> dict[str, Tensor]:
    """For k and v, which keys the output of a row depends on, by gradient: bool (B, H, S) each.

    For inputs whose q and k are normal numbers times each scale, together.
    """
    found: dict[str, Tensor] = {}
    for scale in scales:
        q, k, v = leaves(*(x * size for x, size in zip(subject.qkv(B=2, L=L), (scale, scale, 1.0), strict=True)))
        out = module(q, k, v, Mask(causal)).out[:, :, row]
        for which, grad in zip("qkv", gradients(out, (q, k, v), subject.draw(*out.shape)), strict=True):
            touched = (grad != 0).any(-1)
            found[which] = touched | found[which] if which in found else touched
    return found


def density(module: Attention, subject: Subject, causal: bool, L: int = LENGTH) -> float | None:
    """Share of the visible keys that get a weight above 0; None where there are no weights."""
    q, k, v = subject.qkv(B=1, L=L)
    with torch.no_grad():
        weights = module(q * subject.temperature, k, v, Mask(causal), True).weights
    if weights is None:
        return None
    visible = visibility(Mask(causal), *weights.shape)
    return float((weights[visible] > 0).double().mean())


def growth(subject: Subject, start: int = SHORT) -> dict[str, tuple[float, float]]:
    """Elements written, peak bytes and seconds of forward and backward, at lengths `start` and 4 `start`."""
    causal = subject.spec.causal
    found: dict[str, list[float]] = {"written": [], "peak": [], "seconds": []}
    H = subject.fewest_heads
    module = subject.module(H, HEAD_DIM, dtype=torch.float32)
    for round_, L in enumerate((start, 4 * start)):
        inputs = leaves(*subject.qkv(B=1, H=H, L=L, D=HEAD_DIM, Dv=HEAD_DIM, dtype=torch.float32))

        def step() -> None:
            module(*inputs, Mask(causal)).out.sum().backward()  # noqa: B023

        if round_ == 0:
            step()  # from now on gradients are there, and nothing is loaded for the first time
        before = time.perf_counter()
        step()
        found["seconds"].append(time.perf_counter() - before)
        with Cost() as cost:
            step()
        found["written"].append(cost.written)
        found["peak"].append(cost.peak)
    return {what: (short, long) for what, (short, long) in found.items()}


def exponent(short: float, long: float) -> float:
    """e in long = 4^e short."""
    return math.log(max(long, 1.0) / max(short, 1.0), 4)


def state_bytes(subject: Subject, tokens: int) -> int | None:
    """What decoding keeps after so many tokens of one sequence: 4 heads of 8, float32. None where the state does not say."""
    module = subject.module(dtype=torch.float32)
    q, k, v = subject.qkv(B=1, L=tokens, dtype=torch.float32)
    with torch.no_grad():
        size = getattr(module.step(q, k, v, None)[1], "nbytes", None)
    return size if type(size) is int else None
