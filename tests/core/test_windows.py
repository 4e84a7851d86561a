"""Attention in blocks is the plain formula restricted to a window: any length, window, mask and grouping of blocks."""

import pytest
import torch

import core.windows
from core import BackendError, Mask, build
from core.backends import dense_attention
from core.contract.measure import Cost
from core.functional import average, both_visible, masked_softmax, scaled_scores, window_visible
from core.windows import BLOCK, window_attention

B, H, D, DV = 2, 2, 4, 3
CLOSE = {"rtol": 1e-11, "atol": 1e-11}


def draw(L, S, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (B, H, L, D), (B, H, S, D), (B, H, S, DV)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def plain(q, k, v, mask, window, num_global=0, temperature=1.0):
    L, S = q.shape[-2], k.shape[-2]
    near = window_visible(L, S, window, mask.causal, q.device, num_global)
    visible = both_visible(mask.visible(L, S, q.device), near)
    return average(masked_softmax(scaled_scores(q, k, temperature), visible), v)


def masks(causal, L, S):
    generator = torch.Generator().manual_seed(1)
    keys = torch.rand(B, S, generator=generator) < 0.7
    keys[0, : S // 2] = False  # left padding, and so rows that see nothing
    pairs = torch.rand(L, S, generator=generator) < 0.7
    pairs[L // 3] = False
    wide = torch.rand(B, H, L, S, generator=generator) < 0.7
    yield Mask(causal)
    yield Mask(causal, keys)
    yield Mask(causal, None, pairs)
    yield Mask(causal, keys, wide)
    yield Mask(causal, None, wide[:1, :, :, :1])


@pytest.mark.parametrize("scores", [1, 2**13, 2**19])  # a block at a time, some heads or blocks at a time, everything at once
@pytest.mark.parametrize("window", [1, 2, 7, BLOCK, BLOCK + 1, 3 * BLOCK])
@pytest.mark.parametrize("causal", [False, True])
def test_equals_the_plain_formula(monkeypatch, window, causal, scores):
    monkeypatch.setattr(core.windows, "SCORES", scores)
    lengths = [(1, 1), (BLOCK, BLOCK), (2 * BLOCK + 5, 2 * BLOCK + 5)]
    lengths += [(3, BLOCK + 9), (1, 3 * BLOCK), (BLOCK + 3, BLOCK), (5, 2)] if causal else []
    for L, S in lengths:
        for num_global in (0, 1, 5):
            q, k, v = draw(L, S)
            for mask in masks(causal, L, S):
                out, used = window_attention(q, k, v, mask, window, num_global, 0.7)
                expected = plain(q, k, v, mask, window, num_global, 0.7)
                assert used == "blocks" or window >= S
                torch.testing.assert_close(out, expected, **CLOSE)
                weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
                given, wanted = (torch.autograd.grad((x * weight).sum(), (q, k, v)) for x in (out, expected))
                for a, b in zip(given, wanted, strict=True):
                    assert a.isfinite().all()
                    torch.testing.assert_close(a, b, **CLOSE)


def test_many_globals_see_all_and_are_seen_by_all():
    q, k, v = draw(40, 40)
    for num_global in (39, 40, 1000):
        for causal in (False, True):
            out, _ = window_attention(q, k, v, Mask(causal), 3, num_global)
            torch.testing.assert_close(out, plain(q, k, v, Mask(causal), 3, num_global), **CLOSE)


def test_no_tensor_of_all_pairs_is_alive():
    L = 4096
    q, k, v = (torch.randn(1, 1, L, 8, requires_grad=True) for _ in range(3))
    with Cost() as cost:
        window_attention(q, k, v, Mask(causal=True, keys=torch.ones(1, L, dtype=torch.bool)), 64)[0].sum().backward()
    assert cost.peak < L * L / 2  # bytes: not even one bit of four for each pair


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_summed_in_single(dtype):
    q, k, v = draw(80, 80, dtype)
    out, _ = window_attention(q, k, v, Mask(True), 9)
    assert out.dtype == dtype
    wide = [x.detach().float().requires_grad_() for x in (q, k, v)]
    expected = plain(*wide, Mask(True), 9)
    torch.testing.assert_close(out.float(), expected, rtol=1e-2, atol=1e-2)
    for given, wanted in zip(torch.autograd.grad(out.sum(), (q, k, v)), torch.autograd.grad(expected.sum(), wide), strict=True):
        torch.testing.assert_close(given.float(), wanted, rtol=2e-2, atol=2e-2)


def test_backward_under_autocast_is_backward_without_it():
    q, k, v = draw(70, 70, torch.float32)
    alone = torch.autograd.grad(window_attention(q, k, v, Mask(True), 9)[0].square().sum(), (q, k, v))
    out = window_attention(q, k, v, Mask(True), 9)[0].square().sum()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        within = torch.autograd.grad(out, (q, k, v))
    for a, b in zip(alone, within, strict=True):
        assert torch.equal(a, b)


def test_a_second_derivative_is_refused_and_not_made_up():
    q, k, v = draw(40, 40)
    (grad,) = torch.autograd.grad(window_attention(q, k, v, Mask(True), 9)[0].square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize("backend", ["math", "sdpa"])
@pytest.mark.parametrize("causal", [False, True])
def test_an_explicit_backend_is_used(backend, causal):
    q, k, v = draw(50, 50)
    attention = build("local_global", num_heads=H, head_dim=D, window=9, num_global=2, backend=backend)
    out = attention(q, k, v, Mask(causal)).out
    assert attention.backend_used == backend
    torch.testing.assert_close(out, plain(q, k, v, Mask(causal), 9, 2), **CLOSE)
    assert dense_attention(q, k, v, Mask(causal), window=9, num_global=2, backend=backend)[1] == backend


def test_xformers_is_not_replaced_by_blocks():
    q, k, v = draw(50, 50)
    with pytest.raises(BackendError, match="needs tensors on a CUDA device"):
        build("local_global", num_heads=H, head_dim=D, window=9, backend="xformers")(q, k, v)
