"""What a sweep will do and what that will cost, before it runs."""

from __future__ import annotations

import itertools
from typing import Any

from experiments.config import describe
from experiments.console import words
from experiments.report import aligned, number
from experiments.resolve import Resolver
from experiments.sweep import Assignment, Sweep

MAX_SHOWN = 200


def plan(sweep: Sweep, resolver: Resolver) -> str:
    """The study in words, and the configurations of a grid."""
    file, seeds = sweep.file, len(sweep.file.seeds)
    lines = [f"study {file.name}: method {file.method}, {sweep.trials} trials x {seeds} seeds = {sweep.trials * seeds} runs"]
    if file.method == "grid":
        size = sum(1 for _ in itertools.islice(sweep.grid(), 1_000_000)) + len(file.baseline)
        if size > sweep.trials:
            lines.append(f"the grid has {size} configurations; the budget runs the first {sweep.trials}")
    lines.append(f"objective: {file.objectives[0].goal} {file.objectives[0].metric}")
    for path, parameter in sweep.parameters.items():
        what = parameter.values if parameter.values is not None else f"{parameter.min} to {parameter.max}"
        lines.append(f"  {path}: {what}" + (f" when {parameter.when}" if parameter.when else ""))
    for number_, (kind, assignment) in enumerate(_first(sweep)):
        lines.append(f"  {number_:4d} {kind:<8} {describe(assignment)}  [{resolver.run(assignment).hash()}]")
    return "\n".join(lines)


def costs(sweep: Sweep, resolver: Resolver) -> str:
    """Parameters, operations, memory and time of each configuration, from three real steps of each on this machine."""
    rows = [["trial", "configuration", "parameters", "FLOPs/token", "peak MiB", "ms/step"]]
    found = as_json(sweep, resolver)
    for entry in found["configurations"]:
        figures = entry["figures"]
        rows.append(
            [
                str(entry["trial"]),
                entry["description"],
                number(figures.get("cost/params"), 0),
                number(figures.get("cost/flops_per_token"), 0),
                number(figures.get("memory/peak_mb"), 1),
                number(figures.get("speed/step_ms"), 1),
            ]
        )
    total = found["seconds"]
    lines = aligned(rows)
    if total is not None:
        parallel = sweep.file.budget.parallel
        together = words(total / parallel)
        lines.append(f"training alone: about {words(total)} one run after another, {together} with {parallel} at a time")
        lines.append("(steps measured on one thread, validation and start not counted)")
    return "\n".join(lines)


def as_json(sweep: Sweep, resolver: Resolver) -> dict[str, Any]:
    """The configurations and what each costs; seconds: training of all of them, one after another."""
    import torch

    from experiments.worker import probe

    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    entries, seconds = [], 0.0
    for number_, (kind, assignment) in enumerate(_first(sweep)):
        run = resolver.run(assignment)
        figures = probe(run, device)
        seconds += figures["speed/step_ms"] / 1e3 * run.train.steps * len(sweep.file.seeds)
        entries.append(
            {
                "trial": number_,
                "kind": kind,
                "description": describe(assignment),
                "config": run.model_dump(),
                "config_hash": run.hash(),
                "figures": figures,
            }
        )
    whole = len(entries) == sweep.trials
    return {"name": sweep.file.name, "trials": sweep.trials, "configurations": entries, "seconds": seconds if whole else None}


def _first(sweep: Sweep) -> list[tuple[str, Assignment]]:
    """The configurations that are known beforehand: the baseline, and those of a grid."""
    known = [("baseline", dict(assignment)) for assignment in sweep.file.baseline]
    if sweep.file.method == "grid":
        known += [("grid", assignment) for assignment in itertools.islice(sweep.grid(), MAX_SHOWN)]
    return known[: min(sweep.trials, MAX_SHOWN)]
