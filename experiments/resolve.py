"""Assignments become complete configurations. The only file that asks tasks and variants for their own settings."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import torch
from pydantic import ValidationError

import variants  # noqa: F401  registers the house's own
from core import registry
from core.errors import MissingExtraError, PluginError
from core.registry import reason
from experiments.config import Model, Run, Train, digest
from experiments.identity import file_digest
from experiments.strict_yaml import Key
from experiments.sweep import MAX_CHECKED, Assignment, Sweep, assignments, close_match, corners, section_error
from experiments.tasks import tasks

# What every run comes to, beside val/NAME and test/NAME for the metrics of its task.
METRICS = (
    "val/loss", "val/perplexity", "memory/peak_mb", "memory/state_bytes", "cost/flops_per_token", "cost/params",
    "attention/entropy", "attention/density", "attention/span",
)  # fmt: skip
SPEEDS = ("speed/tokens_per_s", "speed/step_ms")


class Resolver:
    """Turns assignments into complete configurations.

    Raises:
        InputError: a plugin that cannot be imported.
    """

    def __init__(self, sweep: Sweep) -> None:
        self.sweep = sweep
        self._tasks = tasks
        self._variants = registry.variants
        self._make_config = registry.make_config
        self._made: set[str] = set()
        self.metrics: set[str] = set()  # of the tasks that were made
        self.data: dict[str, str] = {}  # digest of a task's settings -> digest of its data
        self.code: dict[str, str] = {}  # "variant NAME" or "task NAME" that is not the house's own -> digest of its file
        for index, plugin in enumerate(sweep.plugins):
            try:
                registry.load_plugin(plugin)
            except PluginError as error:
                raise sweep.error(("plugins", index), str(error)) from error

    def run(self, assignment: Assignment, origin: Key = ("parameters",)) -> Run:
        """The complete configuration of an assignment.

        Args:
            origin: where the assignment stands in the file, for the lines of errors.

        Raises:
            InputError: what the task, the model or the variant refuses, at the line that asked for it.
        """
        tree = self.sweep.tree(assignment)
        task = self._own("task", "name", self._tasks, tree["task"], assignment, origin)
        attention = self._own("attention", "variant", self._variants, tree["attention"], assignment, origin)
        try:
            model, train = Model(**tree["model"]), Train(**tree["train"])
        except ValidationError as error:
            raise section_error(self.sweep, error, assignment, origin) from None
        run = Run(task=task, model=model, attention=attention, train=train)
        self._check_task(run)
        return run

    def check(self) -> None:
        """Resolve every configuration of the grid, or the corners of a space, so that nothing fails late for its settings.

        Raises:
            InputError.
        """
        seen: dict[str, int] = {}
        for index, baseline in enumerate(self.sweep.file.baseline):
            name = self.run(baseline, ("baseline", index)).hash()
            if name in seen:
                raise self.sweep.error(("baseline", index), f"is the same configuration as baseline.{seen[name]}")
            seen[name] = index
        for assignment in itertools.islice(assignments(self.sweep.parameters, corners), MAX_CHECKED):
            self.run(assignment)
        self._check_metrics()

    def _own(
        self, section: str, key: str, registry: Any, given: dict[str, Any], assignment: Assignment, origin: Key
    ) -> dict[str, Any]:
        settings = dict(given)
        name = settings.pop(key, None)
        try:
            cls = registry.get(name)
        except (ValueError, MissingExtraError) as error:  # a name that only an import could tell, or what is broken
            path = f"{section}.{key}"
            raise self.sweep.error((*origin, path) if path in assignment else ("base", section, key), str(error)) from error
        if not cls.__module__.startswith(("variants.", "experiments.tasks.")):
            self.code[f"{registry.kind} {name}"] = file_digest(inspect.getfile(cls))
        for setting in settings:
            if setting not in cls.Config.model_fields:
                path = f"{section}.{setting}"
                place: Key = (*origin, path) if path in assignment else ("base", section, setting)
                fields = cls.Config.model_fields
                swept = f"{section}.{key}" in self.sweep.parameters
                hint = f"; if it is meant for another, add `when: {{{section}.{key}: ...}}`" if swept else ""
                raise self.sweep.error(
                    place,
                    f"{key} {name!r} has no setting {setting!r} (it has: {', '.join(fields) or 'none'})"
                    f"{close_match(setting, fields)}{hint}",
                )
        try:
            complete = self._make_config(cls, settings).model_dump(mode="json")
        except ValueError as error:
            at = next((p for p in assignment if p.startswith(f"{section}.") and p.split(".", 1)[1] in str(error)), None)
            raise self.sweep.error((*origin, at) if at else ("base", section), str(error)) from None
        return {key: name, **complete}

    def _check_task(self, run: Run) -> None:
        """Make each task once: a missing corpus, or a task that cannot make a batch, is found before the first run."""
        name = digest([run.task, run.train.batch_size])
        if name in self._made:
            return
        cls = self._tasks.get(run.task["name"])
        settings = {key: value for key, value in run.task.items() if key != "name"}
        try:
            task = cls(self._make_config(cls, settings), run.train.batch_size)
            batch = task.batch("val", 0, 0)
            output = batch.inputs.new_zeros((), dtype=torch.float32).expand(*batch.inputs.shape, task.vocab_size)
            if "loss" in task.metrics(output, batch):
                raise ValueError("metrics: the name 'loss' is the loss's own; give the metric another")
            self.metrics.update(f"val/{metric}" for metric in task.metrics(output, batch))
            self.data[digest(run.task)] = str(task.describe().get("digest", "generated"))
        except (ValueError, OSError) as error:
            key = "corpus" if "corpus" in str(error) else "name"
            raise self.sweep.error(("base", "task", key), " ".join(str(error).split())) from error
        except Exception as error:  # a plugin's mistake
            raise self.sweep.error(("base", "task", "name"), f"{run.task['name']}: {reason(error)}") from error
        self._made.add(name)

    def _check_metrics(self) -> None:
        known = self.metrics | set(METRICS)
        file = self.sweep.file
        wanted = [("objectives", index, objective.metric) for index, objective in enumerate(file.objectives)]
        wanted += [("constraints", index, constraint.metric) for index, constraint in enumerate(file.constraints)]
        for section, index, metric in wanted:
            allowed = known if section == "objectives" else known | set(SPEEDS)
            if metric not in allowed:
                listed = ", ".join(sorted(allowed))
                raise self.sweep.error(
                    (section, index, "metric"), f"unknown metric {metric!r}{close_match(metric, allowed)} (there are: {listed})"
                )
