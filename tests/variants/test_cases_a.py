"""Cases A1 to A19: faults that others have reported, with small inputs and the right values, for every variant concerned."""

import copy
import math
import pickle

import pytest
import torch
from torch.testing import assert_close

from core import ConfigError, Mask, MaskError, MultiHeadAttention, build, mask_from_multihead
from core.functional import masked_softmax, scaled_scores
from tests.variants.grid import layouts
from variants.additive import FEATURES

# With all scores equal, each of these is the mean of the visible values.
MEANS = [
    ("standard", {}),
    ("standard", {"backend": "math"}),
    ("standard", {"chunk_size": 1}),
    ("temperature", {"temperature": 0.5}),
    ("temperature", {"learn": "per_head"}),
    ("topk", {"keep": 100}),
    ("local_global", {"window": 100}),
    ("linear", {"feature_map": "elu"}),
    ("linear", {"feature_map": "relu"}),
    ("linear", {"feature_map": "taylor"}),
    ("additive", {"hidden_dim": 8}),
    ("top_p", {"mass": 1.0}),
    ("entmax", {"alpha": 1.0}),
    ("entmax", {"alpha": 1.5}),
    ("entmax", {"alpha": 1.7, "learn": "per_head"}),
    ("memory", {"num_slots": 0}),
    ("uniform", {}),
]
# With D = 2 these are softmax(q k^T / sqrt(2)) v.
SOFTMAX = [
    each
    for each in MEANS
    if each[0] not in ("linear", "uniform", "additive") and each[1].get("temperature") != 0.5 and each[1].get("alpha", 1.0) == 1.0
]
# What a mechanism does beside averaging: where a case is not about the mean.
ALL = [
    *MEANS,
    ("topk", {"keep": 2}),
    ("local_global", {"window": 2}),
    ("local_global", {"window": 3, "num_global": 1}),
    ("top_p", {"mass": 0.5}),
    ("entmax", {"alpha": 2.0}),
    ("memory", {}),
]
each_mean = pytest.mark.parametrize(("variant", "config"), MEANS)
each_variant = pytest.mark.parametrize(("variant", "config"), ALL)
each_softmax = pytest.mark.parametrize(("variant", "config"), SOFTMAX)
each_path = pytest.mark.parametrize("plain", [False, True])
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def heads(rows, dtype=torch.float64):
    """A list (length,) or (length, dim) as (1, 1, length, dim)."""
    tensor = torch.tensor(rows, dtype=dtype)
    return (tensor[:, None] if tensor.dim() == 1 else tensor)[None, None]


def bools(rows):
    return torch.tensor(rows, dtype=torch.bool)


def averaged(variant, config, values, mask, plain, queries=None, dtype=torch.float64):
    """The output for all scores equal, as a list; the same for contiguous inputs and for views."""
    v = heads(values, dtype)
    q, k = (torch.zeros(1, 1, n, 1, dtype=dtype) for n in (queries or len(values), len(values)))
    attention = build(variant, num_heads=1, head_dim=1, **config)
    found = [
        attention(q_, k_, v_, mask, need_weights=plain).out.flatten()
        for (_, q_), (_, k_), (_, v_) in zip(layouts(q), layouts(k), layouts(v), strict=True)
    ]
    for other in found[1:]:
        assert_close(other, found[0], rtol=4 * torch.finfo(dtype).eps, atol=0.0)
    return found[0].tolist()


def claims(variant, claim):
    return getattr(type(build(variant, num_heads=1, head_dim=2)).spec, claim)


def scores_of(values, dtype=torch.float64):
    """q (1, 1, 1, 1) and k whose scores are these values: D is 1, so nothing is scaled."""
    return torch.ones(1, 1, 1, 1, dtype=dtype), heads(values, dtype)


class TestA1:
    Q = [[1, 0], [0, 1], [1, 1]]
    V = [[1, 2], [3, 4], [5, 6]]
    ROWS = [[1, 0, 0], [1, 1, 0], [0, 0, 0]]

    @each_softmax
    @each_path
    def test_values_and_gradient(self, variant, config, plain):
        attention = build(variant, num_heads=1, head_dim=2, **config)
        for number in range(3):
            q, k, v = (list(layouts(heads(rows)))[number][1].requires_grad_() for rows in (self.Q, self.Q, self.V))
            self.check(attention, q, k, v, plain)

    def check(self, attention, q, k, v, plain):
        out, weights = attention(q, k, v, Mask(pairs=bools(self.ROWS)), need_weights=plain)
        # The values are given with seven digits.
        assert_close(out[0, 0], torch.tensor([[1, 2], [2.3395231, 3.3395231], [0, 0]]).double(), rtol=0.0, atol=1e-6)
        assert out[0, 0, 2].tolist() == [0.0, 0.0]
        if plain:
            assert weights[0, 0, 2].tolist() == [0.0, 0.0, 0.0]
        out.sum().backward()
        expected = torch.tensor([[0, 0], [-0.6255944, 0.6255944], [0, 0]]).double()
        assert_close(q.grad[0, 0], expected, rtol=0.0, atol=1e-6)
        assert all(x.grad.isfinite().all() for x in (k, v, *attention.parameters()))

    @each_variant
    @each_path
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_a_query_without_a_key_is_zero_for_every_variant(self, variant, config, plain, dtype):
        torch.manual_seed(0)
        attention = build(variant, num_heads=2, head_dim=3, **config)
        q, k, v = (torch.randn(2, 2, 4, 3).to(dtype).requires_grad_() for _ in range(3))
        masks = [Mask(keys=bools([[0, 0, 0, 0], [1, 1, 1, 1]])), Mask(causal=True, keys=bools([[0, 0, 1, 1], [1] * 4]))]
        if claims(variant, "pairs"):
            pairs = bools([[1, 1, 0, 1], [0, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1]])
            # Each part leaves this row a key, both together none.
            masks += [Mask(pairs=pairs), Mask(causal=True, pairs=bools([[0, 1, 1, 1]] + [[1] * 4] * 3))]
        for mask in masks:
            visible = mask.visible(4, 4).expand(2, 2, 4, 4)
            empty = ~visible.any(-1)
            assert empty.any()
            out, weights = attention(q, k, v, mask, need_weights=plain)
            assert (out[empty] == 0).all()
            if not claims(variant, "positional"):  # a window may hide what the mask shows
                assert (out[~empty] != 0).any(-1).all()
            if plain:
                assert (weights[~visible] == 0).all()
            gradients = torch.autograd.grad(out.float().square().sum(), (q, k, v), allow_unused=True)
            assert all(gradient is None or gradient.isfinite().all() for gradient in gradients)


class TestA2:
    @each_mean
    @each_path
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_hidden_by_one_mask_and_by_two(self, variant, config, plain, dtype):
        assert averaged(variant, config, [3, 7], Mask(True, keys=bools([[0, 1]])), plain, 1, dtype) == [7.0]
        # key 2 of query 1 is hidden by causality and by padding at once
        mask = Mask(causal=True, keys=bools([[0, 1, 0]]))
        assert averaged(variant, config, [3, 7, 9], mask, plain, 3, dtype) == [0.0, 7.0, 7.0]

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_weights(self, dtype):
        assert masked_softmax(torch.zeros(1, 2, dtype=dtype), bools([[0, 1]])).tolist() == [[0.0, 1.0]]


class TestA3:
    @each_mean
    @each_path
    def test_true_means_may_attend(self, variant, config, plain):
        assert averaged(variant, config, [1, 2, 3], Mask(causal=True), plain) == pytest.approx([1, 1.5, 2])
        assert averaged(variant, config, [1, 3], Mask(keys=bools([[1, 0]])), plain) == [1.0, 1.0]
        if claims(variant, "pairs"):
            lower = torch.ones(3, 3, dtype=torch.bool).tril()
            assert averaged(variant, config, [1, 2, 3], Mask(pairs=lower), plain) == pytest.approx([1, 1.5, 2])

    def test_the_other_polarity_by_name(self):
        ignored = torch.ones(3, 3, dtype=torch.bool).triu(1)
        mask = mask_from_multihead(attn_mask=ignored)
        assert averaged("standard", {}, [1, 2, 3], mask, False) == pytest.approx([1, 1.5, 2])

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.uint8])
    def test_numbers_are_no_mask(self, dtype):
        for part in ("keys", "pairs"):
            with pytest.raises(MaskError, match="must be bool"):
                Mask(**{part: torch.tensor([[1, 0]], dtype=dtype)})


class TestA4:
    @each_mean
    @each_path
    def test_the_last_query_sees_all(self, variant, config, plain):
        mask = Mask(causal=True)
        assert averaged(variant, config, [1, 2, 3, 4], mask, plain, 1) == pytest.approx([2.5])
        assert averaged(variant, config, [1, 2, 3, 4], mask, plain, 2) == pytest.approx([2.0, 2.5])
        assert averaged(variant, config, [1, 2], mask, plain, 4) == pytest.approx([0, 0, 1, 1.5])


class TestA5:
    @each_mean
    def test_evaluation_has_no_dropout(self, variant, config):
        attention = build(variant, num_heads=1, head_dim=4, **config).eval()
        ones = torch.ones(1, 1, 4, 4)
        assert torch.equal(attention(ones, ones, ones).out, ones)
        layer = MultiHeadAttention(4, 1, variant=variant, config=config, dropout=0.5).eval()
        x = torch.randn(1, 4, 4)
        assert torch.equal(layer(x), layer(x))
        layer.train()
        assert not torch.equal(layer(x), layer(x))


class TestA6:
    def test_dropped_keys_weigh_nothing(self):
        q, k = scores_of([2, 1, 0, -1])
        k.requires_grad_()
        attention = build("topk", num_heads=1, head_dim=1, keep=2)
        for plain in (False, True):
            out, weights = attention(q, k, heads([1, 2, 3, 4]), need_weights=plain)
            assert out.item() == pytest.approx(1.2689414, abs=1e-7)
            (gradient,) = torch.autograd.grad(out.sum(), k)  # q is 1, so this is d/dscores
            expected = [-0.1966119, 0.1966119, 0.0, 0.0]
            assert gradient.flatten().tolist() == pytest.approx(expected, abs=1e-7)
            assert gradient.flatten()[2:].tolist() == [0.0, 0.0]
        assert weights.flatten().tolist() == pytest.approx([0.7310586, 0.2689414, 0.0, 0.0], abs=1e-7)
        assert weights.flatten()[2:].tolist() == [0.0, 0.0]


class TestA7:
    @each_path
    @pytest.mark.parametrize(("L", "S", "keep"), [(4, 4, 8), (20, 7, 10), (20, 7, 7), (1, 1, 1)])
    def test_more_than_there_are_is_dense(self, L, S, keep, plain):
        torch.manual_seed(0)
        q, k, v = (torch.randn(2, 3, n, 4).double() for n in (L, S, S))
        given = build("topk", num_heads=3, head_dim=4, keep=keep)(q, k, v, need_weights=plain).out
        dense = build("standard", num_heads=3, head_dim=4)(q, k, v, need_weights=plain).out
        assert_close(given, dense, rtol=1e-12, atol=1e-12)

    def test_ties(self):
        q, k = scores_of([1, 1, 1, 0])
        weights = build("topk", num_heads=1, head_dim=1, keep=2)(q, k, k, need_weights=True).weights
        assert weights.flatten().tolist() == [0.5, 0.5, 0.0, 0.0]

    @pytest.mark.parametrize("keep", [0, -3])
    def test_nothing_to_keep(self, keep):
        with pytest.raises(ConfigError, match=f"got {keep}"):
            build("topk", num_heads=1, head_dim=1, keep=keep)


class TestA8:
    @pytest.mark.parametrize(
        ("value", "expected"),
        [
            (1.0, [0.0900306, 0.2447285, 0.6652409]),
            (1e-8, [0.0, 0.0, 1.0]),
            (0.5, [0.0158762, 0.1173104, 0.8668134]),
        ],
    )
    @pytest.mark.parametrize("variant", ["temperature", "topk", "local_global"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_values(self, variant, value, expected, dtype):
        q, k = scores_of([1, 2, 3], dtype)
        identity = torch.eye(3, dtype=dtype)[None, None]
        config = {"window": 100} if variant == "local_global" else {}
        attention = build(variant, num_heads=1, head_dim=1, temperature=value, **config)
        # local_global refuses a query beside three keys unless it stands after them: causal puts it there.
        out, weights = attention(q, k, identity, Mask(causal=True), need_weights=True)
        assert weights.flatten().tolist() == pytest.approx(expected, abs=1e-7)
        assert out.flatten().tolist() == pytest.approx(expected, abs=1e-7)
        fast = attention(q, k, identity, Mask(causal=True)).out
        assert fast.flatten().tolist() == pytest.approx(expected, abs=1e-7)

    @pytest.mark.parametrize("variant", ["temperature", "topk", "local_global"])
    @pytest.mark.parametrize("value", [0.0, -1.0, 1e-40, float("nan"), float("inf"), -float("inf")])
    def test_no_temperature(self, variant, value):
        with pytest.raises(ConfigError, match="temperature"):
            build(variant, num_heads=1, head_dim=1, temperature=value)

    def test_a_learned_one_never_inverts_the_ranking(self):
        attention = build("temperature", num_heads=1, head_dim=1, learn="shared").double()
        q, k = scores_of([1, 2, 3])
        optimiser = torch.optim.SGD(attention.parameters(), lr=1e3)
        for _ in range(20):
            weights = attention(q, k, k, need_weights=True).weights.flatten()
            assert weights[0] <= weights[1] <= weights[2]
            assert weights.isfinite().all()
            optimiser.zero_grad()
            weights[2].backward()  # drives the temperature away from what ranks the third first
            optimiser.step()


class TestA9:
    CASES = [
        (True, 4, [1, 1.5, 2, 2.5, 3.5]),
        (True, 2, [1, 1.5, 2.5, 3.5, 4.5]),
        (False, 3, [1.5, 2, 3, 4, 4.5]),
        (True, 1, [1, 2, 3, 4, 5]),
        (False, 1, [1, 2, 3, 4, 5]),
        (True, 9, [1, 1.5, 2, 2.5, 3]),
        (False, 99, [3, 3, 3, 3, 3]),
        (False, 2, [1.5, 2.5, 3.5, 4.5, 5]),  # even: the further key lies ahead
    ]

    @each_path
    @pytest.mark.parametrize(("causal", "window", "expected"), CASES)
    def test_values(self, causal, window, expected, plain):
        given = averaged("local_global", {"window": window}, [1, 2, 3, 4, 5], Mask(causal=causal), plain)
        assert given == pytest.approx(expected)


class TestA10:
    @each_path
    @pytest.mark.parametrize(
        ("causal", "expected", "pairs"),
        [(False, [3.5, 2, 2.5, 3.25, 4, 4], 24), (True, [1, 1.5, 2, 2.5, 3.25, 4], 18)],
    )
    def test_values(self, causal, expected, pairs, plain):
        config = {"window": 3, "num_global": 1}
        given = averaged("local_global", config, [1, 2, 3, 4, 5, 6], Mask(causal=causal), plain)
        assert given == pytest.approx(expected)
        zeros = torch.zeros(1, 1, 6, 2)
        attention = build("local_global", num_heads=1, head_dim=2, **config)
        weights = attention(zeros, zeros, zeros, Mask(causal=causal), need_weights=True).weights
        assert (weights > 0).sum() == pairs


class TestA11:
    @each_path
    @pytest.mark.parametrize("feature_map", ["elu", "relu", "taylor"])
    def test_normalised(self, feature_map, plain):
        given = averaged("linear", {"feature_map": feature_map}, [1, 2, 3, 4], Mask(causal=True), plain)
        assert given == pytest.approx([1, 1.5, 2, 2.5])

    def test_recurrent(self):
        attention = build("linear", num_heads=1, head_dim=2)
        zeros, outs, state = torch.zeros(1, 1, 1, 2).double(), [], None
        for value in (1, 2, 3, 4):
            out, state = attention.step(zeros, zeros, heads([value]), state)
            outs.append(out.item())
        assert outs == pytest.approx([1, 1.5, 2, 2.5])


class TestA12:
    @each_mean
    @each_path
    @pytest.mark.parametrize("pad", [0.0, 1e10, -5.0, float("nan"), float("inf")])
    def test_padding_is_in_neither_sum(self, variant, config, plain, pad):
        right = Mask(keys=bools([[1, 1, 0, 0]]))
        assert averaged(variant, config, [10, 20, pad, pad], right, plain) == pytest.approx([15] * 4)
        left = Mask(causal=True, keys=bools([[0, 0, 1, 1]]))
        assert averaged(variant, config, [pad, pad, 10, 20], left, plain) == pytest.approx([0, 0, 10, 15])

    @each_mean
    @each_path
    def test_adding_padding_changes_nothing_and_gets_no_gradient(self, variant, config, plain):
        torch.manual_seed(0)
        attention = build(variant, num_heads=2, head_dim=3, **config).double()
        q, k, v = (torch.randn(1, 2, 5, 3).double() for _ in range(3))
        expected = attention(q, k, v, Mask(causal=True), need_weights=plain).out
        q, k, v = (torch.cat([torch.randn(1, 2, 3, 3).double(), x], dim=2).requires_grad_() for x in (q, k, v))
        out = attention(q, k, v, Mask(causal=True, keys=bools([[0] * 3 + [1] * 5])), need_weights=plain).out
        assert_close(out[:, :, 3:], expected, rtol=1e-12, atol=1e-12)
        gradients = torch.autograd.grad(out.square().sum(), (q, k, v), allow_unused=True)
        assert all(gradient is None or (gradient[:, :, :3] == 0).all() for gradient in gradients)


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """The size of the largest tensor that any operation made, in bytes."""

    nbytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for each in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(each, torch.Tensor):
                self.nbytes = max(self.nbytes, each.untyped_storage().nbytes())
        return result


class TestA13:
    def test_causal_linear_keeps_no_state_for_every_step(self):
        x = torch.zeros(1, 8, 8192, 64)
        attention = build("linear", num_heads=8, head_dim=64)
        with Largest() as largest, torch.no_grad():
            attention(x, x, x, Mask(causal=True))
        # 16 MiB each for q and for the states of the chunks, where one state a step is 1,073,741,824 bytes.
        assert largest.nbytes <= 2 * x.nbytes

    def test_additive_holds_no_features_of_all_pairs(self):
        x = torch.zeros(8, 8, 1024, 64)
        attention = build("additive", num_heads=8, head_dim=64, hidden_dim=64)
        with Largest() as largest, torch.no_grad():
            attention(x[:, :, :24], x, x)  # what is alive does not depend on the number of queries
        # 16 MiB for the features of a chunk, or q itself, where those of all pairs are 17,179,869,184 bytes.
        assert largest.nbytes <= max(x.nbytes, 4 * FEATURES)

    def test_chunks_of_queries_bound_the_scores(self):
        q = torch.zeros(1, 1, 4096, 8)
        attention = build("standard", num_heads=1, head_dim=8, chunk_size=128, backend="math")
        with Largest() as largest, torch.no_grad():
            attention(q, q, q, Mask(causal=True))
        assert largest.nbytes == 128 * 4096 * 4


class TestA14:
    @each_mean
    @each_path
    def test_query_heads_share_neighbouring_key_value_heads(self, variant, config, plain):
        attention = build(variant, num_heads=4, head_dim=1, **config)
        q, k = torch.zeros(1, 4, 1, 1), torch.zeros(1, 2, 1, 1)
        v = torch.tensor([10.0, 20.0]).reshape(1, 2, 1, 1)
        assert attention(q, k, v, need_weights=plain).out.flatten().tolist() == [10.0, 10.0, 20.0, 20.0]

    @pytest.mark.parametrize(("sizes", "both"), [((384, 5), ("384", "5")), ((12, 6, 4), ("6", "4")), ((512, 6), ("6",))])
    def test_sizes_that_do_not_divide(self, sizes, both):
        with pytest.raises(ConfigError) as caught:
            MultiHeadAttention(*sizes)
        assert all(number in str(caught.value) for number in both)


class TestA15:
    @each_variant
    @each_path
    @pytest.mark.parametrize("batch", [0, 1, 2])
    def test_every_length_and_layout(self, variant, config, plain, batch):
        attention = build(variant, num_heads=2, head_dim=4, **config).double()
        reference = build("standard", num_heads=2, head_dim=4, backend="math")
        dense = (variant, config) in SOFTMAX
        dim = 4 if variant == "memory" else 3
        for L in (0, 1, 2, 7, 33):
            for S in (0, 1, 2, 7, 33):
                torch.manual_seed(L * 100 + S)
                q, k, v = torch.randn(batch, 2, L, 4), torch.randn(batch, 2, S, 4), torch.randn(batch, 2, S, dim)
                q, k, v = (x.double() for x in (q, k, v))
                for causal in (False, True):
                    if L != S and not causal and not claims(variant, "cross"):
                        continue
                    for mask in self.masks(causal, batch, L, S, claims(variant, "pairs")):
                        out, weights = attention(q, k, v, mask, need_weights=plain)
                        assert out.shape == (batch, 2, L, dim)
                        assert out.dtype == q.dtype
                        assert weights is None if not plain else weights.shape == (batch, 2, L, S)
                        assert S or (out == 0).all()
                        if dense:
                            assert_close(out, reference(q, k, v, mask).out, rtol=1e-12, atol=1e-12)

    @staticmethod
    def masks(causal, batch, L, S, pairs):
        yield Mask(causal)
        keys = torch.rand(2 * S + 1, batch + 1) < 0.7
        yield Mask(causal, keys=keys[: 2 * S : 2, :batch].t())  # stepped and transposed
        if pairs:
            wide = torch.rand(S + 2, 2 * L + 1) < 0.7
            yield Mask(causal, pairs=wide[1 : 1 + S, : 2 * L : 2].t())
            yield Mask(causal, pairs=wide[:S, :L].t().expand(batch, 2, L, S))

    @each_variant
    @each_path
    @pytest.mark.parametrize("length", [1, 2, 7, 33])
    def test_views_equal_their_copies(self, variant, config, plain, length):
        torch.manual_seed(length)
        attention = build(variant, num_heads=4, head_dim=4, **config).double()
        wide = [torch.randn(2, 4, length, 8).double()[..., ::2] for _ in range(3)]
        transposed = [torch.randn(2, length, 4, 4).double().transpose(1, 2) for _ in range(3)]
        shared = [transposed[0], *(torch.randn(2, 1, length, 4).double().expand(2, 4, length, 4) for _ in range(2))]
        for inputs in (wide, transposed, shared):
            for mask in (Mask(), Mask(causal=True)):
                given = attention(*inputs, mask, need_weights=plain).out
                copied = attention(*(x.contiguous() for x in inputs), mask, need_weights=plain).out
                assert_close(given, copied, rtol=1e-12, atol=1e-12)

    @each_variant
    @each_path
    @pytest.mark.parametrize(("L", "S"), [(0, 3), (3, 0), (0, 0)])
    def test_empty_ones_have_gradients(self, variant, config, plain, L, S):
        attention = build(variant, num_heads=2, head_dim=4, **config)
        inputs = [torch.randn(2, 2, n, 4, requires_grad=True) for n in (L, S, S)]
        out = attention(*inputs, Mask(causal=True), need_weights=plain).out
        gradients = torch.autograd.grad(out.sum(), inputs)
        assert [gradient.shape for gradient in gradients] == [x.shape for x in inputs]
        assert all((gradient == 0).all() for gradient in gradients)


class TestA16:
    @each_mean
    @each_path
    @pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf"), 1e10])
    def test_what_nobody_sees_does_not_matter(self, variant, config, plain, poison):
        attention = build(variant, num_heads=1, head_dim=2, **config).double()
        masks = [Mask(keys=bools([[1, 0]]))]
        if claims(variant, "pairs"):
            masks.append(Mask(pairs=bools([[1, 0], [1, 0]])))
        for mask in masks:
            q, k = (torch.zeros(1, 1, 2, 2).double() for _ in range(2))
            k[0, 0, 1] = poison
            v = heads([[1.0, 1.0], [poison, 7.0]])
            tensors = [x.requires_grad_() for x in (q, k, v)]
            out = attention(*tensors, mask, need_weights=plain).out
            assert out[0, 0].tolist() == [[1.0, 1.0], [1.0, 1.0]]
            gradients = torch.autograd.grad(out.sum(), tensors, allow_unused=True)
            assert all(gradient is None or gradient.isfinite().all() for gradient in gradients)
            assert gradients[2][0, 0, 1].tolist() == [0.0, 0.0]

    @each_variant
    @each_path
    def test_finite_values_that_only_some_may_see(self, variant, config, plain):
        torch.manual_seed(0)
        attention = build(variant, num_heads=1, head_dim=2, **config).double()
        q, k, v = (torch.randn(1, 1, 4, 2).double() for _ in range(3))
        expected = attention(q, k, v, Mask(causal=True), need_weights=plain).out
        k[0, 0, 3], v[0, 0, 3] = 1e10, -1e10
        assert torch.equal(attention(q, k, v, Mask(causal=True), need_weights=plain).out[:, :, :3], expected[:, :, :3])


class TestA17:
    @each_variant
    def test_checkpointing_with_dropout(self, variant, config):
        results = []
        for checkpoint in (False, True):
            torch.manual_seed(0)
            layer = MultiHeadAttention(64, 4, variant=variant, config=config, dropout=0.5, checkpoint=checkpoint)
            x = torch.ones(2, 8, 64, requires_grad=True)
            torch.manual_seed(1)
            loss = layer(x, mask=Mask(causal=True)).tanh().square().sum()
            loss.backward()
            results.append([loss, x.grad, *(parameter.grad for parameter in layer.parameters())])
        assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


class TestA18:
    @each_variant
    @each_path
    def test_copies_after_a_forward(self, variant, config, plain):
        attention = build(variant, num_heads=1, head_dim=2, **config).train()
        q = torch.randn(1, 1, 3, 2, requires_grad=True)
        out = attention(q, q, q, Mask(causal=True), need_weights=plain).out
        twins = copy.deepcopy(attention), pickle.loads(pickle.dumps(attention))
        for twin in twins:
            assert torch.equal(twin(q, q, q, Mask(causal=True), need_weights=plain).out, out)

    @each_variant
    def test_a_module_keeps_nothing_of_a_forward(self, variant, config):
        attention = build(variant, num_heads=1, head_dim=2, **config)
        q = torch.randn(1, 1, 3, 2, requires_grad=True)
        attention(q, q, q, need_weights=True)
        assert not [each for each in vars(attention).values() if isinstance(each, torch.Tensor)]
        assert not list(attention.buffers())


class TestA19:
    # No additive bias is ever built here, so there is none to lay out: bool masks go to SDPA, and xformers is given a
    # structure or refuses. What is left of the case is that an odd S is served in every dtype.
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_an_odd_length_with_a_mask(self, dtype):
        torch.manual_seed(0)
        q, k, v = (torch.randn(2, 3, n, 8).to(dtype) for n in (5, 37, 37))
        mask = Mask(causal=True, pairs=torch.rand(2, 1, 5, 37) < 0.8)
        exact = build("standard", num_heads=3, head_dim=8, backend="math")(*(x.double() for x in (q, k, v)), mask).out
        given = build("standard", num_heads=3, head_dim=8, backend="sdpa")(q, k, v, mask).out
        tolerance = 4 * torch.finfo(dtype).eps
        assert_close(given.double(), exact, rtol=tolerance, atol=tolerance)


def test_scaling_is_by_the_head_dim():
    q = torch.full((1, 1, 1, 16), 1.0)
    assert scaled_scores(q, q).item() == 16 / math.sqrt(16)
