"""Optuna proposes what to try next. It lives in memory and is told everything again at the start; nothing of it is kept."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import Trial, TrialState, create_trial

from experiments.schema import Parameter
from experiments.seeding import derive
from experiments.sweep import Assignment, Sweep, assignments, is_active, is_whole

_NOTHING: Mapping[str, float] = MappingProxyType({})
MAX_REPEATS = 100  # proposals in a row that were tried already
MAX_LISTED = 100_000  # configurations of a space that is listed

optuna.logging.set_verbosity(optuna.logging.WARNING)


class Search:
    """Asks for configurations in the sweep's space, and learns from what they came to.

    What it proposes depends on the sweep's name and the trials before, and on nothing else, so that a study that was stopped goes
    on as if it had not been.
    """

    def __init__(self, sweep: Sweep) -> None:
        self.sweep = sweep
        direction = sweep.file.objectives[0].goal
        self._study = optuna.create_study(direction=direction, sampler=optuna.samplers.RandomSampler(seed=0))
        self._grid: Iterator[Assignment] | None = sweep.grid() if sweep.file.method == "grid" else None
        self._listable = not any(isinstance(_distribution(p), FloatDistribution) for p in sweep.parameters.values())
        self._asked = 0
        self._trials: dict[int, Trial] = {}  # our number -> Optuna's trial that waits for its value

    def restore(
        self,
        number: int,
        assignment: Assignment,
        value: float | None,
        running: bool,
        figures: Mapping[str, float] = _NOTHING,
        skipped: bool = False,
    ) -> None:
        """Tell of a trial that stands in the store, in the order of their numbers; figures: for the constraints."""
        self._asked += 1
        distributions = {path: _distribution(self.sweep.parameters[path]) for path in assignment if path in self.sweep.parameters}
        labels = {path: _label(self.sweep.parameters[path], assignment[path]) for path in distributions}
        state = TrialState.RUNNING if running else _end(value, skipped)
        self._study.add_trial(
            create_trial(
                state=state,
                value=value if state == TrialState.COMPLETE else None,
                params=labels,
                distributions=distributions,
                constraints=self._excess(figures) if state == TrialState.COMPLETE else None,
            )
        )
        if running:
            self._trials[number] = Trial(self._study, self._study.trials[-1]._trial_id)

    def ask(self, is_new: Any) -> Assignment | None:
        """The next configuration for which `is_new(assignment)` holds; None where the space has no more.

        The caller names it by a call of `begin`.
        """
        if self._grid is not None:
            return next((assignment for assignment in self._grid if is_new(assignment)), None)
        for repeat in range(MAX_REPEATS if not self._listable else MAX_REPEATS // 5):
            self._study.sampler = self._sampler(repeat)
            trial = self._study.ask()
            assignment = self._suggest(trial)
            if is_new(assignment):
                self._waiting = trial
                return assignment
            self._study.tell(trial, state=TrialState.FAIL)
        return self._first_left(is_new)

    def _first_left(self, is_new: Any) -> Assignment | None:
        """What a sampler that repeats itself has left of a space that can be listed, the first in the order of the file."""
        if not self._listable:
            return None
        left = filter(is_new, itertools.islice(assignments(self.sweep.parameters, _every), MAX_LISTED))
        found = next(left, None)
        if found is not None:
            self._study.enqueue_trial({path: _label(self.sweep.parameters[path], value) for path, value in found.items()})
            self._waiting = self._study.ask()
            self._suggest(self._waiting)
        return found

    def begin(self, number: int) -> None:
        """The configuration of the last `ask` has become trial `number`."""
        self._asked += 1
        if self._grid is None:
            self._trials[number] = self._waiting

    def tell(self, number: int, value: float | None, figures: Mapping[str, float] = _NOTHING, skipped: bool = False) -> None:
        """What a trial came to; None where it failed, or was skipped. figures: for the constraints."""
        trial = self._trials.pop(number, None)
        if trial is not None:
            for name, excess in self._excess(figures).items():
                trial.set_constraint(name, excess)
            self._study.tell(trial, value, state=_end(value, skipped))

    def _excess(self, figures: Mapping[str, float]) -> dict[str, float]:
        """By how much each constraint is broken; 0 or less where it is kept."""
        excess = {}
        for constraint in self.sweep.file.constraints:
            value = figures.get(constraint.metric)
            if value is not None and constraint.max is not None:
                excess[f"{constraint.metric} max"] = value - constraint.max
            if value is not None and constraint.min is not None:
                excess[f"{constraint.metric} min"] = constraint.min - value
        return excess

    def _sampler(self, repeat: int) -> optuna.samplers.BaseSampler:
        seed = derive("search", self.sweep.file.name, self._asked, repeat) % 2**32
        if self.sweep.file.method == "random":
            return optuna.samplers.RandomSampler(seed=seed)
        return optuna.samplers.TPESampler(seed=seed)

    def _suggest(self, trial: Trial) -> Assignment:
        chosen: Assignment = {}
        for path, parameter in self.sweep.parameters.items():
            if is_active(parameter, chosen):
                chosen[path] = _value(parameter, trial._suggest(path, _distribution(parameter)))
        return chosen


def _end(value: float | None, skipped: bool) -> TrialState:
    """A skipped trial is a pruned one, which a sampler takes for a bad one; a failed one tells it nothing."""
    return TrialState.PRUNED if skipped else TrialState.FAIL if value is None else TrialState.COMPLETE


def _distribution(parameter: Parameter) -> BaseDistribution:
    """Values become labels: Optuna cannot hold lists, and takes 1, 1.0 and True for the same."""
    if parameter.values is not None:
        return CategoricalDistribution([json.dumps(value) for value in parameter.values])
    assert parameter.min is not None
    assert parameter.max is not None
    if is_whole(parameter):
        return IntDistribution(int(parameter.min), int(parameter.max), log=parameter.log, step=int(parameter.step or 1))
    return FloatDistribution(float(parameter.min), float(parameter.max), log=parameter.log, step=parameter.step)


def _every(parameter: Parameter) -> Sequence[Any]:
    if parameter.values is not None:
        return parameter.values
    distribution = _distribution(parameter)
    assert isinstance(distribution, IntDistribution)
    return range(distribution.low, distribution.high + 1, distribution.step)


def _label(parameter: Parameter, value: Any) -> Any:
    return json.dumps(value) if parameter.values is not None else value


def _value(parameter: Parameter, label: Any) -> Any:
    return json.loads(label) if parameter.values is not None else label
