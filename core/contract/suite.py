"""The rules as pytest tests, for the tests of a plugin. Imported on use only, since it needs pytest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest

from core.attention import Attention, AttentionConfig
from core.contract.rules import RULES
from core.contract.runner import check


class ContractSuite:
    """Subclass it as `class TestMine(ContractSuite): variant = "mine"`: one test a rule, which fails with the witness.

    Attributes:
        variant: a registered name, or an Attention subclass.
        seeds, configs: as in `check`.
    """

    variant: ClassVar[str | type[Attention]]
    seeds: ClassVar[Sequence[int]] = (0,)
    configs: ClassVar[Sequence[AttentionConfig | dict[str, Any]] | None] = None

    @pytest.mark.parametrize("rule", [rule.__name__ for rule in RULES])
    def test_rule(self, rule: str, record_property: Callable[[str, object], None]) -> None:
        """The variant obeys this rule, or does not claim what it is about."""
        (result,) = check(self.variant, seeds=self.seeds, configs=self.configs, rules=[rule]).results
        if not result.claimed:
            record_property("not claimed", result.witness)
        if not result.passed:
            pytest.fail(f"{rule}: {result.witness}", pytrace=False)
