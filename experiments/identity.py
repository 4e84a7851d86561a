"""What makes a study the same study at the next invocation, and where it was begun."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from experiments.config import flatten


def changed(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What makes a study another one, in words. Ranges may widen and lists of values may grow at their end."""
    changes = []
    before, after = old["parameters"], new["parameters"]
    for path in sorted(before.keys() | after.keys()):
        if path not in after or path not in before:
            changes.append(f"parameters.{path}: {'was added' if path in after else 'was taken away'}")
            continue
        a, b = before[path], after[path]
        # As text, because Python takes 1, 1.0 and True for the same.
        grown = bool(a["values"] and b["values"]) and _labels(b["values"][: len(a["values"])]) == _labels(a["values"])
        widened = a["values"] is None and b["values"] is None and b["min"] <= a["min"] and b["max"] >= a["max"]
        same_kind = all(type(a[bound]) is type(b[bound]) for bound in ("min", "max"))
        rest = all(a[key] == b[key] for key in ("log", "step", "when"))
        if not (rest and same_kind and (grown or widened)):
            changes.append(f"parameters.{path}: was {_short(a)}, is now {_short(b)}")
    flat_old = flatten({key: value for key, value in old.items() if key != "parameters"})
    flat_new = flatten({key: value for key, value in new.items() if key != "parameters"})
    for path in sorted(flat_old.keys() | flat_new.keys()):
        if flat_old.get(path) != flat_new.get(path):
            changes.append(f"{path}: was {flat_old.get(path, 'not given')!r}, is now {flat_new.get(path, 'not given')!r}")
    return changes


def _labels(values: list[Any]) -> list[str]:
    return [json.dumps(value) for value in values]


def _short(parameter: dict[str, Any]) -> str:
    return "{" + ", ".join(f"{key}: {value}" for key, value in parameter.items() if value not in (None, {}, False)) + "}"


def provenance() -> dict[str, str]:
    """Where this study was begun: commit of the working directory and versions."""
    from importlib.metadata import version

    found = {f"version.{name}": version(name) for name in ("torch", "optuna", "mlflow")}
    found["version.python"] = sys.version.split()[0]
    try:
        asked = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=True)
        dirty = subprocess.run(["git", "status", "--porcelain"], capture_output=True, text=True, timeout=5, check=True)
        found["mlflow.source.git.commit"] = asked.stdout.strip()
        found["git.dirty"] = str(bool(dirty.stdout.strip())).lower()
    except (OSError, subprocess.SubprocessError):
        found["mlflow.source.git.commit"] = "unknown"
    return found


def file_digest(path: str) -> str:
    """Twelve hex digits of a file's content."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:12]
