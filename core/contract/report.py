"""The report card of one variant."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from core.contract.measure import Measured


@dataclass(frozen=True)
class Result:
    """What became of one rule, over all configs and seeds.

    Args:
        rule: its name.
        passed: nothing against it was found (also where nothing is claimed).
        claimed: False where the Spec claims nothing that the rule is about.
        config: the settings it failed at; None otherwise.
        witness: the smallest evidence of a failure, or why nothing is claimed; "" for a pass.
        measured: what the rule measured on its way.
    """

    rule: str
    passed: bool
    claimed: bool = True
    config: dict[str, Any] | None = None
    witness: str = ""
    measured: tuple[Measured, ...] = ()

    @property
    def status(self) -> str:
        """`pass`, `FAIL` or `not claimed`."""
        if not self.passed:
            return "FAIL"
        return "pass" if self.claimed else "not claimed"

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "rule": self.rule, "status": self.status, "passed": self.passed, "claimed": self.claimed,
            "config": self.config, "witness": self.witness,
        }  # fmt: skip


@dataclass(frozen=True)
class Report:
    """The results of all rules for one variant; `str` gives the card, one line a rule."""

    variant: str
    configs: list[dict[str, Any]]
    seeds: list[int]
    results: list[Result] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """No rule failed."""
        return all(result.passed for result in self.results)

    @property
    def failures(self) -> list[Result]:
        """The results that are failures."""
        return [result for result in self.results if not result.passed]

    @property
    def measured(self) -> list[Measured]:
        """What was measured, at the default settings."""
        return [one for result in self.results for one in result.measured]

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "variant": self.variant, "ok": self.ok, "configs": self.configs, "seeds": self.seeds,
            "results": [result.as_dict() for result in self.results],
            "measured": [vars(one) for one in self.measured],
        }  # fmt: skip

    def __str__(self) -> str:
        counts = dict.fromkeys(("pass", "FAIL", "not claimed"), 0)
        for result in self.results:
            counts[result.status] += 1
        verdict = "conforms" if self.ok else "DOES NOT CONFORM"
        summary = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
        lines = [f"{self.variant}: {verdict} ({summary}; {len(self.configs)} configs, {len(self.seeds)} seeds)"]
        width = max((len(result.rule) for result in self.results), default=0)
        for result in self.results:
            lines.append(f"  {result.status:<11}  {result.rule:<{width}}  {result.witness}".rstrip())
        lines += [f"measured at {settings_line(self.configs[0])}:"] if self.measured else []
        widths = [max((len(getattr(one, field)) for one in self.measured), default=0) for field in ("what", "found")]
        for one in self.measured:
            claimed = f"claimed {one.claimed}" if one.claimed else ""
            lines.append(f"  {one.what:<{widths[0]}}  {one.found:<{widths[1]}}  {claimed}".rstrip())
        return "\n".join(lines)


def settings_line(config: dict[str, Any]) -> str:
    """Settings in one line, for a witness."""
    return ", ".join(f"{key}={value!r}" for key, value in config.items()) or "none"
