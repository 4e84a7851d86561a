"""Settings of a variant that a search may vary: a pydantic field that carries its default search range."""

from __future__ import annotations

from typing import Any

from pydantic import Field


def tunable(
    default: Any,
    *,
    low: float | None = None,
    high: float | None = None,
    log: bool = False,
    choices: list[Any] | None = None,
    **limits: Any,
) -> Any:
    """A config field with a default search range.

    Args:
        default: the value when nothing is said.
        low, high, log: the range that the contract suite draws from and that a search starts from. It is no limit.
        choices: the values, for a field that is no number.
        **limits: pydantic's hard limits (ge, gt, le, lt, multiple_of) and description.

    Raises:
        TypeError: both a range and choices, or half a range; a mistake of the variant's author.
    """
    if choices is not None and (low is not None or high is not None):
        raise TypeError("tunable: give low and high, or choices, not both")
    if (low is None) != (high is None):
        raise TypeError("tunable: low and high go together")
    search: Any = {"choices": choices} if choices is not None else {"low": low, "high": high, "log": log}
    return Field(default, json_schema_extra={"search": search}, **limits)
