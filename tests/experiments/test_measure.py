"""What is said to be measured, against counts by hand."""

import math

import pytest
import torch
from torch import nn

from core import Attention, AttentionOutput
from experiments import measure
from experiments.measure import MIB, attention_figures, decode_state_bytes, flops_per_token, peak_memory, resident_bytes
from experiments.model import build_model
from experiments.tasks import Batch, Task
from experiments.train import Trainer, make_optimizer
from tests.experiments.small import run_of, task_of

CPU = torch.device("cpu")


def model_of(attention, seed=0, **settings):
    run = run_of(attention, model=settings)
    task = task_of(run)
    return build_model(run, task, seed), task


def peak_of(work, resident=0):
    with peak_memory(CPU, resident) as peak:
        work()
    return peak.nbytes


def test_a_known_pattern_of_memory():
    """12 and 8 MiB alive together, then 8 and 10: the peak is 20."""

    def work():
        first = torch.empty(12 * MIB, dtype=torch.uint8)
        second = torch.empty(8 * MIB, dtype=torch.uint8)
        del first
        third = torch.empty(10 * MIB, dtype=torch.uint8)
        del second, third

    assert peak_of(work) == pytest.approx(20 * MIB, rel=0.01)
    assert peak_of(work, resident=100 * MIB) == pytest.approx(120 * MIB, rel=0.01)


def test_the_memory_of_a_run():
    """Parameters, gradients and two states of the optimiser, and beside them what grows with the batch."""
    peaks = []
    for batch_size in (64, 128, 192):
        run = run_of(train={"batch_size": batch_size})
        task = task_of(run)
        model = build_model(run, task, 0)
        trainer = Trainer(run, task, model, 0, CPU, lambda step, when, values: None)
        trainer.advance()
        assert trainer.peak_bytes is None
        trainer.advance()
        peaks.append(trainer.peak_bytes)
        trainer.advance()
        assert trainer.peak_bytes == peaks[-1]
    assert peaks[0] > 4 * 4 * sum(parameter.numel() for parameter in model.parameters())
    assert peaks[2] - peaks[1] == pytest.approx(peaks[1] - peaks[0], rel=0.01)
    # Of each token: logits and their gradient, and the hidden layer of the MLP before and after its nonlinearity, in each layer.
    assert peaks[1] - peaks[0] > 64 * 6 * 4 * (2 * 6 + 2 * 2 * 32)


def test_the_memory_of_a_training_step_by_count():
    """One linear layer without bias: activations and gradients are known."""
    rows, n, m = 512, 1024, 2048
    layer, x = nn.Linear(n, m, bias=False), torch.randn(512, 1024)
    # Forward: y; loss: y * y; backward: gradients of both and of the weight.
    nbytes = peak_of(lambda: layer(x).square().sum().backward(), resident_bytes(layer, torch.optim.SGD(layer.parameters())))
    weight, y = n * m * 4, rows * m * 4
    assert weight + y + weight <= nbytes <= weight + 3 * y + weight + y


def test_nothing_measured_is_not_called_nothing():
    assert peak_of(lambda: None, resident=5) is None


def test_shared_storage_is_counted_once():
    model = nn.ModuleDict({"a": nn.Linear(10, 20, bias=False), "b": nn.Linear(10, 20, bias=False)})
    model["b"].weight = model["a"].weight
    model.register_buffer("view", model["a"].weight.detach()[:5])
    model.register_buffer("other", torch.zeros(7, dtype=torch.float64))
    optimizer = torch.optim.AdamW(model.parameters())
    assert resident_bytes(model, optimizer) == 200 * 4 + 7 * 8
    model["a"](torch.ones(1, 10)).sum().backward()
    optimizer.step()
    steps = 4  # AdamW counts its steps in a tensor
    assert resident_bytes(model, optimizer) == 3 * 200 * 4 + 7 * 8 + steps


def test_the_state_of_the_optimiser_is_counted():
    model, _ = model_of({"variant": "standard"})
    optimizer = make_optimizer(model, run_of().train)
    numbers = sum(parameter.numel() for parameter in model.parameters())
    assert resident_bytes(model, optimizer) == numbers * 4
    sum(parameter.sum() for parameter in model.parameters()).backward()
    optimizer.step()
    tensors = len(list(model.parameters()))
    assert resident_bytes(model, optimizer) == 3 * numbers * 4 + 4 * tensors


class Projection(nn.Module):
    def __init__(self, n, m):
        super().__init__()
        self.first = nn.Embedding(5, n)
        self.second = nn.Linear(n, m, bias=False)

    def forward(self, inputs, keys=None):
        return self.second(self.first(inputs))


class Five(Task):
    vocab_size, seq_len = 5, 7

    def batch(self, split, seed, step):
        tokens = torch.randint(5, (3, 8), generator=torch.Generator().manual_seed(step))
        return Batch(tokens[:, :-1], tokens[:, 1:])


def test_the_operations_of_a_projection_by_formula():
    """2 m n k forward, and twice that backward: gradients of the input and of the weight."""
    task = Five(None, 3)
    found = flops_per_token(Projection(64, 96), task, task.batch("train", 0, 0))
    assert found * 21 == 2 * 21 * 64 * 96 * 3


@pytest.mark.parametrize("num_kv_heads", [None, 1])
def test_a_fused_kernel_costs_what_the_plain_products_cost(num_kv_heads):
    found = {}
    for backend in ("math", "sdpa"):
        model, task = model_of({"variant": "standard", "backend": backend}, num_kv_heads=num_kv_heads, positions="none")
        batch = Batch(torch.zeros(2, 64, dtype=torch.long), torch.zeros(2, 64, dtype=torch.long))
        found[backend] = flops_per_token(model, task, batch)
        assert {m.backend_used for m in model.modules() if isinstance(m, Attention)} == {backend}
    assert found["sdpa"] == pytest.approx(found["math"], rel=0.01)
    # By formula: projections, MLP and head, then scores and averages; three times for backward.
    C, L, layers, vocab = 8, 64, 2, 6
    kv = C if num_kv_heads is None else C // 2
    per_token = 2 * layers * (C * (C + 2 * kv) + C * C + 2 * C * 4 * C) + 2 * C * vocab + layers * 4 * L * C
    assert found["math"] == pytest.approx(3 * per_token, rel=0.01)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_counting_operations_leaves_no_trace(dropout):
    model, task = model_of({"variant": "standard"}, dropout=dropout)
    model.train()
    batch = task.batch("train", 0, 0)
    torch.manual_seed(3)
    before, parameters = torch.get_rng_state(), [p.detach().clone() for p in model.parameters()]
    flops_per_token(model, task, batch)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(parameters, model.parameters(), strict=True))
    assert model.training


def test_trainable_numbers():
    model, _ = model_of({"variant": "standard"}, tied=True)
    numbers = measure.parameters(model)
    assert numbers == sum(p.numel() for p in model.parameters())
    model.embedding.weight.requires_grad_(False)
    assert measure.parameters(model) == numbers - 6 * 8


@pytest.mark.parametrize("variant", ["standard", "topk", "uniform", "linear"])
@pytest.mark.parametrize("padded", [False, True])
def test_attention_figures_against_loops(variant, padded):
    own = {"keep": 2} if variant == "topk" else {}
    model, task = model_of({"variant": variant, **own})
    model.eval()
    batch = task.batch("val", 0, 0)
    if padded:
        keys = torch.ones_like(batch.inputs, dtype=torch.bool)
        keys[0, :2] = False
        keys[1, 0] = False
        batch = batch._replace(keys=keys)
    seen = []

    def remember(module, args, output):
        q, k, v, mask = args[:4]
        with torch.no_grad():
            seen.append(type(module).attend(module, q, k, v, mask, True).weights)

    hooks = [m.register_forward_hook(remember) for m in model.modules() if isinstance(m, Attention)]
    with torch.no_grad():
        model(batch.inputs, batch.keys)
    for hook in hooks:
        hook.remove()
    entropy = density = span = 0.0
    rows = 0
    for weights in seen:
        for b, heads in enumerate(weights.tolist()):
            for head in heads:
                for i, row in enumerate(head):
                    visible = [j for j in range(i + 1) if batch.keys is None or batch.keys[b, j]]
                    if not visible:
                        continue
                    assert sum(row) == pytest.approx(1.0, abs=1e-5)
                    entropy -= sum(w * math.log(w) for w in row if w > 0)
                    density += sum(w > 0 for w in row) / len(visible)
                    span += sum(w * (i - j) for j, w in enumerate(row))
                    rows += 1
    assert rows == 2 * 2 * (4 * 6 - (3 if padded else 0))  # layers, heads, rows that see something
    found = attention_figures(model, batch)
    assert found["attention/entropy"] == pytest.approx(entropy / rows, rel=1e-5)
    assert found["attention/density"] == pytest.approx(density / rows, rel=1e-6)
    assert found["attention/span"] == pytest.approx(span / rows, rel=1e-5)
    if variant == "topk":  # of 1 to 6 visible keys, two
        assert padded or found["attention/density"] == pytest.approx((1 + 1 + 2 / 3 + 2 / 4 + 2 / 5 + 2 / 6) / 6)
    if variant == "uniform" and not padded:
        assert found["attention/entropy"] == pytest.approx(sum(math.log(n) for n in range(1, 7)) / 6, rel=1e-5)
        assert found["attention/span"] == pytest.approx(sum(n / 2 for n in range(6)) / 6, rel=1e-5)


def test_a_variant_without_weights_has_no_figures(monkeypatch):
    model, task = model_of({"variant": "standard"})
    attend = type(model.blocks[0].attention.attention).attend
    monkeypatch.setattr(
        type(model.blocks[0].attention.attention), "attend", lambda *args: AttentionOutput(attend(*args).out, None)
    )
    assert attention_figures(model, task.batch("val", 0, 0)) == {}


def test_no_hook_is_left_behind():
    model, task = model_of({"variant": "standard"})
    attention_figures(model, task.batch("val", 0, 0))
    with pytest.raises(ValueError, match="made for 6"):
        attention_figures(model, Batch(torch.zeros(1, 9, dtype=torch.long), torch.zeros(1, 9, dtype=torch.long)))
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("seq_len", [1, 10, 64])
def test_the_state_of_decoding_by_formula(seq_len):
    C, layers = 8, 2
    for variant in ("standard", "topk", "uniform"):
        assert decode_state_bytes(model_of({"variant": variant})[0], seq_len) == 2 * seq_len * C * 4 * layers
    shared, _ = model_of({"variant": "standard"}, num_kv_heads=1)
    assert decode_state_bytes(shared, seq_len) == 2 * seq_len * C // 2 * 4 * layers
    assert decode_state_bytes(shared, seq_len, torch.bfloat16) == seq_len * C // 2 * 4 * layers
    # Sums of phi(k) [v, 1]: heads x D x (D + 1) numbers a layer, whatever the length.
    assert decode_state_bytes(model_of({"variant": "linear"})[0], seq_len) == layers * 2 * 4 * 5 * 4


def test_a_variant_that_cannot_decode_has_no_state(monkeypatch):
    model, _ = model_of({"variant": "uniform"})
    cls = type(model.blocks[0].attention.attention)
    monkeypatch.setattr(cls, "spec", type(cls.spec)(causal=True))
    assert decode_state_bytes(model, 5) is None


def test_seconds_are_wall_clock(monkeypatch):
    clock = iter([10.0, 12.5])
    monkeypatch.setattr(measure.time, "perf_counter", lambda: next(clock))
    called = []
    assert measure.seconds(CPU, lambda: called.append(1)) == 2.5
    assert called == [1]
