"""What the contract suite measures, and the devices that it pretends to have."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from core import Attention, AttentionOutput, Mask, Spec, build
from core.contract import check
from core.contract.devices import OneDevice, _get, _set, fake_cuda
from core.contract.measure import Cost, exponent
from core.contract.subject import ViolationError
from tests.core import planted


def measured(variant, **config):
    """The rows of the card for one variant, {what: (found, claimed)}."""
    report = check(variant, configs=[config], rules=["costs_as_claimed"])
    assert report.ok, f"\n{report}"
    return {one.what: (one.found, one.claimed) for one in report.measured}


class TestCost:
    def test_elements_of_results_but_not_of_views(self):
        x = torch.ones(3, 4)
        with Cost() as cost:
            y = x @ x.T  # 9; the transpose is a view
            y.add_(1)  # 9, in place
            y[0].exp()  # 3
        assert cost.written == 21

    def test_a_fused_kernel_writes_its_scores(self):
        q, k = torch.randn(2, 3, 5, 8, requires_grad=True), torch.randn(2, 3, 7, 8)
        with Cost() as cost:
            out = F.scaled_dot_product_attention(q, k, k)
        scores = 2 * 3 * 5 * 7
        assert scores + out.numel() <= cost.written < 2 * scores + 4 * out.numel()
        with Cost() as backward:
            out.sum().backward()
        assert backward.written > scores

    def test_the_peak_is_what_is_alive_at_once(self):
        x = torch.zeros(1000)
        with Cost() as cost:
            y = x + 1  # 4,000 bytes
            z = y * y  # 8,000
            del y
            z = z.exp()  # 8,000 while both are there
            z = z.view(10, 100).T  # nothing new
        assert cost.peak == 8000

    def test_backward_is_seen(self):
        x = torch.randn(50, 50, requires_grad=True)
        with Cost() as forward:
            y = x.exp().sum()
        with Cost() as backward:
            y.backward()
        assert forward.written == 2501
        assert backward.written >= 2500

    def test_exponent(self):
        assert exponent(10, 40) == pytest.approx(1.0)
        assert exponent(10, 160) == pytest.approx(2.0)
        assert exponent(0, 0) == 0.0


def test_a_window_is_measured():
    rows = measured("local_global", window=20)
    assert rows["window (causal, L 300)"] == ("20 keys, j-i from -19 to +0", "window 20")
    assert rows["window (two-sided, L 300)"] == ("20 keys, j-i from -9 to +10", "window 20")
    assert rows["receptive field (causal)"][0].startswith("20 keys through k, 20 through v")


def test_a_selection_is_measured():
    rows = measured("topk", keep=6)
    assert rows["receptive field (causal)"][0].startswith("6 keys through k, 6 through v")
    assert rows["density (two-sided)"] == ("2 % of the visible keys", "min(6, visible) keys a row")
    # 1 + 2 + ... + 6 and 294 rows of 6, of 300 * 301 / 2
    share = (21 + 294 * 6) / 45150
    assert rows["density (causal)"][0] == f"{100 * share:.4g} % of the visible keys"


def test_state_of_decoding_is_measured():
    # 4 heads of 8 numbers, keys and values (of 5), in float32; linear: (8 features) x (5 + 1) sums.
    assert measured("standard")["decoding state (4 heads of 8)"][0] == "13,312 bytes after 64 tokens, 53,248 after 256"
    assert measured("linear")["decoding state (4 heads of 8)"][0] == "768 bytes after 64 tokens, 768 after 256"


@pytest.mark.parametrize(("variant", "time", "memory"), [("standard", 2, 1), ("linear", 1, 1), ("local_global", 1, 1)])
def test_growth_is_measured(variant, time, memory):
    rows = measured(variant)
    for what, power in (("elements written (L 256 to 1024)", time), ("peak bytes (L 256 to 1024)", memory)):
        found, claimed = rows[what]
        assert float(found.partition(",")[0].removeprefix("L^")) == pytest.approx(power, abs=0.15)
        assert claimed == f"L^{power}"


@pytest.mark.parametrize("variant", ["topk", "top_p", "uniform"])
def test_a_buffer_that_is_bounded_but_not_yet_full_is_looked_at_twice(variant):
    found, claimed = measured(variant)["peak bytes (L 1024 to 4096)"]
    assert float(found.partition(",")[0].removeprefix("L^")) < 1.0
    assert claimed == "L^1"


def test_a_contradicted_claim_says_both():
    (result,) = check(planted.ClaimsLinearMemory, rules=["costs_as_claimed"]).results
    assert "peak bytes (L 1024 to 4096): grow as L^2" in result.witness
    assert "claimed is L^1" in result.witness


def test_what_is_not_known_is_unknown():
    class Silent(Attention):
        """No claims, no weights."""

        spec = Spec()

        def attend(self, q, k, v, mask, need_weights):
            return AttentionOutput(v.expand(v.shape) + 0 * q.sum(), None)

    report = check(Silent, rules=["costs_as_claimed"])
    assert report.ok
    rows = {one.what: one for one in report.measured}
    assert rows["density (two-sided)"].found == "unknown"
    assert rows["elements written (L 256 to 1024)"].claimed == ""
    assert not any("decoding" in what for what in rows)


def test_the_card_and_the_document_hold_what_was_measured():
    report = check("topk", configs=[{"keep": 6}], rules=["costs_as_claimed"])
    assert "measured at keep=6, temperature=1.0:" in str(report)
    assert "claimed min(6, visible) keys a row" in str(report)
    (found,) = [one for one in report.as_dict()["measured"] if one["what"] == "elements written (L 256 to 1024)"]
    assert found["claimed"] == "L^2"
    assert found["fault"] == ""


INDICES = [
    0, -1, None, ..., slice(1, 3), (slice(None), None), (..., None), (..., 0), (0, ..., 1), (slice(None, None, 2), ...),
    (None, ..., slice(1, None), 0), (slice(None), torch.tensor([1, 0])), torch.tensor([True, False]), (..., [0, 2]),
    (slice(None), None, None, slice(None)), (torch.tensor([[True, False, True], [False, True, True]]), 1),
]  # fmt: skip


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_indexing_by_operations(index):
    x = torch.arange(2 * 3 * 4).reshape(2, 3, 4)
    assert torch.equal(_get(x, index), x[index])
    for value in (-1, -torch.ones_like(x[index])):
        given, expected = x.clone(), x.clone()
        _set(given, index, value)
        expected[index] = value
        assert torch.equal(given, expected)


def test_fake_cuda_has_no_data_and_a_device():
    with fake_cuda():
        x = torch.zeros(2, 3, device="cuda")
        assert (~(x[:, None] > 0)).device.type == "cuda"
        with pytest.raises(RuntimeError, match="two devices, cuda:0 and cpu"):
            x + torch.zeros(3)
        layer = build("standard", num_heads=2, head_dim=4)
        q = torch.zeros(1, 2, 5, 4, device="cuda")
        assert layer(q, q, q, Mask(causal=True)).out.is_cuda


def test_one_device():
    x = torch.zeros(2, 3, device="meta")
    with OneDevice("meta"):
        torch.where(x > 0, x, 0.0) + 1.0
        with pytest.raises(ViolationError, match=r"arange.* makes a tensor on cpu where the inputs are on meta"):
            torch.arange(3)
        with pytest.raises(ViolationError, match="makes a tensor on cpu"):
            torch.tensor(2.0)
    outside = torch.zeros(3)
    with OneDevice("meta"):
        outside.to("meta")
        with pytest.raises(ViolationError, match="gets a tensor on cpu"):
            x.add(outside)
