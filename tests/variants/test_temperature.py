import math

import pytest
import torch

from core import ConfigError, build
from tests.variants import oracles
from tests.variants.grid import B, D, H, check_against_oracle, check_gradients
from variants.temperature import HIGH, LOW


@pytest.mark.parametrize("value", [0.3, 1.0, 2.5, 1 / math.sqrt(D)])
def test_equals_the_loops(value):
    check_against_oracle("temperature", {"temperature": value}, oracles.temperature(value))


def test_a_learned_one_starts_where_it_was_told():
    check_against_oracle("temperature", {"temperature": 1.0, "learn": "shared"}, oracles.temperature(1.0))


@pytest.mark.parametrize("learn", ["none", "shared", "per_head"])
def test_gradients_reach_inputs_and_temperature(learn):
    check_gradients("temperature", {"temperature": 0.7, "learn": learn})


def test_each_head_has_its_own():
    torch.manual_seed(0)
    attention = build("temperature", num_heads=H, head_dim=D, learn="per_head").double()
    with torch.no_grad():
        attention.position.copy_(torch.linspace(-1, 1, H, dtype=torch.float64)[:, None, None])
    q, k, v = (torch.randn(B, H, 5, D, dtype=torch.float64) for _ in range(3))
    for plain in (False, True):
        out = attention(q, k, v, need_weights=plain).out
        for head in range(H):
            share = 1 / (1 + math.exp(-attention.position[head].item()))
            weigh = oracles.temperature(LOW * (HIGH / LOW) ** share)
            expected, _ = oracles.attend(weigh, *(x[:, head : head + 1].tolist() for x in (q, k, v)))
            torch.testing.assert_close(
                out[:, head : head + 1], torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12
            )


@pytest.mark.parametrize("start", [0.02, 0.1, 1.0, 50.0])
def test_learned_start(start):
    # The parameter is float32.
    value = build("temperature", num_heads=2, head_dim=4, temperature=start, learn="per_head").temperature()
    torch.testing.assert_close(value, torch.full((2, 1, 1), start), rtol=1e-5, atol=0.0)


def test_both_paths_agree_where_the_learned_parameter_is_narrower_than_the_input():
    torch.manual_seed(0)
    attention = build("temperature", num_heads=2, head_dim=3, temperature=0.3, learn="per_head")
    q, k, v = (torch.randn(2, 2, 5, 3, dtype=torch.float64) for _ in range(3))
    fast, plain = attention(q, k, v).out, attention(q, k, v, need_weights=True).out
    torch.testing.assert_close(fast, plain, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("start", [LOW, HIGH, 1e-3, 1000.0])
def test_a_learned_one_must_start_within_its_bounds(start):
    with pytest.raises(ConfigError, match=r"between 0.01 and 100.0, got") as caught:
        build("temperature", num_heads=2, head_dim=4, temperature=start, learn="shared")
    assert str(start) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("raw", [-1e4, -30.0, 0.0, 30.0, 1e4])
def test_a_learned_one_stays_positive_and_bounded_wherever_training_drives_it(raw):
    attention = build("temperature", num_heads=2, head_dim=4, learn="per_head")
    with torch.no_grad():
        attention.position.fill_(raw)
    value = attention.temperature()
    assert (value >= LOW * (1 - 1e-6)).all()
    assert (value <= HIGH * (1 + 1e-6)).all()
    q = torch.randn(1, 2, 3, 4)
    out = attention(q, q, q).out
    out.sum().backward()
    assert out.isfinite().all()
    assert attention.position.grad.isfinite().all()
