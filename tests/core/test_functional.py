import math

import pytest
import torch

from core.functional import (
    accumulate_dtype,
    average,
    both_visible,
    chunks,
    masked_softmax,
    pieces,
    scaled_scores,
    window_visible,
)


def test_accumulate_dtype():
    assert accumulate_dtype(torch.float16) == torch.float32
    assert accumulate_dtype(torch.bfloat16) == torch.float32
    assert accumulate_dtype(torch.float32) == torch.float32
    assert accumulate_dtype(torch.float64) == torch.float64


def test_scaled_scores():
    q = torch.tensor([1.0, 2.0, 2.0, 0.0], dtype=torch.float64).reshape(1, 1, 1, 4)
    k = torch.tensor([3.0, 0.0, 1.0, 5.0], dtype=torch.float64).reshape(1, 1, 1, 4)
    assert scaled_scores(q, k).item() == 2.5
    assert scaled_scores(q, k, 0.5).item() == 5.0
    assert scaled_scores(q, k, torch.tensor(0.25, dtype=torch.float64)).item() == 10.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scores_of_the_largest_half_precision_numbers_are_finite(dtype):
    x = torch.full((1, 1, 2, 64), 6e4, dtype=dtype)
    scores = scaled_scores(x, x, 1e-8)
    assert scores.dtype == torch.float32
    assert scores.isfinite().all()


def test_masked_softmax():
    scores = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0], [1.0, 2.0, 3.0]], dtype=torch.float64, requires_grad=True)
    visible = torch.tensor([[True, False, True], [False, False, False], [True, True, True]])
    weights = masked_softmax(scores, visible)
    share = 1 / (1 + math.exp(2.0))
    torch.testing.assert_close(weights[0], torch.tensor([share, 0, 1 - share]).double(), rtol=1e-7, atol=0.0)
    assert weights[0, 1] == 0.0
    assert weights[1].tolist() == [0.0, 0.0, 0.0]
    assert torch.equal(weights[2], scores[2].softmax(-1))
    assert torch.equal(masked_softmax(scores, None), scores.softmax(-1))
    # Anomaly detection also finds a NaN on the way back that a later step would hide.
    with torch.autograd.set_detect_anomaly(True):
        (weights**2).sum().backward()
    assert scores.grad.isfinite().all()
    assert scores.grad[1].tolist() == [0.0, 0.0, 0.0]
    assert scores.grad[0, 1] == 0.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.0, "min", "max"])
def test_a_hidden_score_takes_nothing_however_large(dtype, value):
    # An additive fill would be beaten by the dtype's extremes, or overflow with a second one.
    limits = torch.finfo(dtype)
    seen = {"min": limits.min, "max": limits.max}.get(value, value)
    scores = torch.tensor([[limits.max, seen]], dtype=dtype)
    assert masked_softmax(scores, torch.tensor([[False, True]])).tolist() == [[0.0, 1.0]]


def test_average_sums_in_the_dtype_of_the_weights():
    weights = torch.full((1, 1, 1, 4096), 1 / 4096)
    v = torch.full((1, 1, 4096, 1), 60000.0).half()
    out = average(weights, v)
    assert out.dtype == torch.float16
    assert out.item() == v[0, 0, 0, 0].item()


def test_both_visible():
    a, b = torch.tensor([True, True, False]), torch.tensor([True, False, False])
    assert both_visible(None, None) is None
    assert both_visible(a, None) is a
    assert both_visible(None, b) is b
    assert both_visible(a, b).tolist() == [True, False, False]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [1, 2, 3, 4, 20])
@pytest.mark.parametrize(("L", "S"), [(7, 7), (1, 7), (3, 7), (7, 3)])
@pytest.mark.parametrize("num_global", [0, 1, 2])
def test_window_visible(L, S, window, causal, num_global):
    visible = window_visible(L, S, window, causal, torch.device("cpu"), num_global)
    assert visible.shape == (L, S)
    for i in range(L):
        p = S - L + i
        for j in range(S):
            near = 0 <= p - j < window if causal else -((window - 1) // 2) <= j - p <= window // 2
            assert bool(visible[i, j]) == (near or (num_global > 0 and (j < num_global or p < num_global)))


@pytest.mark.parametrize(
    ("length", "size", "expected"),
    [(0, 3, []), (1, 3, [(0, 1)]), (6, 3, [(0, 3), (3, 6)]), (7, 3, [(0, 3), (3, 6), (6, 7)]), (2, 9, [(0, 2)])],
)
def test_chunks(length, size, expected):
    assert list(chunks(length, size)) == expected


def test_pieces_have_many_queries_of_few_rows_of_the_batch():
    """Of one query at a time a product would read every key for little."""

    def of(B, H, L, S, bound):
        return [(piece.batch.start, piece.batch.stop, piece.rows) for piece in pieces(torch.empty(B, H, L, 1), S, bound)]

    assert of(1, 4, 4096, 4096, 2**20) == [(0, 1, 64)]
    assert of(3, 16, 1024, 1024, 2**20) == [(0, 1, 64), (1, 2, 64), (2, 3, 64)]
    assert of(5, 1, 128, 128, 2**14) == [(0, 2, 64), (2, 4, 64), (4, 5, 64)]
    assert of(2, 2, 8, 8, 10**9)[0][:2] == (0, 2)
    assert of(2, 2, 8, 8, 1) == [(0, 1, 1), (1, 2, 1)]  # never less than a query
