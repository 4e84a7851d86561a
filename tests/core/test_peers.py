"""The contract suite on attention that others wrote: it accuses what is known to be wrong, and passes what is right."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from core import Attention, AttentionConfig, AttentionOutput, Mask, Spec, tunable
from core.contract import check
from core.functional import both_visible, masked_softmax, scaled_scores, window_visible


class TorchSDPA(Attention):
    """torch's own kernel, its mask given as bool."""

    spec = Spec(
        causal=True, padding=True, pairs=True, cross=True, decode=True, convex=True,
        equals_standard_when={}, time=2, memory=2,
    )  # fmt: skip

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, need_weights: bool) -> AttentionOutput:
        visible = mask.visible(q.shape[-2], k.shape[-2], q.device)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        weights = masked_softmax(scaled_scores(q, k), visible).to(q.dtype) if need_weights else None
        return AttentionOutput(out, weights)


class TorchIsCausal(TorchSDPA):
    """The same, with the flag `is_causal`, which is aligned top-left."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, need_weights: bool) -> AttentionOutput:
        if need_weights or not mask.causal or mask.keys is not None or mask.pairs is not None:
            return super().attend(q, k, v, mask, need_weights)
        return AttentionOutput(F.scaled_dot_product_attention(q, k, v, is_causal=True), None)


class Windows(Attention):
    """`local-attention` with an exact window, as its documentation offers it."""

    spec = Spec(causal=True, positional=True)

    class Config(AttentionConfig):
        window: int = tunable(16, low=2, high=64, ge=2)

    def local(self, causal: bool) -> torch.nn.Module:
        from local_attention import LocalAttention

        return LocalAttention(
            window_size=self.config.window, causal=causal, exact_windowsize=True, autopad=True, use_rotary_pos_emb=False
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, need_weights: bool) -> AttentionOutput:
        return AttentionOutput(self.local(mask.causal)(q, k, v), None)


class OurWindows(Windows):
    """The same claim, by this project's pattern."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, need_weights: bool) -> AttentionOutput:
        L, S = q.shape[-2], k.shape[-2]
        pattern = window_visible(L, S, self.config.window, mask.causal, q.device)
        weights = masked_softmax(scaled_scores(q, k), both_visible(mask.visible(L, S, q.device), pattern))
        return AttentionOutput(weights.to(v.dtype) @ v, weights.to(q.dtype) if need_weights else None)


def test_sdpa_passes():
    report = check(TorchSDPA)
    assert report.ok, f"\n{report}"


def test_its_causal_flag_does_not():
    report = check(TorchIsCausal)
    # Of a square it is right; with L != S its rows stand elsewhere than they must.
    assert {"causal_is_bottom_right", "decode_equals_forward"} <= {failure.rule for failure in report.failures}


@pytest.mark.parametrize("window", [8, 16, 50])
def test_an_exact_window_of_others_holds_one_key_more(window):
    pytest.importorskip("local_attention")
    (result,) = check(Windows, configs=[{"window": window}], rules=["window_is_exact"]).results
    assert not result.passed
    # Two-sided it looks a whole window to each side.
    assert f"two-sided, window {window}: row 150 attends {2 * window + 1} keys" in result.witness


@pytest.mark.parametrize("window", [8, 16, 50])
def test_and_causal_it_is_one_more(window):
    pytest.importorskip("local_attention")

    class Causal(Windows):
        spec = Spec(causal=True, positional=True)

        def local(self, causal: bool) -> torch.nn.Module:
            return super().local(True)

        def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, need_weights: bool) -> AttentionOutput:
            if mask.causal:
                return super().attend(q, k, v, mask, need_weights)
            return OurWindows.attend(self, q, k, v, mask, need_weights)

    (result,) = check(Causal, configs=[{"window": window}], rules=["window_is_exact"]).results
    assert not result.passed
    assert f"causal, window {window}: row 299 attends {window + 1} keys, j-i from -{window} to +0" in result.witness


def test_ours_is_exact():
    (result,) = check(OurWindows, rules=["window_is_exact"]).results
    assert result.passed, result.witness
