import pytest
import torch

from core import ConfigError, Mask, MaskError, build
from tests.variants import oracles
from tests.variants.grid import check_against_oracle, check_gradients


@pytest.mark.parametrize(
    ("window", "num_global", "value"),
    [(1, 0, 1.0), (2, 0, 1.0), (3, 1, 1.0), (4, 2, 0.5), (5, 0, 2.0), (100, 0, 1.0), (1, 100, 1.0)],
)
def test_equals_the_loops(window, num_global, value):
    config = {"window": window, "num_global": num_global, "temperature": value}
    check_against_oracle("local_global", config, oracles.local_global(window, num_global, value), cross=False)


@pytest.mark.parametrize("num_global", [0, 1])
def test_gradients(num_global):
    check_gradients("local_global", {"window": 2, "num_global": num_global}, cross=False)


@pytest.mark.parametrize("window", range(1, 12))
@pytest.mark.parametrize("causal", [False, True])
def test_an_inner_query_sees_exactly_the_window(window, causal):
    attention = build("local_global", num_heads=1, head_dim=2, window=window)
    q = torch.zeros(1, 1, 31, 2)
    weights = attention(q, q, q, Mask(causal=causal), need_weights=True).weights[0, 0]
    assert (weights[15] > 0).sum() == window
    assert weights[15, 15] > 0


def test_cross_attention_is_refused():
    attention = build("local_global", num_heads=1, head_dim=2)
    with pytest.raises(MaskError, match="L 3, S 5"):
        attention(torch.zeros(1, 1, 3, 2), torch.zeros(1, 1, 5, 2), torch.zeros(1, 1, 5, 2))


@pytest.mark.parametrize(("setting", "value"), [("window", 0), ("window", -2), ("num_global", -1)])
def test_limits(setting, value):
    with pytest.raises(ConfigError, match=f"{setting}: .*got {value}"):
        build("local_global", num_heads=1, head_dim=2, **{setting: value})


@pytest.mark.parametrize(("window", "num_global"), [(1, 0), (3, 0), (3, 2), (50, 0)])
def test_decoding_keeps_no_more_than_the_window(window, num_global):
    torch.manual_seed(0)
    attention = build("local_global", num_heads=2, head_dim=4, window=window, num_global=num_global).double()
    q, k, v = (torch.randn(2, 2, 12, 4, dtype=torch.float64) for _ in range(3))
    keys = torch.ones(2, 12, dtype=torch.bool)
    keys[0, :4] = False
    expected = attention(q, k, v, Mask(causal=True, keys=keys)).out
    outs, state = [], None
    for start, stop in ((0, 5), (5, 6), (6, 6), (6, 12)):
        part = (x[:, :, start:stop] for x in (q, k, v))
        out, state = attention.step(*part, state, keys[:, start:stop])
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs, dim=2), expected, rtol=1e-12, atol=1e-12)
    assert state.k.shape[2] == (12 if num_global else min(window - 1, 12))
    # What is kept is what is held: a view of the whole past would keep it alive.
    assert state.k.untyped_storage().nbytes() == state.k.nbytes
