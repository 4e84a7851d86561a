import copy
import pickle

import pytest
import torch

from core import (
    Attention,
    AttentionConfig,
    AttentionError,
    AttentionOutput,
    Mask,
    MaskError,
    ShapeError,
    Spec,
    build,
    get,
    names,
)
from core.attention import expand_heads

B, H, HKV, L, S, D, DV = 2, 6, 3, 4, 7, 5, 8
HOUSE = names()


def made(variant, length=L, source=L, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    dim = D if variant == "memory" else DV  # its slots have one
    shapes = (B, H, length, D), (B, HKV, source, D), (B, HKV, source, dim)
    return build(variant, num_heads=H, head_dim=D), *(
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes
    )


def test_the_list_is_whole():
    assert {"linear", "local_global", "standard", "temperature", "topk", "uniform"} <= set(HOUSE)


@pytest.mark.parametrize("variant", HOUSE)
class TestRefusals:
    @pytest.mark.parametrize(
        ("q", "k", "v", "both"),
        [
            ((B, H, L, D), (B, HKV, L, D), (B, HKV, L + 2, DV), ("4", "6")),
            ((B, H, L, D), (B, HKV, L, D), (B + 1, HKV, L, DV), ("2", "3")),
            ((B, H, L, D), (B + 3, HKV, L, D), (B, HKV, L, DV), ("2", "5")),
            ((B, H + 2, L, D), (B, HKV, L, D), (B, HKV, L, DV), ("6", "8")),
            ((B, H, L, D + 4), (B, HKV, L, D + 4), (B, HKV, L, DV), ("5", "9")),
            ((B, H, L, D), (B, HKV, L, D + 4), (B, HKV, L, DV), ("5", "9")),
            ((B, H, L, D), (B, HKV, L, D), (B, 1, L, DV), ("3", "1")),
            ((B, H, L, D), (B, 4, L, D), (B, 4, L, DV), ("6", "4")),
            ((B, H, L, D), (B, 12, L, D), (B, 12, L, DV), ("6", "12")),
            ((B, H, L, D), (B, 0, L, D), (B, 0, L, DV), ("6", "0")),
            ((B, L, D), (B, HKV, L, D), (B, HKV, L, DV), ("(2, 4, 5)",)),
            ((B, H, L, D), (B, HKV, L, D), (B, L, DV), ("(2, 4, 8)",)),
        ],
    )
    def test_shapes(self, variant, q, k, v, both):
        attention = build(variant, num_heads=H, head_dim=D)
        with pytest.raises(ShapeError, match=variant) as caught:
            attention(torch.zeros(q), torch.zeros(k), torch.zeros(v))
        assert all(number in str(caught.value) for number in both)
        with pytest.raises(ShapeError, match=variant):
            attention.step(torch.zeros(q), torch.zeros(k), torch.zeros(v), None)

    def test_dtypes_and_devices(self, variant):
        attention, q, k, v = made(variant)
        with pytest.raises(ShapeError, match=r"k must have the dtype of q, torch.float32, got torch.float64"):
            attention(q, k.double(), v)
        with pytest.raises(ShapeError, match=r"v must have the dtype of q, torch.float32, got torch.bfloat16"):
            attention(q, k, v.bfloat16())
        with pytest.raises(ShapeError, match=r"v must be on the device of q, cpu, got meta"):
            attention(q, k, v.to("meta"))
        with pytest.raises(ShapeError, match=r"q must be floating point, got torch.int64"):
            attention(q.long(), k.long(), v.long())

    def test_masks(self, variant):
        attention, q, k, v = made(variant)
        with pytest.raises(MaskError, match=r"\(2, 4\).*\(2, 5\)"):
            attention(q, k, v, Mask(keys=torch.ones(B, L + 1, dtype=torch.bool)))
        with pytest.raises(MaskError, match=r"\(4, 4\).*\(4, 5\)"):
            attention(q, k, v, Mask(pairs=torch.ones(L, L + 1, dtype=torch.bool)))

    def test_what_is_not_claimed(self, variant, monkeypatch):
        attention, q, k, v = made(variant)
        monkeypatch.setattr(type(attention), "spec", Spec())
        _, _, long_k, long_v = made(variant, source=S)
        everything = torch.ones(B, L, dtype=torch.bool)
        for mask, inputs, words in (
            (Mask(causal=True), (q, k, v), "a causal mask"),
            (Mask(keys=everything), (q, k, v), "a padding mask"),
            (Mask(pairs=torch.ones(L, L, dtype=torch.bool)), (q, k, v), "a pair mask"),
            (Mask(), (q, long_k, long_v), "cross-attention \\(L 4, S 7\\)"),
        ):
            with pytest.raises(MaskError, match=f"{variant}: cannot honour {words}"):
                attention(*inputs, mask)
        with pytest.raises(MaskError, match=variant):
            attention.step(q, k, v, None)
        monkeypatch.setattr(type(attention), "spec", Spec(causal=True, padding=True))
        with pytest.raises(MaskError, match=r"causal attention with L != S \(L 4, S 7\)"):
            attention(q, long_k, long_v, Mask(causal=True))

    def test_a_state_of_other_tokens(self, variant):
        attention, q, k, v = made(variant)
        _, state = attention.step(q, k, v, None)
        for other_q, other_k, other_v in (
            (q[:1], k[:1], v[:1]),  # another batch
            (q, k, v[..., :3]),  # another value dim, for which a memory has no slots
        ):
            with pytest.raises(ShapeError, match=r"state|slots"):
                attention.step(other_q, other_k, other_v, state)
        for keys in (torch.ones(B, L + 1, dtype=torch.bool), torch.ones(1, L, dtype=torch.bool), torch.ones(B, L)):
            with pytest.raises(MaskError, match="mask keys"):
                attention.step(q, k, v, state, keys)


@pytest.mark.parametrize("variant", HOUSE)
class TestEveryVariant:
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
    def test_shapes_and_dtypes(self, variant, dtype):
        attention, q, k, v = made(variant, dtype=dtype)
        result = attention(q, k, v, Mask(causal=True))
        assert type(result) is AttentionOutput
        assert result.out.shape == (B, H, L, v.shape[-1])
        assert result.out.dtype == dtype
        assert result.weights is None
        out, weights = attention(q, k, v, Mask(causal=True), need_weights=True)
        assert weights.shape == (B, H, L, L)
        assert weights.dtype == dtype
        assert out.dtype == dtype

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_half_precision_is_the_rounding_of_float32(self, variant, dtype):
        # The inputs are exact in both; the output is rounded once, and weights times values at most once more.
        attention, q, k, v = made(variant, dtype=dtype)
        keys = torch.ones(B, L, dtype=torch.bool)
        keys[0, -1] = False
        for mask in (Mask(), Mask(causal=True, keys=keys)):
            exact = attention(q.float(), k.float(), v.float(), mask).out
            for plain in (False, True):
                tolerance = 4 * torch.finfo(dtype).eps
                given = attention(q, k, v, mask, need_weights=plain).out
                torch.testing.assert_close(given.float(), exact, rtol=tolerance, atol=tolerance)

    def test_the_largest_float16_does_not_overflow(self, variant):
        attention = build(variant, num_heads=2, head_dim=64)
        settings = {"temperature": 1e-8} if "temperature" in attention.Config.model_fields else {}
        for each in (attention, build(variant, num_heads=2, head_dim=64, **settings)):
            for width in (64,) if variant == "memory" else (64, 8):
                q = torch.full((1, 2, 5, 64), 6e4).half().requires_grad_()
                v = torch.full((1, 2, 5, width), 6e4).half().requires_grad_()
                for mask in (Mask(), Mask(causal=True), Mask(keys=torch.ones(1, 5, dtype=torch.bool))):
                    for plain in (False, True):
                        out = each(q, q, v, mask, need_weights=plain).out
                        # The rounding of 1/3 in the weights, and then that of float16.
                        torch.testing.assert_close(out, v.detach(), rtol=2e-3, atol=0.0)

    def test_layouts_of_the_mask(self, variant):
        attention, q, k, v = made(variant, dtype=torch.float64)
        keys = torch.rand(B, L, generator=torch.Generator().manual_seed(1)) < 0.7
        expected = attention(q, k, v, Mask(causal=True, keys=keys)).out
        wide = torch.zeros(B, 2 * L, dtype=torch.bool)
        wide[:, ::2] = keys
        for same in (keys.t().contiguous().t(), wide[:, ::2], torch.cat([keys, keys], dim=1)[:, :L]):
            assert torch.equal(attention(q, k, v, Mask(causal=True, keys=same)).out, expected)

    def test_inputs_are_not_modified(self, variant):
        attention, q, k, v = made(variant)
        keys = torch.ones(B, L, dtype=torch.bool)
        keys[0, 0] = False
        tensors = q, k, v, keys
        before = [tensor.clone() for tensor in tensors]
        for plain in (False, True):
            attention(q, k, v, Mask(causal=True, keys=keys), need_weights=plain)
        attention.step(q, k, v, attention.step(q, k, v, None, keys)[1], keys)
        assert all(torch.equal(now, then) for now, then in zip(tensors, before, strict=True))

    def test_a_row_does_not_depend_on_the_rest_of_the_batch(self, variant):
        attention, q, k, v = made(variant, dtype=torch.float64)
        whole = attention(q, k, v, Mask(causal=True)).out
        alone = attention(q[1:], k[1:], v[1:], Mask(causal=True)).out
        torch.testing.assert_close(alone, whole[1:], rtol=1e-12, atol=1e-12)

    def test_evaluation_repeats_itself(self, variant):
        attention, q, k, v = made(variant)
        attention.eval()
        first = attention(q, k, v, Mask(causal=True)).out
        attention(2 * q, k, v, Mask())
        assert torch.equal(attention(q, k, v, Mask(causal=True)).out, first)

    def test_on_another_device(self, variant):
        attention, q, k, v = made(variant)
        attention = attention.to("meta")
        keys = torch.ones(B, L, dtype=torch.bool, device="meta")
        for plain in (False, True):
            out = attention(
                *(x.to("meta").requires_grad_() for x in (q, k, v)), Mask(causal=True, keys=keys), need_weights=plain
            ).out
            assert out.device.type == "meta"
            out.sum().backward()
        state = None
        for _ in range(2):
            out, state = attention.step(*(x.to("meta") for x in (q, k, v)), state, keys)
            assert out.device.type == "meta"

    def test_copies_before_and_after_a_forward(self, variant):
        attention, q, k, v = made(variant)
        for parameter in attention.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        expected = None
        for _ in range(2):
            fresh = build(variant, num_heads=H, head_dim=D)
            fresh.load_state_dict(attention.state_dict())
            for twin in (copy.deepcopy(attention), pickle.loads(pickle.dumps(attention)), fresh):
                given = twin(q, k, v, Mask(causal=True)).out
                expected = given if expected is None else expected
                assert torch.equal(given, expected)
            attention(q, k, v.requires_grad_(), Mask(causal=True), need_weights=True).out.sum().backward()

    def test_settings_are_typed(self, variant):
        assert issubclass(get(variant).Config, AttentionConfig)
        get(variant).Config()


def test_expand_heads():
    x = torch.arange(3.0).reshape(1, 3, 1, 1)
    assert expand_heads(x, 6).flatten().tolist() == [0, 0, 1, 1, 2, 2]
    assert expand_heads(x, 3) is x


def test_a_plugin_without_attend_says_so():
    x = torch.zeros(1, 1, 2, 2)
    with pytest.raises(NotImplementedError, match="Attention must define attend"):
        Attention(1, 2, AttentionConfig())(x, x, x)


def test_every_refusal_is_a_value_error():
    from core import errors

    kinds = {kind for kind in vars(errors).values() if isinstance(kind, type)}
    assert len(kinds) >= 9
    refusals = kinds - {errors.MissingExtraError}  # nothing was refused there: something is to be installed
    assert all(issubclass(kind, AttentionError) and issubclass(kind, ValueError) for kind in refusals)
    assert issubclass(errors.MissingExtraError, ImportError)
    assert not issubclass(errors.MissingExtraError, ValueError)
