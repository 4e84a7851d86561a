"""Blocks that carry sums are the loop over tokens that carries them, forward and backward."""

import pytest
import torch

import core.running_sums
from core.functional import accumulate_dtype
from core.running_sums import BLOCK, FeatureMap, Sums, causal_average, no_sums

B, H, D, DV = 2, 2, 3, 4
SQUARE = FeatureMap(lambda x: x * x + 0.1, lambda x, features, grad: 2 * x * grad)


def by_loops(q, k, v, before, keys=None):
    """One token after another: add to the sums, then read them."""
    products, features = before
    outs = []
    for i in range(q.shape[2]):
        shown = 1.0 if keys is None else keys[:, None, i, None].to(q.dtype)
        phi_k = (k[:, :, i] * k[:, :, i] + 0.1) * shown
        phi_q = q[:, :, i] * q[:, :, i] + 0.1
        products = products + phi_k.unsqueeze(-1) * v[:, :, i].unsqueeze(-2)
        features = features + phi_k.unsqueeze(-1)
        denominator = (phi_q.unsqueeze(-1) * features).sum(-2)
        numerator = (phi_q.unsqueeze(-1) * products).sum(-2)
        outs.append(numerator / torch.where(denominator == 0, torch.ones_like(denominator), denominator))
    return torch.stack(outs, dim=2), Sums(products, features)


def draw(L):
    generator = torch.Generator().manual_seed(L)
    shapes = (B, H, L, D), (B, H, L, D), (B, H, L, DV), (B, H, D, DV), (B, H, D, 1)
    return [torch.rand(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("features", [1, 2**17])  # a block at a time, or all of them
@pytest.mark.parametrize("L", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7])
@pytest.mark.parametrize("padded", [False, True])
def test_equals_the_loop_with_what_came_before(monkeypatch, L, padded, features):
    monkeypatch.setattr(core.running_sums, "FEATURES", features)
    q, k, v, products, counts = leaves = draw(L)
    keys = torch.rand(B, L, generator=torch.Generator().manual_seed(1)) < 0.6 if padded else None
    out, after = causal_average(q, k, v, SQUARE, Sums(products, counts), keys)
    expected, expected_after = by_loops(q, k, v, Sums(products, counts), keys)
    torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-11)
    for given, wanted in zip(after, expected_after, strict=True):
        torch.testing.assert_close(given, wanted, rtol=1e-11, atol=1e-11)
    # Gradients also through the sums that are handed on, and to those that were handed in.
    totals = [x.square().sum() + y[0].sum() + y[1].square().sum() for x, y in ((out, after), (expected, expected_after))]
    for given, wanted in zip(*(torch.autograd.grad(total, leaves) for total in totals), strict=True):
        torch.testing.assert_close(given, wanted, rtol=1e-10, atol=1e-10)


def test_where_nothing_is_visible_there_is_0():
    q, k, v, _, _ = draw(5)
    keys = torch.tensor([[False, False, True, True, False], [False] * 5])
    out, after = causal_average(q, k, v, SQUARE, no_sums(k, v, SQUARE), keys)
    assert (out[0, :, :2] == 0).all()
    assert (out[1] == 0).all()
    assert (out[0, :, 2:] != 0).all()
    assert (after.features[1] == 0).all()
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(grad.isfinite().all() for grad in grads)
    assert (grads[1][1] == 0).all()


def test_no_token_leaves_the_sums_as_they_were():
    q, k, v, products, counts = draw(3)
    out, after = causal_average(q[:, :, :0], k[:, :, :0], v[:, :, :0], SQUARE, Sums(products, counts))
    assert out.shape == (B, H, 0, DV)
    assert after.products is products


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_are_wider_than_the_inputs(dtype):
    x, ones = torch.zeros(1, 1, 3000, 2, dtype=dtype), torch.ones(1, 1, 3000, 1, dtype=dtype)
    out, after = causal_average(x, x, ones, SQUARE, no_sums(x, ones, SQUARE))
    assert after.features.dtype == accumulate_dtype(dtype) == torch.float32
    assert torch.equal(out, ones)
