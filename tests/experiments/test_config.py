"""A run as data: what is refused, what names it, and what a person reads of it."""

import json
import subprocess
import sys

import pytest
from pydantic import ValidationError

from experiments.config import Model, Run, Train, describe, digest, flatten
from tests.experiments.small import run_of


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model_dim": 64, "num_heads": 3}, "model_dim 64 is not divisible by num_heads 3"),
        ({"num_heads": 4, "num_kv_heads": 3}, "num_heads 4 is not divisible by num_kv_heads 3"),
        ({"num_heads": 2, "num_kv_heads": 4}, "num_heads 2 is not divisible by num_kv_heads 4"),
        ({"model_dim": 12, "num_heads": 4, "positions": "rotary"}, "model_dim 12 / num_heads 4"),
        ({"model_dim": 0}, "model_dim"),
        ({"model_dim": "64"}, "model_dim"),
        ({"model_dim": 64.0}, "model_dim"),
        ({"num_layers": True}, "num_layers"),
        ({"dropout": 1.0}, "dropout"),
        ({"dropout": -0.1}, "dropout"),
        ({"dropout": float("nan")}, "dropout"),
        ({"mlp_ratio": float("inf")}, "mlp_ratio"),
        ({"mlp_ratio": 0}, "mlp_ratio"),
        ({"bias": 1}, "bias"),
        ({"positions": "sinus"}, "positions"),
        ({"d_model": 64}, "d_model"),
    ],
)
def test_a_model_that_cannot_be_is_refused(settings, words):
    with pytest.raises(ValidationError) as caught:
        Model(**settings)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"steps": 3, "warmup_steps": 4}, "warmup_steps 4 is more than steps 3"),
        ({"lr": 1e-3, "min_lr": 1e-2}, "min_lr 0.01 is above lr 0.001"),
        ({"steps": 0}, "steps"),
        ({"batch_size": 0}, "batch_size"),
        ({"accumulate": 0}, "accumulate"),
        ({"lr": 0.0}, "lr"),
        ({"lr": "1e-3"}, "lr"),
        ({"lr": -1.0}, "lr"),
        ({"grad_clip": 0.0}, "grad_clip"),
        ({"weight_decay": -1.0}, "weight_decay"),
        ({"beta1": 1.0}, "beta1"),
        ({"precision": "float32"}, "precision"),
        ({"eval_every": 0}, "eval_every"),
    ],
)
def test_training_that_cannot_be_is_refused(settings, words):
    with pytest.raises(ValidationError) as caught:
        Train(**settings)
    assert words in str(caught.value)


def test_what_is_allowed_at_the_edge():
    assert Train(steps=4, warmup_steps=4).warmup_steps == 4
    assert Train(lr=1e-3, min_lr=1e-3).min_lr == 1e-3
    assert Train(grad_clip=None).grad_clip is None
    assert Train(lr=1).lr == 1
    assert Model(model_dim=12, num_heads=6, positions="rotary").num_kv_heads is None


def test_a_run_cannot_be_changed():
    run = run_of()
    with pytest.raises(ValidationError, match="frozen"):
        run.train = Train()
    with pytest.raises(ValidationError, match="frozen"):
        run.model.num_heads = 1


def test_flat_settings():
    assert flatten({"a": {"b": 1, "c": {"d": [2]}}, "e": {}, "f": None}) == {"a.b": 1, "a.c.d": [2], "e": {}, "f": None}
    flat = run_of().flat()
    assert flat["model.num_heads"] == 2
    assert flat["attention.variant"] == "standard"
    assert flat["task.length"] == 3
    assert len(flat) == 3 + 1 + len(Model.model_fields) + len(Train.model_fields)


def test_a_hash_names_the_content_and_not_the_order():
    assert digest({"a": 1, "b": [2, {"c": None, "d": 0.1}]}) == digest({"b": [2, {"d": 0.1, "c": None}], "a": 1})
    assert len(digest({})) == 12
    different = [{"a": 1}, {"a": 1.0}, {"a": True}, {"a": "1"}, {"a": None}, {"a": [1]}, {"b": 1}, {}]
    assert len({digest(each) for each in different}) == len(different)


def test_every_setting_changes_the_hash():
    base = run_of()
    other = {
        "model_dim": 16, "num_layers": 3, "num_heads": 4, "num_kv_heads": 1, "mlp_ratio": 2.0, "positions": "rotary",
        "dropout": 0.1, "init_std": 0.1, "bias": False, "tied": True, "checkpoint": True,
    }  # fmt: skip
    assert other.keys() == Model.model_fields.keys()
    changed = [run_of(model={key: value}) for key, value in other.items()]
    train = {
        "steps": 7, "batch_size": 5, "accumulate": 2, "lr": 1e-3, "min_lr": 1e-4, "schedule": "linear", "warmup_steps": 1,
        "grad_clip": None, "weight_decay": 0.0, "beta1": 0.8, "beta2": 0.95, "precision": "bf16", "compile": True,
        "eval_every": 2, "log_every": 1, "checkpoint_seconds": 0.0,
    }  # fmt: skip
    assert train.keys() == Train.model_fields.keys()
    changed += [run_of(train={key: value}) for key, value in train.items()]
    changed += [run_of(attention={"variant": "linear"}), run_of(task={"name": "copy", "length": 4, "vocab": 5})]
    assert len({run.hash() for run in [base, *changed]}) == len(changed) + 1


def test_a_run_survives_its_store():
    run = run_of(attention={"variant": "topk", "keep": 3, "temperature": 0.1})
    again = Run(**json.loads(json.dumps(run.model_dump())))
    assert again == run
    assert again.hash() == run.hash()


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ({"attention.variant": "topk", "model.num_heads": 4}, "topk, num_heads 4"),
        ({"model.num_heads": 4, "attention.variant": "topk"}, "topk, num_heads 4"),
        ({"model.num_heads": 4}, "num_heads 4"),
        ({"task.split": [0.8, 0.2, 0]}, "split [0.8, 0.2, 0]"),
        ({}, "base"),
    ],
)
def test_an_assignment_in_words(assignment, words):
    assert describe(assignment) == words


def test_the_driver_side_needs_no_torch():
    code = "import sys, experiments.config, experiments.sweep, experiments.store; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
