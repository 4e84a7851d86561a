import dataclasses
import itertools
import subprocess
import sys

import pytest
import torch

from core import Mask, MaskError, mask_from_multihead

B, H, L, S = 2, 3, 4, 6


def bools(*shape, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.6


def looped(mask, i, j, b, h, length=L, source=S):
    """The rule in words: every part must allow it."""
    causal = not mask.causal or j <= source - length + i
    keys = mask.keys is None or bool(mask.keys[b, j])
    pairs = mask.pairs is None or bool(mask.pairs.expand(B, H, length, source)[b, h, i, j])
    return causal and keys and pairs


PAIRS = [None, (L, S), (B, 1, L, S), (1, H, L, S), (B, H, L, S), (B, H, 1, S), (B, H, L, 1), (1, 1, 1, 1)]


@pytest.mark.parametrize("shape", PAIRS)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_visible_is_the_and_of_its_parts(causal, padded, shape):
    mask = Mask(causal, bools(B, S) if padded else None, None if shape is None else bools(*shape, seed=1))
    visible = mask.visible(L, S)
    if visible is None:
        assert not causal
        assert not padded
        assert shape is None
        return
    assert visible.dtype == torch.bool
    full = visible.expand(B, H, L, S)
    for b, h, i, j in itertools.product(range(B), range(H), range(L), range(S)):
        assert bool(full[b, h, i, j]) == looped(mask, i, j, b, h)


@pytest.mark.parametrize("shape", PAIRS)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 9])
def test_rows_are_slices_of_the_whole(causal, padded, shape, size):
    mask = Mask(causal, bools(B, S) if padded else None, None if shape is None else bools(*shape, seed=1))
    whole = mask.visible(L, S)
    whole = torch.ones(B, H, L, S, dtype=torch.bool) if whole is None else whole.expand(B, H, L, S)
    for start in range(0, L, size):
        stop = min(start + size, L)
        part = mask.visible(L, S, rows=(start, stop))
        part = torch.tensor(True) if part is None else part
        assert torch.equal(part.expand(B, H, stop - start, S), whole[:, :, start:stop])


@pytest.mark.parametrize(("length", "source"), [(5, 5), (1, 5), (3, 5), (5, 3), (5, 1)])
def test_causal_is_bottom_right_aligned(length, source):
    visible = Mask(causal=True).visible(length, source)
    visible = torch.ones(length, source, dtype=torch.bool) if visible is None else visible
    for i, j in itertools.product(range(length), range(source)):
        assert bool(visible[i, j]) == (j <= source - length + i)


def test_none_by_structure_where_nothing_hides():
    assert Mask().visible(4, 6) is None
    assert Mask(causal=True).visible(1, 6) is None
    assert Mask(causal=True).visible(4, 6, rows=(3, 4)) is None
    assert Mask(causal=True).visible(4, 6, rows=(2, 4)) is not None
    # A mask that happens to be all True is data, and data is not read.
    everything = torch.ones(B, S, dtype=torch.bool)
    assert Mask(keys=everything).visible(L, S) is not None
    assert Mask(keys=everything.to("meta")).visible(L, S, "meta").device.type == "meta"


def test_visible_is_made_on_the_device_asked_for():
    mask = Mask(causal=True, keys=bools(B, S), pairs=bools(L, S))
    assert mask.visible(L, S, torch.device("meta")).device.type == "meta"


def test_the_parts_keep_their_names():
    keys, pairs = bools(B, S), bools(L, S)
    mask = Mask(causal=True, keys=keys, pairs=pairs)
    assert mask.causal is True
    assert mask.keys is keys
    assert mask.pairs is pairs


@pytest.mark.parametrize("part", ["causal", "keys", "pairs"])
def test_immutable(part):
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(Mask(), part, None)


def test_visible_leaves_the_parts_alone():
    keys, pairs = bools(B, S), bools(B, H, L, S)
    before = keys.clone(), pairs.clone()
    Mask(causal=True, keys=keys, pairs=pairs).visible(L, S).zero_()
    Mask(causal=True, keys=keys).seen_keys(L, S)
    assert torch.equal(keys, before[0])
    assert torch.equal(pairs, before[1])


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Mask(), Mask()),
        (Mask(causal=True), Mask()),
        (Mask(causal=True), Mask(keys=bools(B, S))),
        (Mask(keys=bools(B, S)), Mask(keys=bools(B, S, seed=5))),
        (Mask(pairs=bools(L, S)), Mask(pairs=bools(B, H, L, S, seed=5))),
        (Mask(pairs=bools(B, 1, L, S)), Mask(True, bools(B, S), bools(1, H, L, S, seed=5))),
    ],
)
def test_two_masks_combine_by_and(first, second):
    def full(mask):
        visible = mask.visible(L, S)
        return torch.ones(B, H, L, S, dtype=torch.bool) if visible is None else visible.expand(B, H, L, S)

    for both in (first & second, second & first):
        assert isinstance(both, Mask)
        assert torch.equal(full(both), full(first) & full(second))


@pytest.mark.parametrize(
    ("first", "second", "sizes"),
    [
        (Mask(keys=bools(2, 5)), Mask(keys=bools(2, 6)), ("5", "6")),
        (Mask(keys=bools(1, 6)), Mask(keys=bools(2, 6)), ("1", "2")),
        (Mask(pairs=bools(4, 5)), Mask(pairs=bools(4, 6)), ("5", "6")),
        (Mask(pairs=bools(2, 1, 4, 6)), Mask(pairs=bools(3, 1, 4, 6)), ("2", "3")),
        (Mask(pairs=bools(4, 6)), Mask(pairs=bools(2, 1, 3, 6)), ("4", "3")),
    ],
)
def test_masks_that_do_not_fit_each_other_do_not_combine(first, second, sizes):
    with pytest.raises(MaskError) as caught:
        _ = first & second
    assert all(size in str(caught.value) for size in sizes)


@pytest.mark.parametrize("name", ["keys", "pairs"])
@pytest.mark.parametrize(
    "given", [torch.ones(2, 3), torch.zeros(2, 3).half(), torch.ones(2, 3, dtype=torch.int64), torch.ones(2, 3).byte()]
)
def test_only_bool_masks(name, given):
    with pytest.raises(MaskError, match=f"mask {name}: must be bool with True = may attend, got {given.dtype}"):
        Mask(**{name: given})


@pytest.mark.parametrize("given", [[[True, False]], "causal", 1])
def test_only_tensors(given):
    with pytest.raises(MaskError, match=type(given).__name__):
        Mask(keys=given)


@pytest.mark.parametrize("given", [1, 0, None, "yes", torch.tensor(True)])
def test_causal_is_true_or_false(given):
    with pytest.raises(MaskError, match="causal: must be True or False"):
        Mask(causal=given)


def test_three_axes_get_a_hint():
    # On the head axis it would fall silently where B == H.
    with pytest.raises(MaskError, match=r"\(2, 4, 6\).*mask\[:, None\]"):
        Mask(pairs=bools(B, L, S))


@pytest.mark.parametrize("shape", [(3,), (2, 3, 4, 5, 6)])
def test_other_numbers_of_axes(shape):
    with pytest.raises(MaskError, match="pairs: must be"):
        Mask(pairs=bools(*shape))
    with pytest.raises(MaskError, match="keys: must be"):
        Mask(keys=bools(*shape))


@pytest.mark.parametrize(
    ("mask", "both"),
    [
        (Mask(keys=bools(B, S + 1)), ("(2, 6)", "(2, 7)")),
        (Mask(keys=bools(B + 1, S)), ("(2, 6)", "(3, 6)")),
        (Mask(keys=bools(1, S)), ("(2, 6)", "(1, 6)")),
        (Mask(pairs=bools(L, 1)), ("(4, 6)", "(4, 1)")),
        (Mask(pairs=bools(S, L)), ("(4, 6)", "(6, 4)")),
        (Mask(pairs=bools(B, 2, L, S)), ("(2, 3, 4, 6)", "(2, 2, 4, 6)")),
        (Mask(pairs=bools(B, H, L, 2)), ("(2, 3, 4, 6)", "(2, 3, 4, 2)")),
    ],
)
def test_check_names_both_shapes(mask, both):
    with pytest.raises(ValueError, match="mask") as caught:
        mask.check(B, H, L, S)
    assert isinstance(caught.value, MaskError)
    assert all(shape in str(caught.value) for shape in both)


@pytest.mark.parametrize("shape", PAIRS)
@pytest.mark.parametrize("padded", [False, True])
def test_seen_keys(padded, shape):
    mask = Mask(True, bools(B, S) if padded else None, None if shape is None else bools(*shape, seed=1))
    seen = mask.seen_keys(L, S)
    if seen is None:
        assert not padded
        assert shape is None
        return
    for b, j in itertools.product(range(B), range(S)):
        expected = any(looped(mask, i, j, b, h) for i in range(L) for h in range(H))
        assert bool(seen.expand(B, S)[b, j]) == expected


def test_from_multihead_turns_the_polarity_around():
    ignore = torch.tensor([[False, False, True]])
    blocked = torch.tensor([[False, True, True], [False, False, True], [False, False, False]])
    mask = mask_from_multihead(ignore, blocked)
    assert mask.keys.tolist() == [[True, True, False]]
    assert mask.pairs.tolist() == [[True, False, False], [True, True, False], [True, True, True]]
    assert mask_from_multihead(causal=True).causal
    # batch b, head h of torch's 3-D form is row b * num_heads + h
    stacked = bools(B * H, L, S)
    pairs = mask_from_multihead(attn_mask=stacked, num_heads=H).pairs
    for b, h in itertools.product(range(B), range(H)):
        assert torch.equal(pairs[b, h], ~stacked[b * H + h])


def test_from_multihead_equals_the_layer_of_torch():
    torch.manual_seed(0)
    theirs = torch.nn.MultiheadAttention(6, H, batch_first=True).double()
    x, context = torch.randn(B, L, 6).double(), torch.randn(B, S, 6).double()
    ignore, blocked = bools(B, S), bools(B * H, L, S, seed=3)
    ignore[:, 0] = False
    blocked[..., 0] = False
    expected, _ = theirs(x, context, context, key_padding_mask=ignore, attn_mask=blocked)

    from core import build

    mask = mask_from_multihead(ignore, blocked, num_heads=H)
    weights, biases = theirs.in_proj_weight.chunk(3), theirs.in_proj_bias.chunk(3)
    q, k, v = (
        torch.nn.functional.linear(source, weight, bias).unflatten(-1, (H, 2)).transpose(1, 2)
        for source, weight, bias in zip((x, context, context), weights, biases, strict=True)
    )
    out = build("standard", num_heads=H, head_dim=2)(q, k, v, mask).out
    torch.testing.assert_close(theirs.out_proj(out.transpose(1, 2).flatten(2)), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("given", [torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.int64)])
def test_from_multihead_refuses_what_is_not_bool(given):
    # An additive mask of torch's would be misread as its opposite.
    with pytest.raises(MaskError, match="key_padding_mask: must be bool"):
        mask_from_multihead(given)
    with pytest.raises(MaskError, match="attn_mask: must be bool"):
        mask_from_multihead(attn_mask=given)


@pytest.mark.parametrize("num_heads", [None, 0, 4])
def test_from_multihead_needs_heads_that_divide(num_heads):
    with pytest.raises(MaskError, match=f"6 must be B \\* num_heads, but num_heads is {num_heads}"):
        mask_from_multihead(attn_mask=bools(6, L, S), num_heads=num_heads)


def test_the_refusals_are_no_asserts():
    script = """
import torch, variants
from core import Mask, build
x, y = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 5, 4)
attention = build("standard", num_heads=2, head_dim=4)
linear = build("linear", num_heads=2, head_dim=4)
pairs = torch.ones(3, 3, dtype=torch.bool)
calls = [
    lambda: Mask(keys=torch.ones(1, 3)),
    lambda: Mask(pairs=torch.ones(1, 3, 3, dtype=torch.bool)),
    lambda: attention(x, x, y),
    lambda: attention(x, x, x, Mask(keys=pairs[:1, :2])),
    lambda: linear(x, x, x, Mask(pairs=pairs)),
    lambda: build("standard", num_heads=0, head_dim=4),
    lambda: build("topk", num_heads=1, head_dim=4, keep=0),
    lambda: build("nothing", num_heads=1, head_dim=4),
]
for call in calls:
    try:
        call()
    except ValueError as error:
        print(type(error).__module__)
"""
    done = subprocess.run([sys.executable, "-O", "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["core.errors"] * 8
