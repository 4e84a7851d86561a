"""A sweep file becomes a Sweep: its space, checked before anything runs.

`load` knows the file, the schema and the names, and imports no torch, so that a typing error is answered at once. What tasks
and variants say of their own settings is asked for in `resolve`.
"""

from __future__ import annotations

import ast
import copy
import difflib
import importlib.metadata
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from experiments import strict_yaml
from experiments.config import Model, ModelSettings, Strict, Train, TrainSettings
from experiments.errors import InputError
from experiments.schema import SECTIONS, Parameter, SweepFile
from experiments.strict_yaml import Document, Key

MAX_CHECKED = 5_000  # configurations that are looked at before the first run

Assignment = dict[str, Any]  # dotted path -> value

_SETTINGS: dict[str, type[Strict]] = {"model": ModelSettings, "train": TrainSettings}


@dataclass(frozen=True)
class Sweep:
    """A checked sweep file.

    Args:
        document: the file as read, for the lines of errors.
        file: its content, of the right types.
        plugins: the plugin files, as absolute paths.
        overrides: what the command line changed.
    """

    document: Document
    file: SweepFile
    plugins: tuple[str, ...]
    overrides: tuple[str, ...] = ()

    @property
    def parameters(self) -> dict[str, Parameter]:
        """The parameters, each after those that its `when` refers to."""
        return self.file.parameters

    @cached_property
    def size(self) -> int:
        """Configurations of baseline and grid together; counted up to a million."""
        return len(self.file.baseline) + sum(1 for _ in itertools.islice(self.grid(), 1_000_000))

    @property
    def trials(self) -> int:
        """The number of trials to reach, over all invocations."""
        if self.file.budget.trials is None:
            return self.size
        return min(self.file.budget.trials, self.size) if self.file.method == "grid" else self.file.budget.trials

    def text(self) -> str:
        """The file as it was written, and what the command line changed in it."""
        source = Path(self.document.source).read_text(encoding="utf-8-sig")
        return source + "".join(f"# on the command line: {override}\n" for override in self.overrides)

    def grid(self) -> Iterator[Assignment]:
        """Every combination, in the order of the file, the last parameter fastest; without the baseline's."""
        taken = [self.tree(baseline) for baseline in self.file.baseline]
        for assignment in assignments(self.parameters, lambda parameter: parameter.values or []):
            if not taken or self.tree(assignment) not in taken:
                yield assignment

    def tree(self, assignment: Assignment) -> dict[str, Any]:
        """The base with the assigned values in their places."""
        tree = self.file.base.model_dump()
        for path, value in assignment.items():
            section, key = path.split(".", 1)
            tree[section][key] = copy.deepcopy(value)
        return tree

    def identity(self) -> dict[str, Any]:
        """What makes this study the same study at the next invocation."""
        parts = {"base", "method", "objectives", "parameters"}
        return self.file.model_dump(include=parts)

    def error(self, path: Key, message: str) -> InputError:
        """An error at a place in the file."""
        return self.document.error(path, f"{_dotted(path)}: {message}")


def load(path: str | Path, overrides: Sequence[str] = (), plugins: Sequence[str] = ()) -> Sweep:
    """Read and check a sweep file, without torch.

    Args:
        overrides: `dotted.path=value` from the command line, in YAML's scalars and flow lists.
        plugins: further plugin files, from the working directory.

    Raises:
        InputError: `file:line: key: what is wrong`.
    """
    document = strict_yaml.load(path)
    for override in overrides:
        _apply_override(document, override)
    try:
        file = SweepFile.model_validate(document.data)
    except ValidationError as error:
        raise _first_error(document, error) from None
    folder = Path(path).resolve().parent
    found = [_plugin_path(document, name, index, folder) for index, name in enumerate(file.plugins)]
    sweep = Sweep(document, file, (*found, *(str(Path(plugin).resolve()) for plugin in plugins)), tuple(overrides))
    sweep = replace(sweep, file=file.model_copy(update={"parameters": _by_dependency(sweep)}))
    _check_parameters(sweep)
    _check_names(sweep)
    _check_consistency(sweep)
    return sweep


def assignments(parameters: Mapping[str, Parameter], candidates: Callable[[Parameter], Sequence[Any]]) -> Iterator[Assignment]:
    """Every combination of candidates of the parameters that are active in it."""

    def extend(index: int, chosen: Assignment) -> Iterator[Assignment]:
        if index == len(paths):
            yield dict(chosen)
            return
        path = paths[index]
        if not is_active(parameters[path], chosen):
            yield from extend(index + 1, chosen)
            return
        for value in candidates(parameters[path]):
            chosen[path] = value
            yield from extend(index + 1, chosen)
        chosen.pop(path, None)

    paths = list(parameters)
    yield from extend(0, {})


def is_active(parameter: Parameter, chosen: Assignment) -> bool:
    """Whether the `when` of a parameter is met. A key that is itself inactive meets nothing."""
    for key, wanted in parameter.when.items():
        allowed = wanted if isinstance(wanted, list) else [wanted]
        if key not in chosen or not any(same(chosen[key], value) for value in allowed):
            return False
    return True


def same(a: Any, b: Any) -> bool:
    """Equal and of one type: True is not 1."""
    return type(a) is type(b) and a == b


def corners(parameter: Parameter) -> Sequence[Any]:
    """The values of a list, or the ends of a range, of the type that a search draws."""
    if parameter.values is not None:
        return parameter.values
    assert parameter.min is not None
    assert parameter.max is not None
    kind = int if is_whole(parameter) else float
    return (kind(parameter.min), kind(parameter.max))


def is_whole(parameter: Parameter) -> bool:
    """Whether a range is one of whole numbers."""
    return isinstance(parameter.min, int) and isinstance(parameter.max, int) and not isinstance(parameter.step, float)


def _apply_override(document: Document, override: str) -> None:
    path, separator, text = override.partition("=")
    if not separator or not path:
        raise InputError(f"{override}: must be key=value, such as base.train.steps=100")
    value = strict_yaml.parse(text, f"command line: {path}").data
    node: Any = document.data
    place: Key = ()
    rest = path
    while True:
        # A key of `parameters` holds dots itself, so the longest key that is there is the one that is meant.
        known = [key for key in node if rest == key or rest.startswith(f"{key}.")]
        added = rest.rpartition(".")[0] if place == ("parameters",) and rest.count(".") > 1 else rest.split(".", 1)[0]
        key = max(known, key=len, default=added)
        place, rest = (*place, key), rest[len(key) + 1 :]
        if not rest:
            node[key] = value
            return
        node = node.setdefault(key, {})
        if not isinstance(node, dict):
            raise InputError(f"command line: {path}: {_dotted(place)} holds {node!r}, which has no keys")


def _plugin_path(document: Document, name: str, index: int, folder: Path) -> str:
    for base in (folder, Path.cwd()):
        if os.path.isfile(base / name):  # unlike Path.is_file, False for a name that no file can have
            return str((base / name).resolve())
    raise document.error(("plugins", index), f"plugins: {name}: no such file in {folder} or {Path.cwd()}")


def _by_dependency(sweep: Sweep) -> dict[str, Parameter]:
    """Parameters in the order of the file, each after those that its `when` refers to."""
    given, ordered = sweep.file.parameters, {}

    def place(path: str, waiting: tuple[str, ...]) -> None:
        if path in ordered:
            return
        if path in waiting:
            raise sweep.error(("parameters", path, "when"), f"refers to itself through {' -> '.join((*waiting, path))}")
        for key in given[path].when:
            if key not in given:
                hint = close_match(key, given)
                raise sweep.error(("parameters", path, "when", key), f"is not a swept parameter{hint}")
            place(key, (*waiting, path))
        ordered[path] = given[path]

    for path in given:
        place(path, ())
    return ordered


def _check_parameters(sweep: Sweep) -> None:
    for path, parameter in sweep.parameters.items():
        place: Key = ("parameters", path)
        _check_path(sweep, path, place)
        if parameter.values is None and sweep.file.method == "grid":
            raise sweep.error(place, "a range does not go with method grid; give values, or use random or tpe")
        for index, value in enumerate(parameter.values or []):
            if any(value == other for other in (parameter.values or [])[:index]):
                raise sweep.error((*place, "values", index), f"{value!r} equals an earlier value")
        for key, wanted in parameter.when.items():
            possible = sweep.parameters[key].values
            if wanted == []:
                raise sweep.error((*place, "when", key), "needs at least one value")
            for value in wanted if isinstance(wanted, list) else [wanted]:
                if possible is not None and not any(same(value, other) for other in possible):
                    raise sweep.error((*place, "when", key), f"{value!r} is none of the values {possible}")
        section, key = path.split(".", 1)
        settings = _SETTINGS.get(section)
        for value in corners(parameter):
            try:
                if settings is not None:
                    settings.model_validate({key: value})
            except ValidationError as error:
                raise sweep.error(place, _message(error.errors(include_url=False)[0])) from None
    for index, baseline in enumerate(sweep.file.baseline):
        for path in baseline:
            _check_path(sweep, path, ("baseline", index, path))
    if sweep.file.method != "grid" and sweep.file.budget.trials is None:
        raise sweep.error(("budget",), f"trials: method {sweep.file.method} needs a number of trials")
    if sweep.file.method != "grid" and not sweep.parameters:
        raise sweep.error(("parameters",), f"method {sweep.file.method} needs at least one parameter")


def _check_path(sweep: Sweep, path: str, place: Key) -> None:
    section, _, key = path.partition(".")
    if section not in SECTIONS or not key:
        raise sweep.error(place, f"must be a path into base ({', '.join(f'{s}.…' for s in SECTIONS)}), got {path!r}")
    settings = _SETTINGS.get(section)
    if settings is not None and key not in settings.model_fields:
        raise sweep.error(place, f"{section} has no setting {key!r}{close_match(key, settings.model_fields)}")


def _check_names(sweep: Sweep) -> None:
    """Names of variants and tasks, from file names, entry points and the text of plugins; nothing is imported."""
    for section, key, folder, group, decorator in (
        ("task", "name", Path(__file__).parent / "tasks", "attention_tasks", "register_task"),
        ("attention", "variant", Path(__file__).parent.parent / "variants", "attention_variants", "register"),
    ):
        known = {file.stem for file in folder.glob("*.py") if not file.stem.startswith("_")}
        known |= {entry.name for entry in importlib.metadata.entry_points(group=group)}
        readable = True
        for plugin in sweep.plugins:
            names = _registered_names(sweep, plugin, decorator)
            readable = readable and names is not None
            known |= names or set()
        path = f"{section}.{key}"
        given = sweep.file.base.model_dump()[section]
        if key not in given and path not in sweep.parameters:
            raise sweep.error(("base", section), f"{key}: needs to be given (there are: {', '.join(sorted(known))})")
        wanted: list[tuple[Key, Any]] = [(("base", section, key), given[key])] if key in given else []
        swept = sweep.parameters.get(path)
        if swept is not None:
            wanted += [(("parameters", path, "values", i), value) for i, value in enumerate(swept.values or [])]
            if swept.values is None:
                raise sweep.error(("parameters", path), "is a name, so it needs values")
        wanted += [(("baseline", i, path), line[path]) for i, line in enumerate(sweep.file.baseline) if path in line]
        for place, name in wanted:
            if not isinstance(name, str) or (name not in known and readable):
                raise sweep.error(
                    place, f"unknown {key} {name!r}{close_match(name, known)} (there are: {', '.join(sorted(known))})"
                )


def _registered_names(sweep: Sweep, plugin: str, decorator: str) -> set[str] | None:
    """The names that a plugin's decorators register, read from its text; None where they cannot be told."""
    try:
        module = ast.parse(Path(plugin).read_text(encoding="utf-8"))
    except SyntaxError as error:
        raise sweep.error(("plugins",), f"{plugin}:{error.lineno}: {error.msg}") from None
    except (OSError, UnicodeDecodeError, ValueError, MemoryError, RecursionError) as error:
        raise sweep.error(("plugins",), f"{plugin}: cannot be read: {type(error).__name__} {error}") from None
    names: set[str] = set()
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == decorator:
            if not (node.args and isinstance(node.args[0], ast.Constant)):
                return None
            names.add(str(node.args[0].value))
    return names or None  # it may register under another word, or through what it imports: its import will tell


def _check_consistency(sweep: Sweep) -> None:
    """Settings of model and training that exclude each other, in any combination: sizes that do not divide, above all."""
    relevant: dict[str, Parameter] = {}

    def need(path: str) -> None:
        for key in sweep.parameters[path].when:
            need(key)
        relevant[path] = sweep.parameters[path]

    for path in sweep.parameters:
        if path.split(".")[0] in ("model", "train"):
            need(path)
    for assignment in itertools.islice(assignments(relevant, _every), MAX_CHECKED):
        tree = sweep.tree(assignment)
        try:
            Model(**tree["model"]), Train(**tree["train"])
        except ValidationError as error:
            raise section_error(sweep, error, assignment) from None


def _every(parameter: Parameter) -> Sequence[Any]:
    """All values of a list or of a whole-number range; the ends of another."""
    if parameter.values is None and isinstance(parameter.min, int) and isinstance(parameter.max, int):
        step = parameter.step if isinstance(parameter.step, int) else 1
        return range(parameter.min, parameter.max + 1, step)[:1000]
    return corners(parameter)


def section_error(sweep: Sweep, error: ValidationError, assignment: Assignment, origin: Key = ("parameters",)) -> InputError:
    message = _message(error.errors(include_url=False)[0])
    culprit = next((path for path in reversed(assignment) if path.split(".", 1)[1] in message), None)
    if culprit is not None:
        return sweep.error((*origin, culprit), message)
    section = "train" if "steps" in message or "lr" in message else "model"
    key = next(
        (key for key in reversed(message.replace(",", " ").split()) if ("base", section, key) in sweep.document.lines),
        None,
    )
    return sweep.error(("base", section, key) if key else ("base", section), message)


def _first_error(document: Document, error: ValidationError) -> InputError:
    """The schema's first finding, at its line. Unknown keys come first: they explain what is missing."""
    found = sorted(error.errors(include_url=False), key=lambda e: e["type"] != "extra_forbidden")[0]
    place = tuple(part for part in found["loc"] if not (isinstance(part, str) and part in ("int", "float", "constrained-int")))
    if found["type"] == "extra_forbidden":
        return document.error(place, f"{_dotted(place)}: unknown key{close_match(str(place[-1]), _siblings(place))}")
    return document.error(place, f"{_dotted(place) or 'sweep file'}: {_message(found)}")


def _siblings(place: Key) -> list[str]:
    """The keys that the schema knows beside a place."""
    schema = SweepFile.model_json_schema()
    node: Any = schema
    for part in place[:-1]:
        node = node.get("properties", {}).get(part) or node.get("items") or node.get("additionalProperties") or {}
        if "$ref" in node:
            node = schema["$defs"][node["$ref"].rsplit("/", 1)[-1]]
    return list(node.get("properties", {}))


def _message(found: Any) -> str:
    if found["type"] == "missing":
        return "needs to be given"
    if found["type"] == "value_error":
        return str(found["msg"]).removeprefix("Value error, ")
    text = str(found["msg"]).replace("Input should be", "must be").replace("should have", "must have")
    return f"{text}, got {found['input']!r}"


def close_match(name: Any, known: Iterable[str]) -> str:
    match = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.6)
    return f"; did you mean {match[0]!r}?" if match else ""


def _dotted(place: Key) -> str:
    return ".".join(str(part) for part in place)
