import itertools
import math

import pytest
import torch

from core import BackendError, Mask, build
from core.backends import (
    Window,
    _sdpa_would_hold_pairs,
    aligned_bias,
    dense_attention,
    from_xformers,
    unserved_by_xformers,
    xformers_inputs,
)
from core.contract.devices import fake_cuda

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
@pytest.mark.parametrize("window", [{}, {"window": 2}, {"window": 3, "num_global": 1}])
def test_every_backend_is_the_same_function(L, S, temperature, window):
    q, k, v = (x.requires_grad_() for x in inputs(L, S))
    for mask in masks(L, S):
        settings = {"temperature": temperature, **window}
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


def reference(inputs):
    """What xformers computes from these inputs, in loops over its layout and with its own `materialize`."""
    query, key, value = inputs.query, inputs.key, inputs.value
    shape = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
    if inputs.bias is None:
        bias = torch.zeros(shape, dtype=torch.float64)
    elif isinstance(inputs.bias, torch.Tensor):
        bias = inputs.bias
    else:
        bias = inputs.bias.materialize(shape, dtype=torch.float64)
    out = torch.empty(*query.shape[:3], value.shape[-1], dtype=torch.float64)
    for b in range(query.shape[0]):
        for h in range(query.shape[2]):
            for i in range(query.shape[1]):
                scores = [
                    float(query[b, i, h] @ key[b, j, h]) * inputs.scale + float(bias[b, h, i, j]) for j in range(key.shape[1])
                ]
                highest = max(scores)
                parts = [math.exp(score - highest) if score > -math.inf else 0.0 for score in scores]
                out[b, i, h] = sum(part * value[b, j, h] for j, part in enumerate(parts)) / sum(parts)
    return out


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(("L", "S"), [(5, 5), (1, 7), (4, 7), (7, 4)])
@pytest.mark.parametrize("window", [None, Window(2), Window(3, 1)])
def test_what_xformers_is_given_means_what_our_masks_mean(L, S, window):
    q, k, v = inputs(L, S)
    for mask in masks(L, S):
        if window is not None and not mask.causal and L != S:
            continue  # a two-sided window has no place there
        given = xformers_inputs(q, k, v, mask, window, 0.25)
        settings = {} if window is None else {"window": window.size, "num_global": window.num_global}
        expected, _ = dense_attention(q, k, v, mask, backend="math", temperature=4 / math.sqrt(D), **settings)
        out = from_xformers(reference(given), given, q, v)
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
def test_xformers_is_given_its_own_masks_where_it_has_them():
    q, k, v = inputs(6, 6)
    keys = torch.tensor([[True, False, True, True, True, True], [False] * 6])
    pairs = torch.ones(6, 6, dtype=torch.bool)

    def bias(mask, window=None, q=q):
        return type(xformers_inputs(q, k, v, mask, window, 1.0).bias).__name__

    assert bias(Mask()) == "NoneType"
    assert bias(Mask(causal=True)) == bias(Mask(causal=True), q=q[:, :, :2]) == "LowerTriangularFromBottomRightMask"
    assert bias(Mask(causal=True), Window(3)) == "LowerTriangularFromBottomRightLocalAttentionMask"
    assert bias(Mask(), Window(3)) == "LocalAttentionFromBottomRightMask"
    assert bias(Mask(keys=keys)) == "BlockDiagonalMask"
    for rest in (Mask(pairs=pairs), Mask(causal=True, keys=keys)):
        assert bias(rest) == "Tensor"
    assert bias(Mask(causal=True), Window(3, 1)) == "Tensor"
    packed = xformers_inputs(q, k, v, Mask(keys=keys), None, 1.0)
    assert packed.query.shape == (1, 2 * 6, H, D)
    assert packed.key.shape == (1, 5 + 1, H, D)  # a row that sees nothing keeps one key, and gives 0


def test_a_tensor_for_xformers_is_aligned_and_expanded():
    q = torch.zeros(2, 3, 5, 8)
    bias = aligned_bias(torch.ones(1, 1, 1, 37, dtype=torch.bool), q, 37)
    assert bias.shape == (2, 3, 5, 37)
    assert bias.stride() == (0, 0, 40, 1)
    assert bias.contiguous().stride(-2) == 37  # what a copy would bring back


@pytest.mark.parametrize(
    ("mask", "window", "L", "dtype", "expected"),
    [
        (Mask(), None, 8, torch.float16, False),
        (Mask(causal=True), None, 8, torch.float16, False),
        (Mask(causal=True), None, 3, torch.float16, True),
        (Mask(causal=True), None, 3, torch.float32, False),
        (Mask(keys=torch.ones(B, 8, dtype=torch.bool)), None, 8, torch.bfloat16, True),
        (Mask(causal=True, keys=torch.ones(B, 8, dtype=torch.bool)), None, 8, torch.bfloat16, False),
        (Mask(pairs=torch.ones(8, 8, dtype=torch.bool)), None, 8, torch.bfloat16, False),
        (Mask(causal=True), Window(2), 8, torch.float16, True),
        (Mask(causal=True), Window(2, 1), 8, torch.float16, False),
    ],
)
def test_auto_asks_xformers_only_where_sdpa_would_hold_pairs(mask, window, L, dtype, expected):
    q, k, _ = inputs(L, 8, dtype)
    assert not _sdpa_would_hold_pairs(q, k, mask, window)  # on a CPU never
    with fake_cuda():
        q, k = (torch.empty(x.shape, dtype=dtype, device="cuda") for x in (q, k))
        assert _sdpa_would_hold_pairs(q, k, mask, window) == expected


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("gradients", [False, True])
def test_the_library_is_asked_which_of_its_kernels_serve(gradients):
    given = xformers_inputs(*inputs(2, 8), Mask(causal=True), None, 1.0)
    refusal = unserved_by_xformers(given, gradients)
    assert refusal.startswith("no forward kernel serves torch.float64, head dim 8: ")
    assert "device=cpu" in refusal


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("window", [None, Window(5), Window(5, 1)])
def test_every_backend_on_a_gpu(dtype, window):
    q, k, v = (torch.randn(B, H, 37, 16, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3))
    keys = torch.rand(B, 37, device="cuda") < 0.7
    settings = {} if window is None else {"window": window.size, "num_global": window.num_global}
    for mask in (
        Mask(),
        Mask(causal=True),
        Mask(keys=keys),
        Mask(True, keys),
        Mask(pairs=torch.rand(37, 37, device="cuda") < 0.7),
    ):
        expected, _ = dense_attention(q, k, v, mask, backend="math", **settings)
        grads = torch.autograd.grad(expected.float().square().sum(), (q, k, v))
        for backend in ("auto", "sdpa", "xformers"):
            try:
                out, used = dense_attention(q, k, v, mask, backend=backend, **settings)
            except BackendError:
                if backend != "xformers":
                    raise
                continue  # which kernels the installed wheel holds is not ours to say
            assert used == backend or (backend == "auto" and used in ("sdpa", "xformers"))
            torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-2)  # float16
            for given, wanted in zip(torch.autograd.grad(out.float().square().sum(), (q, k, v)), grads, strict=True):
                torch.testing.assert_close(given, wanted, rtol=2e-2, atol=2e-2)
