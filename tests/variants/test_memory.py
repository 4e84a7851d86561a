import pytest
import torch

from core import Mask, ShapeError, build
from tests.variants import oracles
from tests.variants.grid import D, H, check_against_oracle, check_gradients


@pytest.mark.parametrize(("num_slots", "value"), [(0, 1.0), (1, 0.5), (3, 1.0)])
def test_equals_the_loops(num_slots, value):
    torch.manual_seed(0)
    config = {"num_slots": num_slots, "temperature": value}
    attention = build("memory", num_heads=H, head_dim=D, **config).double()
    slots = attention.keys.tolist(), attention.values.tolist()
    check_against_oracle("memory", config, oracles.temperature(value), dv=D, slots=slots, attention=attention)


@pytest.mark.parametrize("num_slots", [1, 3])
def test_gradients(num_slots):
    check_gradients("memory", {"num_slots": num_slots}, dv=3)


def test_weights_cover_the_sequence_only():
    torch.manual_seed(0)
    attention = build("memory", num_heads=2, head_dim=4)
    q = torch.randn(1, 2, 5, 4)
    weights = attention(q, q, q, need_weights=True).weights
    assert weights.shape == (1, 2, 5, 5)
    assert (weights.sum(-1) < 1).all()


def test_slots_alone_make_no_output():
    attention = build("memory", num_heads=2, head_dim=4)
    q = torch.randn(2, 2, 3, 4)
    keys = torch.tensor([[False, False, False], [True, True, True]])
    for plain in (False, True):
        out = attention(q, q, q, Mask(keys=keys), need_weights=plain).out
        assert (out[0] == 0).all()
        assert (out[1] != 0).all()


def test_other_value_dims_are_refused():
    attention = build("memory", num_heads=2, head_dim=4)
    q = torch.randn(1, 2, 3, 4)
    for call in (lambda v: attention(q, q, v), lambda v: attention.step(q, q, v, None)):
        with pytest.raises(ShapeError, match="head dim of the slots, 4, got 5"):
            call(torch.randn(1, 2, 3, 5))
