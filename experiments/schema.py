"""The shape of a sweep file: which keys it has and of which type. What they mean together is checked in `sweep`."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from experiments.config import ModelSettings, Strict, TrainSettings

SECTIONS = ("task", "model", "attention", "train")
_DURATION = re.compile(r"(?:(\d{1,5})h)?(?:(\d{1,5})m)?(?:(\d{1,7})s)?")


class Base(Strict):
    """Everything that is not swept."""

    task: dict[str, Any] = Field(description="name, and the task's own settings")
    model: ModelSettings = ModelSettings()
    attention: dict[str, Any] = Field({"variant": "standard"}, description="variant, and its own settings")
    train: TrainSettings = TrainSettings()


class Objective(Strict):
    """A metric that the search improves."""

    metric: str = "val/loss"
    goal: Literal["minimize", "maximize"] = "minimize"

    @field_validator("metric")
    @classmethod
    def _fair(cls, metric: str) -> str:
        if metric.startswith("test/"):
            raise ValueError(f"a search must not see the test split; use {'val/' + metric.removeprefix('test/')!r}")
        if metric.startswith("speed/"):
            raise ValueError("speed is measured after the search, each configuration alone; it cannot lead the search")
        return metric


class Constraint(Strict):
    """A metric that must stay within bounds."""

    metric: str
    min: float | None = None
    max: float | None = None

    @model_validator(mode="after")
    def _bounded(self) -> Constraint:
        if self.min is None and self.max is None:
            raise ValueError("give min, max or both")
        return self


class Parameter(Strict):
    """What is varied: a list of values, or a range."""

    values: list[Any] | None = Field(None, min_length=1)
    min: int | float | None = None
    max: int | float | None = None
    log: bool = False
    step: int | float | None = Field(None, gt=0)
    when: dict[str, Any] = Field({}, description="only where other parameters have this value, or one of a list")

    @model_validator(mode="after")
    def _one_kind(self) -> Parameter:
        ranged = self.min is not None or self.max is not None
        if (self.values is not None) == ranged:
            raise ValueError("give values, or min and max")
        if self.values is not None:
            if self.log or self.step is not None:
                raise ValueError("log and step belong to min and max, not to values")
            return self
        if self.min is None or self.max is None:
            raise ValueError("min and max go together")
        if self.min > self.max:
            raise ValueError(f"min {self.min} is above max {self.max}")
        if self.log and self.min <= 0:
            raise ValueError(f"log needs min above 0, got {self.min}")
        if self.log and self.step is not None:
            raise ValueError("log and step exclude each other")
        return self


class Budget(Strict):
    """How much is run. trials is a total over all invocations."""

    trials: int | None = Field(None, ge=1, description="none: the whole grid; needed by the other methods")
    timeout: str | None = Field(None, description="wall-clock time of one invocation, such as 2h, 1h30m or 45s")
    parallel: int = Field(1, ge=1, description="runs at a time")
    retries: int = Field(1, ge=0, description="new attempts for a run whose worker was lost")

    @field_validator("timeout")
    @classmethod
    def _duration(cls, text: str | None) -> str | None:
        if text is not None and duration(text) <= 0:
            raise ValueError(f"must be a time such as 2h, 1h30m or 45s, got {text!r}")
        return text


class Resources(Strict):
    """Of one run. auto: cores divided by parallel; one GPU where there is one."""

    cpus: int | Literal["auto"] = "auto"
    gpus: Literal[0, 1, "auto"] = "auto"

    @field_validator("cpus")
    @classmethod
    def _count(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 1:
            raise ValueError(f"must be at least 1, or auto, got {value}")
        return value


class SweepFile(Strict):
    """A sweep file."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=100, description="the study")
    experiment: str | None = Field(None, min_length=1, max_length=200, description="MLflow experiment; none: the name")
    description: str = ""
    plugins: list[str] = Field([], description="Python files with variants or tasks, from this file's folder")
    base: Base
    method: Literal["grid", "random", "tpe"] = "grid"
    objectives: list[Objective] = Field([Objective()], min_length=1, max_length=1)
    constraints: list[Constraint] = []
    parameters: dict[str, Parameter] = Field({}, max_length=100)
    seeds: list[int] = Field([0], min_length=1, description="runs of each configuration")
    baseline: list[dict[str, Any]] = Field([], description="configurations that are run first, by dotted path")
    budget: Budget = Budget()
    resources: Resources = Resources()

    @field_validator("seeds")
    @classmethod
    def _different(cls, seeds: list[int]) -> list[int]:
        if len(set(seeds)) != len(seeds):
            raise ValueError("the same seed stands twice")
        if min(seeds) < 0:
            raise ValueError("a seed must be 0 or more")
        if max(seeds) >= 2**63:
            raise ValueError("a seed must be below 2**63")
        return seeds


def duration(text: str) -> int:
    """Seconds of a time such as 1h30m; 0 where it is none."""
    match = _DURATION.fullmatch(text)
    if not match:
        return 0
    hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return hours * 3600 + minutes * 60 + seconds


def json_schema() -> dict[str, Any]:
    """JSON Schema of sweep files, for editors."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **SweepFile.model_json_schema()}
