import pytest
import torch

from core import KeyValueState, LayerCache, Mask, ShapeError, build

B, H, HKV, S, D, DV = 2, 4, 2, 11, 4, 3
CONFIGS = [
    ("standard", {}),
    ("standard", {"chunk_size": 2}),
    ("temperature", {"temperature": 0.5}),
    ("temperature", {"learn": "per_head"}),
    ("topk", {"keep": 3}),
    ("local_global", {"window": 3}),
    ("local_global", {"window": 4, "num_global": 2}),
    ("linear", {}),
    ("linear", {"feature_map": "taylor"}),
    ("uniform", {}),
]


def inputs():
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((B, H, S, D), (B, HKV, S, D), (B, HKV, S, DV))
    ]


def padding(kind):
    keys = torch.ones(B, S, dtype=torch.bool)
    if kind == "left":
        keys[0, :4] = False
    if kind == "scattered":
        keys[1, [0, 5, 8]] = False
    return None if kind == "none" else keys


@pytest.mark.parametrize(("variant", "config"), CONFIGS)
@pytest.mark.parametrize("pieces", [[1] * S, [5, 1, 1, 4], [1, 0, 10], [S], [3, 8]])
@pytest.mark.parametrize("pad", ["none", "left", "scattered"])
def test_steps_equal_the_full_causal_forward(variant, config, pieces, pad):
    attention = build(variant, num_heads=H, head_dim=D, **config).double()
    q, k, v = inputs()
    keys = padding(pad)
    expected = attention(q, k, v, Mask(causal=True, keys=keys)).out
    outs, state, start = [], None, 0
    for length in pieces:
        part = slice(start, start + length)
        new = None if keys is None else keys[:, part]
        out, state = attention.step(q[:, :, part], k[:, :, part], v[:, :, part], state, new)
        assert out.shape == (B, H, length, DV)
        outs.append(out)
        start += length
    torch.testing.assert_close(torch.cat(outs, dim=2), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("variant", "config"), CONFIGS)
def test_padding_may_come_with_some_steps_only(variant, config):
    attention = build(variant, num_heads=H, head_dim=D, **config).double()
    q, k, v = inputs()
    keys = torch.ones(B, S, dtype=torch.bool)
    keys[0, 4:6] = False
    expected = attention(q, k, v, Mask(causal=True, keys=keys)).out
    outs, state = [], None
    for start, stop, new in ((0, 4, None), (4, 7, keys[:, 4:7]), (7, S, None)):
        out, state = attention.step(q[:, :, start:stop], k[:, :, start:stop], v[:, :, start:stop], state, new)
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs, dim=2), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("variant", "config"), CONFIGS)
def test_what_padding_holds_does_not_matter(variant, config):
    attention = build(variant, num_heads=H, head_dim=D, **config).double()
    q, k, v = inputs()
    keys = padding("left")
    clean, poisoned = [], []
    for fill, outs in ((0.0, clean), (float("nan"), poisoned)):
        bad_k, bad_v = (x.masked_fill(~keys[:, None, :, None], fill).requires_grad_() for x in (k, v))
        state = None
        for start, stop in ((0, 6), (6, S)):
            part = slice(start, stop)
            out, state = attention.step(q[:, :, part], bad_k[:, :, part], bad_v[:, :, part], state, keys[:, part])
            outs.append(out)
        outs.extend(torch.autograd.grad(torch.cat(outs, dim=2).sum(), (bad_k, bad_v), allow_unused=True))
    for one, other in zip(clean, poisoned, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)


@pytest.mark.parametrize(("variant", "config"), CONFIGS)
def test_an_old_state_stays_valid(variant, config):
    attention = build(variant, num_heads=H, head_dim=D, **config).double()
    q, k, v = inputs()
    first, second, third = slice(0, 5), slice(5, 8), slice(8, S)
    _, state = attention.step(q[:, :, first], k[:, :, first], v[:, :, first], None)
    one, _ = attention.step(q[:, :, second], k[:, :, second], v[:, :, second], state)
    attention.step(q[:, :, third], k[:, :, third], v[:, :, third], state)
    again, _ = attention.step(q[:, :, second], k[:, :, second], v[:, :, second], state)
    assert torch.equal(one, again)


def test_bytes():
    k, v = torch.zeros(2, 3, 5, 4), torch.zeros(2, 3, 5, 6)
    state = KeyValueState(k, v, None)
    assert state.nbytes == 2 * 3 * 5 * (4 + 6) * 4
    grown = state.extend(k[:, :, :1], v[:, :, :1], torch.ones(2, 1, dtype=torch.bool))
    assert grown.nbytes == 2 * 3 * 6 * (4 + 6) * 4 + 2 * 6
    assert grown.keys.all()
    assert LayerCache(state, 5).nbytes == state.nbytes


@pytest.mark.parametrize(("variant", "config"), CONFIGS)
def test_the_reported_bytes_are_those_held(variant, config):
    attention = build(variant, num_heads=H, head_dim=D, **config)
    q, k, v = (x.float() for x in inputs())
    _, state = attention.step(q, k, v, None, padding("left"))
    assert state.nbytes == sum(part.nbytes for part in state if part is not None)
    grouped = KeyValueState(k, v, None).nbytes
    if variant in ("standard", "topk"):  # key/value heads are kept as they come, not expanded
        assert state.nbytes == grouped + B * S


@pytest.mark.parametrize(
    ("shape", "both"),
    [((3, HKV, 1, D), ("(2, 2, 5, 4)", "(3, 2, 1, 4)")), ((2, 1, 1, D), ("(2, 2, 5, 4)", "(2, 1, 1, 4)"))],
)
def test_other_tokens_are_refused(shape, both):
    state = KeyValueState(torch.zeros(2, HKV, 5, D), torch.zeros(2, HKV, 5, D), None)
    with pytest.raises(ShapeError, match="state k") as caught:
        state.extend(torch.zeros(shape), torch.zeros(shape), None)
    assert all(each in str(caught.value) for each in both)
