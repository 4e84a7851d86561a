"""What there is to choose from: variants, broken plugins, tasks and metrics."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import variants  # noqa: F401
from core import registry
from experiments.resolve import METRICS
from experiments.tasks import tasks


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
        "objectives": [*METRICS, "val/ and the name of a metric of the task, such as val/accuracy"],
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
    # A file that has the name of what it registers is about nothing else.
    module = inspect.getmodule(cls)
    alone = Path(getattr(module, "__file__", None) or "").stem == name
    text = (getattr(module, "__doc__", None) if alone else None) or cls.__doc__ or ""
    defaults = cls.Config().model_dump(mode="json")
    return {"name": name, "summary": text.strip().split("\n")[0], "settings": defaults, "source": registry_.source(name)}
