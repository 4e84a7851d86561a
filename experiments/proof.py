"""Before a stranger's mechanism counts, it is proven: the contract suite runs on it once for each version of its code."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Mapping
from typing import Any

from core.contract import check
from experiments.store import Store

_SHOWN = 3  # rules in a message


def prove(store: Store, code: Mapping[str, str], say: Callable[[str], None]) -> dict[str, str]:
    """Check every variant that is not the house's own; what this study has proven before is not proven again.

    Args:
        code: "variant NAME" or "task NAME" -> digest of its file.

    Returns:
        the variants that fail, and how: their numbers shall not count.
    """
    proofs: dict[str, Any] = store.meta("proofs") or {}
    for name, digest in code.items():
        kind, _, variant = name.partition(" ")
        if kind != "variant" or proofs.get(variant, {}).get("code") == digest:
            continue
        say(f"checking {variant} against the contract suite, since its code is new here")
        with contextlib.redirect_stdout(io.StringIO()):  # what a plugin prints is no output of this program
            failures = check(variant).failures
        fault = "; ".join(f"{failure.rule}: {failure.witness}" for failure in failures[:_SHOWN])
        proofs[variant] = {"code": digest, "fault": fault}
        if failures:
            rules = "rule" if len(failures) == 1 else "rules"
            say(f"{variant} fails {len(failures)} {rules}, so its numbers will not count: {fault}")
    store.set_meta("proofs", proofs)
    return {variant: proof["fault"] for variant, proof in proofs.items() if proof["fault"]}
