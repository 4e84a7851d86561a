"""`new`: a variant that works as it is written, and its test."""

from __future__ import annotations

from pathlib import Path

from experiments.errors import InputError

_VARIANT = '''"""One line: what each query attends to.

    out = softmax(q k^T / (T sqrt(D))) v

Paper   Whose, and what differs.
Time    O(L S D)      Memory  O(L S)
Masks   all.          Equals `standard` at temperature 1.
"""

from torch import Tensor

from core import Attention, AttentionConfig, AttentionOutput, Mask, Spec, register, tunable
from core.functional import average, masked_softmax, scaled_scores


@register("{name}")
class {cls}(Attention):
    """softmax(q k^T / (T sqrt(D))) v."""

    # What you do not claim is refused, what you claim is checked: python -m experiments check {name}.py
    spec = Spec(
        causal=True, padding=True, pairs=True, cross=True, decode=True, convex=True,
        equals_standard_when={{"temperature": 1.0}}, time=2, memory=2,
    )

    class Config(AttentionConfig):
        """temperature: T. low and high are where a search looks, ge is a hard limit."""

        temperature: float = tunable(1.0, low=0.1, high=1.0, log=True, ge=1e-8)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, need_weights: bool) -> AttentionOutput:
        scores = scaled_scores(q, k, self.config.temperature)  # (B, H, L, S), float32 or wider
        weights = masked_softmax(scores, mask.visible(q.shape[-2], k.shape[-2], q.device))
        return AttentionOutput(average(weights, v), weights.to(q.dtype) if need_weights else None)
'''

_TEST = '''"""Run with pytest, from the folder of {name}.py: every rule of the contract suite is one test."""

from core.contract import ContractSuite
from core.registry import load_plugin

load_plugin("{name}.py")


class Test{cls}(ContractSuite):
    variant = "{name}"
'''


def write(name: str, folder: Path) -> list[Path]:
    """Write NAME.py and test_NAME.py.

    Raises:
        InputError: a name that is malformed or taken, or a file that is there already.
    """
    import variants as house  # noqa: F401
    from core.registry import SNAKE_CASE, variants

    if not SNAKE_CASE.fullmatch(name):
        raise InputError(f"new {name}: a name must be lower snake case, such as my_attention")
    if name in variants.names() or name in variants.broken:
        raise InputError(f"new {name}: this name is taken by a variant (python -m experiments list)")
    cls = "".join(part.capitalize() for part in name.split("_"))
    files = {folder / f"{name}.py": _VARIANT, folder / f"test_{name}.py": _TEST}
    for path in files:
        if path.exists():
            raise InputError(f"new {name}: {path.name} is there already")
    for path, text in files.items():
        try:
            path.write_text(text.format(name=name, cls=cls), encoding="utf-8")
        except OSError as error:
            raise InputError(f"new {name}: {path} cannot be written ({error.strerror})") from None
    return list(files)
