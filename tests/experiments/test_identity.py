"""What makes a study another one than before: what may change between two invocations, and what is refused."""

import json

import pytest

from experiments import identity
from tests.experiments.small import HEAD, sweep_of

BEFORE = """\
parameters:
  attention.variant: {values: [standard, topk]}
  attention.keep: {values: [1, 2], when: {attention.variant: topk}}
"""
RANGE = "method: random\nbudget: {trials: 9}\nparameters:\n  train.lr: {min: 1e-4, max: 1e-1, log: true}\n"
IDENTITY = {
    "budget": (BEFORE, BEFORE + "budget: {parallel: 4, trials: 2, timeout: 1h}\nresources: {cpus: 2}\nseeds: [0, 5]\n", []),
    "longer list": (BEFORE, BEFORE.replace("[1, 2]", "[1, 2, 3]"), []),
    "order of parameters": (
        "parameters:\n  model.tied: {values: [true]}\n  model.bias: {values: [true]}\n",
        "parameters:\n  model.bias: {values: [true]}\n  model.tied: {values: [true]}\n",
        [],
    ),
    "shorter list": (BEFORE, BEFORE.replace("[1, 2]", "[1]"), ["parameters.attention.keep", "[1, 2]", "[1]"]),
    "order of values": (BEFORE, BEFORE.replace("[1, 2]", "[2, 1]"), ["parameters.attention.keep", "[1, 2]", "[2, 1]"]),
    "kind of values": (
        "parameters:\n  task.a: {values: [1, 2]}\n",
        "parameters:\n  task.a: {values: [1.0, 2.0]}\n",
        ["parameters.task.a", "[1, 2]", "[1.0, 2.0]"],
    ),
    "truth for a number": (
        "parameters:\n  task.a: {values: [1, 0]}\n",
        "parameters:\n  task.a: {values: [true, false]}\n",
        ["parameters.task.a", "[1, 0]", "[True, False]"],
    ),
    "condition": (BEFORE, BEFORE.replace(", when: {attention.variant: topk}", ""), ["parameters.attention.keep", "when"]),
    "parameter taken away": (BEFORE, BEFORE[: BEFORE.rindex("  attention.keep")], ["parameters.attention.keep: was taken away"]),
    "parameter added": (BEFORE, BEFORE + "  model.tied: {values: [true]}\n", ["parameters.model.tied: was added"]),
    "wider range": (RANGE, RANGE.replace("1e-4", "1e-5").replace("1e-1", "1.0"), []),
    "narrower range": (RANGE, RANGE.replace("1e-1", "1e-2"), ["parameters.train.lr", "0.1", "0.01"]),
    "log taken off": (RANGE, RANGE.replace(", log: true", ""), ["parameters.train.lr", "log: True"]),
    "float to int": (
        RANGE.replace("train.lr: {min: 1e-4, max: 1e-1, log: true}", "model.mlp_ratio: {min: 1.0, max: 4.0}"),
        RANGE.replace("train.lr: {min: 1e-4, max: 1e-1, log: true}", "model.mlp_ratio: {min: 1, max: 4}"),
        ["parameters.model.mlp_ratio", "min: 1.0", "min: 1,"],
    ),
    "range to list": (
        RANGE,
        RANGE.replace("{min: 1e-4, max: 1e-1, log: true}", "{values: [1e-3, 1e-2]}"),
        ["parameters.train.lr", "max: 0.1", "[0.001, 0.01]"],
    ),
    "step": (
        RANGE.replace(", log: true", ", step: 0.1"),
        RANGE.replace(", log: true", ", step: 0.2"),
        ["parameters.train.lr", "step: 0.1", "step: 0.2"],
    ),
    "method": (RANGE, RANGE.replace("random", "tpe"), ["method: was 'random', is now 'tpe'"]),
    "objective": (BEFORE, BEFORE + "objectives: [{metric: val/accuracy, goal: maximize}]\n", ["objectives", "val/accuracy"]),
    "training": (BEFORE, "  train: {steps: 7}\n" + BEFORE, ["base.train.steps: was 300, is now 7"]),
    "setting of the task": (
        BEFORE,
        "  attention: {variant: linear}\n" + BEFORE,
        ["base.attention.variant: was 'standard', is now 'linear'"],
    ),
}


@pytest.mark.parametrize(("before", "after", "words"), IDENTITY.values(), ids=list(IDENTITY))
def test_what_makes_a_study_another_one(tmp_path, before, after, words):
    # As the store gives it back.
    old = json.loads(json.dumps(sweep_of(tmp_path, HEAD + before).identity()))
    changes = identity.changed(old, sweep_of(tmp_path, HEAD + after).identity())
    assert len(changes) == (1 if words else 0), changes
    for word in words:
        assert word in changes[0]
