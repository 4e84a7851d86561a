"""Faults that code for teaching carries and that are copied from it: each is looked for in every registered mechanism."""

import ast
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from core import Mask, MaskError, MultiHeadAttention, build, get, names
from experiments.model import build_model
from experiments.tasks import IGNORE, Batch, tasks
from tests.experiments.small import run_of, task_of

ROOT = Path(__file__).parents[2]
B, H, L, S, D, DV = 2, 3, 5, 7, 4, 6
EXACT = {"rtol": 1e-12, "atol": 1e-12}
ALL = names()
CHUNKED = [name for name in ALL if "chunk_size" in get(name).Config.model_fields]
SELECTING = [name for name in ALL if get(name).spec.keys_per_query]
each = pytest.mark.parametrize("variant", ALL)
each_path = pytest.mark.parametrize("plain", [False, True])


def heads(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def bools(*shape, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.6


def made(variant, num_heads=H, head_dim=D, **config):
    torch.manual_seed(0)
    return build(variant, num_heads=num_heads, head_dim=head_dim, **config).double().eval()


def value_dim(variant):
    """Another than D, but where the mechanism refuses that."""
    try:
        made(variant)(heads(1, H, 1, D), heads(1, H, 1, D), heads(1, H, 1, DV))
    except ValueError:
        return D
    return DV


def masks(variant, length, source):
    """Everything that the mechanism claims to honour, together."""
    spec = get(variant).spec
    keys = bools(B, source, seed=3) if spec.padding else None
    pairs = bools(B, H, length, source, seed=4) if spec.pairs else None
    allowed = [causal for causal, claimed in ((True, spec.decode), (False, spec.cross)) if claimed or length == source]
    return [mask for causal in allowed for mask in (Mask(causal), Mask(causal, keys), Mask(causal, keys, pairs))]


class TestChunks:
    """Queries in chunks: slices of the head axis, a mask that is dropped, a causal offset that is lost."""

    @pytest.mark.parametrize("variant", CHUNKED)
    @pytest.mark.parametrize(("length", "source"), [(L, L), (L, S), (S, L), (1, S)])
    @pytest.mark.parametrize("size", [1, 3, "L"])
    def test_chunks_equal_the_whole(self, variant, length, source, size):
        whole, parts = made(variant), made(variant, chunk_size=length if size == "L" else size)
        for mask in masks(variant, length, source):
            q, k, v = (
                heads(B, n, m, d, seed=n).requires_grad_() for n, m, d in ((H, length, D), (1, source, D), (3, source, DV))
            )
            k = k.expand(-1, 3, -1, -1)
            assert_close(parts(q, k, v, mask).out, whole(q, k, v, mask).out, **EXACT)
            direction = heads(B, H, length, DV, seed=9)
            found = [torch.autograd.grad((one(q, k, v, mask).out * direction).sum(), (q, k, v)) for one in (parts, whole)]
            for one, other in zip(*found, strict=True):
                assert_close(one, other, **EXACT)

    @each
    @each_path
    def test_the_last_rows_are_those_of_the_whole(self, variant, plain):
        attention, dim = made(variant), value_dim(variant)
        q, k, v = heads(B, H, S, D, seed=1), heads(B, H, S, D, seed=2), heads(B, H, S, dim, seed=3)
        for mask in masks(variant, S, S):
            whole = attention(q, k, v, mask, need_weights=plain).out
            for size in (1, 3) if mask.causal else ():
                pairs = None if mask.pairs is None else mask.pairs[:, :, -size:]
                part = attention(q[:, :, -size:], k, v, Mask(True, mask.keys, pairs), need_weights=plain).out
                assert_close(part, whole[:, :, -size:], **EXACT)


class TestPadding:
    @each
    def test_a_real_token_0_is_attended_to(self, variant):
        """`keys = ids != 0`, where 0 is a character like every other."""
        run = run_of({"variant": variant})
        model = build_model(run, task_of(run), 0).double().eval()
        tokens = torch.tensor([[1, 0, 2, 3], [0, 0, 4, 1]])
        before = model(tokens)
        with torch.no_grad():
            model.embedding.weight[0] += torch.linspace(-1, 1, 8)  # what the token says, and not which it is
        moved = (model(tokens) - before).abs().amax(-1) > 1e-9
        assert moved.tolist() == [[False, True, True, True], [True] * 4]

    @pytest.mark.parametrize("name", tasks.names())
    def test_a_target_0_counts_and_no_token_is_hidden_for_its_number(self, name):
        task = tasks.get(name)(tasks.get(name).Config(), 4)
        batch = task.batch("train", 0, 0)
        assert batch.keys is None or not torch.equal(batch.keys, batch.inputs != 0)
        zeros = torch.zeros_like(batch.inputs)
        _, count = task.loss(torch.zeros(*zeros.shape, task.vocab_size), Batch(zeros, zeros))
        assert int(count) == zeros.numel()
        assert IGNORE < 0

    @each
    @each_path
    def test_padding_and_causality_hold_together(self, variant, plain):
        attention, dim = made(variant), value_dim(variant)
        keys = torch.tensor([[0, 1, 1, 0, 1], [1, 1, 0, 1, 1]], dtype=torch.bool)
        q, k, v = heads(B, H, L, D, seed=1), heads(B, H, L, D, seed=2), heads(B, H, L, dim, seed=3)

        def out(k, v):
            return attention(q, k, v, Mask(causal=True, keys=keys), need_weights=plain).out

        visible = torch.ones(L, L, dtype=torch.bool).tril() & keys[:, None, :]
        moved = torch.zeros(B, L, L, dtype=torch.bool)
        for j in range(L):
            other_k, other_v = k.clone(), v.clone()
            other_k[:, :, j] += 1.0
            other_v[:, :, j] += 10.0
            moved[:, :, j] = (out(other_k, other_v) - out(k, v)).abs().amax((1, 3)) > 1e-9
        assert not (moved & ~visible).any()
        assert torch.equal(moved.any(-1), visible.any(-1))  # which keys a sparse one takes is its own business

    @each
    @each_path
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
    def test_hidden_keys_weigh_nothing_beside_scores_below_any_fill(self, variant, plain, dtype):
        """A fill of -1e9 is no -inf: a visible score below it would lose against what is hidden."""
        size = {torch.float16: 6e4}.get(dtype, 1e12)
        q, k = torch.full((1, H, 1, D), size, dtype=dtype), torch.full((1, H, 2, D), 0.0, dtype=dtype)
        k[:, :, 1] = -size
        v = heads(1, H, 2, D, seed=3, dtype=dtype)
        keys, attention = torch.tensor([[False, True]]), made(variant).to(dtype)
        causal = not get(variant).spec.cross
        out = attention(q, k, v, Mask(causal, keys), need_weights=plain).out
        alone = attention(q, k[:, :, 1:], v[:, :, 1:], Mask(causal), need_weights=plain).out
        tolerance = 4 * torch.finfo(dtype).eps
        assert_close(out, alone, rtol=tolerance, atol=tolerance)
        if get(variant).spec.convex:
            assert_close(out, v[:, :, 1:], rtol=tolerance, atol=tolerance)


class TestThreeAxes:
    """A mask (B, L, S) lands on the head axis, without a word where B == H."""

    def test_it_is_refused_with_what_to_write(self):
        with pytest.raises(MaskError, match=r"got shape \(3, 5, 5\); for \(B, L, S\) write `mask\[:, None\]`"):
            Mask(pairs=bools(H, L, L))

    @pytest.mark.parametrize("variant", [name for name in ALL if get(name).spec.pairs])
    @each_path
    def test_what_to_write_is_right(self, variant, plain):
        attention, dim, pairs = made(variant), value_dim(variant), bools(H, L, L, seed=5)
        q, k, v = heads(H, H, L, D, seed=1), heads(H, H, L, D, seed=2), heads(H, H, L, dim, seed=3)
        whole = attention(q, k, v, Mask(pairs=pairs[:, None]), need_weights=plain).out
        for b in range(H):
            alone = attention(q[b : b + 1], k[b : b + 1], v[b : b + 1], Mask(pairs=pairs[b]), need_weights=plain).out
            assert_close(whole[b : b + 1], alone, **EXACT)
        layer = MultiHeadAttention(H * D, H, variant=variant).double()
        x = heads(H, L, H * D)
        assert_close(layer(x, mask=Mask(pairs=pairs[:, None]))[1:2], layer(x[1:2], mask=Mask(pairs=pairs[1])), **EXACT)


class TestScale:
    """`torch.sqrt(torch.tensor(d_k))` is float32 and on the CPU, whatever q is."""

    @pytest.mark.parametrize("variant", [name for name in ALL if get(name).spec.equals_standard_when is not None])
    @each_path
    @pytest.mark.parametrize("dim", [3, 7])
    def test_float64_is_exact(self, variant, plain, dim):
        attention = made(variant, head_dim=dim, **get(variant).spec.equals_standard_when)
        q, k, v = heads(1, H, L, dim, seed=1), heads(1, H, L, dim, seed=2), heads(1, H, L, dim, seed=3)
        out = attention(3 * q, k, v, need_weights=plain).out
        for h in range(H):
            for i in range(L):
                scores = [3 * math.fsum((q[0, h, i] * k[0, h, j]).tolist()) / math.sqrt(dim) for j in range(L)]
                powers = [math.exp(score - max(scores)) for score in scores]
                for d in range(dim):
                    expected = math.fsum(p * v[0, h, j, d].item() for j, p in enumerate(powers)) / math.fsum(powers)
                    assert out[0, h, i, d].item() == pytest.approx(expected, rel=1e-12, abs=1e-12)

    @each
    @each_path
    def test_float64_stays_float64_inside(self, variant, plain):
        """A difference that float32 cannot hold arrives at the output."""
        attention, dim = made(variant), value_dim(variant)
        q, k, v = heads(B, H, L, D, seed=1), heads(B, H, L, D, seed=2), heads(B, H, L, dim, seed=3)
        before = attention(q, k, v, need_weights=plain).out
        for moved in ((q, k, v + 1e-10), *(((q + 1e-10, k + 1e-10, v),) if variant != "uniform" else ())):
            difference = (attention(*moved, need_weights=plain).out - before).abs().max().item()
            assert 1e-13 < difference < 1e-7

    @each
    @each_path
    def test_every_tensor_is_where_the_inputs_are(self, variant, plain):
        attention, dim = made(variant).to("meta"), value_dim(variant)
        q, k, v = (torch.empty(B, H, L, n, device="meta", dtype=torch.float64).requires_grad_() for n in (D, D, dim))
        out = attention(q, k, v, Mask(causal=True), need_weights=plain).out
        assert (out.device.type, out.dtype) == ("meta", torch.float64)
        out.sum().backward()


class TestPolarity:
    """`mask == 0`, which is right for one kind of mask and inverts the other."""

    VISIBLE = torch.tensor([[True, False, True], [False, True, True]])

    @pytest.mark.parametrize("low", [-math.inf, torch.finfo(torch.float32).min, -1e9])
    def test_both_hints_are_right_for_their_kind_and_wrong_for_the_other(self, low):
        additive = torch.zeros(2, 3).masked_fill(~self.VISIBLE, low)
        zero_one = self.VISIBLE.float()
        with pytest.raises(MaskError) as caught:
            Mask(keys=additive)
        for_zero_one, for_additive = re.findall(r"`(mask[^`]*)`", str(caught.value))
        assert "for a 0/1 mask" in str(caught.value).split(f"`{for_zero_one}`")[1].split("`")[0]
        assert "for an additive one (0 and -inf)" in str(caught.value).split(f"`{for_additive}`")[1]
        assert torch.equal(eval(for_additive, {"mask": additive}), self.VISIBLE)
        assert torch.equal(eval(for_zero_one, {"mask": zero_one}), self.VISIBLE)
        assert torch.equal(eval(for_additive, {"mask": zero_one}), ~self.VISIBLE)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int64, torch.int32, torch.uint8])
    def test_so_neither_is_taken_for_a_mask(self, dtype):
        numbers = self.VISIBLE.to(dtype)
        for given in ({"keys": numbers}, {"pairs": numbers}):
            with pytest.raises(MaskError, match="must be bool with True = may attend"):
                Mask(**given)

    @each
    def test_nor_is_a_bare_tensor(self, variant):
        x = heads(B, H, L, D)
        for given in (torch.zeros(L, L), torch.ones(L, L, dtype=torch.bool)):
            with pytest.raises(MaskError, match=f"{variant}: mask must be a Mask, got Tensor; write Mask"):
                made(variant)(x, x, x, given)


class TestSelection:
    @pytest.mark.parametrize("variant", SELECTING)
    @each_path
    @pytest.mark.parametrize("shift", [-50.0, 50.0])
    def test_what_is_not_selected_is_not_a_score_of_0(self, variant, plain, shift):
        """Top scores scattered into zeros: where all scores are negative, a dropped key then weighs the most."""
        keep = 2
        attention = made(variant, head_dim=1, **{get(variant).spec.keys_per_query: keep})
        scores = torch.tensor([0.1, 0.4, 0.3, 0.2, 0.0], dtype=torch.float64) + shift
        q, k = torch.ones(1, H, 1, 1, dtype=torch.float64), scores.reshape(1, 1, 5, 1).expand(1, H, 5, 1)
        v = heads(1, H, 5, 1, seed=3)
        out, weights = attention(q, k, v, need_weights=plain)
        high, low = (math.exp(score) / (math.exp(0.4) + math.exp(0.3)) for score in (0.4, 0.3))
        assert_close(out[:, :, 0], high * v[:, :, 1] + low * v[:, :, 2], **EXACT)
        if plain:
            assert ((weights != 0).sum(-1) == keep).all()


@each
@each_path
def test_nothing_is_changed_in_place(variant, plain):
    """`scores.masked_fill_` on what is a view of q, a mask that is inverted where it stands, `q *= scale`."""
    attention, dim = made(variant), value_dim(variant)
    for mask in masks(variant, L, L):
        parts = [part for part in (mask.keys, mask.pairs) if part is not None]
        inputs = [heads(B, H, L, n, seed=n).requires_grad_() for n in (D, D, dim)]
        before = [x.detach().clone() for x in (*inputs, *parts)]
        attention(*inputs, mask, need_weights=plain).out.sum().backward()
        attention(*(x.detach() for x in inputs), mask, need_weights=plain)
        assert all(torch.equal(now, then) for now, then in zip((*inputs, *parts), before, strict=True))


REFUSALS = """
import sys
import torch
import core, variants
from core import Mask, MultiHeadAttention, build, get, mask_from_multihead, names, register
from core.contract import check
from core.functional import average, masked_softmax, scaled_scores
from core.registry import load_plugin, require
from experiments import sweep

assert False, "this is to be run with -O"
if sys.flags.optimize != 1:
    sys.exit("this is to be run with -O")
folder = sys.argv[1]
x, longer, wide = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 5, 4), torch.zeros(1, 2, 3, 6)
square, three = torch.ones(3, 3, dtype=torch.bool), torch.ones(1, 3, 3, dtype=torch.bool)
calls = {
    "float mask": lambda: Mask(keys=torch.ones(1, 3)),
    "three axes": lambda: Mask(pairs=three),
    "mask of another kind": lambda: Mask(causal=1),
    "masks that do not fit": lambda: Mask(keys=square) & Mask(keys=square[:2]),
    "heads of a multihead mask": lambda: mask_from_multihead(attn_mask=three, num_heads=2),
    "sizes of a layer": lambda: MultiHeadAttention(8, 3),
    "dropout of a layer": lambda: MultiHeadAttention(8, 2, dropout=1.5),
    "input of a layer": lambda: MultiHeadAttention(8, 2)(torch.zeros(1, 3, 9)),
    "causal with a context": lambda: MultiHeadAttention(8, 2)(torch.zeros(1, 3, 8), torch.zeros(1, 3, 8), Mask(True)),
    "unknown name": lambda: build("nothing", num_heads=1, head_dim=4),
    "bad name": lambda: register("Not-A-Name"),
    "no class of ours": lambda: register("mine")(int),
    "no plugin": lambda: load_plugin(folder + "/absent.py"),
    "broken plugin": lambda: load_plugin(folder + "/broken.py"),
    "no library": lambda: require("not_installed_anywhere", extra="any"),
    "no such rule": lambda: check("standard", rules=["nothing"]),
    "no sweep file": lambda: sweep.load(folder + "/absent.yaml"),
    "unknown key": lambda: sweep.load(folder + "/key.yaml"),
    "duplicate key": lambda: sweep.load(folder + "/twice.yaml"),
    "range in a grid": lambda: sweep.load(folder + "/range.yaml"),
}
for name in names():
    module = build(name, num_heads=2, head_dim=4)
    calls |= {
        f"{name}: lengths": lambda m=module: m(x, x, longer),
        f"{name}: dims": lambda m=module: m(wide, wide, wide),
        f"{name}: dtypes": lambda m=module: m(x, x.double(), x),
        f"{name}: no numbers": lambda m=module: m(x.long(), x.long(), x.long()),
        f"{name}: padding of another length": lambda m=module: m(x, x, x, Mask(keys=square[:1, :2])),
        f"{name}: bare mask": lambda m=module: m(x, x, x, square),
        f"{name}: step": lambda m=module: m.step(x, longer, longer, None),
        f"{name}: heads": lambda n=name: build(n, num_heads=0, head_dim=4),
        f"{name}: setting": lambda n=name: build(n, num_heads=1, head_dim=4, no_setting=1),
    }
for what, call in calls.items():
    try:
        call()
    except (ValueError, ImportError) as error:
        if len(str(error).splitlines()) != 1:
            print(what, "is not refused in one line:", error)
    except BaseException as error:
        print(what, "ends in", type(error).__name__, error)
    else:
        print(what, "is not refused")


class Leaky(get("standard")):
    def attend(self, q, k, v, mask, need_weights):
        weights = masked_softmax(scaled_scores(q, k), None)
        return core.AttentionOutput(average(weights, v), weights if need_weights else None)


if check(Leaky, rules=["no_future_leak"]).ok:
    print("the contract suite finds nothing")
print(len(calls), "tried")
"""


def test_refusals_stay_without_asserts(tmp_path):
    """`assert q.shape == k.shape` is gone under -O, and with it the check of what a person gives."""
    (tmp_path / "broken.py").write_text("raise RuntimeError('broken')")
    head = "name: s\nbase:\n  task: {name: copy}\n"
    (tmp_path / "key.yaml").write_text(head + "bugdet: {}\n")
    (tmp_path / "twice.yaml").write_text(head + "name: t\n")
    (tmp_path / "range.yaml").write_text(head + "parameters:\n  train.lr: {min: 1e-4, max: 1e-2}\n")
    call = [sys.executable, "-O", "-c", REFUSALS, str(tmp_path)]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    *found, last = done.stdout.splitlines()
    assert found == []
    assert int(last.split()[0]) >= 20 + 9 * len(ALL)


@pytest.mark.parametrize("package", ["core", "variants", "experiments"])
def test_an_assert_only_tells_a_type_checker_what_is_known(package):
    for file in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Assert):
                text = ast.unparse(node.test)
                assert text.endswith(" is not None") or text.startswith("isinstance("), f"{file}:{node.lineno}: {text}"
