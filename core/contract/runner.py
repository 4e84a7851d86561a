"""Runs the rules on one variant: at its default settings, at both ends of its search ranges, and at drawn ones."""

from __future__ import annotations

import contextlib
import math
import random
import traceback
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from core.attention import Attention, AttentionConfig
from core.contract.report import Report, Result, settings_line
from core.contract.rules import RULES, Rule
from core.contract.subject import NotClaimedError, Subject, ViolationError
from core.errors import UnknownNameError
from core.registry import get, make_config, reason, unknown_name

LEAST = ("low", "drawn", "high")  # see choose_settings; more are drawn where a list of choices is longer, up to MOST_CONFIGS
MOST_CONFIGS = 6
MOST_WHEN_SMALL = 6  # a window of 200 hides nothing among 9 keys


def check(
    variant: str | type[Attention],
    *,
    seeds: Sequence[int] = (0,),
    configs: Sequence[AttentionConfig | dict[str, Any]] | None = None,
    rules: Sequence[str] | None = None,
) -> Report:
    """Run the contract suite on one variant.

    Args:
        variant: a registered name, or an Attention subclass, registered or not.
        seeds: for the inputs, the parameters and the drawn settings.
        configs: settings to check at; None: the default ones, both ends of the search ranges, and drawn ones.
        rules: names of the rules to run; None: all.

    Raises:
        UnknownNameError, PluginError: no such variant or rule, or a broken plugin.
        ConfigError: settings in `configs` that the variant refuses, or a field without a default.
    """
    cls = get(variant) if isinstance(variant, str) else variant
    chosen = _choose_rules(rules)
    given = None
    if configs is not None:
        given = [config if isinstance(config, AttentionConfig) else make_config(cls, dict(config)) for config in configs]
    # Parameters that a variant draws come from the global generator, which is the caller's.
    with one_thread(), torch.random.fork_rng(devices=[]), warnings.catch_warnings(), torch.enable_grad():
        warnings.simplefilter("ignore")
        cases = [(config, seed) for seed in seeds for config in given or standard_configs(cls, seed)]
        results = [_run(rule, cls, cases) for rule in chosen]
    unique = list({settings_line(_plain(config)): _plain(config) for config, _ in cases}.values())
    return Report(cls.name or cls.__name__, unique, list(seeds), results)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Probes are small: several threads make them slower, many times so beside other work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def standard_configs(cls: type[Attention], seed: int) -> list[AttentionConfig]:
    """The default, both ends of the search ranges, and drawn settings; each once."""
    configs = [make_config(cls, {})]
    source = random.Random(seed)
    ranges = searches(cls)
    most = max([len(LEAST), *(len(search["choices"]) for search in ranges.values() if "choices" in search)])
    kinds = [*LEAST, *["drawn"] * (min(most, MOST_CONFIGS) - len(LEAST))]
    if any(cls.Config.model_fields[name].default == 0 for name in ranges):
        kinds.append("bare")
    for number, kind in enumerate(kinds):
        for _ in range(20):  # settings chosen one by one may be refused together
            try:
                config = cls.Config(**choose_settings(cls, source, kind, number))
                cls(4, 8, config)
            except ValueError:
                continue
            configs.append(config)
            break
    unique: list[AttentionConfig] = []
    for config in configs:
        if config not in unique:
            unique.append(config)
    return unique


def searches(cls: type[Attention]) -> dict[str, Any]:
    """The search range of every `tunable` field."""
    extras = {name: field.json_schema_extra for name, field in cls.Config.model_fields.items()}
    return {name: extra["search"] for name, extra in extras.items() if isinstance(extra, dict) and "search" in extra}


def choose_settings(cls: type[Attention], source: random.Random, kind: str, number: int) -> dict[str, Any]:
    """A value from every search range; choices take turns by `number`.

    Args:
        kind: "low" and "high" take that end of every range; "drawn" takes any value, whole numbers small; "bare" is drawn, but
            what is 0 by default stays 0, so that each part of a mechanism is seen without the others.
    """
    settings = {}
    for name, search in searches(cls).items():
        if "choices" in search:
            settings[name] = search["choices"][number % len(search["choices"])]
            continue
        low, high = search["low"], search["high"]
        if kind in ("low", "high"):
            settings[name] = search[kind]
        elif isinstance(low, int) and isinstance(high, int):
            bare = kind == "bare" and cls.Config.model_fields[name].default == 0
            settings[name] = 0 if bare else source.randint(low, max(low, min(high, MOST_WHEN_SMALL)))
        elif search.get("log"):
            settings[name] = math.exp(source.uniform(math.log(low), math.log(high)))
        else:
            settings[name] = source.uniform(low, high)
    return settings


def _choose_rules(names: Sequence[str] | None) -> list[Rule]:
    if names is None:
        return list(RULES)
    by_name = {rule.__name__: rule for rule in RULES}
    for name in names:
        if name not in by_name:
            raise UnknownNameError(unknown_name("rule", name, list(by_name)))
    return [by_name[name] for name in names]


def _plain(config: AttentionConfig) -> dict[str, Any]:
    return config.model_dump(mode="json")


def _run(rule: Rule, cls: type[Attention], cases: list[tuple[AttentionConfig, int]]) -> Result:
    """One rule over all cases, up to the first failure: one witness is enough to look at."""
    name = rule.__name__
    unclaimed, claimed = "", False
    measured: tuple[Any, ...] = ()
    for number, (config, seed) in enumerate(cases):
        subject = Subject(cls, config, seed, salt=name, first=number == 0)
        try:
            rule(subject)
            claimed = True
            measured = measured or tuple(subject.measured)
        except NotClaimedError as error:
            unclaimed = str(error)
        except (Exception, SystemExit) as error:  # whatever a variant raises is a finding about the variant
            witness = str(error) if isinstance(error, ViolationError) else f"raised {reason(error)}{_place(error)}"
            settings = _plain(config)
            where = f"config {settings_line(settings)}, seed {seed}, {subject.sizes}".rstrip(", ")
            return Result(name, False, True, settings, f"{witness}; {where}", tuple(subject.measured))
    return Result(name, True, claimed, None, "" if claimed else unclaimed, measured)


def _place(error: BaseException) -> str:
    """Where the variant's own code stood when it raised."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "site-packages" not in frame.filename]
    return f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
