import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F

from core import ConfigError, Mask, MaskError, MultiHeadAttention, ShapeError, UnknownNameError, get
from core.contract.devices import OneDevice, fake_cuda

B, L, S, C, H = 2, 6, 9, 12, 6
VARIANTS = [
    ("standard", {}),
    ("temperature", {"temperature": 0.5, "learn": "per_head"}),
    ("topk", {"keep": 3}),
    ("local_global", {"window": 3}),
    ("local_global", {"window": 3, "num_global": 1}),
    ("linear", {}),
    ("uniform", {}),
    ("additive", {}),
    ("top_p", {"mass": 0.7}),
    ("entmax", {}),
    ("memory", {"num_slots": 3}),
]
each_variant = pytest.mark.parametrize(("variant", "config"), VARIANTS)


def layer(variant="standard", config=None, **settings):
    torch.manual_seed(0)
    return MultiHeadAttention(C, H, variant=variant, config=config, **settings)


def tokens(length=L, seed=1, dtype=torch.float64):
    return torch.randn(B, length, C, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def by_hand(module, x, source, mask, num_kv_heads):
    """Loops over heads on slices of the weights, with a softmax written out."""
    dim = C // H
    weight, bias = module.in_proj.weight, module.in_proj.bias
    first = H * dim
    second = first + num_kv_heads * dim
    q = x @ weight[:first].T + bias[:first]
    k = source @ weight[first:second].T + bias[first:second]
    v = source @ weight[second:].T + bias[second:]
    heads = []
    for h in range(H):
        shared = h // (H // num_kv_heads)
        one_k, one_v = (t[..., shared * dim : (shared + 1) * dim] for t in (k, v))
        scores = q[..., h * dim : (h + 1) * dim] @ one_k.transpose(1, 2) / dim**0.5
        powers = scores.exp() * mask
        heads.append(powers / powers.sum(-1, keepdim=True) @ one_v)
    return torch.cat(heads, dim=-1) @ module.out_proj.weight.T + module.out_proj.bias


@pytest.mark.parametrize("num_kv_heads", [1, 2, 3, 6])
def test_equals_the_layer_by_hand(num_kv_heads):
    module = layer(num_kv_heads=num_kv_heads).double()
    x, context = tokens(), tokens(S, seed=2)
    causal = torch.ones(L, L).double().tril()
    keys = torch.ones(B, S, dtype=torch.bool)
    keys[0, 5:] = False
    for given, expected in (
        (module(x), by_hand(module, x, x, torch.ones(L, L), num_kv_heads)),
        (module(x, mask=Mask(causal=True)), by_hand(module, x, x, causal, num_kv_heads)),
        (
            module(x, context, Mask(keys=keys)),
            by_hand(module, x, context, keys[:, None, :].double(), num_kv_heads),
        ),
    ):
        assert given.shape == (B, L, C)
        torch.testing.assert_close(given, expected, rtol=1e-12, atol=1e-12)


def test_without_bias():
    module = layer(bias=False).double()
    assert sorted(module.state_dict()) == ["in_proj.weight", "out_proj.weight"]
    x, context = tokens(), tokens(S, seed=2)
    assert module(x, context).shape == (B, L, C)
    torch.testing.assert_close(module(x, x), module(x), rtol=1e-12, atol=1e-12)


def test_a_head_of_one_channel():
    assert MultiHeadAttention(4, 4)(torch.randn(1, 3, 4)).shape == (1, 3, 4)


@pytest.mark.parametrize(
    ("sizes", "both"),
    [
        ((384, 5, None), ("384", "5")),
        ((512, 6, None), ("512", "6")),
        ((12, 6, 4), ("6", "4")),
        ((12, 2, 4), ("2", "4")),
        ((12, 0, None), ("0",)),
        ((12, 2, 0), ("num_kv_heads", "0")),
        (("12", 2, None), ("model_dim", "'12'")),
        ((12, 2.0, None), ("num_heads", "2.0")),
        ((12, -2, None), ("-2",)),
    ],
)
def test_sizes_that_do_not_divide(sizes, both):
    with pytest.raises(ConfigError) as caught:
        MultiHeadAttention(*sizes)
    assert all(number in str(caught.value) for number in both)


@pytest.mark.parametrize("dropout", [-0.1, 1.0, 2.0, float("nan")])
def test_dropout_limits(dropout):
    with pytest.raises(ConfigError, match="dropout"):
        MultiHeadAttention(4, 2, dropout=dropout)


def test_names_and_settings_are_those_of_the_variant():
    with pytest.raises(UnknownNameError, match="did you mean 'linear'"):
        layer("linaer")
    with pytest.raises(ConfigError, match="topk: unknown setting 'kep'; did you mean 'keep'"):
        layer("topk", {"kep": 3})


def test_causal_with_a_context_is_refused():
    with pytest.raises(MaskError, match="causal with a context"):
        layer()(tokens(), tokens(), Mask(causal=True))


@pytest.mark.parametrize("shape", [(B, L, C + 1), (B, C), (B, 1, L, C)])
def test_inputs_of_another_shape(shape):
    module = layer()
    with pytest.raises(ShapeError, match=r"x: must be \(B, length, 12\)"):
        module(torch.zeros(shape))
    with pytest.raises(ShapeError, match=r"context: must be \(B, length, 12\)"):
        module(tokens(dtype=torch.float32), torch.zeros(shape))
    with pytest.raises(ShapeError, match="x: must be"):
        module.decode(torch.zeros(shape), None)


def test_a_context_of_another_batch():
    with pytest.raises(ShapeError, match="batch of k must be 2, got 3"):
        layer()(torch.zeros(2, L, C), torch.zeros(3, S, C))


@each_variant
def test_projections_start_equal_under_one_seed(variant, config):
    reference, module = layer(), layer(variant, config)
    for name in ("in_proj", "out_proj"):
        assert torch.equal(getattr(module, name).weight, getattr(reference, name).weight)
        assert torch.equal(getattr(module, name).bias, getattr(reference, name).bias)


@each_variant
@pytest.mark.parametrize("num_kv_heads", [6, 2])
@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("pieces", [[1] * S, [4, 1, 4]])
def test_decoding_equals_the_full_forward(variant, config, num_kv_heads, rotary, pieces):
    module = layer(variant, config, num_kv_heads=num_kv_heads, rotary=rotary).double()
    x = tokens(S)
    left = torch.ones(B, S, dtype=torch.bool)
    left[0, :3] = False
    for keys in (None, left):
        expected = module(x, mask=Mask(causal=True, keys=keys))
        outs, cache, start = [], None, 0
        for length in pieces:
            part = slice(start, start + length)
            out, cache = module.decode(x[:, part], cache, None if keys is None else keys[:, part])
            outs.append(out)
            start += length
        assert cache.length == S
        assert cache.nbytes > 0
        torch.testing.assert_close(torch.cat(outs, dim=1), expected, rtol=1e-12, atol=1e-12)


def test_rotary_changes_the_layer_and_depends_on_distance():
    module = layer(rotary=True).double()
    x = tokens()
    flipped = module(x.flip(1)).flip(1)
    assert not torch.allclose(flipped, module(x))
    torch.testing.assert_close(layer().double()(x.flip(1)).flip(1), layer().double()(x), rtol=1e-12, atol=1e-12)


@each_variant
def test_dropout_acts_on_the_output_in_training_only(variant, config):
    module, x = layer(variant, config, dropout=0.5).double(), tokens()
    plain = layer(variant, config).double()(x, mask=Mask(causal=True))
    torch.manual_seed(5)
    given = module(x, mask=Mask(causal=True))
    torch.manual_seed(5)
    assert torch.equal(given, F.dropout(plain, 0.5))
    module.eval()
    assert torch.equal(module(x, mask=Mask(causal=True)), plain)
    assert torch.equal(module(x, mask=Mask(causal=True)), plain)


@each_variant
def test_checkpointing_changes_nothing(variant, config):
    losses, gradients = [], []
    for checkpoint in (False, True):
        module = layer(variant, config, dropout=0.3, checkpoint=checkpoint, num_kv_heads=3)
        x = tokens(dtype=torch.float32).requires_grad_()
        torch.manual_seed(9)
        loss = (module(x, mask=Mask(causal=True)) ** 2).sum()
        loss.backward()
        losses.append(loss)
        gradients.append([x.grad, *(parameter.grad for parameter in module.parameters())])
    assert torch.equal(*losses)
    for with_, without in zip(*gradients, strict=True):
        assert torch.equal(with_, without)


@pytest.mark.parametrize("training", [True, False])
def test_checkpointing_recomputes_in_training_only(training):
    module = layer(checkpoint=True).train(training)
    calls = []
    module.attention.register_forward_pre_hook(lambda *_: calls.append(1))
    module(tokens(dtype=torch.float32).requires_grad_()).sum().backward()
    assert len(calls) == (2 if training else 1)


@each_variant
def test_copies_before_and_after_a_forward(variant, config):
    module = layer(variant, config, num_kv_heads=2, dropout=0.5, rotary=True)
    x = tokens(dtype=torch.float32)
    module(x, mask=Mask(causal=True)).sum().backward()
    for original in (layer(variant, config, num_kv_heads=2, dropout=0.5, rotary=True), module):
        saved = io.BytesIO()
        torch.save(original.state_dict(), saved)
        saved.seek(0)
        loaded = layer(variant, config, num_kv_heads=2, dropout=0.5, rotary=True)
        torch.nn.init.zeros_(loaded.in_proj.weight)
        loaded.load_state_dict(torch.load(saved))
        expected = original.eval()(x, mask=Mask(causal=True))
        for twin in (copy.deepcopy(original), pickle.loads(pickle.dumps(original)), loaded.eval()):
            assert torch.equal(twin(x, mask=Mask(causal=True)), expected)


@each_variant
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_narrows_the_projections_only(variant, config, dtype, monkeypatch):
    module, x = layer(variant, config), tokens(dtype=torch.float32)
    seen = []
    real = type(module.attention).attend

    def spy(self, q, k, v, mask, need_weights):
        seen.append((q.dtype, torch.is_autocast_enabled("cpu")))
        return real(self, q, k, v, mask, need_weights)

    monkeypatch.setattr(type(module.attention), "attend", spy)
    with torch.autocast("cpu", dtype=dtype):
        given = module(x, mask=Mask(causal=True))
        projected = module.project(x)
        cached, _ = module.decode(x, None)
    assert seen[0] == (dtype, False)
    assert given.dtype == dtype
    # From the rounded projections on, what is computed is the float32 function, rounded once.
    exact = real(module.attention, *(t.float() for t in projected), Mask(causal=True), True).out
    tolerance = 4 * torch.finfo(dtype).eps
    rounded = module.attention(*projected, Mask(causal=True)).out.float()
    torch.testing.assert_close(rounded, exact, rtol=tolerance, atol=tolerance)
    # The projections themselves cost a few roundings of the format.
    for out in (given, cached):
        torch.testing.assert_close(out.float(), module(x, mask=Mask(causal=True)), rtol=20 * tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("length", [0, 1])
@pytest.mark.parametrize("batch", [0, 1, 2])
def test_empty_and_single(batch, length):
    module = layer()
    x = torch.randn(batch, length, C, requires_grad=True)
    out = module(x, mask=Mask(causal=True))
    assert out.shape == (batch, length, C)
    out.sum().backward()
    assert x.grad.shape == x.shape


@each_variant
@pytest.mark.parametrize("checkpoint", [False, True])
def test_every_tensor_is_made_on_the_device_of_the_inputs(variant, config, checkpoint):
    module = layer(variant, config, rotary=True, dropout=0.1, checkpoint=checkpoint).to("meta").train()
    x, context = (torch.zeros(B, length, C, device="meta", requires_grad=True) for length in (L, S))
    keys = torch.ones(B, L, dtype=torch.bool, device="meta")
    with OneDevice("meta"):
        outs = [module(x, mask=Mask(causal=True, keys=keys)), module(x)]
        if get(variant).spec.cross:
            outs.append(module(x, context))
        cache = None
        for _ in range(2):
            out, cache = module.decode(x, cache, keys)
            outs.append(out)
        sum(out.sum() for out in outs).backward()
    assert {out.device.type for out in outs} == {"meta"}
    assert all(parameter.grad.device.type == "meta" for parameter in module.parameters())


@each_variant
def test_and_on_a_cuda_device_that_is_not_there(variant, config):
    with fake_cuda():
        with torch.device("cuda"):
            module = layer(variant, config, rotary=True)
            x, keys = torch.zeros(B, L, C), torch.ones(B, L, dtype=torch.bool)
        assert module(x, mask=Mask(causal=True, keys=keys)).is_cuda
        _, cache = module.decode(x, None, keys)
        assert module.decode(x, cache)[0].is_cuda
