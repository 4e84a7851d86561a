"""What a sweep will do and what that will cost, before it runs."""

from __future__ import annotations

import itertools
from typing import Any

from experiments import resources
from experiments.config import Run, describe
from experiments.console import words
from experiments.report import aligned, number
from experiments.resolve import Resolver
from experiments.sweep import Assignment, Sweep

MAX_SHOWN = 200


def plan(sweep: Sweep, resolver: Resolver) -> str:
    """The study in words, and the configurations of a grid."""
    file, seeds = sweep.file, len(sweep.file.seeds)
    lines = [f"study {file.name}: method {file.method}, {sweep.trials} trials x {seeds} seeds = {sweep.trials * seeds} runs"]
    if file.method == "grid" and sweep.size > sweep.trials:
        lines.append(f"the grid has {sweep.size} configurations; the budget runs the first {sweep.trials}")
    lines.append(f"objective: {file.objectives[0].goal} {file.objectives[0].metric}")
    for path, parameter in sweep.parameters.items():
        what = parameter.values if parameter.values is not None else f"{parameter.min} to {parameter.max}"
        lines.append(f"  {path}: {what}" + (f" when {parameter.when}" if parameter.when else ""))
    for number_, (kind, assignment) in enumerate(_first(sweep)):
        lines.append(f"  {number_:4d} {kind:<8} {describe(assignment)}  [{resolver.run(assignment).hash()}]")
    return "\n".join(lines)


def costs(sweep: Sweep, resolver: Resolver) -> str:
    """What each configuration costs: memory predicted without running it, the rest from three real steps on this machine."""
    rows = [["trial", "configuration", "parameters", "FLOPs/token", "predicted peak MiB", "ms/step"]]
    found = as_json(sweep, resolver)
    for entry in found["configurations"]:
        figures = entry["figures"]
        rows.append(
            [
                str(entry["trial"]),
                entry["description"],
                number(figures.get("cost/params"), 0),
                number(figures.get("cost/flops_per_token"), 0),
                number(entry["predicted_peak_mb"], 1),
                number(figures.get("speed/step_ms"), 1),
            ]
        )
    total = found["seconds"]
    lines = aligned(rows)
    lines += [f"trial {entry['trial']}: {entry['error']}" for entry in found["configurations"] if "error" in entry]
    lines += [f"trial {entry['trial']}: {entry['skipped']}" for entry in found["configurations"] if "skipped" in entry]
    if total is not None:
        parallel = sweep.file.budget.parallel
        together = words(total / parallel)
        lines.append(f"training alone: about {words(total)} one run after another, {together} with {parallel} at a time")
        lines.append("(steps measured with the threads of a run, validation and start not counted)")
    return "\n".join(lines)


def plan_json(sweep: Sweep, resolver: Resolver) -> dict[str, Any]:
    """The configurations that are known beforehand."""
    entries = []
    for number_, (kind, assignment) in enumerate(_first(sweep)):
        run = resolver.run(assignment)
        known = {"trial": number_, "kind": kind, "description": describe(assignment)}
        entries.append({**known, "config": run.model_dump(), "config_hash": run.hash()})
    return {"name": sweep.file.name, "trials": sweep.trials, "configurations": entries}


def as_json(sweep: Sweep, resolver: Resolver) -> dict[str, Any]:
    """The configurations and what each costs; seconds: training of all that are not skipped, one after another."""
    import torch

    from experiments.predict import foresee, peak_mb
    from experiments.worker import probe

    torch.set_num_threads(resources.threads(sweep))
    device = torch.device(resources.devices(sweep)[0])
    found, seconds = plan_json(sweep, resolver), 0.0
    for entry in found["configurations"]:
        run = Run(**entry["config"])
        entry["predicted_peak_mb"], entry["figures"] = peak_mb(run, device.type), {}
        foreseen = foresee(run, device.type, sweep.file.constraints)
        if foreseen is not None:
            entry["skipped"] = f"`run` will skip it: {foreseen}"
            continue
        try:
            entry["figures"] = probe(run, device)
        except Exception as error:  # too large for this machine, or a plugin that raises: its costs stay unknown
            entry["error"] = " ".join(f"{type(error).__name__}: {error}".split())
        else:
            seconds += entry["figures"]["speed/step_ms"] / 1e3 * run.train.steps * len(sweep.file.seeds)
    known = sum("error" not in entry for entry in found["configurations"])
    return {**found, "seconds": seconds if known == sweep.trials else None}


def _first(sweep: Sweep) -> list[tuple[str, Assignment]]:
    """The configurations that are known beforehand: the baseline, and those of a grid."""
    known = [("baseline", dict(assignment)) for assignment in sweep.file.baseline]
    if sweep.file.method == "grid":
        known += [("grid", assignment) for assignment in itertools.islice(sweep.grid(), MAX_SHOWN)]
    return known[: min(sweep.trials, MAX_SHOWN)]
