"""Rules on state: repeated calls, copies of a module, decoding."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import torch
from torch import Tensor

from core.attention import Attention
from core.contract.subject import Subject, claim, demand, near
from core.mask import Mask


def evaluation_is_deterministic(subject: Subject) -> None:
    """In evaluation a call gives the same bits each time, whatever was called before, and draws no random number."""
    module = subject.module()
    B, H = 3, 4
    for name, mask in subject.masks(B, H, 7, 7):
        q, k, v = subject.qkv(B, H)
        for need_weights in (False, True):
            torch.manual_seed(1)
            before = torch.get_rng_state()
            first = module(q, k, v, mask, need_weights)
            demand(torch.equal(before, torch.get_rng_state()), f"{name}: evaluation draws from the global generator")
            torch.manual_seed(2)
            again = module(q, k, v, mask, need_weights)
            _same_bits(first, again, f"{name}: the second call with the same inputs")
            for L in (1, 3, 12):
                others = subject.masks(2, H, L, L)
                for _, other in (others[0], others[-1]):
                    module(*subject.qkv(2, H, L=L), other, need_weights)
            _same_bits(first, module(q, k, v, mask, need_weights), f"{name}: a call after calls with other inputs")
            _same_bits(first, subject.module()(q, k, v, mask, need_weights), f"{name}: the first call of a fresh module")


def _same_bits(first: tuple[Tensor, Tensor | None], second: tuple[Tensor, Tensor | None], what: str) -> None:
    for which, a, b in (("out", first[0], second[0]), ("weights", first[1], second[1])):
        if a is not None and b is not None:
            near(b, a, f"{what}: {which}", 0.0)


def module_copies(subject: Subject) -> None:
    """deepcopy, pickle and a state_dict round trip give the same module, before and after a forward and backward."""
    module = subject.module()
    q, k, v = subject.qkv()
    mask = Mask(causal=subject.spec.causal)
    for when in ("before a forward", "after a forward"):
        copies: dict[str, Attention] = {"deepcopy": copy.deepcopy(module)}
        if "<locals>" not in subject.variant.__qualname__:  # pickle finds classes by name
            copies["pickle"] = pickle.loads(pickle.dumps(module))
        fresh = subject.module(trained=False)
        fresh.load_state_dict(module.state_dict())
        copies["state_dict"] = fresh
        want = module(q, k, v, mask, True)
        for how, made in copies.items():
            _same_bits(want, made(q, k, v, mask, True), f"{how} {when}")
            _same_bits(module(q, k, v, mask), made(q, k, v, mask), f"{how} {when}")
        if want.out.requires_grad:
            want.out.sum().backward()
        module(*(x.clone().requires_grad_() for x in (q, k, v)), mask, True).out.sum().backward()


CHUNKS = ([1] * 7, [3, 1, 3], [7], [65, 1, 4], [1, 63, 2, 64])


def decode_equals_forward(subject: Subject) -> None:
    """decode: steps of any size, with left padding, equal the full causal forward; an old state stays valid."""
    spec = subject.spec
    claim(spec.decode and spec.causal, "decode")
    module = subject.module()
    for chunks in CHUNKS:
        L = sum(chunks)
        for padded in (False, True) if spec.padding else (False,):
            q, k, v = subject.qkv(Hkv=2, L=L)
            keys = torch.arange(L) >= torch.tensor([0, 2, 5])[:, None] if padded else None
            name = f"steps of {chunks}{' with left padding' if padded else ''}"
            want = module(q, k, v, Mask(True, keys)).out
            state: Any = None
            start = 0
            for size in chunks:
                now = slice(start, start + size)
                part = None if keys is None else keys[:, now]
                new = q[:, :, now], k[:, :, now], v[:, :, now]
                out, following = module.step(new[0], new[1], new[2], state, part)
                near(out, want[:, :, now], f"{name}: tokens {start} to {start + size - 1} against the full forward")
                _state_size(following, name)
                if L < 10:  # other continuations from the same state, as a beam search would try, must not be felt
                    other = [5 * x + 1 for x in new]
                    module.step(other[0], other[1], other[2], state, part)
                    module.step(new[0], new[1], new[2], following, part)
                    again = module.step(new[0], new[1], new[2], state, part)[0]
                    near(again, out, f"{name}: a step repeated from an old state", 0.0)
                state, start = following, start + size


def _state_size(state: Any, name: str) -> None:
    size = getattr(state, "nbytes", None)
    demand(type(size) is int, f"{name}: state.nbytes must be an int, got {type(size).__name__}")
    assert size is not None
    held = [part for part in state if isinstance(part, Tensor)] if isinstance(state, tuple) else []
    # A window of one key holds nothing between steps, and says so.
    least = sum(part.nbytes for part in held) if held else 1
    demand(size >= least, f"{name}: state.nbytes is {size}, but the state holds {least} bytes")
