"""The model around a mechanism: the same for every variant, and blind to the future."""

import pytest
import torch
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

import core
from core.contract.devices import OneDevice, fake_cuda
from experiments import config
from experiments.model import Decoder, build_model, forward_loss
from experiments.train import make_optimizer
from tests.experiments.small import run_of, task_of

VARIANTS = core.names()
TOKENS = torch.tensor([[1, 2, 3, 5, 0, 4], [0, 0, 1, 4, 2, 5]])


def model_of(attention="standard", seed=0, device="cpu", **settings):
    run = run_of({"variant": attention}, model=settings)
    return build_model(run, task_of(run), seed, device)


@pytest.mark.parametrize("variant", VARIANTS)
def test_shared_parameters_start_equal(variant):
    standard = dict(model_of(seed=3, positions="learned").named_parameters())
    other = dict(model_of(variant, seed=3).named_parameters())
    assert standard.keys() <= other.keys()
    for name, parameter in standard.items():
        assert torch.equal(parameter, other[name]), name


def test_what_a_variant_adds_shifts_no_other():
    run = run_of({"variant": "temperature", "learn": "per_head"})
    standard, other = dict(model_of(seed=3).named_parameters()), dict(build_model(run, task_of(run), 3).named_parameters())
    assert len(other) == len(standard) + 2
    assert all(torch.equal(parameter, other[name]) for name, parameter in standard.items())


def test_seeds_differ_in_every_matrix():
    one, two, again = (dict(model_of(seed=seed).named_parameters()) for seed in (0, 1, 0))
    for name, parameter in one.items():
        assert torch.equal(parameter, again[name])
        assert torch.equal(parameter, two[name]) == (parameter.dim() == 1), name


def test_no_two_matrices_start_alike():
    matrices = [parameter for _, parameter in model_of().named_parameters() if parameter.dim() > 1]
    starts = {tuple(round(number / matrix.std().item(), 4) for number in matrix.flatten()[:8].tolist()) for matrix in matrices}
    assert len(starts) == len(matrices)


def test_the_start_does_not_depend_on_the_global_stream():
    torch.manual_seed(1)
    one = model_of()
    torch.manual_seed(2)
    two = model_of()
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def test_spreads_of_the_start():
    model = model_of(model_dim=64, num_layers=8)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            assert set(parameter.tolist()) == ({1.0} if "norm" in name and name.endswith("weight") else {0.0}), name
        else:
            expected = 0.02 / 4 if name.endswith(("out_proj.weight", "mlp_out.weight")) else 0.02  # sqrt(2 * 8) = 4
            assert float(parameter.detach().std()) == pytest.approx(expected, rel=0.12), name


@pytest.mark.parametrize("positions", ["none", "learned", "rotary"])
@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_no_output_knows_the_future(variant, positions):
    model = model_of(variant, positions=positions).double().eval()
    before = model(TOKENS)
    for place in range(TOKENS.shape[1]):
        changed = TOKENS.clone()
        changed[0, place] = (changed[0, place] + 1) % 6
        after = model(changed)
        assert torch.equal(after[1], before[1])
        assert float((after[0, :place] - before[0, :place]).abs().max() if place else 0.0) <= 1e-12
        assert float((after[0, place] - before[0, place]).abs().max()) > 1e-9


def test_the_end_of_a_text_changes_nothing_before_it():
    model = model_of().double().eval()
    assert torch.allclose(model(TOKENS[:, :4]), model(TOKENS)[:, :4], atol=1e-12)


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_positions_tell_the_order(positions):
    def last(kind, tokens):  # of one layer; with more, causality itself tells the order
        return model_of(positions=kind, num_layers=1).double().eval()(torch.tensor([tokens]))[0, -1]

    assert not torch.allclose(last(positions, [1, 2, 3]), last(positions, [2, 1, 3]), atol=1e-7)
    assert torch.allclose(last("none", [1, 2, 3]), last("none", [2, 1, 3]), atol=1e-12)


def test_padding_is_passed_on():
    model = model_of(positions="none").double().eval()
    keys = torch.tensor([[False, False, True, True, True, True]])
    padded = model(torch.tensor([[0, 0, 3, 1, 4, 2]]), keys)
    assert torch.allclose(padded[:, 2:], model(torch.tensor([[3, 1, 4, 2]])), atol=1e-12)


def test_a_tied_head_is_the_embedding():
    free, tied = model_of(), model_of(tied=True)
    assert tied.head.weight is tied.embedding.weight
    assert sum(p.numel() for p in free.parameters()) - sum(p.numel() for p in tied.parameters()) == 6 * 8
    tied(TOKENS).sum().backward()
    assert tied.embedding.weight.grad.shape == (6, 8)
    assert len(tied.state_dict()) == len(free.state_dict())


@pytest.mark.parametrize("variant", VARIANTS)
def test_recomputed_activations_change_nothing(variant):
    gradients = []
    for checkpoint in (False, True):
        model = model_of(variant, checkpoint=checkpoint, dropout=0.3).train()
        torch.manual_seed(5)
        model(TOKENS).square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*gradients, strict=True))


def test_dropout_is_for_training_only():
    model = model_of(dropout=0.5)
    model.eval()
    assert torch.equal(model(TOKENS), model(TOKENS))
    model.train()
    assert not torch.equal(model(TOKENS), model(TOKENS))


@pytest.mark.parametrize("positions", ["none", "learned", "rotary"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_tensor_is_made_on_the_device_of_the_model(variant, positions):
    """Forward, backward and the optimiser's step on meta, where a tensor made elsewhere raises."""
    run = run_of({"variant": variant}, model={"positions": positions, "dropout": 0.1})
    task = task_of(run)
    model = build_model(run, task, 0, "meta")
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    batch = task.batch("train", 0, 0)
    batch = batch._replace(inputs=batch.inputs.to("meta"), targets=batch.targets.to("meta"))
    with OneDevice("meta"):
        output, total, _ = forward_loss(model, task, batch)
        assert output.shape == (4, 6, 6)
        total.backward()
        parameters = list(model.parameters())
        clip_grads_with_norm_(parameters, 1.0, get_total_norm([parameter.grad for parameter in parameters]))
    assert all(parameter.grad.device.type == "meta" for parameter in parameters)
    optimizer = make_optimizer(model, run.train, fused=False)  # the fused kernel does not know meta
    optimizer.step()
    states = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert len(states) == 2 * len(parameters)
    assert {state.device.type for state in states} == {"meta"}


@pytest.mark.parametrize("positions", ["none", "learned", "rotary"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_made_on_cuda_only_is_seen_without_a_gpu(variant, positions):
    run = run_of({"variant": variant}, model={"positions": positions})
    task = task_of(run)
    with fake_cuda():
        with torch.device("cuda"):
            model = Decoder(run.model, run.attention, task.vocab_size, task.seq_len)
            tokens = torch.zeros(4, 6, dtype=torch.long)
            keys = torch.ones(4, 6, dtype=torch.bool)
        for given in (None, keys):
            assert model(tokens, given).device.type == "cuda"


def counted(C, layers, vocab, length, hidden, bias, tied, kv_share=1.0, positions=True):
    """Parameters by formula: embedding, positions, layers, last norm, head."""
    norm = 2 * C if bias else C
    attention = C * (C + 2 * int(C * kv_share)) + C * C
    mlp = 2 * C * hidden
    biases = (C + 2 * int(C * kv_share)) + C + hidden + C if bias else 0
    layer = 2 * norm + attention + mlp + biases
    return vocab * C + (length * C if positions else 0) + layers * layer + norm + (0 if tied else vocab * C)


def test_the_published_character_setting_has_the_published_size(tmp_path):
    """nanoGPT's small character model: 0.80 M parameters without its positions, which it does not count."""
    path = tmp_path / "c.txt"
    path.write_text("".join(chr(32 + n) for n in range(65)) * 40)
    run = run_of(
        task={"name": "text", "corpus": str(path), "seq_len": 64},
        model={"model_dim": 128, "num_layers": 4, "num_heads": 4, "bias": False, "tied": True},
    )
    model = build_model(run, task_of(run), 0)
    total = sum(parameter.numel() for parameter in model.parameters())
    assert total == counted(128, 4, 65, 64, 512, bias=False, tied=True)
    assert total - 64 * 128 == 795_904


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kv_heads", [None, 1, 2])
def test_sizes_by_formula(bias, tied, kv_heads):
    model = model_of(bias=bias, tied=tied, num_kv_heads=kv_heads, mlp_ratio=1.5, num_layers=3)
    share = 1.0 if kv_heads is None else kv_heads / 2
    assert sum(p.numel() for p in model.parameters()) == counted(8, 3, 6, 6, 12, bias, tied, share)


def test_a_kind_without_a_model_is_refused():
    run = run_of()
    task = task_of(run)
    task.kind = "encoder_decoder"
    with pytest.raises(ValueError, match=r"^task copy: kind encoder_decoder has no model here \(there are: decoder\)$"):
        build_model(run, task, 0)


def test_an_input_longer_than_the_positions_is_refused():
    with pytest.raises(ValueError, match="made for 6, got 7"):
        model_of()(torch.zeros(1, 7, dtype=torch.long))


def test_settings_reach_the_layers():
    model = model_of("topk", num_heads=4, num_kv_heads=2, dropout=0.25)
    layer = model.blocks[1].attention
    assert (layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.dropout) == (4, 2, 2, 0.25)
    assert layer.attention.config.keep == 8
    assert isinstance(run_of().model, config.Model)
