import pytest
import torch

from core import Mask, MaskError, build
from core.running_sums import BLOCK
from tests.variants import oracles
from tests.variants.grid import check_against_oracle, check_gradients

FEATURE_MAPS = ["elu", "relu", "taylor"]


@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
def test_equals_the_loops(feature_map):
    check_against_oracle("linear", {"feature_map": feature_map}, oracles.linear(feature_map), pairs=False)


@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
def test_gradients(feature_map):
    check_gradients("linear", {"feature_map": feature_map}, pairs=False)


@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
@pytest.mark.parametrize(
    ("L", "S"), [(BLOCK, BLOCK), (BLOCK + 1, BLOCK + 1), (2 * BLOCK - 1,) * 2, (3, 2 * BLOCK + 5), (2 * BLOCK + 5, 3)]
)
def test_causal_chunks_equal_the_plain_path(feature_map, L, S):
    torch.manual_seed(0)
    attention = build("linear", num_heads=2, head_dim=4, feature_map=feature_map)
    q, k, v = torch.randn(2, 2, L, 4).double(), torch.randn(2, 1, S, 4).double(), torch.randn(2, 1, S, 3).double()
    keys = torch.rand(2, S) < 0.8
    for mask in (Mask(causal=True), Mask(causal=True, keys=keys)):
        fast, plain = attention(q, k, v, mask).out, attention(q, k, v, mask, need_weights=True).out
        torch.testing.assert_close(fast, plain, rtol=1e-11, atol=1e-11)  # sums over up to 133 keys


@pytest.mark.parametrize("value", [-1e4, -200.0, -1.0])
@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
def test_weights_are_a_mean_however_negative_the_features(value, feature_map):
    # exp(-200) is 0 in float32: an unbounded elu + 1 would leave nothing to divide by.
    attention = build("linear", num_heads=1, head_dim=4, feature_map=feature_map)
    q, v = torch.full((1, 1, 3, 4), value), torch.tensor([1.0, 2.0, 3.0]).reshape(1, 1, 3, 1)
    for plain in (False, True):
        out = attention(q, q, v, Mask(causal=True), need_weights=plain).out
        torch.testing.assert_close(out.flatten(), torch.tensor([1.0, 1.5, 2.0]))


def test_the_state_has_a_constant_size():
    attention = build("linear", num_heads=2, head_dim=4)
    x = torch.randn(3, 2, 5, 4)
    sizes, state = [], None
    for _ in range(4):
        _, state = attention.step(x, x, x, state)
        sizes.append(state.nbytes)
    assert sizes == [3 * 2 * 4 * (4 + 1) * 4] * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_running_sums_are_wider_than_the_inputs(dtype):
    # A bfloat16 sum of ones stops at 256: then the mean of 2,000 ones would be nearly 8.
    attention = build("linear", num_heads=1, head_dim=2)
    x, ones = torch.zeros(1, 1, 2000, 2, dtype=dtype), torch.ones(1, 1, 2000, 1, dtype=dtype)
    out, state = attention.step(x, x, ones, None)
    assert torch.equal(out, ones)
    assert state.sums.dtype == torch.float32
    assert state.sums[0, 0, 0].tolist() == [2000.0, 2000.0]
    assert torch.equal(attention(x, x, ones, Mask(causal=True)).out, ones)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_running_sums_stay_wide_under_autocast(dtype):
    torch.manual_seed(0)
    attention = build("linear", num_heads=2, head_dim=4)
    q, k, v = (torch.randn(1, 2, 70, 4).to(dtype) for _ in range(3))
    with torch.autocast("cpu", dtype=dtype):
        out, state = attention.step(q, k, v, None)
    alone, sums = attention.step(q, k, v, None)
    assert state.sums.dtype == torch.float32
    assert torch.equal(state.sums, sums.sums)
    assert torch.equal(out, alone)


def test_pairs_are_refused():
    attention = build("linear", num_heads=1, head_dim=2)
    x = torch.zeros(1, 1, 3, 2)
    with pytest.raises(MaskError, match="linear: cannot honour a pair mask"):
        attention(x, x, x, Mask(pairs=torch.ones(3, 3, dtype=torch.bool)))
