"""Rules on state: repeated calls, copies of a module, decoding."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from core.attention import Attention
from core.contract.subject import Subject, claim, demand, gradients, leaves, near
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
        fresh = subject.module(trained=False, shift=1)  # drawn otherwise, so that what is not saved is missing
        fresh.load_state_dict(module.state_dict())
        copies["state_dict"] = fresh
        want = module(q, k, v, mask, True)
        for how, made in copies.items():
            _same_bits(want, made(q, k, v, mask, True), f"{how} {when}")
            _same_bits(module(q, k, v, mask), made(q, k, v, mask), f"{how} {when}")
        if want.out.requires_grad:
            want.out.sum().backward()
        module.train()(*(x.clone().requires_grad_() for x in (q, k, v)), mask, True).out.sum().backward()
        module.eval()
    narrow, fresh = subject.module(dtype=torch.float32), subject.module(dtype=torch.float32).double()
    narrow(*(x.float() for x in (q, k, v)), mask)
    near(narrow.double()(q, k, v, mask).out, fresh(q, k, v, mask).out, "out after a call in float32 and a move to float64")


def same_in_every_mode(subject: Subject) -> None:
    """Training, no_grad, inference mode, autocast and what asks for gradients change neither the result nor the gradients."""
    subject.numbers_do_not_matter()
    masks = subject.masks(3, 4, 7, 7)
    plain = [x.detach() for x in subject.qkv()]
    module, first = subject.module(), subject.module()
    for name, mask in masks:
        want = subject.module()(*leaves(*plain), mask).out
        near(module(*plain, mask).out, want, f"{name}: out where no input asks for a gradient")
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                near(module(*plain, mask).out.clone(), want, f"{name}: out under {mode.__name__}")
        before = torch.get_rng_state()
        near(module.train()(*plain, mask).out, want, f"{name}: out in training (dropout is the layer's business)")
        demand(torch.equal(before, torch.get_rng_state()), f"{name}: draws random numbers in training")
        module.eval()
    for name, mask in (masks[0], masks[-1]):
        with torch.inference_mode():
            first(*plain, mask)
        q, k, v = leaves(*plain)
        fresh = subject.module()
        want = fresh(q, k, v, mask).out
        direction = subject.draw(*want.shape)
        inputs = {"q": q, "k": k, "v": v, **dict(fresh.named_parameters())}
        grads = dict(zip(inputs, gradients(want, list(inputs.values()), direction), strict=True))
        # After calls in the other modes: what one of them left behind without a graph would be missing here.
        for used in (module, first):
            own = dict(used.named_parameters())
            for which, grad in zip(own, gradients(used(*plain, mask).out, list(own.values()), direction), strict=True):
                near(grad, grads[which], f"{name}: gradient of {which} where no input asks for one")
        for which in "qkv":
            parts = {each: x.clone().requires_grad_(each == which) for each, x in zip("qkv", plain, strict=True)}
            (grad,) = gradients(module(*parts.values(), mask).out, [parts[which]], direction)
            near(grad, grads[which], f"{name}: gradient of {which} where it alone asks for one")
            (large,) = gradients(want, [inputs[which]], 1e3 * direction)
            near(large, 1e3 * grads[which], f"{name}: gradient of {which} for a loss 1e3 as large", 1e-6)
    with torch.no_grad():
        for used in (module, fresh := subject.module()):
            for parameter in used.parameters():
                parameter.mul_(1.5 if parameter.is_floating_point() else 1)
        near(module(*plain).out, fresh(*plain).out, "out after the parameters have changed, as by a training step")
    narrow = subject.module(dtype=torch.float32)
    inputs32 = subject.qkv(dtype=torch.float32)
    want = narrow(*inputs32, masks[-1][1]).out
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = narrow(*inputs32, masks[-1][1]).out
    demand(out.dtype == torch.float32, f"{masks[-1][0]}: out is {out.dtype} for float32 inputs under autocast")
    near(out, want, f"{masks[-1][0]}: out under autocast", 1e-4)


CHUNKS = ([1] * 7, [3, 1, 3], [7], [65, 1, 4], [1, 63, 2, 64], [200, 1, 99])


def decode_equals_forward(subject: Subject) -> None:
    """decode: steps of any size, with any padding, equal the full causal forward, in every dtype; an old state stays valid."""
    spec = subject.spec
    claim(spec.decode and spec.causal, "decode")
    module = subject.module()
    for chunks in CHUNKS:
        L = sum(chunks)
        B = 3 if L < 200 else 1
        paddings = ("", "left", "mixed", "prompt") if L < 10 else ("", "left") if L < 200 else ("",)
        for padding in paddings if spec.padding else ("",):
            q, k, v = subject.qkv(B, Hkv=2, L=L)
            keys = _padding(subject, padding, B, L, chunks[0])
            name = f"steps of {chunks}{f' with {padding} padding' if padding else ''}"
            if keys is not None:
                hidden = ~keys[:, None, :, None]
                k, v = k.masked_fill(hidden, math.nan), v.masked_fill(hidden, math.inf)
            want = module(q, k, v, Mask(True, keys)).out
            state: Any = None
            start = 0
            for size in chunks:
                now = slice(start, start + size)
                # Padding stands in the prompt, and later tokens come without a word of it.
                part = None if keys is None or (padding == "prompt" and start > 0) else keys[:, now]
                new = q[:, :, now].clone(), k[:, :, now].clone(), v[:, :, now].clone()
                given = [x.clone() for x in new]
                out, following = module.step(new[0], new[1], new[2], state, part)
                near(out, want[:, :, now], f"{name}: tokens {start} to {start + size - 1} against the full forward")
                same = all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(new, given, strict=True))
                demand(same, f"{name}: step modifies its inputs")
                _state_size(following, name)
                if L < 10 and padding in ("", "left"):
                    # Other continuations from the same state, as a beam search would try, must not be felt.
                    again = module.step(new[0], new[1], new[2], state, part)[0]
                    near(again, out, f"{name}: a step repeated from an old state", 0.0)
                    other = [5 * x + 1 for x in new]
                    module.step(other[0], other[1], other[2], state, part)
                state, start = following, start + size
    _other_states(subject, module)
    if type(module).step is not Attention.step:  # the base answers by a forward, which other rules look at
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            _narrow_steps(subject, dtype)


def _padding(subject: Subject, padding: str, B: int, L: int, prompt: int) -> Tensor | None:
    if padding == "left":
        return torch.arange(L) >= torch.tensor([0, 2, 5])[:B, None]
    if padding == "mixed":
        return subject.draw_bool(B, L)
    if padding == "prompt":
        return subject.draw_bool(B, L) | (torch.arange(L) >= prompt)
    return None


def _other_states(subject: Subject, module: Attention) -> None:
    """New tokens of another batch than the state are an error of any kind, and never an answer."""
    q, k, v = subject.qkv(B=1, L=2)
    state = module.step(q, k, v, None)[1]
    q, k, v = subject.qkv(B=3, L=1)
    try:
        module.step(q, k, v, state)
    except Exception:
        return
    if _state_bytes(state):  # one that holds nothing fits everything
        demand(False, "step takes 3 sequences with the state of 1")


def _narrow_steps(subject: Subject, dtype: torch.dtype) -> None:
    """Steps in half precision give its dtype and are as close as the forward: sums of a state stay wide."""
    L = 400
    module = subject.module(subject.fewest_heads, dtype=dtype)
    q, k, v = subject.qkv(B=1, H=module.num_heads, L=L)
    q, v = q * subject.temperature * 0.2, 1 + v / 10
    v[:, :, L // 2 :] *= 3  # a sum that has stopped growing does not follow
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    want = copy.deepcopy(module).double()(q.double(), k.double(), v.double(), Mask(causal=True)).out
    bound = 6 * max(torch.finfo(dtype).eps, 1e-5) * float(v.abs().max())
    for autocast in (False, True) if dtype == torch.float32 else (False,):
        state, worst = None, 0.0
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            for i in range(L):
                out, state = module.step(q[:, :, i : i + 1], k[:, :, i : i + 1], v[:, :, i : i + 1], state)
                demand(out.dtype == dtype, f"a step of {dtype} gives {out.dtype}")
                error = (out.double() - want[:, :, i : i + 1]).abs().max().item()
                worst = max(worst, error) if error == error else math.inf
        how = " under autocast" if autocast else ""
        demand(worst <= bound, f"{L} steps of one token in {dtype}{how} are {worst:.2g} away from float64")


def _state_bytes(state: Any) -> int:
    """Bytes of the tensors in a state, of whatever kind it is."""
    parts = list(vars(state).values()) if hasattr(state, "__dict__") else [state]
    storages = {id(one): one.nbytes for one in tree_leaves(parts) if isinstance(one, Tensor)}
    return sum(storages.values())


def _state_size(state: Any, name: str) -> None:
    size = getattr(state, "nbytes", None)
    demand(type(size) is int, f"{name}: state.nbytes must be an int, got {type(size).__name__}")
    assert size is not None
    least = _state_bytes(state)  # a window of one key holds nothing between steps, and says so
    demand(size >= least, f"{name}: state.nbytes is {size}, but the state holds {least} bytes")
