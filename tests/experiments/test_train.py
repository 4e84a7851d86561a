"""Training: rates, clipping, weights of targets, and a stopped run that goes on bit by bit as if it had not been."""

import itertools
import json
import math
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from experiments import train as train_module
from experiments.config import Train
from experiments.model import build_model
from experiments.seeding import derive
from experiments.tasks import IGNORE, Batch, Task
from experiments.train import MAX_SKIPPED, DivergedError, StoppedError, Trainer, learning_rate, make_optimizer, write_whole
from tests.experiments.small import ROOT, run_of, task_of

CPU = torch.device("cpu")


def trainer_of(run, seed=0, task=None, model=None, **settings):
    task = task or task_of(run)
    model = model or build_model(run, task, seed)
    recorded, times = [], []

    def record(step, when, values):
        recorded.append((step, values))
        times.append(when)

    made = Trainer(run, task, model, seed, CPU, record, **{"full": False, **settings})
    made.recorded, made.times = recorded, times
    return made


def rates(**settings):
    train = Train(**{"lr": 1.0, "schedule": "constant", **settings})
    return [learning_rate(train, step) for step in range(train.steps)]


def test_warm_up():
    """B5: no step is wasted on a rate of 0, and the peak is reached."""
    assert rates(steps=6, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert rates(steps=3, warmup_steps=0) == [1.0, 1.0, 1.0]
    assert rates(steps=3, warmup_steps=1) == [1.0, 1.0, 1.0]
    assert rates(steps=4, warmup_steps=4, schedule="cosine") == [0.25, 0.5, 0.75, 1.0]
    assert rates(steps=1, schedule="linear") == [1.0]


def test_linear_and_cosine_by_hand():
    assert rates(steps=6, warmup_steps=2, schedule="linear", min_lr=0.2) == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4])
    expected = [1.0, 0.2 + 0.8 * 0.5 * (1 + math.sqrt(0.5)), 0.2 + 0.8 * 0.5, 0.2 + 0.8 * 0.5 * (1 - math.sqrt(0.5))]
    assert rates(steps=4, schedule="cosine", min_lr=0.2) == pytest.approx(expected)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_after_warm_up_the_rate_falls_to_its_end(schedule):
    found = rates(steps=500, warmup_steps=50, schedule=schedule, min_lr=0.1)
    assert all(a < b for a, b in itertools.pairwise(found[:50]))
    assert found[49] == found[50] == 1.0
    assert all(a > b for a, b in itertools.pairwise(found[50:]))
    assert 0.1 < found[-1] < 0.1 + 0.9 / 400


def test_the_recorded_rate_is_the_one_that_was_used():
    run = run_of(train={"steps": 3, "warmup_steps": 3, "lr": 0.3, "log_every": 1})
    trainer = trainer_of(run)
    used = []
    step = trainer.optimizer.step
    trainer.optimizer.step = lambda: (used.append(trainer.optimizer.param_groups[0]["lr"]), step())
    for _ in range(3):
        trainer.advance()
    assert [values["lr"] for _, values in trainer.recorded] == used == pytest.approx([0.1, 0.2, 0.3])
    assert [step for step, _ in trainer.recorded] == [1, 2, 3]


class Slope(nn.Module):
    """A model whose gradient is what a test wants."""

    def __init__(self, *gradients):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.gradients = [torch.tensor(gradient) for gradient in gradients]

    def forward(self, inputs, keys=None):
        return (self.weight * self.gradients.pop(0)).sum()


class Plain(Task):
    """Its loss is the model's output."""

    vocab_size, seq_len = 2, 1

    def batch(self, split, seed, step):
        return Batch(torch.zeros(1, 1, dtype=torch.long), torch.zeros(1, 1, dtype=torch.long))

    def eval_batches(self, split):
        return 0

    def loss(self, output, batch):
        return output, torch.tensor(1)


def slope(*gradients, **train):
    """A trainer on such a model, with plain gradient descent at rate 1, so that a step is minus what was left of the gradient."""
    run = run_of(train={"steps": 40, "lr": 1.0, "log_every": 1, **train})
    model = Slope(*gradients)
    trainer = trainer_of(run, task=Plain(None, 1), model=model)
    trainer.optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return trainer, model


@pytest.mark.parametrize(
    ("clip", "step"), [(1.0, (0.6, 0.8)), (2.5, (1.5, 2.0)), (5.1, (3.0, 4.0)), (100.0, (3.0, 4.0)), (None, (3.0, 4.0))]
)
def test_clipping(clip, step):
    """B6."""
    trainer, model = slope((3.0, 4.0), grad_clip=clip)
    trainer.advance()
    assert (-model.weight).tolist() == pytest.approx(step, rel=1e-5)
    assert trainer.recorded[0][1]["grad_norm"] == pytest.approx(5.0)  # before clipping


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_no_number_is_skipped_and_counted(bad):
    trainer, model = slope((3.0, 4.0), (3.0, bad), (0.3, 0.4))
    # A finite loss with a gradient that is not.
    model.forward = lambda inputs, keys=None: (gradient := model.gradients.pop(0)) is None or _Given.apply(model.weight, gradient)
    trainer.advance()
    before = model.weight.detach().clone()
    trainer.advance()
    assert torch.equal(model.weight, before)
    trainer.advance()
    assert (before - model.weight.detach()).tolist() == pytest.approx([0.3, 0.4])
    first, second, third = (values for _, values in trainer.recorded)
    assert "train/skipped_steps" not in first
    assert "grad_norm" not in second
    assert second["train/skipped_steps"] == third["train/skipped_steps"] == 1.0
    assert third["grad_norm"] == pytest.approx(0.5)


class _Given(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, gradient):
        ctx.gradient = gradient
        return weight.sum() * 0.0

    @staticmethod
    def backward(ctx, grad):
        return ctx.gradient * grad, None


def test_a_run_without_a_gradient_ends():
    trainer, model = slope()
    nan = torch.tensor([float("nan"), 0.0])
    model.forward = lambda inputs, keys=None: _Given.apply(model.weight, nan)
    for _ in range(MAX_SKIPPED - 1):
        trainer.advance()
    with pytest.raises(DivergedError, match=r"no finite gradient in the 10 steps up to 10 of 40"):
        trainer.advance()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_loss_that_is_no_number_ends_the_run(bad):
    trainer, model = slope((1.0, 1.0))
    trainer.advance()
    model.forward = lambda inputs, keys=None: model.weight.sum() * 0 + bad
    before = model.weight.detach().clone()
    with pytest.raises(DivergedError, match=r"the training loss is -?(nan|inf) at step 2 of 40"):
        trainer.advance()
    assert torch.equal(model.weight, before)


class Uneven(Task):
    """Batch A: four targets that cost 1 each, batch B: one that costs 3."""

    vocab_size, seq_len = 2, 4

    def batch(self, split, seed, step):
        targets = [[1, 1, 1, 1], [1, IGNORE, IGNORE, IGNORE]][step]
        return Batch(torch.full((1, 4), step), torch.tensor([targets]))

    def eval_batches(self, split):
        return {"val": 2, "test": 0}[split]


class Costs(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, inputs, keys=None):
        cost = torch.where(inputs == 0, 1.0, 3.0)
        other = torch.log(torch.exp(cost) - 1)  # -log softmax([other, 0])[1] = log(1 + exp(other)) = cost
        return torch.stack([other, torch.zeros_like(other)], -1)


def test_perplexity_weighs_every_target_alike():
    """B1: not the mean of the means of batches, 7.389, nor the mean of perplexities, 11.402."""
    found = trainer_of(run_of(), task=Uneven(None, 1), model=Costs()).evaluate("val")
    assert found["val/loss"] == pytest.approx(7 / 5, abs=1e-6)
    assert found["val/perplexity"] == pytest.approx(4.0551999, abs=1e-5)
    assert found["val/accuracy"] == 0.0
    assert found.keys() == {"val/loss", "val/perplexity", "val/accuracy"}


def test_an_empty_split_has_no_figures():
    assert trainer_of(run_of(), task=Uneven(None, 1), model=Costs()).evaluate("test") == {}


class Scores(nn.Module):
    """20 on the token `ahead` of the input, -20 on all others."""

    def __init__(self, vocab, ahead):
        super().__init__()
        self.weight, self.vocab, self.ahead = nn.Parameter(torch.zeros(1)), vocab, ahead

    def forward(self, inputs, keys=None):
        return nn.functional.one_hot((inputs + self.ahead) % self.vocab, self.vocab) * 40.0 - 20.0


@pytest.mark.parametrize(("ahead", "loss"), [(1, 0.0), (0, 40.0), (2, 40.0)])
def test_a_target_is_the_next_token(tmp_path, ahead, loss):
    """B2: an oracle of the next token costs nothing, one that copies or looks too far costs 40."""
    path = tmp_path / "c.txt"
    path.write_text("0123456789" * 60)
    run = run_of(task={"name": "text", "corpus": str(path), "seq_len": 7})
    task = task_of(run)
    assert trainer_of(run, task=task, model=Scores(10, ahead)).evaluate("val")["val/loss"] == pytest.approx(loss, abs=1e-4)
    batch = task.batch("train", 0, 0)
    total, count = task.loss(Scores(10, ahead)(batch.inputs), batch)
    assert int(count) == 4 * 7
    assert float(total / count) == pytest.approx(loss, abs=1e-4)


class Halves(Task):
    """Eight rows in one batch, or the same in two batches of four, of which one has fewer targets."""

    vocab_size, seq_len = 6, 5

    def batch(self, split, seed, step):
        draw = torch.Generator().manual_seed(step * self.batch_size // 8)
        tokens = torch.randint(6, (8, 6), generator=draw)
        targets = tokens[:, 1:].clone()
        targets[5:, 1:] = IGNORE
        rows = slice(None) if self.batch_size == 8 else slice(step % 2 * 4, step % 2 * 4 + 4)
        return Batch(tokens[rows, :-1], targets[rows])


def test_accumulation_is_a_larger_batch():
    models = []
    for batch_size, accumulate in ((8, 1), (4, 2)):
        run = run_of(train={"steps": 5, "batch_size": batch_size, "accumulate": accumulate, "log_every": 1, "lr": 1e-3})
        trainer = trainer_of(run, task=Halves(None, batch_size), seed=1)
        for _ in range(5):
            trainer.advance()
        models.append(trainer)
    whole, halves = models
    for (_, a), (_, b) in zip(whole.recorded, halves.recorded, strict=True):
        assert a["train/loss"] == pytest.approx(b["train/loss"], abs=1e-6)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], abs=1e-6)
    for a, b in zip(whole.model.parameters(), halves.model.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_decay_is_for_matrices():
    run = run_of({"variant": "temperature", "learn": "per_head"}, train={"weight_decay": 0.3})
    model = build_model(run, task_of(run), 0)
    groups = make_optimizer(model, run.train).param_groups
    decay = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    assert len(decay) == len(list(model.parameters()))
    for name, parameter in model.named_parameters():
        matrix = name.endswith("weight") and "norm" not in name
        if "attention.attention" not in name:
            assert decay[id(parameter)] == (0.3 if matrix else 0.0), name


def test_a_variants_own_scalars_do_not_decay():
    """A learned temperature is pulled to no value, however many axes its parameter has."""
    run = run_of({"variant": "temperature", "learn": "per_head"}, train={"weight_decay": 0.3})
    model = build_model(run, task_of(run), 0)
    groups = make_optimizer(model, run.train).param_groups
    decay = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    found = {decay[id(parameter)] for name, parameter in model.named_parameters() if name.endswith("position")}
    assert found == {0.0}


RESUMED = {
    "model": {"dropout": 0.3},
    "train": {"steps": 6, "schedule": "cosine", "warmup_steps": 2, "log_every": 1, "eval_every": 2},
}
GO_ON = """
import json, sys
from pathlib import Path
import torch
torch.set_num_threads(1)  # as in the process that began
from tests.experiments.test_train import RESUMED, trainer_of
from tests.experiments.small import run_of
trainer = trainer_of(run_of(**RESUMED), seed=2, checkpoint=Path(sys.argv[1]))
assert trainer.step == 3
trainer.fit()
trainer.save_weights()
print(json.dumps([trainer.recorded, trainer.times, trainer.order]))
"""


def test_a_stopped_run_goes_on_bit_by_bit_in_another_process(tmp_path):
    """B4, with dropout on: weights, optimiser, schedule, random stream and place in the data."""
    whole = trainer_of(run_of(**RESUMED), seed=2, checkpoint=tmp_path / "whole.pt")
    whole.fit()
    whole.save_weights()
    path = tmp_path / "run.pt"
    asked = iter([False, False, False, True])
    half = trainer_of(run_of(**RESUMED), seed=2, checkpoint=path, stop=lambda: next(asked))
    with pytest.raises(StoppedError, match=r"^stopped after step 3 of 6$"):
        half.fit()
    out = subprocess.run([sys.executable, "-c", GO_ON, str(path)], stdout=subprocess.PIPE, text=True, cwd=ROOT, check=True).stdout
    recorded, times, order = json.loads(out)
    assert order == whole.order
    # The driver may have died before it stored what it was told, so the checkpoint tells it again, as it was.
    assert [(step, values) for step, values in recorded] == whole.recorded
    assert recorded[: len(half.recorded)] == [list(each) for each in half.recorded]
    assert times[: len(half.times)] == half.times
    ended, expected = (torch.load(file, weights_only=True) for file in (path, tmp_path / "whole.pt"))
    assert ended.keys() == expected.keys()
    assert all(torch.equal(ended["model"][name], tensor) for name, tensor in expected["model"].items())


def test_a_run_that_stops_before_its_first_step_begins_again(tmp_path):
    path = tmp_path / "run.pt"
    with pytest.raises(StoppedError, match="step 0 of 6"):
        trainer_of(run_of(**RESUMED), checkpoint=path, stop=lambda: True).fit()
    whole = trainer_of(run_of(**RESUMED)).fit()  # first: both draw from the one stream of the process
    assert trainer_of(run_of(**RESUMED), checkpoint=path).fit() == whole


def test_a_finished_run_keeps_weights_only_and_does_no_step_more(tmp_path):
    path = tmp_path / "run.pt"
    trainer = trainer_of(run_of(**RESUMED), checkpoint=path)
    figures = trainer.fit()
    trainer.save_weights()
    assert not {"optimizer", "random"} & torch.load(path, weights_only=True).keys()
    again = trainer_of(run_of(**RESUMED), checkpoint=path)
    again.advance = None
    assert again.fit() == figures


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    path = tmp_path / "run.pt"
    trainer_of(run_of(**RESUMED), checkpoint=path, stop=lambda: True)._save()
    for run, seed in ((run_of(**RESUMED), 1), (run_of(model={"dropout": 0.2}), 0)):
        with pytest.raises(ValueError, match=rf"^checkpoint \S+run\.pt: belongs to {run_of(**RESUMED).hash()}/0, not to "):
            trainer_of(run, seed=seed, checkpoint=path)


class Harm:
    def __reduce__(self):
        return os.mkdir, ("harm",)


def test_a_checkpoint_runs_no_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"identity": Harm()}, tmp_path / "run.pt")
    trainer_of(run_of(), checkpoint=tmp_path / "run.pt")  # it is put aside, and the run begins again
    assert not (tmp_path / "harm").exists()
    assert [file.name for file in tmp_path.iterdir()] == ["run.damaged"]


def test_a_checkpoint_that_was_cut_short_is_put_aside(tmp_path):
    first = trainer_of(run_of(), checkpoint=tmp_path / "run.pt")
    expected = first.fit()
    first.save_weights()
    whole = (tmp_path / "run.pt").read_bytes()
    (tmp_path / "run.pt").write_bytes(whole[: len(whole) // 2])
    again = trainer_of(run_of(), checkpoint=tmp_path / "run.pt")
    assert again.step == 0
    assert again.fit() == expected
    assert (tmp_path / "run.damaged").exists()


def test_a_checkpoint_is_written_whole(tmp_path, monkeypatch):
    path = tmp_path / "new" / "run.pt"
    write_whole(path, {"a": 1})

    def torn(state, file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(train_module.torch, "save", torn)
        with pytest.raises(OSError, match="No space left"):
            write_whole(path, {"a": 2})
    assert [file.name for file in path.parent.iterdir()] == ["run.pt"]
    assert torch.load(path, weights_only=True) == {"a": 1}


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from experiments import train
save = torch.save
def killed(state, file):
    save(state, file)
    file.seek(-100, 2)
    file.truncate()
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
path = Path(sys.argv[1])
train.write_whole(path, {"a": 1})
torch.save = killed
train.write_whole(path, {"a": 2})
"""


def test_a_kill_while_writing_leaves_the_old_checkpoint(tmp_path):
    path = tmp_path / "run.pt"
    assert subprocess.run([sys.executable, "-c", KILLED, str(path)], cwd=ROOT).returncode == -9
    assert torch.load(path, weights_only=True) == {"a": 1}
    assert sorted(file.suffix for file in tmp_path.iterdir()) == [".part", ".pt"]  # swept by the store


def test_validation_changes_nothing():
    trained = []
    for validations in (0, 1):
        trainer = trainer_of(run_of(**RESUMED))
        for _ in range(4):
            trainer.advance()
            for _ in range(validations):
                trainer.evaluate("val")
                assert trainer.model.training
        trained.append([parameter.detach() for parameter in trainer.model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*trained, strict=True))


def test_what_is_recorded_and_when():
    trainer = trainer_of(run_of(train={"steps": 7, "log_every": 3, "eval_every": 2}))
    trainer.fit()
    losses = [step for step, values in trainer.recorded if "train/loss" in values]
    assert losses == [3, 6, 7]
    assert [step for step, values in trainer.recorded if "val/loss" in values] == [2, 4, 6, 7]


def test_variants_see_the_same_batches_and_the_same_dropout():
    orders, streams = set(), set()
    for variant in ("standard", "linear", "uniform"):
        trainer = trainer_of(run_of({"variant": variant}, **RESUMED), seed=4, full=True)
        assert torch.initial_seed() == derive("dropout", 4)
        trainer.advance()
        streams.add(tuple(torch.get_rng_state().tolist()))
        orders.add(trainer.order)
    assert len(orders) == len(streams) == 1
    other = trainer_of(run_of(**RESUMED), seed=5, full=True)
    other.advance()
    assert other.order not in orders


def test_half_precision_trains_and_is_judged_in_single():
    trainer = trainer_of(run_of(train={"precision": "bf16", "steps": 30, "lr": 1e-2}))
    first = trainer.evaluate("val")["val/loss"]
    assert trainer.fit()["val/loss"] < first
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.float32}
