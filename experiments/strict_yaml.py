"""YAML as people expect it: 1.2 scalars, no duplicate keys, no tags, and the line of every value.

`1e-3` is a number, `on`, `off`, `yes`, `no`, `12:30` and `1_000` are strings. A file is data: nothing in it can run code, and
its size, depth and alias expansion are bounded.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from experiments.errors import InputError

MAX_BYTES = 256 * 1024
MAX_NODES = 50_000
MAX_DEPTH = 40

Key = tuple[str | int, ...]

_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_SURROGATE = re.compile("[\ud800-\udfff]")
_WORDS: dict[str, Any] = {
    "": None, "~": None, "null": None, "Null": None, "NULL": None,
    "true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False,
    ".nan": float("nan"), ".NaN": float("nan"), ".NAN": float("nan"),
    **{sign + word: float(sign + "inf") for sign in ("", "+", "-") for word in (".inf", ".Inf", ".INF")},
}  # fmt: skip


@dataclass(frozen=True)
class Document:
    """Plain data and, for each path into it, the line where it stands (from 1)."""

    source: str
    data: Any
    lines: dict[Key, int]

    def line(self, path: Key) -> int:
        """The line of a path, or of the nearest part of it that stands in the file."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)

    def error(self, path: Key, message: str) -> InputError:
        """An error that says where: `file:line: message`."""
        return InputError(f"{self.source}:{self.line(path)}: {message}")


class _Loader(yaml.SafeLoader):
    """Composes nodes without resolving any scalar, and refuses every tag that was written by hand."""

    yaml_implicit_resolvers: dict[str, Any] = {}

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()
        tag = getattr(event, "tag", None)
        if tag is not None:
            problem = f"tag {tag!r}: tags are not accepted, a sweep file is plain data"
            raise yaml.composer.ComposerError(None, None, problem, event.start_mark)
        return super().compose_node(parent, index)


def scalar(text: str) -> Any:
    """A plain scalar by the YAML 1.2 core schema."""
    if text in _WORDS:
        return _WORDS[text]
    if _INT.fullmatch(text):
        return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    return text


def load(path: str | Path) -> Document:
    """Read one YAML file whose root is a mapping.

    Raises:
        InputError: `file:line: what is wrong`.
    """
    source = str(path)
    try:
        with Path(path).open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise InputError(f"{source}: cannot be read: {error.strerror}") from None
    if len(raw) > MAX_BYTES:
        raise InputError(f"{source}:1: is larger than {MAX_BYTES // 1024} KiB; a sweep file is a page or two")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise InputError(f"{source}:{line}: is not UTF-8 text (byte 0x{raw[error.start]:02x})") from None
    document = parse(text, source)
    if not isinstance(document.data, dict):
        given = "an empty file" if document.data is None else type(document.data).__name__
        raise InputError(f"{source}:1: must be a mapping such as `name: heads`, got {given}")
    return document


def parse(text: str, source: str) -> Document:
    """Plain data from YAML text.

    Raises:
        InputError: `source:line: what is wrong`.
    """
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        raise InputError(f"{source}:{line}: {' '.join((error.problem or 'is not YAML').split())}") from None
    except yaml.reader.ReaderError as error:
        line = text[: error.position].count("\n") + 1 if isinstance(error.position, int) else 1
        raise InputError(f"{source}:{line}: holds a character that no text has ({error.character!r})") from None
    except RecursionError:
        raise InputError(f"{source}:1: is nested too deeply (at most {MAX_DEPTH} levels)") from None
    except yaml.YAMLError as error:
        raise InputError(f"{source}:1: {' '.join(str(error).split())}") from None
    except (ValueError, OverflowError):  # PyYAML converts escapes and versions without looking at their size
        raise InputError(f"{source}:{loader.line + 1}: holds an escape or a version that is out of range") from None
    reader = _Reader(source)
    return Document(source, None if node is None else reader.value(node, (), 0), reader.lines)


class _Reader:
    def __init__(self, source: str) -> None:
        self.source = source
        self.lines: dict[Key, int] = {}
        self.nodes = 0

    def error(self, node: yaml.Node, message: str) -> InputError:
        return InputError(f"{self.source}:{node.start_mark.line + 1}: {message}")

    def value(self, node: yaml.Node, path: Key, depth: int) -> Any:
        self.nodes += 1
        if depth > MAX_DEPTH:
            raise self.error(node, f"is nested too deeply (at most {MAX_DEPTH} levels)")
        if self.nodes > MAX_NODES:
            raise self.error(node, f"holds more than {MAX_NODES} values once its aliases are expanded")
        self.lines.setdefault(path, node.start_mark.line + 1)
        if isinstance(node, yaml.ScalarNode):
            return self.plain(node)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*path, index), depth + 1) for index, item in enumerate(node.value)]
        assert isinstance(node, yaml.MappingNode)  # the three kinds of node
        return self.mapping(node, path, depth)

    def plain(self, node: yaml.ScalarNode) -> Any:
        if _SURROGATE.search(node.value):
            raise self.error(node, "holds half of a surrogate pair, which is no character")
        if node.style is not None:
            return node.value
        try:
            return scalar(node.value)
        except ValueError:  # Python refuses to convert integers of thousands of digits
            raise self.error(node, f"a number of {len(node.value)} digits is out of range") from None

    def mapping(self, node: yaml.MappingNode, path: Key, depth: int) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = self.plain(key_node) if isinstance(key_node, yaml.ScalarNode) else None
            if not isinstance(key, str):
                raise self.error(key_node, "a key must be a word or a quoted string")
            if key in result:
                raise self.error(key_node, f"{key}: duplicate key (first on line {self.lines[(*path, key)]})")
            self.lines[(*path, key)] = key_node.start_mark.line + 1
            result[key] = self.value(value_node, (*path, key), depth + 1)
        return result
