"""Mechanisms that take queries in chunks are the same function in one chunk as in many, and hold no L x S tensor."""

import importlib

import pytest
import torch

from core import Mask, build
from core.contract.measure import Cost

CASES = [
    ("standard", {"chunk_size": 3}, None),
    ("standard", {"chunk_size": 3, "backend": "math"}, None),
    ("topk", {"keep": 3}, ("core.functional", "SCORES")),
    ("topk", {"keep": 30, "temperature": 0.4}, ("core.functional", "SCORES")),
    ("top_p", {"mass": 0.7}, ("variants.top_p", "SCORES")),
    ("entmax", {}, ("variants.entmax", "SCORES")),
    ("entmax", {"learn": "per_head", "alpha": 1.3}, ("variants.entmax", "SCORES")),
    ("additive", {"hidden_dim": 5}, ("variants.additive", "FEATURES")),
    ("memory", {"num_slots": 2}, ("variants.memory", "SCORES")),
    ("uniform", {}, ("variants.uniform", "SCORES")),
]
IDS = [" ".join([name, *map(str, config.values())]) for name, config, _ in CASES]


@pytest.fixture(params=CASES, ids=IDS)
def case(request, monkeypatch):
    name, config, bound = request.param
    if name == "entmax":
        pytest.importorskip("entmax")
    return name, config, lambda size: bound and monkeypatch.setattr(importlib.import_module(bound[0]), bound[1], size)


def masks(L, S):
    generator = torch.Generator().manual_seed(3)
    keys = torch.rand(2, S, generator=generator) < 0.7
    keys[0, : S // 2] = False
    pairs = torch.rand(L, S, generator=generator) < 0.7
    wide = torch.rand(2, 2, L, S, generator=generator) < 0.7
    for causal in (False, True):
        yield Mask(causal)
        yield Mask(causal, keys)
        yield Mask(causal, None, pairs)
        yield Mask(causal, keys, wide)


# Bounds: one query of one row of the batch at a time; some queries of one row; some of both rows.
@pytest.mark.parametrize(("L", "S"), [(1, 1), (7, 7), (13, 13), (4, 11), (11, 4)])
@pytest.mark.parametrize("bound", [1, 100, 600])
def test_many_chunks_are_the_plain_path(case, L, S, bound):
    name, config, limit = case
    torch.manual_seed(0)
    attention = build(name, num_heads=2, head_dim=4, **config).double()
    limit(bound)
    q, k, v = (torch.randn(2, 2, n, 4, dtype=torch.float64, requires_grad=True) for n in (L, S, S))
    leaves = q, k, v, *attention.parameters()
    for mask in masks(L, S):
        fast, (plain, weights) = attention(q, k, v, mask).out, attention(q, k, v, mask, need_weights=True)
        torch.testing.assert_close(fast, plain, rtol=1e-11, atol=1e-11)
        assert weights.shape == (2, 2, L, S)
        found = (
            torch.autograd.grad(out.square().sum(), leaves, allow_unused=True, materialize_grads=True) for out in (fast, plain)
        )
        for given, expected in zip(*found, strict=True):
            torch.testing.assert_close(given, expected, rtol=1e-9, atol=1e-10)


def test_what_is_alive_does_not_grow_with_the_square(case):
    name, config, limit = case
    if "chunk_size" in config:
        config = {**config, "chunk_size": 16}
    limit(2**14)
    attention = build(name, num_heads=1, head_dim=4, **config)
    peaks = []
    for L in (512, 1024):
        q, k, v = (torch.randn(1, 1, L, 4, requires_grad=True) for _ in range(3))
        keys = torch.ones(1, L, dtype=torch.bool)
        with Cost() as cost:
            attention(q, k, v, Mask(causal=True, keys=keys)).out.sum().backward()
        peaks.append(cost.peak)
    assert peaks[1] < 2.3 * peaks[0]
    assert peaks[1] < 4 * 1024 * 1024  # one float32 for each pair


def test_ties_across_chunks_go_to_the_lowest_index(monkeypatch):
    monkeypatch.setattr("core.functional.SCORES", 40)
    torch.manual_seed(0)
    q, k = torch.ones(1, 1, 20, 1, dtype=torch.float64), torch.randint(-2, 3, (1, 1, 20, 1)).double()
    v = torch.randn(1, 1, 20, 3, dtype=torch.float64)
    for keep in (1, 4, 9, 19):
        attention = build("topk", num_heads=1, head_dim=1, keep=keep)
        for mask in (Mask(), Mask(causal=True)):
            expected = attention(q, k, v, mask, need_weights=True).out
            torch.testing.assert_close(attention(q, k, v, mask).out, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("keep", [1, 3])
def test_a_score_that_is_no_number_does_not_vanish(keep):
    q, k = torch.ones(1, 1, 6, 2), torch.randn(1, 1, 6, 2)
    k[0, 0, 4] = float("nan")
    attention = build("topk", num_heads=1, head_dim=2, keep=keep)
    out = attention(q, k, torch.randn(1, 1, 6, 2), Mask(causal=True)).out
    assert out[0, 0, 4:].isnan().all()
    assert out[0, 0, :4].isfinite().all()


@pytest.mark.parametrize("variant", ["topk", "linear"])
def test_backward_under_autocast_is_backward_without_it(variant):
    torch.manual_seed(0)
    attention = build(variant, num_heads=2, head_dim=4)
    q, k, v = (torch.randn(1, 2, 70, 4, requires_grad=True) for _ in range(3))
    alone = torch.autograd.grad(attention(q, k, v, Mask(causal=True)).out.square().sum(), (q, k, v))
    out = attention(q, k, v, Mask(causal=True)).out.square().sum()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        within = torch.autograd.grad(out, (q, k, v))
    for a, b in zip(alone, within, strict=True):
        assert torch.equal(a, b)
