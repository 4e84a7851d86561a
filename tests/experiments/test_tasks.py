"""Data: the same for every variant, each target once in an evaluation, and no window across a border."""

import hashlib
import math
import os
import subprocess
import sys

import pytest
import torch

from core.registry import load_plugin
from experiments.config import Job
from experiments.tasks import IGNORE, Batch, Task, tasks
from experiments.tasks.text import read_corpus
from experiments.worker import run_job
from tests.experiments.small import ROOT, run_of, task_of


def make(name, batch_size=3, **settings):
    cls = tasks.get(name)
    return cls(cls.Config(**settings), batch_size)


@pytest.fixture
def corpus(tmp_path):
    """A text in which every character stands once, so that a token tells its place."""
    path = tmp_path / "corpus.txt"
    path.write_text("".join(chr(0x4E00 + n) for n in range(1000)), encoding="utf-8")
    return str(path)


def equal(a, b):
    return torch.equal(a.inputs, b.inputs) and torch.equal(a.targets, b.targets)


@pytest.mark.parametrize("name", ["copy", "text"])
def test_a_batch_is_a_pure_function(name, corpus):
    settings = {"corpus": corpus, "seq_len": 10} if name == "text" else {}
    first, second = make(name, **settings), make(name, **settings)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    wanted = {
        (split, seed, step): first.batch(split, seed, step) for split in ("train", "val") for seed in (0, 1) for step in (0, 5)
    }
    assert torch.equal(torch.get_rng_state(), before)  # data do not touch the stream of dropout
    torch.manual_seed(2)
    for arguments, batch in reversed(wanted.items()):  # in another order, and again
        assert equal(second.batch(*arguments), batch)
        assert equal(first.batch(*arguments), batch)
    train = [wanted["train", seed, step].inputs for seed in (0, 1) for step in (0, 5)]
    assert len({tuple(inputs.flatten().tolist()) for inputs in train}) == 4
    assert equal(wanted["val", 0, 5], wanted["val", 1, 5])


def test_batches_do_not_depend_on_the_process():
    """Nor on the variant, of which a task knows nothing."""
    code = (
        "from tests.experiments.small import run_of, task_of\n"
        "for variant in ('standard', 'linear'):\n"
        "    task = task_of(run_of({'variant': variant}, {'name': 'text', 'corpus': 'python-docs', 'seq_len': 8}))\n"
        "    print(task.batch('train', 3, 4).inputs.tolist())\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout.splitlines()
    here = task_of(run_of(task={"name": "text", "corpus": "python-docs", "seq_len": 8})).batch("train", 3, 4).inputs.tolist()
    assert found == [str(here)] * 2


@pytest.mark.parametrize("batch_size", [1, 3, 8, 100])
@pytest.mark.parametrize("seq_len", [1, 7, 10, 99])
def test_an_evaluation_asks_for_every_target_once(corpus, batch_size, seq_len):
    task = make("text", batch_size, corpus=corpus, seq_len=seq_len)
    for split, (first, last) in {"val": (800, 900), "test": (900, 1000)}.items():
        asked = []
        for step in range(task.eval_batches(split)):
            batch = task.batch(split, 0, step)
            assert batch.inputs.shape == batch.targets.shape
            assert batch.inputs.shape[0] <= batch_size
            assert batch.inputs.shape[1] == seq_len
            for inputs, targets in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True):
                for given, target in zip(inputs, targets, strict=True):
                    if target != IGNORE:
                        assert target == given + 1  # the next one, within the row
                        asked.append(target)
        # The alphabet is sorted, so a token is the place of its character. The first has nothing before it.
        assert asked == list(range(first + 1, last))


def test_training_sees_its_own_part_and_all_of_it(corpus):
    task = make("text", 50, corpus=corpus, seq_len=10)
    starts, seen = set(), set()
    for step in range(400):
        batch = task.batch("train", 0, step)
        for inputs, targets in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True):
            assert inputs == list(range(inputs[0], inputs[0] + 10))
            assert targets == [token + 1 for token in inputs]
            starts.add(inputs[0])
            seen.update(inputs, targets)
    assert starts == set(range(790))
    assert seen == set(range(800))


@pytest.mark.parametrize(
    ("split", "sizes"), [([0.8, 0.1, 0.1], (800, 100, 100)), ([0.9, 0.1, 0], (900, 100, 0)), ([0.5, 0.25, 0.25], (500, 250, 250))]
)
def test_shares(corpus, split, sizes):
    task = make("text", corpus=corpus, seq_len=10, split=split)
    found = task.describe()
    assert (found["train"], found["val"], found["test"]) == sizes
    assert (task.eval_batches("test") == 0) == (sizes[2] == 0)


def test_characters_and_bytes(tmp_path):
    path = tmp_path / "t.txt"
    path.write_text("aé€" * 40, encoding="utf-8")
    characters = make("text", corpus=str(path), seq_len=4)
    octets = make("text", corpus=str(path), seq_len=4, tokens="bytes")
    assert (characters.vocab_size, octets.vocab_size) == (3, 256)
    assert sum(len(stream) for stream in characters.streams.values()) == 120
    assert sum(len(stream) for stream in octets.streams.values()) == 40 * 6
    assert characters.streams["train"][:4].tolist() == [0, 1, 2, 0]
    assert octets.streams["train"][:7].tolist() == [0x61, 0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0x61]
    assert characters.digest == octets.digest == hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def test_the_reference_text():
    text = read_corpus("python-docs")
    assert len(text) > 300_000
    assert text == read_corpus("python-docs")


def error_of(call):
    with pytest.raises(ValueError, match=r"^\S") as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_corpora_that_cannot_be_used(tmp_path):
    path = tmp_path / "c.txt"
    assert "nowhere.txt: cannot be read (No such file or directory)" in error_of(lambda: read_corpus("nowhere.txt"))
    assert "cannot be read (Is a directory)" in error_of(lambda: read_corpus(str(tmp_path)))
    assert "cannot be read" in error_of(lambda: read_corpus("~nobody-of-this-name/c.txt"))
    path.write_bytes(b"abc\xff")
    assert "is not UTF-8 text (byte 3)" in error_of(lambda: read_corpus(str(path)))
    path.write_bytes(b"")
    assert "is empty" in error_of(lambda: read_corpus(str(path)))
    path.write_text("x" * 100)
    message = error_of(lambda: make("text", corpus=str(path), seq_len=10))
    assert "val has 10 tokens, which must be more than seq_len 10" in message
    message = error_of(lambda: make("text", corpus=str(path), seq_len=80))
    assert "train has 80 tokens, which must be more than seq_len 80" in message
    assert make("text", corpus=str(path), seq_len=9).eval_batches("val") == 1


@pytest.mark.parametrize(
    "settings",
    [
        {"split": [0.5, 0.5]}, {"split": [0.5, 0.5, 0.5]}, {"split": [1.2, -0.1, -0.1]}, {"seq_len": 0}, {"tokens": "words"},
        {"seq_len": "8"}, {"corpus": 3}, {"file": "x"},
    ],
)  # fmt: skip
def test_settings_of_text_that_cannot_be(settings):
    with pytest.raises(ValueError, match="Config"):
        tasks.get("text").Config(**settings)


def test_copy_asks_for_the_second_prefix_only():
    task = make("copy", 5, length=4, vocab=7)
    assert (task.vocab_size, task.seq_len) == (8, 8)
    batch = task.batch("train", 0, 0)
    assert batch.keys is None
    for inputs, targets in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True):
        prefix = inputs[:4]
        assert all(0 <= token < 7 for token in prefix)
        assert inputs == [*prefix, 7, *prefix[:3]]
        assert targets == [IGNORE] * 4 + prefix


def test_copy_never_trains_on_what_it_is_judged_by():
    task = make("copy", 20, length=6, vocab=32)
    held = {tuple(row) for split in ("val", "test") for step in range(8) for row in task.batch(split, 0, step).inputs.tolist()}
    assert len(held) == 2 * 8 * 20
    trained = {tuple(row) for seed in range(4) for step in range(50) for row in task.batch("train", seed, step).inputs.tolist()}
    assert not held & trained


def test_loss_and_accuracy_by_hand():
    """B3: the loss is computed in float32, whatever the output is in."""
    task = make("copy")
    batch = Batch(torch.zeros(1, 3, dtype=torch.long), torch.tensor([[0, IGNORE, 1]]))
    output = torch.tensor([[[0.0, 36.3], [5.0, 0.0], [0.0, 36.3]]])
    total, count = task.loss(output, batch)
    assert total.dtype == torch.float32
    assert (float(total), int(count)) == (pytest.approx(36.3, abs=1e-5), 2)
    assert {name: (int(a), int(b)) for name, (a, b) in task.metrics(output, batch).items()} == {"accuracy": (1, 2)}
    batch = Batch(batch.inputs[:, :1], torch.tensor([[0]]))
    exact = torch.tensor([[[2.0, 1.0, 0.1]]])
    assert float(task.loss(exact, batch)[0]) == pytest.approx(0.4170299, abs=1e-6)
    # An output in bfloat16 is rounded (0.1 becomes 0.10009765625), what is made of it is not; all in bfloat16: 0.416015625.
    half = task.loss(exact.bfloat16(), batch)[0]
    assert half.dtype == torch.float32
    assert float(half) == pytest.approx(math.log(math.exp(2) + math.exp(1) + math.exp(0.10009765625)) - 2, abs=1e-6)


PLUGIN = '''"""Always the same token."""
import torch
from pydantic import Field
from experiments.tasks import Batch, Task, TaskConfig, register_task


@register_task("constant")
class Constant(Task):
    class Config(TaskConfig):
        token: int = Field(2, ge=0, le=4)

    vocab_size, seq_len = 5, 4

    def batch(self, split, seed, step):
        tokens = torch.full((self.batch_size, 5), self.config.token)
        return Batch(tokens[:, :-1], tokens[:, 1:])
'''


def test_a_task_of_somebody_else(tmp_path):
    path = tmp_path / "constant.py"
    path.write_text(PLUGIN)
    load_plugin(path)
    try:
        assert "constant" in tasks.names()
        run = run_of(task={"name": "constant", "token": 3}, train={"steps": 40, "lr": 0.05})
        events = []
        run_job(Job("0/0", "train", (run,), plugins=(str(path),)), events.append, lambda: False)
        assert events[-1]["state"] == "finished"
        assert events[-1]["values"]["val/accuracy"] == 1.0
        assert events[-1]["values"]["val/loss"] < 0.1
        with pytest.raises(ValueError, match="token"):
            tasks.get("constant").Config(token=5)
    finally:
        tasks._classes.pop("constant", None)


def test_a_task_must_define_its_batch():
    with pytest.raises(NotImplementedError, match="Task must define batch"):
        Task(None, 1).batch("train", 0, 0)


def test_the_home_folder_of_a_corpus(tmp_path, monkeypatch):
    (tmp_path / "c.txt").write_text("hello")
    monkeypatch.setitem(os.environ, "HOME", str(tmp_path))
    assert read_corpus("~/c.txt") == "hello"
