"""Rules on single rows: what a row gives does not depend on the company it is computed in."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from core.attention import Attention
from core.contract.rules_masks import EXTREME
from core.contract.subject import NotClaimedError, Subject, gradients, leaves, near, visibility
from core.errors import ConfigError, ShapeError
from core.mask import Mask

# B, H, Hkv, L, S, D, Dv: axes alone, axes that equal each other, odd dims, more rows or keys than a block holds.
SHAPES = (
    (1, 1, 1, 8, 8, 8, 8), (4, 4, 1, 4, 4, 4, 4), (2, 2, 2, 5, 8, 8, 5), (2, 4, 2, 6, 9, 7, 7), (1, 2, 1, 1, 9, 6, 4),
    (3, 2, 2, 9, 1, 8, 8), (70, 2, 2, 3, 3, 8, 8), (1, 2, 2, 150, 150, 8, 8), (1, 2, 1, 3, 300, 8, 8), (2, 2, 2, 7, 3, 8, 8),
)  # fmt: skip
MASKS_A_SHAPE = 4


def rows_stand_alone(subject: Subject) -> None:
    """A row is what it is alone, with the keys that it may see in any order and no others: at every shape and mask."""
    spec = subject.spec
    if spec.positional or not (spec.cross or (spec.causal and spec.decode)):
        raise NotClaimedError("the place of a key matters, or a row alone with its keys is not served")
    turn = 0
    for B, H, Hkv, L, S, D, Dv in SHAPES:
        try:
            module = subject.module(H, D)
            module(*subject.qkv(1, H, Hkv, L=2, D=D, Dv=Dv))
        except (ConfigError, ShapeError, ValueError):  # a size that this mechanism refuses
            continue
        masks = list(_masks(subject, B, H, L, S))
        chosen = masks  # an axis may be taken for another where all are equal, so there every mask has its turn
        if len(masks) > MASKS_A_SHAPE and B != L:
            chosen = [masks[(turn + number) % len(masks)] for number in range(MASKS_A_SHAPE)]
        turn += MASKS_A_SHAPE
        for number, (name, mask) in enumerate(chosen):
            q, k, v = subject.qkv(B, H, Hkv, L=L, S=S, D=D, Dv=Dv)
            kind = number % 3  # flat rows, sharp ones, and scores below any fill
            if kind == 2:
                q, k, name = q.abs() * EXTREME, -k.abs() * EXTREME, f"{name}, very low scores"
            else:
                q = q * subject.temperature * (4.0 if kind else 1.0)
            # Mostly without weights: that both ways agree is another rule's business.
            _compare_rows(subject, module, name, (q, k, v), mask, need_weights=number % 4 == 3 and L * S < 1000)


def _masks(subject: Subject, B: int, H: int, L: int, S: int) -> Iterator[tuple[str, Mask]]:
    spec = subject.spec
    for causal in (False, True):
        if (causal and not spec.causal) or (L != S and not (spec.decode if causal else spec.cross)):
            continue
        lead = "causal" if causal else "no mask"
        yield lead, Mask(causal)
        # At length whole blocks are hidden.
        keys = subject.draw_bool(B, S) if S < 100 else torch.arange(S) >= torch.full((B, 1), S - 10)
        if spec.padding:
            yield f"{lead}, keys", Mask(causal, keys)
            yield f"{lead}, other keys", Mask(causal, ~keys)
            yield f"{lead}, keys all True", Mask(causal, torch.ones(B, S, dtype=torch.bool))
        if spec.pairs:
            for shape in ((L, S), (B, 1, L, S), (1, H, L, S), (B, 1, 1, S), (1, H, L, 1)):
                yield f"{lead}, pairs {shape}", Mask(causal, None, subject.draw_bool(*shape))
            yield f"{lead}, pairs all True", Mask(causal, None, torch.ones(L, S, dtype=torch.bool))
        if spec.pairs and spec.padding:
            yield f"{lead}, keys and pairs", Mask(causal, keys, subject.draw_bool(L, S))


def _compare_rows(
    subject: Subject, module: Attention, name: str, inputs: tuple[Tensor, ...], mask: Mask, need_weights: bool
) -> None:
    q, k, v = leaves(*inputs)
    (B, H, L, _), S = q.shape, k.shape[2]
    out = module(q, k, v, mask, need_weights).out
    visible = visibility(mask, B, H, L, S)
    where = f"{name}, B {B}, H {H}, Hkv {k.shape[1]}, L {L}, S {S}, D {q.shape[-1]}"
    for b, h, i in {(0, H - 1, 0), (B - 1, 0, L - 1), (B // 2, H // 2, L // 2)}:
        seen = visible[b, h, i].nonzero().flatten()
        row = out[b, h, i]
        if len(seen) == 0:
            near(row, torch.zeros_like(row), f"{where}: row {(b, h, i)}, which sees no key", 0.0)
            continue
        seen = seen[torch.randperm(len(seen), generator=subject.generator)]
        alone = leaves(q[b : b + 1, :, i : i + 1], k[b : b + 1, :, seen], v[b : b + 1, :, seen])
        # Where L != S is served only under causality, a single query is the last one and sees all.
        own = Mask(causal=not subject.spec.cross)
        want = module(*alone, own).out[0, h, 0]
        near(row, want, f"{where}: row (b, h, i) = {(b, h, i)} against the row alone with the {len(seen)} keys that it may see")
        if "low scores" in name:  # there a softmax is a maximum, whose gradient is rounding
            continue
        direction = subject.draw(*row.shape)
        full, single = gradients(row, (q, k, v), direction), gradients(want, alone, direction)
        for which, got, expected in (
            ("q", full[0][b, h, i], single[0][0, h, 0]),
            ("k", full[1][b][:, seen], single[1][0]),
            ("v", full[2][b][:, seen], single[2][0]),
        ):
            near(got, expected, f"{where}: gradient of {which} by row {(b, h, i)} against that of the row alone")
