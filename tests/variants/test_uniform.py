import torch

from core import build
from tests.variants import oracles
from tests.variants.grid import check_against_oracle, check_gradients


def test_equals_the_loops():
    check_against_oracle("uniform", {}, oracles.uniform)


def test_gradients():
    check_gradients("uniform", {})


def test_scores_do_not_matter():
    torch.manual_seed(0)
    attention = build("uniform", num_heads=2, head_dim=4)
    q, k, v = (torch.randn(1, 2, 5, 4) for _ in range(3))
    assert torch.equal(attention(q, k, v).out, attention(100 * q, -k, v).out)
