import pytest
import torch

from core import ConfigError, Mask, build
from tests.variants import oracles
from tests.variants.grid import check_against_oracle, check_gradients


@pytest.mark.parametrize(("keep", "value"), [(1, 1.0), (2, 0.5), (3, 1.0), (5, 2.0), (100, 1.0)])
def test_equals_the_loops(keep, value):
    check_against_oracle("topk", {"keep": keep, "temperature": value}, oracles.topk(keep, value))


def test_gradients():
    check_gradients("topk", {"keep": 2})


@pytest.mark.parametrize("S", [4, 7, 33, 100, 1000])
@pytest.mark.parametrize("keep", [1, 2, 3])
def test_among_equals_the_lowest_visible_index_is_kept(S, keep):
    q, k = torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, S, 2)
    keys = torch.ones(1, S, dtype=torch.bool)
    keys[0, 0] = False
    weights = build("topk", num_heads=1, head_dim=2, keep=keep)(q, k, k, Mask(keys=keys), need_weights=True).weights
    assert weights[0, 0, 0].nonzero().flatten().tolist() == list(range(1, 1 + keep))


def test_ties_across_the_threshold_equal_the_loops():
    torch.manual_seed(0)
    # Whole-number scores tie all the time; D = 1 and T = 1 leave them exact.
    q = torch.ones(1, 1, 20, 1, dtype=torch.float64)
    k = torch.randint(-2, 3, (1, 1, 20, 1)).double()
    v = torch.randn(1, 1, 20, 2, dtype=torch.float64)
    for keep in (1, 4, 9, 19):
        attention = build("topk", num_heads=1, head_dim=1, keep=keep)
        for causal in (False, True):
            expected, weights = oracles.attend(oracles.topk(keep), q.tolist(), k.tolist(), v.tolist(), causal=causal)
            given = attention(q, k, v, Mask(causal=causal), need_weights=True)
            torch.testing.assert_close(given.out, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)
            assert torch.equal(given.weights > 0, torch.tensor(weights) > 0)


@pytest.mark.parametrize("keep", [0, -1])
def test_keeps_at_least_one(keep):
    with pytest.raises(ConfigError, match=f"keep: .* 1, got {keep}"):
        build("topk", num_heads=1, head_dim=2, keep=keep)
