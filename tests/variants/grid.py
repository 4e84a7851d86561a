"""The grid on which each mechanism meets its oracle: masks x lengths x key/value heads x layouts x both paths."""

import itertools

import torch

from core import Mask, build
from tests.variants import oracles

# Sizes that differ pairwise, so that a swapped axis cannot pass.
B, H, D, DV = 2, 4, 3, 5
LENGTHS = [(6, 6), (1, 7), (4, 7), (7, 4), (5, 1)]
# Float64 against float64: what is left is the order of a few additions.
TOLERANCE = {"rtol": 1e-12, "atol": 1e-12}


def keys_of(kind, S):
    """Padding: none, on the right, on the left, or everywhere in one row of the batch."""
    keys = torch.ones(B, S, dtype=torch.bool)
    if kind == "none":
        return None
    if kind == "right":
        keys[0, (S + 1) // 2 :] = False
    elif kind == "left":
        keys[1, : S // 2] = False
    else:
        keys[1] = False
    return keys


def pairs_of(kind, L, S, generator):
    """Pairs: none, or random ones in each of the shapes that are allowed, the first query without any key."""
    shapes = {
        "square": (L, S),
        "per_batch": (B, 1, L, S),
        "per_head": (1, H, L, S),
        "full": (B, H, L, S),
        "row": (B, 1, 1, S),
        "column": (1, H, L, 1),
    }
    if kind == "none":
        return None
    pairs = torch.rand(shapes[kind], generator=generator) < 0.6
    if pairs.shape[-2] == L > 1:
        pairs[..., 0, :] = False
    return pairs


def layouts(tensor):
    """The same values: contiguous, transposed from (B, length, heads, dim), and every other element of a longer one."""
    yield "contiguous", tensor.contiguous()
    yield "transposed", tensor.transpose(1, 2).contiguous().transpose(1, 2)
    wide = torch.full((*tensor.shape[:-1], 2 * tensor.shape[-1]), 99.0, dtype=tensor.dtype)
    wide[..., ::2] = tensor
    yield "strided", wide[..., ::2]


def cases(pairs=True, cross=True):
    """(L, S, causal, kind of keys, kind of pairs, Hkv): every pair of values of two of them occurs."""
    pair_kinds = ["none", "square", "per_batch", "per_head", "full", "row", "column"] if pairs else ["none"]
    products = itertools.product(LENGTHS, [False, True], ["none", "right", "left", "row"], pair_kinds)
    for index, ((L, S), causal, key_kind, pair_kind) in enumerate(products):
        if cross or causal or L == S:
            yield L, S, causal, key_kind, pair_kind, (4, 2, 1)[index % 3]


def check_against_oracle(variant, config, weigh, *, pairs=True, cross=True, dv=DV, slots=None, attention=None):
    """Both paths of the variant, in every layout, equal the loops over floats.

    attention: the module, where its parameters are part of what the oracle knows.
    """
    if attention is None:
        attention = build(variant, num_heads=H, head_dim=D, **config).double()
    for number, (L, S, causal, key_kind, pair_kind, kv_heads) in enumerate(cases(pairs, cross)):
        generator = torch.Generator().manual_seed(number)
        q, k, v = (
            torch.randn(*shape, generator=generator, dtype=torch.float64)
            for shape in ((B, H, L, D), (B, kv_heads, S, D), (B, kv_heads, S, dv))
        )
        keys, pair_mask = keys_of(key_kind, S), pairs_of(pair_kind, L, S, generator)
        mask = Mask(causal=causal, keys=keys, pairs=pair_mask)
        out, weights = oracles.attend(
            weigh,
            *(x.tolist() for x in (q, k, v)),
            causal=causal,
            keys=None if keys is None else keys.tolist(),
            pairs=None if pair_mask is None else pair_mask.tolist(),
            slots=slots,
        )
        out, weights = torch.tensor(out, dtype=torch.float64), torch.tensor(weights, dtype=torch.float64)
        where = f"{variant} {config} L={L} S={S} causal={causal} keys={key_kind} pairs={pair_kind} Hkv={kv_heads}"
        for (layout, q_), (_, k_), (_, v_) in zip(layouts(q), layouts(k), layouts(v), strict=True):
            fast = attention(q_, k_, v_, mask)
            plain = attention(q_, k_, v_, mask, need_weights=True)
            assert fast.weights is None
            for name, given, expected in (
                ("fast out", fast.out, out),
                ("plain out", plain.out, out),
                ("weights", plain.weights, weights),
            ):
                torch.testing.assert_close(
                    given, expected, **TOLERANCE, msg=lambda text, n=name, w=where, y=layout: f"{w} {y}: {n}\n{text}"
                )


def check_gradients(variant, config, *, pairs=True, cross=True, dv=2):
    """Both paths' gradients equal central differences, with a row that sees nothing and a padded key among the rest."""
    attention = build(variant, num_heads=2, head_dim=3, **config).double()
    L, S = (3, 4) if cross else (4, 4)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in ((2, 2, L, 3), (2, 1, S, 3), (2, 1, S, dv))
    )
    keys = torch.ones(2, S, dtype=torch.bool)
    keys[0, -1] = False
    pair_mask = torch.ones(L, S, dtype=torch.bool)
    pair_mask[1] = False
    parameters = list(attention.parameters())
    for mask in (Mask(keys=keys, pairs=pair_mask if pairs else None), Mask(causal=True, keys=keys)):

        def fast(q, k, v, *_, mask=mask):
            return attention(q, k, v, mask).out

        def plain(q, k, v, *_, mask=mask):
            return attention(q, k, v, mask, need_weights=True)

        assert torch.autograd.gradcheck(fast, (q, k, v, *parameters))
        assert torch.autograd.gradcheck(plain, (q, k, v, *parameters))
