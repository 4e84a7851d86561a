import itertools

import pytest
import torch

from core import BackendError, Mask, build
from core.backends import dense_attention

B, H, D, DV = 2, 3, 8, 5


def inputs(L, S, dtype=torch.float64):
    generator = torch.Generator().manual_seed(L * 10 + S)
    shapes = (B, H, L, D), (B, H, S, D), (B, H, S, DV)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def masks(L, S):
    generator = torch.Generator().manual_seed(7)
    keys = torch.rand(B, S, generator=generator) < 0.7
    keys[1] = False
    shapes = [(L, S), (B, 1, L, S), (1, H, L, S), (B, H, L, S), (B, H, 1, S), (B, H, L, 1), (1, 1, 1, 1)]
    pairs = [torch.rand(shape, generator=generator) < 0.7 for shape in shapes]
    for causal, padding, pair in itertools.product([False, True], [None, keys], [None, *pairs]):
        yield Mask(causal, padding, pair)


@pytest.mark.parametrize(("L", "S"), [(5, 5), (1, 7), (4, 7), (7, 4)])
@pytest.mark.parametrize("temperature", [1.0, 0.3])
@pytest.mark.parametrize("with_pattern", [False, True])
def test_every_backend_is_the_same_function(L, S, temperature, with_pattern):
    q, k, v = (x.requires_grad_() for x in inputs(L, S))
    pattern = torch.rand(L, S, generator=torch.Generator().manual_seed(3)) < 0.8 if with_pattern else None
    for mask in masks(L, S):
        settings = {"temperature": temperature, "pattern": pattern}
        plain, used = dense_attention(q, k, v, mask, backend="math", **settings)
        assert used == "math"
        expected = torch.autograd.grad((plain**2).sum(), (q, k, v))
        for backend in ("sdpa", "auto"):
            out, used = dense_attention(q, k, v, mask, backend=backend, **settings)
            assert used == "sdpa"
            torch.testing.assert_close(out, plain, rtol=1e-12, atol=1e-12)
            for given, wanted in zip(torch.autograd.grad((out**2).sum(), (q, k, v)), expected, strict=True):
                assert given.isfinite().all()
                torch.testing.assert_close(given, wanted, rtol=1e-11, atol=1e-11)  # two products more than the output


@pytest.mark.parametrize("backend", ["math", "sdpa", "auto"])
def test_the_module_reports_what_ran(backend):
    attention = build("standard", num_heads=H, head_dim=D, backend=backend)
    assert attention.backend_used is None
    attention(*inputs(4, 4))
    assert attention.backend_used == ("math" if backend == "math" else "sdpa")
    attention(*inputs(4, 4), need_weights=True)
    assert attention.backend_used == "math"


@pytest.mark.parametrize("mask", [Mask(), Mask(causal=True), Mask(keys=torch.ones(B, 4, dtype=torch.bool))])
def test_xformers_on_a_cpu_is_refused_and_never_replaced(mask):
    attention = build("standard", num_heads=H, head_dim=D, backend="xformers")
    with pytest.raises(BackendError, match="xformers: needs tensors on a CUDA device, got cpu"):
        attention(*inputs(4, 4), mask)
    assert attention.backend_used is None
    with pytest.raises(ValueError, match="xformers"):
        build("standard", num_heads=H, head_dim=D, backend="xformers", chunk_size=2)(*inputs(4, 4), mask)


def test_the_kernel_is_not_given_is_causal_where_it_would_align_top_left(monkeypatch):
    calls = []
    real = torch.nn.functional.scaled_dot_product_attention

    def spy(*args, **settings):
        calls.append(settings)
        return real(*args, **settings)

    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", spy)
    for L, S in ((4, 4), (2, 4), (4, 2), (1, 4)):
        dense_attention(*inputs(L, S), Mask(causal=True))
    assert [bool(each.get("is_causal")) for each in calls] == [True, False, False, False]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("causal", [False, True])
def test_xformers_on_a_gpu(causal):
    q, k, _ = (x.to("cuda", torch.float16) for x in inputs(37, 37))
    expected, _ = dense_attention(q, k, k, Mask(causal=causal), backend="math")
    try:
        out, used = dense_attention(q, k, k, Mask(causal=causal), backend="xformers")
    except BackendError as error:
        pytest.skip(str(error))
    assert used == "xformers"
    torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-2)  # float16
