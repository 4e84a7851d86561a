import math

import pytest
import torch

from core import ConfigError, build
from tests.variants import oracles
from tests.variants.grid import B, D, H, check_against_oracle, check_gradients
from variants.entmax import LOW


@pytest.mark.parametrize("alpha", [1.0, 1.01, 1.2, 1.5, 1.8, 2.0])
def test_equals_the_loops(alpha):
    check_against_oracle("entmax", {"alpha": alpha}, oracles.entmax(alpha))


@pytest.mark.parametrize(
    "config", [{"alpha": 1.0}, {"alpha": 1.3}, {"alpha": 1.5}, {"alpha": 2.0}, {"alpha": 1.6, "learn": "per_head"}]
)
def test_gradients(config):
    check_gradients("entmax", config)


def test_each_head_has_its_own():
    attention = build("entmax", num_heads=H, head_dim=D, learn="per_head").double()
    with torch.no_grad():
        attention.position.copy_(torch.linspace(-3, 3, H, dtype=torch.float64)[:, None, None])
    alphas = [LOW + (2 - LOW) / (1 + math.exp(-attention.position[head].item())) for head in range(H)]
    assert max(alphas) - min(alphas) > 0.8
    check_against_oracle("entmax", {}, oracles.entmax(alphas), attention=attention)


@pytest.mark.parametrize("alpha", [1.02, 1.5, 1.9])
def test_a_learned_one_starts_where_it_was_told(alpha):
    attention = build("entmax", num_heads=2, head_dim=4, alpha=alpha, learn="per_head")
    torch.testing.assert_close(attention.alpha(), torch.full((2, 1, 1), alpha), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("raw", [-1e4, 0.0, 1e4])
def test_a_learned_one_stays_within_its_bounds(raw):
    attention = build("entmax", num_heads=2, head_dim=4, learn="per_head")
    with torch.no_grad():
        attention.position.fill_(raw)
    assert (attention.alpha() >= LOW * (1 - 1e-6)).all()
    assert (attention.alpha() <= 2.0 * (1 + 1e-6)).all()
    q = torch.randn(B, 2, 3, 4)
    out = attention(q, q, q).out
    out.sum().backward()
    assert out.isfinite().all()
    assert attention.position.grad.isfinite().all()


def test_larger_alphas_leave_fewer_keys():
    torch.manual_seed(0)
    q = torch.randn(1, 2, 50, 4)
    counts = []
    for alpha in (1.0, 1.2, 1.5, 2.0):
        weights = build("entmax", num_heads=2, head_dim=4, alpha=alpha)(q, q, q, need_weights=True).weights
        counts.append(int((weights > 0).sum()))
    assert counts[0] == 2 * 50 * 50
    assert counts == sorted(counts, reverse=True)
    assert len(set(counts)) == 4


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({"alpha": 0.9}, "alpha"),
        ({"alpha": 2.1}, "alpha"),
        ({"alpha": 1.005}, "1 .softmax. or at least 1.01, got 1.005"),
        ({"alpha": 1.0, "learn": "per_head"}, "between 1.01 and 2, got 1.0"),
        ({"alpha": 2.0, "learn": "per_head"}, "between 1.01 and 2, got 2.0"),
    ],
)
def test_an_alpha_out_of_bounds(config, what):
    with pytest.raises(ConfigError, match=what):
        build("entmax", num_heads=1, head_dim=2, **config)
