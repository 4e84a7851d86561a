import pytest
import torch

from core import ConfigError, Mask, build
from tests.variants import oracles
from tests.variants.grid import check_against_oracle, check_gradients


@pytest.mark.parametrize(("mass", "value"), [(0.1, 1.0), (0.5, 0.5), (0.9, 1.0), (0.999, 2.0), (1.0, 0.7)])
def test_equals_the_loops(mass, value):
    check_against_oracle("top_p", {"mass": mass, "temperature": value}, oracles.top_p(mass, value))


def test_gradients():
    check_gradients("top_p", {"mass": 0.6})


def kept(mass, shares, **mask):
    """How many keys of these shares of the softmax are kept: D is 1, so log(share) is the score."""
    k = torch.tensor(shares, dtype=torch.float64).log()[None, None, :, None]
    q = torch.ones(1, 1, 1, 1).double()
    attention = build("top_p", num_heads=1, head_dim=1, mass=mass)
    return attention(q, k, k, Mask(**mask), need_weights=True).weights[0, 0, 0]


def test_the_fewest_that_reach_the_mass():
    shares = [0.1, 0.4, 0.2, 0.3]
    for mass, indices in ((0.3, [1]), (0.4, [1]), (0.45, [1, 3]), (0.7, [1, 3]), (0.75, [1, 2, 3]), (0.95, [0, 1, 2, 3])):
        weights = kept(mass, shares)
        assert weights.nonzero().flatten().tolist() == indices
        total = sum(shares[index] for index in indices)
        assert weights[indices].tolist() == pytest.approx([shares[index] / total for index in indices], abs=1e-12)


@pytest.mark.parametrize("S", [10, 100, 1000])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_among_equals_the_lowest_index_is_kept_and_no_more_than_needed(S, dtype):
    zeros = torch.zeros(1, 1, S, 2, dtype=dtype)
    for mass in (0.1, 0.3, 0.5, 0.7, 0.9):
        attention = build("top_p", num_heads=1, head_dim=2, mass=mass)
        weights = attention(zeros[:, :, :1], zeros, zeros, need_weights=True).weights[0, 0, 0]
        assert weights.nonzero().flatten().tolist() == list(range(round(mass * S)))


def test_hidden_keys_have_no_mass():
    hidden = torch.tensor([[True, False, True, True]])
    weights = kept(0.5, [0.2, 0.5, 0.2, 0.1], keys=hidden)
    assert weights.nonzero().flatten().tolist() == [0, 2]  # 0.2 of the visible 0.5 is less than half
    assert weights.tolist() == pytest.approx([0.5, 0.0, 0.5, 0.0])


@pytest.mark.parametrize("mass", [0.0, -0.1, 1.1, float("nan")])
def test_a_mass_that_is_no_share(mass):
    with pytest.raises(ConfigError, match="mass"):
        build("top_p", num_heads=1, head_dim=2, mass=mass)
