import pytest
from pydantic import ValidationError

from core import AttentionConfig, tunable


class Settings(AttentionConfig):
    keep: int = tunable(8, low=1, high=64, log=True, ge=1, description="kept")
    share: float = tunable(0.5, low=0.1, high=0.9, gt=0.0, lt=1.0)
    kind: str = tunable("a", choices=["a", "b"])


def search(name):
    return Settings.model_fields[name].json_schema_extra["search"]


def test_the_range_is_carried_by_the_field():
    assert search("keep") == {"low": 1, "high": 64, "log": True}
    assert search("share") == {"low": 0.1, "high": 0.9, "log": False}
    assert search("kind") == {"choices": ["a", "b"]}
    assert Settings.model_fields["keep"].description == "kept"
    assert Settings.model_json_schema()["properties"]["keep"]["search"]["high"] == 64


def test_the_range_is_no_limit():
    assert Settings(keep=1000, share=0.95).keep == 1000


@pytest.mark.parametrize("given", [{"keep": 0}, {"share": 0.0}, {"share": 1.0}])
def test_limits_are(given):
    with pytest.raises(ValidationError):
        Settings(**given)


@pytest.mark.parametrize(
    "given", [{"low": 1}, {"high": 1}, {"low": 1, "high": 2, "choices": [1, 2]}, {"low": 1, "choices": [1, 2]}]
)
def test_half_a_range_or_two_kinds_is_the_authors_mistake(given):
    with pytest.raises(TypeError, match="tunable"):
        tunable(1, **given)


@pytest.mark.parametrize(
    "given",
    [
        {"keep": "8"},
        {"keep": 8.0},
        {"keep": True},
        {"keep": None},
        {"share": "0.5"},
        {"share": True},
        {"share": float("nan")},
        {"share": float("inf")},
        {"kind": 1},
        {"keeps": 8},
    ],
)
def test_nothing_is_converted(given):
    with pytest.raises(ValidationError):
        Settings(**given)


def test_whole_numbers_are_numbers():
    class Wide(AttentionConfig):
        share: float = 1.0

    assert Wide(share=1).share == 1.0


def test_frozen():
    settings = Settings()
    with pytest.raises(ValidationError):
        settings.keep = 3


def test_a_default_outside_the_limits_is_found():
    class Wrong(AttentionConfig):
        keep: int = tunable(0, low=1, high=2, ge=1)

    with pytest.raises(ValidationError):
        Wrong()
