"""Rules on inputs: shapes, dtypes, memory layout, and what must be refused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor

from core.contract.subject import NotClaimedError, Subject, demand, leaves, near, same_gradients
from core.mask import Mask

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def shapes_and_dtypes(subject: Subject) -> None:
    """out is (B, H, L, Dv) in the dtype of q; weights are (B, H, L, S), only when asked for; sizes may be 0."""
    B, H, Dv = 3, 4, subject.value_dim
    lengths = [(7, 7), (1, 1)]
    lengths += [(7, 9), (9, 7), (5, 0)] if subject.spec.cross else []
    for dtype in DTYPES:
        module = subject.module(dtype=dtype)
        for L, S in lengths:
            q, k, v = subject.qkv(B, L=L, S=S, Hkv=2, dtype=dtype)
            for need_weights in (False, True):
                result = module(q, k, v, None, need_weights)
                demand(
                    isinstance(result, tuple) and len(result) == 2,
                    f"returned {type(result).__name__}, not (out, weights)",
                )
                out, weights = result
                demand(out.dtype == dtype, f"out is {out.dtype} for inputs of {dtype}")
                demand(tuple(out.shape) == (B, H, L, Dv), f"out has shape {tuple(out.shape)} instead of {(B, H, L, Dv)}")
                if not need_weights:
                    demand(weights is None, "weights are returned without being asked for")
                    continue
                demand(weights is not None, "weights are None although need_weights is True")
                demand(
                    tuple(weights.shape) == (B, H, L, S),
                    f"weights have shape {tuple(weights.shape)} instead of {(B, H, L, S)}",
                )
                demand(weights.is_floating_point(), f"weights are {weights.dtype}")
                demand(bool(S) or not out.any(), "out is not 0 although there is no key")
    for D in (7, 1):  # served, or refused as bad input
        with contextlib.suppress(ValueError):
            subject.module(D=D)(*subject.qkv(D=D))
    for B, L in ((0, 7), (3, 0)):
        q, k, v = subject.qkv(B, L=L)
        out = subject.module()(q, k, v).out
        demand(out.shape == (B, H, L, Dv), f"out has shape {tuple(out.shape)} instead of {(B, H, L, Dv)}")


def heads_are_interleaved(subject: Subject) -> None:
    """Query head h uses key/value head h // (H / Hkv): equal to expanding k and v by hand, in values and gradients."""
    subject.numbers_do_not_matter()
    for H, Hkv in ((4, 2), (6, 3), (4, 1)):
        try:
            module = subject.module(H)
        except ValueError:  # a number of heads that this mechanism refuses
            continue
        owner = torch.tensor([h // (H // Hkv) for h in range(H)])
        masks = subject.masks(3, H, 7, 7)
        cases = [(7, name, mask) for name, mask in (masks if (H, Hkv) == (4, 2) else [masks[0], masks[-1]])]
        cases += [(100, f"{name}, L 100", mask) for name, mask in subject.masks(3, H, 100, 100)[:1] if (H, Hkv) == (4, 2)]
        for L, name, mask in cases:
            # Heads beside each other in memory, as the projections of a layer leave them.
            laid = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in subject.qkv(H=H, Hkv=Hkv, L=L))
            q, k, v = (x.detach().requires_grad_() for x in laid)
            direction = subject.draw(*q.shape[:3], v.shape[-1])
            for need_weights in (False, True):
                got, weights = module(q, k, v, mask, need_weights)
                want, expected = module(q, k[:, owner], v[:, owner], mask, need_weights)
                if weights is not None and expected is not None:
                    near(weights, expected, f"{name}: weights with {Hkv} key/value heads")
                near(got, want, f"{name}: out with {Hkv} key/value heads, against head h // {H // Hkv}")
                same_gradients(got, want, {"q": q, "k": k, "v": v}, direction, name, f"with {Hkv} key/value heads")


def unclaimed_is_refused(subject: Subject) -> None:
    """What the Spec does not claim raises ValueError before anything is computed."""
    spec, keys = subject.spec, torch.ones(3, 7, dtype=torch.bool)
    pairs = torch.ones(7, 7, dtype=torch.bool)
    square, wide, tall = subject.qkv(), subject.qkv(L=5, S=7), subject.qkv(L=7, S=5)
    cases = [
        (spec.causal, "a causal mask", square, Mask(causal=True)),
        (spec.padding, "a padding mask", square, Mask(keys=keys)),
        (spec.pairs, "a pair mask", square, Mask(pairs=pairs)),
        (spec.cross, "cross-attention", wide, Mask()),
        (spec.cross, "cross-attention", tall, Mask()),
        (spec.causal and spec.decode, "causal attention with L != S", wide, Mask(causal=True)),
        (spec.causal and spec.decode, "causal attention with L != S", tall, Mask(causal=True)),
    ]
    if all(claimed for claimed, *_ in cases) and spec.decode:
        raise NotClaimedError("everything is claimed, so nothing is refused")
    module = subject.module()
    for claimed, what, (q, k, v), mask in cases:
        if not claimed:
            _refused(module, what, lambda q=q, k=k, v=v, mask=mask: module(q, k, v, mask))  # type: ignore[misc]
    if not spec.decode:
        q, k, v = square
        _refused(module, "step", lambda: module.step(q, k, v, None))


def bad_input_is_refused(subject: Subject) -> None:
    """Heads, dims, lengths, dtypes and masks that do not fit raise ValueError before anything is computed."""
    q, k, v = subject.qkv()
    module = subject.module()
    cases: list[tuple[str, tuple[Tensor, Tensor, Tensor], Mask]] = [
        ("3 heads for a module of 4", (q[:, :3], k, v), Mask()),
        ("3 key/value heads for 4 query heads", (q, k[:, :3], v[:, :3]), Mask()),
        ("k with 2 heads and v with 4", (q, k[:, :2], v), Mask()),
        ("head dim 6 for a module of 8", (q[..., :6], k[..., :6], v), Mask()),
        ("head dims 8 of q and 6 of k", (q, k[..., :6], v), Mask()),
        ("lengths 7 of k and 6 of v", (q, k, v[:, :, :6]), Mask()),
        ("batches 3 of q and 1 of k", (q, k[:1], v[:1]), Mask()),
        ("batches 3 of q and k and 1 of v", (q, k, v[:1]), Mask()),
        ("k in another dtype", (q, k.float(), v), Mask()),
        ("v in another dtype", (q, k, v.float()), Mask()),
        ("whole numbers", (q.long(), k.long(), v.long()), Mask()),
        ("three axes", (q[0], k[0], v[0]), Mask()),
    ]
    if subject.spec.padding:
        cases.append(("keys (1, 7) for a batch of 3", (q, k, v), Mask(keys=torch.ones(1, 7, dtype=torch.bool))))
        cases.append(("keys (3, 6) for 7 keys", (q, k, v), Mask(keys=torch.ones(3, 6, dtype=torch.bool))))
    if subject.spec.pairs:
        cases.append(("pairs (7, 6) for L 7, S 7", (q, k, v), Mask(pairs=torch.ones(7, 6, dtype=torch.bool))))
        cases.append(("pairs (2, 1, 7, 7) for a batch of 3", (q, k, v), Mask(pairs=torch.ones(2, 1, 7, 7).bool())))
    for what, (a, b, c), mask in cases:
        _refused(module, what, lambda a=a, b=b, c=c, mask=mask: module(a, b, c, mask))  # type: ignore[misc]
    settings = [("temperature", -1.0)] if "temperature" in subject.variant.Config.model_fields else []
    for name, value in [*settings, ("a_setting_that_does_not_exist", 1)]:
        try:
            subject.exactly({name: value})
        except ValueError:
            continue
        demand(False, f"the setting {name}={value} is accepted")
    _refused(module, "a bare tensor as mask", lambda: module(q, k, v, torch.ones(7, 7, dtype=torch.bool)))
    if subject.spec.decode:
        _refused(module, "a step of 7 queries and 6 keys", lambda: module.step(q, k[:, :, :6], v[:, :, :6], None))
        _refused(module, "a step with k in another dtype", lambda: module.step(q, k.float(), v, None))


def _refused(module: torch.nn.Module, what: str, call: Callable[[], object]) -> None:
    computed = []

    def attend(*arguments: object) -> None:
        computed.append(True)
        raise ValueError

    original = module.attend
    module.attend = attend  # type: ignore[assignment]
    try:
        call()
    except ValueError:
        demand(not computed, f"{what}: computed before it is refused")
    except Exception as error:
        demand(False, f"{what}: must raise a ValueError, raised {type(error).__name__}: {error}")
    else:
        demand(False, f"{what}: is accepted")
    finally:
        module.attend = original


def inputs_unchanged(subject: Subject) -> None:
    """Forward and backward leave q, k, v and the mask as they are, bit by bit."""
    module = subject.module()
    for name, mask in subject.masks(3, 4, 7, 7):
        parts = leaves(*subject.qkv())
        tensors = {**dict(zip("qkv", parts, strict=True)), "mask.keys": mask.keys, "mask.pairs": mask.pairs}
        before = {which: tensor.detach().clone() for which, tensor in tensors.items() if tensor is not None}
        for need_weights in (False, True):
            # Non-leaf views, since a change in place of a leaf would raise instead of being seen.
            q, k, v = (part.view_as(part) for part in parts)
            out = module(q, k, v, mask, need_weights).out
            incoming = torch.ones_like(out)
            if out.requires_grad:
                torch.autograd.grad(out, parts, incoming, allow_unused=True)
            demand(bool((incoming == 1).all()), f"{name}: backward modifies the gradient that it is given")
            with torch.no_grad():
                module(*parts, mask, need_weights)
            for which, tensor in before.items():
                now = tensors[which]
                assert now is not None  # `before` holds only what is there
                demand(torch.equal(now, tensor), f"{name}: {which} is modified")


def memory_layout(subject: Subject) -> None:
    """Transposed, expanded, strided and offset inputs and masks give what contiguous ones give."""
    subject.numbers_do_not_matter()
    module = subject.module()
    B, H, L = 3, 4, 7

    def transposed(x: Tensor) -> Tensor:
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    def strided(x: Tensor) -> Tensor:
        return torch.stack([x, x + 1], dim=-1).flatten(-2)[..., ::2]

    def offset(x: Tensor) -> Tensor:
        return torch.cat([x[:, :, :1] + 5, x], dim=2)[:, :, 1:]

    def expanded(x: Tensor) -> Tensor:
        return x[:, :1].expand(x.shape)

    for name, mask in subject.masks(B, H, L, L):
        q, k, v = subject.qkv(B, H, L=L)
        keys = None if mask.keys is None else torch.stack([mask.keys, ~mask.keys], dim=-1).flatten(1)[:, ::2]
        pairs = None if mask.pairs is None else mask.pairs.transpose(-2, -1).contiguous().transpose(-2, -1)
        for how in (transposed, strided, offset, expanded):
            if how is expanded:
                k, v = k[:, :1].repeat(1, H, 1, 1), v[:, :1].repeat(1, H, 1, 1)
            for need_weights in (False, True):
                want = module(q, k, v, mask, need_weights)
                laid = q if how is expanded else how(q)
                got = module(laid, how(k), how(v), Mask(mask.causal, keys, pairs), need_weights)
                near(got.out, want.out, f"{name}: out of {how.__name__} inputs")
                if got.weights is not None and want.weights is not None:
                    near(got.weights, want.weights, f"{name}: weights of {how.__name__} inputs")
