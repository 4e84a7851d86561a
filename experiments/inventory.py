"""What there is to choose from: variants, broken plugins, tasks and metrics."""

from __future__ import annotations

import inspect
from typing import Any

import variants  # noqa: F401
from core import registry
from experiments.tasks import tasks

# What every run records; a task adds val/NAME and test/NAME for each of its own metrics.
METRICS = (
    "train/loss", "val/loss", "val/perplexity", "val/accuracy", "memory/peak_mb", "memory/state_bytes", "cost/flops_per_token",
    "cost/params", "attention/entropy", "attention/density", "attention/span",
)  # fmt: skip


def collect() -> dict[str, Any]:
    """Everything by name, as plain data."""
    return {
        "variants": [_entry(registry.variants, name) for name in registry.variants.names()],
        "tasks": [_entry(tasks, name) for name in tasks.names()],
        "broken": [
            {"kind": kind.kind, "name": name, "source": broken.source, "reason": broken.reason}
            for kind in (registry.variants, tasks)
            for name, broken in sorted(kind.broken.items())
        ],
        "objectives": list(METRICS),
    }


def words(found: dict[str, Any]) -> str:
    """The same, to read."""
    lines = []
    for heading in ("variants", "tasks"):
        lines.append(f"{heading}:")
        for entry in found[heading]:
            settings = ", ".join(f"{name}={value}" for name, value in entry["settings"].items())
            lines.append(f"  {entry['name']:<14} {entry['summary']}")
            lines.append(f"  {'':<14} settings: {settings or 'none'}   from {entry['source']}")
    if found["broken"]:
        lines.append("broken:")
        lines += [f"  {b['kind']} {b['name']} from {b['source']}: {b['reason']}" for b in found["broken"]]
    lines.append("objectives: " + ", ".join(found["objectives"]))
    return "\n".join(lines)


def _entry(registry_: Any, name: str) -> dict[str, Any]:
    cls = registry_.get(name)
    module = inspect.getmodule(cls)
    text = (module.__doc__ if module is not None and module.__name__.endswith(f".{name}") else None) or cls.__doc__ or ""
    defaults = {field: info.default for field, info in cls.Config.model_fields.items()}
    return {"name": name, "summary": text.strip().split("\n")[0], "settings": defaults, "source": registry_.source(name)}
