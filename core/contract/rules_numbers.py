"""Rules on numbers: gradients and precision."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError

from core.contract.subject import Subject, demand, gradients, leaves, near

SHARP, LOW = 16.0, 500.0
HALF_LARGEST = 3e4  # near the largest float16, 65504


def gradcheck_float64(subject: Subject) -> None:
    """Gradients of out and weights, by inputs and parameters, equal finite differences."""
    H, D = max(subject.fewest_heads, 2), 4
    try:
        module = subject.module(H, D)
    except ValueError:  # a head dim that this mechanism refuses
        H, D, module = 4, 8, subject.module()
    real = {name: parameter for name, parameter in module.named_parameters() if parameter.is_floating_point()}
    names = list(real)
    for name, mask in subject.masks(2, H, 3, 3):
        for need_weights in (False, True):

            def call(q: Tensor, k: Tensor, v: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
                given = dict(zip(names, parameters, strict=True))
                result = torch.func.functional_call(module, given, (q, k, v, mask, need_weights))  # noqa: B023
                return tuple(one for one in result if one is not None)

            failures = []
            for _ in range(2):  # a kink of a mechanism that selects can spoil one point, not two
                Dv = None if subject.value_dim != 8 else D
                inputs = leaves(*subject.qkv(B=2, H=H, L=3, D=D, Dv=Dv), *real.values())
                try:
                    torch.autograd.gradcheck(call, inputs, fast_mode=True, eps=1e-6, atol=1e-6, rtol=1e-5)
                    break
                except GradcheckError as error:
                    failures.append(" ".join(str(error).split())[:300])
            demand(len(failures) < 2, f"{name}: gradient is not the derivative: {failures[0] if failures else ''}")
    _slope_at_length(subject)


def _slope_at_length(subject: Subject) -> None:
    """More keys than a block holds: the derivative along one direction."""
    H, L, step = subject.fewest_heads, 150, 1e-6
    module = subject.module(H)
    name, mask = subject.masks(1, H, L, L)[-1]
    errors = []
    for _ in range(3):  # a kink of a mechanism that selects can spoil some points, not all
        q, k, v = leaves(*(x * size for x, size in zip(subject.qkv(1, H, L=L), (subject.temperature, 1.0, 1.0), strict=True)))
        ways = [subject.draw(*x.shape) for x in (q, k, v)]
        out = module(q, k, v, mask).out
        direction = subject.draw(*out.shape)
        grads = gradients(out, (q, k, v), direction)
        got = sum(float((grad * way).sum()) for grad, way in zip(grads, ways, strict=True))
        ends = []
        for sign in (1.0, -1.0):
            moved = [x.detach() + sign * step * way for x, way in zip((q, k, v), ways, strict=True)]
            ends.append(float((module(*moved, mask).out.detach() * direction).sum()))
        want = (ends[0] - ends[1]) / (2 * step)
        errors.append(abs(got - want) / max(1.0, abs(want)))
    demand(min(errors) < 1e-4, f"{name}, L {L}: gradient along a direction differs from the derivative by {min(errors):.2g}")


def gradients_finite(subject: Subject) -> None:
    """Gradients by inputs and parameters are finite in every precision, for small, large, equal and zero inputs."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        module = subject.module(dtype=dtype)
        names = ["q", "k", "v", *(which for which, _ in module.named_parameters())]
        for what, scale in (("zero", 0.0), ("ordinary", 1.0), ("large", 30.0)):
            masks = subject.masks(3, 4, 7, 7)
            for name, mask in masks if dtype == torch.float64 else [masks[0], masks[-1]]:
                q, k, v = subject.qkv(dtype=dtype)
                q, k, v = leaves(q * scale, k * scale, v)
                for need_weights in (False, True):
                    result = module(q, k, v, mask, need_weights)
                    for output in (one for one in result if one is not None):
                        direction = torch.ones_like(output)
                        grads = gradients(output, (q, k, v, *module.parameters()), direction)
                        for which, grad in zip(names, grads, strict=True):
                            demand(
                                bool(grad.isfinite().all()),
                                f"{name}, {what} inputs in {dtype}: gradient of {which} is not finite",
                            )


def half_precision_no_overflow(subject: Subject) -> None:
    """float16 inputs of up to 3e4 give finite out and weights; if convex, out is no larger than the values."""
    module = subject.module(dtype=torch.float16)
    exact = copy.deepcopy(module).double()
    for L in (7, 67):
        for name, mask in subject.masks(2, 4, L, L):
            for sign in (1.0, -1.0):
                q, k, v = (x.clamp(-1, 1) * HALF_LARGEST for x in subject.qkv(B=2, L=L))
                q, k = q.abs(), sign * k.abs()  # all scores with one sign: the largest sums
                inputs = [x.half() for x in (q, k, v)]
                # What is no average may itself be too large for float16; all else must not become so on its way.
                fits = exact(*(x.double() for x in inputs), mask).out.abs() <= HALF_LARGEST * 2
                for need_weights in (False, True):
                    out, weights = module(*inputs, mask, need_weights)
                    demand(
                        bool((out.isfinite() | ~fits).all()),
                        f"{name}: float16 inputs of up to 3e4 give an out that is not finite",
                    )
                    if weights is not None and subject.spec.convex:
                        demand(
                            bool(weights.isfinite().all()),
                            f"{name}: float16 inputs of up to 3e4 give weights not finite",
                        )
                    if subject.spec.convex:
                        most = float(out.detach().abs().max())
                        demand(most <= HALF_LARGEST * 1.01, f"{name}: out {most:.3g} is larger than every value")


def low_precision_is_close(subject: Subject) -> None:
    """float32, float16 and bfloat16 give the float64 result of the same inputs within a few roundings of the dtype."""
    for dtype, roundings in ((torch.float32, 400), (torch.float16, 6), (torch.bfloat16, 6)):
        H = subject.fewest_heads
        module = subject.module(H, dtype=dtype)
        exact = copy.deepcopy(module).double()
        for L, size in ((7, 1.0), (7, SHARP), (7, LOW), (600, 0.2)):
            masks = subject.masks(1, H, L, L)
            masks = masks if size == 1.0 or L > 7 else [masks[0], masks[-1]]
            for name, mask in masks if L == 7 else [pair for pair in masks if pair[1].causal == subject.spec.causal][:1]:
                q, k, v = subject.qkv(B=1, H=H, L=L)
                # Scores of order 1, so that no rounding of q and k is magnified; sharp ones, which a softmax in half precision
                # would round; ones below any fill; over many keys even weights and values of one sign, so that a sum kept in
                # half precision stops growing.
                if size == LOW:
                    q, k = 100 * q.abs(), -LOW * k.abs()
                q, v = q * subject.temperature * (1.0 if size == LOW else size), 1 + v / 10 if L == 600 else v
                q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
                try:
                    want = exact(q.double(), k.double(), v.double(), mask).out
                except ValueError:  # longer than this mechanism serves
                    continue
                largest = max(float(v.abs().max()), float(want.abs().max()))
                if largest > torch.finfo(dtype).max / 2:  # what is no average may be too large for the dtype
                    continue
                bound = roundings * torch.finfo(dtype).eps * largest
                name = f"{name}, L {L}: {dtype} against float64"
                for need_weights in (False, True) if L == 7 or dtype == torch.float16 else (False,):
                    got = module(q, k, v, mask, need_weights).out.double()
                    near(*_but_near_ties(got, want), name, bound)


def _but_near_ties(got: Tensor, want: Tensor) -> tuple[Tensor, Tensor]:
    """Without the worst row in a hundred: at a near-tie a mechanism that selects may choose otherwise in float32."""
    error = (got - want).detach().abs().amax(-1).flatten()
    order = error.nan_to_num(nan=math.inf).argsort()[: len(error) - len(error) // 100]
    return got.flatten(0, 2)[order], want.flatten(0, 2)[order]
