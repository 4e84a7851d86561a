"""The public conformance suite: what every attention mechanism must obey, and a report card of whether one does.

    from core.contract import check
    print(check("topk"))            # a registered name, or an Attention subclass

    from core.contract import ContractSuite
    class TestMine(ContractSuite):  # in a test file: one test a rule
        variant = "mine"

What is demanded is the list in `core.contract.rules`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from core.contract.report import Report, Result
from core.contract.rules import RULES
from core.contract.runner import check

if TYPE_CHECKING:
    from core.contract.suite import ContractSuite

__all__ = ["RULES", "ContractSuite", "Report", "Result", "check"]


def __getattr__(name: str) -> Any:
    # The suite needs pytest, which someone who only wants a report card may not have.
    if name == "ContractSuite":
        from core.contract.suite import ContractSuite

        return ContractSuite
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
