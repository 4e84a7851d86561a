"""The shape of a sweep file, piece by piece."""

import pytest
from pydantic import ValidationError

from experiments.config import ModelSettings, TrainSettings
from experiments.schema import Budget, Constraint, Objective, Parameter, Resources, SweepFile, duration, json_schema


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2h", 7200), ("45s", 45), ("1h30m", 5400), ("1h1m1s", 3661), ("90m", 5400), ("0s", 0), ("", 0), ("2", 0), ("2 h", 0),
        ("1m1h", 0), ("-1h", 0), ("1.5h", 0), ("2H", 0), ("2h ", 0),
    ],
)  # fmt: skip
def test_durations(text, seconds):
    assert duration(text) == seconds


@pytest.mark.parametrize("text", ["", "2", "soon", "0s", "-1h", 3600])
def test_a_timeout_that_is_no_time_is_refused(text):
    with pytest.raises(ValidationError):
        Budget(timeout=text)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "give values, or min and max"),
        ({"values": [1], "min": 0, "max": 2}, "give values, or min and max"),
        ({"values": []}, "at least 1 item"),
        ({"values": 3}, "list"),
        ({"values": [1, 2], "log": True}, "log and step belong to min and max"),
        ({"values": [1, 2], "step": 1}, "log and step belong to min and max"),
        ({"min": 1}, "min and max go together"),
        ({"max": 1}, "min and max go together"),
        ({"min": 3, "max": 2}, "min 3 is above max 2"),
        ({"min": 0, "max": 1.0, "log": True}, "log needs min above 0, got 0"),
        ({"min": -1.0, "max": 1.0, "log": True}, "log needs min above 0, got -1.0"),
        ({"min": 1, "max": 8, "log": True, "step": 2}, "log and step exclude each other"),
        ({"min": 1, "max": 8, "step": 0}, "greater than 0"),
        ({"min": "1", "max": 8}, "valid"),
        ({"min": True, "max": 8}, "valid"),
        ({"min": float("nan"), "max": 8}, "finite"),
        ({"min": 0.0, "max": float("inf")}, "finite"),
        ({"values": [1], "wen": {}}, "Extra inputs"),
    ],
)
def test_a_parameter_that_cannot_be_varied_is_refused(settings, words):
    with pytest.raises(ValidationError) as caught:
        Parameter(**settings)
    assert words in str(caught.value)


def test_ranges_keep_the_kind_of_their_numbers():
    whole, real = Parameter(min=1, max=8), Parameter(min=1.0, max=8)
    assert (type(whole.min), type(whole.max)) == (int, int)
    assert (type(real.min), type(real.max)) == (float, int)
    assert Parameter(min=2, max=2).max == 2


def test_bounds_of_other_settings():
    for make in (
        lambda: Budget(trials=0), lambda: Budget(parallel=0), lambda: Budget(retries=-1), lambda: Constraint(metric="a"),
        lambda: Resources(cpus=-1), lambda: Resources(gpus="many"), lambda: Objective(goal="min"),
    ):  # fmt: skip
        with pytest.raises(ValidationError):
            make()


def minimal(**settings):
    return SweepFile(**{"name": "a", "base": {"task": {"name": "copy"}}, **settings})


def test_defaults():
    file = minimal()
    assert (file.method, file.seeds, file.parameters, file.baseline) == ("grid", [0], {}, [])
    assert (file.objectives[0].metric, file.objectives[0].goal) == ("val/loss", "minimize")
    assert file.base.attention == {"variant": "standard"}
    assert file.budget.trials is None


@pytest.mark.parametrize("name", ["a", "heads", "A-1_b.c", "0", "x" * 100])
def test_names_of_studies(name):
    assert minimal(name=name).name == name


@pytest.mark.parametrize("name", ["", ".", "..", "../a", "a/b", "/a", "a b", "-a", ".a", "a\n", "ä", "x" * 101, 3, "a\x00"])
def test_a_name_that_is_no_folder_is_refused(name):
    with pytest.raises(ValidationError):
        minimal(name=name)


@pytest.mark.parametrize("seeds", [[], [1, 1], [-1], [2**63], [10**20], [True], [1.0], ["1"], 3])
def test_seeds_that_cannot_be(seeds):
    with pytest.raises(ValidationError):
        minimal(seeds=seeds)


def test_the_largest_seed():
    assert minimal(seeds=[2**63 - 1]).seeds == [2**63 - 1]


def test_two_objectives_are_refused_as_long_as_nothing_serves_them():
    with pytest.raises(ValidationError, match="at most 1 item"):
        minimal(objectives=[{"metric": "a"}, {"metric": "b"}])


def test_editors_are_given_every_key():
    schema = json_schema()
    assert schema["$schema"].startswith("https://json-schema.org/")
    assert set(schema["required"]) == {"name", "base"}
    assert schema["additionalProperties"] is False
    assert set(schema["properties"]) == set(SweepFile.model_fields)
    assert set(schema["$defs"]["ModelSettings"]["properties"]) == set(ModelSettings.model_fields)
    assert set(schema["$defs"]["TrainSettings"]["properties"]) == set(TrainSettings.model_fields)
    assert schema["properties"]["method"]["enum"] == ["grid", "random", "tpe"]
