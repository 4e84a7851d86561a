"""Names to classes: of the house, of installed packages (entry points) and of single plugin files.

One `Registry` serves attention variants, and one serves tasks; both follow the same rules.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

from core.attention import Attention
from core.errors import ConfigError, MissingExtraError, PluginError, RegistrationError, UnknownNameError

T = TypeVar("T")
SNAKE_CASE = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
STRICT = "ATTENTION_STRICT_PLUGINS"  # set to 1, a broken plugin is an error instead of an entry in a list
_PLUGIN = "attention_plugin_"  # the modules of plugin files begin so
_registries: list[Registry[Any]] = []


@dataclass(frozen=True)
class Broken:
    """A plugin that cannot be used: where it comes from, why, and the error that it raised."""

    source: str
    reason: str
    error: BaseException


class Registry(Generic[T]):
    """The classes of one kind, by name.

    Args:
        kind: the word for messages ("variant", "task").
        base: what a class must derive from.
        group: the entry point group through which installed packages take part.
    """

    def __init__(self, kind: str, base: type[T], group: str) -> None:
        self.kind = kind
        self.base = base
        self.group = group
        self.broken: dict[str, Broken] = {}
        self._classes: dict[str, type[T]] = {}
        self._sources: dict[str, str] = {}
        self._tried: set[tuple[str, str, str]] = set()
        _registries.append(self)

    def register(self, name: str) -> Callable[[type[T]], type[T]]:
        """Class decorator that makes a class available under `name` (lower snake case).

        Raises:
            RegistrationError: a malformed name, a class of another kind, settings without usable defaults, or a name that
                another class has. Running the same definition again (a notebook cell) replaces it.
        """
        if not isinstance(name, str) or not SNAKE_CASE.fullmatch(name):
            raise RegistrationError(f"{self.kind} name must be lower snake case such as 'top_p', got {name!r}")

        def add(cls: type[T]) -> type[T]:
            if not (isinstance(cls, type) and issubclass(cls, self.base)):
                raise RegistrationError(f"{self.kind} {name!r}: must be a subclass of {self.base.__name__}, got {cls!r}")
            self._check_settings(name, cls)
            taken = self._classes.get(name)
            if taken is not None and _definition(taken) != _definition(cls):
                raise RegistrationError(f"{self.kind} {name!r} is taken by {_named(taken)}; {_named(cls)} needs another name")
            absent = self.broken.get(name)
            if absent is not None and isinstance(absent.error, MissingExtraError) and absent.source != cls.__module__:
                # Where the library is installed, the same name would mean another mechanism.
                raise RegistrationError(
                    f"{self.kind} {name!r} is taken by {absent.source} ({absent.reason}); {_named(cls)} needs another name"
                )
            other = next((known for known, known_cls in self._classes.items() if known_cls is cls and known != name), None)
            if other is not None:
                raise RegistrationError(f"{self.kind} {name!r}: {cls.__qualname__} is registered as {other!r} already")
            cls.name = name  # type: ignore[attr-defined]
            self._classes[name] = cls
            self.broken.pop(name, None)
            return cls

        return add

    def names(self) -> list[str]:
        """Sorted names of what can be built now; what cannot is in `broken`."""
        self._load_entry_points()
        return sorted(self._classes)

    def source(self, name: str) -> str:
        """Where a class comes from: a distribution and its version, a module, or a plugin file."""
        cls = self.get(name)
        return self._sources.get(name) or _file(cls) or cls.__module__

    def get(self, name: str) -> type[T]:
        """The class of that name.

        Raises:
            UnknownNameError: with close matches and the whole list.
            PluginError: the plugin of that name is broken; its own error is chained.
            MissingExtraError: it needs a library that is not installed.
        """
        if name not in self._classes:
            self._load_entry_points()
        if name in self._classes:
            return self._classes[name]
        if name in self.broken:
            broken = self.broken[name]
            if isinstance(broken.error, MissingExtraError):
                raise broken.error.with_traceback(None)
            raise self._error(name, broken) from broken.error
        raise UnknownNameError(
            unknown_name(self.kind, name, sorted(self._classes))
            + "; a package whose entry points were edited must be installed again"
        )

    def add_broken(self, name: str, source: str, error: BaseException) -> None:
        """List a name as one that cannot be built; `get` raises its error."""
        self.broken[name] = Broken(source, reason(error), error)

    def _error(self, name: str, broken: Broken) -> PluginError:
        return PluginError(f"{self.kind} {name!r} from {broken.source} is broken: {broken.reason}")

    def _check_settings(self, name: str, cls: Any) -> None:
        """Settings are stored and shown as JSON, and every one has a default."""
        base = self.base.Config  # type: ignore[attr-defined]
        if not (isinstance(cls.Config, type) and issubclass(cls.Config, base)):
            raise RegistrationError(f"{self.kind} {name!r}: Config must be a subclass of {base.__name__}, got {cls.Config!r}")
        try:
            cls.Config().model_dump(mode="json")
        except ValueError as error:
            found = config_errors(cls, error) if isinstance(error, ValidationError) else reason(error)
            raise RegistrationError(f"{self.kind} {name!r}: every setting of Config needs a valid default: {found}") from error

    def forget(self, module: str) -> None:
        """Drop what a module registered before its import failed."""
        for name in [name for name, cls in self._classes.items() if cls.__module__ == module]:
            del self._classes[name]

    def _load_entry_points(self) -> None:
        for entry in importlib.metadata.entry_points(group=self.group):
            distribution = f"{entry.dist.name} {entry.dist.version}" if entry.dist else "unknown distribution"
            key = (entry.name, entry.value, distribution)
            if key in self._tried:  # an editable install can list the same entry twice
                continue
            self._tried.add(key)
            module = entry.value.partition(":")[0].strip()
            before = self._classes.get(entry.name)
            try:
                with quiet_import():
                    loaded = entry.load()
                cls = self._classes.get(entry.name)
                if cls is None:
                    raise PluginError(f"{entry.value} registers no {self.kind} named {entry.name!r}")
                if cls is before and cls is not loaded and cls.__module__.split(".")[0] != module.split(".")[0]:
                    raise PluginError(f"{entry.value} registers no {self.kind} named {entry.name!r}, which is {_named(cls)}")
                self._sources[entry.name] = distribution
            except BaseException as error:  # one broken package must not break the others
                if module not in sys.modules:
                    self.forget(module)
                broken = Broken(distribution, reason(error), error)
                if isinstance(error, KeyboardInterrupt) or strict():
                    self._tried.discard(key)
                    if isinstance(error, KeyboardInterrupt):
                        raise
                    raise self._error(entry.name, broken) from error
                self.broken[entry.name] = broken


def unknown_name(what: str, name: object, known: list[str]) -> str:
    """The message for a name that does not exist: close matches, then the list."""
    close = difflib.get_close_matches(str(name), known, n=3, cutoff=0.6)
    hint = f"; did you mean {' or '.join(repr(match) for match in close)}?" if close else ""
    return f"unknown {what} {name!r}{hint} (there are: {', '.join(known) or 'none'})"


def reason(error: BaseException) -> str:
    """An error in one line, with its class; one that is a sentence for people already, without."""
    try:
        text = str(error.code if isinstance(error, SystemExit) else error)
    except Exception:
        text = "(its message cannot be shown)"
    if isinstance(error, SystemExit):
        text = f"it exits on import (SystemExit {text})"
    elif not isinstance(error, MissingExtraError):
        text = f"{type(error).__name__}: {text}"
    return " ".join(text.split()).encode(errors="replace").decode()  # a name of a file may be no text


def strict() -> bool:
    """Whether a broken plugin shall be an error: the switch for its author's own tests."""
    return os.environ.get(STRICT, "") not in ("", "0")


@contextlib.contextmanager
def quiet_import() -> Iterator[None]:
    """What a plugin prints on import goes to standard error, and the working directory stays the person's."""
    place = None
    with contextlib.suppress(OSError):  # the folder may be gone
        place = os.getcwd()
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        if place is not None:
            with contextlib.suppress(OSError):
                os.chdir(place)


def require(module: str, extra: str) -> ModuleType:
    """A library that not everyone installs, at the top of a file that needs it.

    Raises:
        MissingExtraError: it cannot be imported; the message holds the pip command.
    """
    try:
        return importlib.import_module(module)
    except Exception as error:  # one that is installed and does not work beside this torch is as good as missing
        absent = isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]
        what = "is not installed" if absent else f"cannot be imported ({reason(error)})"
        raise MissingExtraError(f"{module} {what}; pip install 'attention-experiments[{extra}]'", name=module) from error


def load_plugin(path: str | Path) -> None:
    """Import a plugin file, which registers what it holds. A file is imported once a process.

    Raises:
        PluginError: no such file, or an import that raises or exits; its own error is chained.
    """
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise PluginError(f"plugin {path}: {'is a folder; name a Python file in it' if file.is_dir() else 'no such file'}")
    if file.suffix != ".py":
        raise PluginError(f"plugin {path}: must be a Python file (.py)")
    name = f"{_PLUGIN}{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None  # a .py file has both
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs, so that pickle finds its classes
    try:
        with quiet_import():
            spec.loader.exec_module(module)
    except BaseException as error:
        sys.modules.pop(name, None)
        for registry in _registries:
            registry.forget(name)
        if isinstance(error, KeyboardInterrupt):
            raise
        raise PluginError(f"plugin {path}: {reason(error)}") from error


def _file(cls: type) -> str | None:
    """The plugin file that defines a class; None where a module does whose name says enough."""
    return getattr(sys.modules.get(cls.__module__), "__file__", None) if cls.__module__.startswith(_PLUGIN) else None


def _named(cls: type) -> str:
    """A class as a person finds it."""
    file = _file(cls)
    return f"{cls.__qualname__} in {file}" if file else f"{cls.__module__}.{cls.__qualname__}"


def _definition(cls: type) -> tuple[str, str]:
    """What makes two classes the same definition: the file (or the notebook) and the qualified name."""
    try:
        place = str(Path(inspect.getfile(cls)).resolve())
    except (TypeError, OSError):
        place = cls.__module__
    return place, cls.__qualname__


variants: Registry[Attention] = Registry("variant", Attention, "attention_variants")
register = variants.register
names = variants.names
get = variants.get


def make_config(cls: type, settings: dict[str, Any]) -> Any:
    """The class's own `Config` from plain settings; what went through JSON (a tuple, a path) is what it was.

    Raises:
        ConfigError: one line naming the setting, what it was and what is allowed.
    """
    try:
        return cls.Config(**settings)  # type: ignore[attr-defined]
    except ValidationError as error:
        with contextlib.suppress(ValidationError, TypeError, ValueError):
            return cls.Config.model_validate_json(json.dumps(settings))  # type: ignore[attr-defined]
        raise ConfigError(f"{cls.name}: {config_errors(cls, error)}") from error  # type: ignore[attr-defined]


def config_errors(cls: type, error: ValidationError) -> str:
    """Pydantic's findings in one line."""
    lines = []
    for found in error.errors(include_url=False):
        where = ".".join(str(part) for part in found["loc"]) or "config"
        if found["type"] == "extra_forbidden":
            lines.append(unknown_name("setting", where, sorted(cls.Config.model_fields)))  # type: ignore[attr-defined]
        else:
            lines.append(f"{where}: {found['msg']}, got {found['input']!r}")
    return "; ".join(lines)


def build(variant: str, *, num_heads: int, head_dim: int, **config: Any) -> Attention:
    """An attention module on projected heads; extra arguments are its settings.

    Raises:
        UnknownNameError, PluginError: no such variant, or a broken one.
        MissingExtraError: it needs a library that is not installed.
        ConfigError: a size below 1, an unknown setting, or one outside its limits.
    """
    cls = get(variant)
    for size_name, size in (("num_heads", num_heads), ("head_dim", head_dim)):
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ConfigError(f"{variant}: {size_name} must be an integer of at least 1, got {size!r}")
    return cls(num_heads, head_dim, make_config(cls, config))
