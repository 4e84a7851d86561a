import pytest
import torch

from core import Mask, build
from tests.variants import oracles
from tests.variants.grid import check_against_oracle, check_gradients


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"backend": "math"},
        {"backend": "sdpa"},
        {"chunk_size": 1},
        {"chunk_size": 3},
        {"chunk_size": 3, "backend": "math"},
    ],
)
def test_equals_the_loops(config):
    check_against_oracle("standard", config, oracles.standard)


@pytest.mark.parametrize("config", [{}, {"backend": "math"}, {"chunk_size": 2}])
def test_gradients(config):
    check_gradients("standard", config)


@pytest.mark.parametrize(("L", "S"), [(7, 7), (4, 9), (9, 4), (1, 6)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("chunk_size", [1, 3, 7, 100])
def test_chunks_equal_the_whole(L, S, causal, chunk_size):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 2, L, 4).double(), torch.randn(2, 1, S, 4).double(), torch.randn(2, 1, S, 4).double()
    keys, pairs = torch.rand(2, S) < 0.7, torch.rand(2, 1, L, S) < 0.7
    for mask in (Mask(causal=causal), Mask(causal=causal, keys=keys, pairs=pairs)):
        whole = build("standard", num_heads=2, head_dim=4)(q, k, v, mask).out
        chunked = build("standard", num_heads=2, head_dim=4, chunk_size=chunk_size)(q, k, v, mask).out
        torch.testing.assert_close(chunked, whole, rtol=1e-12, atol=1e-12)
