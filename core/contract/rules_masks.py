"""Rules on masks: what is hidden has no influence, and what is visible has all of its own."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from core.attention import Attention
from core.contract.subject import (
    TIGHT,
    Subject,
    ViolationError,
    claim,
    demand,
    gradients,
    largest,
    leaves,
    near,
    visibility,
)
from core.mask import Mask

HUGE = 1e12  # of a later token: what a sum takes up and subtracts again shows in its rounding
GARBAGE = 1e4  # finite contents of hidden positions
EXTREME = 1e5  # q and -k of this size give scores below any finite number that a mask might be filled with


def single_key_returns_value(subject: Subject) -> None:
    """convex: a query that sees one key only (itself, where positional) returns exactly that key's value."""
    claim(subject.spec.convex, "convex")
    claim(subject.spec.causal or subject.spec.padding or subject.spec.pairs, "any mask")
    B, H, L = 3, 4, 7
    spec = subject.spec
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        module = subject.module(dtype=dtype)
        # A mechanism that divides two sums of D * D signed terms returns the value up to their rounding in float32.
        tolerance = {torch.float64: TIGHT, torch.float32: 1e-5}.get(dtype, 2 * torch.finfo(dtype).eps)
        q, k, v = subject.qkv(B, H, L=L, dtype=dtype)
        cases: list[tuple[str, Mask, Tensor, Tensor]] = []  # rows to compare (B, H, L), the index of their key (B, H, L)
        everywhere = torch.ones(B, H, L, dtype=torch.bool)
        own = torch.arange(L).expand(B, H, L)
        if spec.causal:
            cases.append(("causal, row 0", Mask(causal=True), everywhere & (own == 0), own))
        if spec.padding:
            index = torch.tensor([2, 0, 5])[:, None, None].expand(B, H, L)
            rows = (index == own) if spec.positional else everywhere
            keys = torch.arange(L) == index[:, 0, :1]
            cases.append(("keys with one True", Mask(keys=keys), rows, index))
            if spec.causal:
                cases.append(("causal and keys with one True", Mask(True, keys), rows & (own >= index), index))
        if spec.pairs:
            cases.append(("pairs with one True a row", Mask(pairs=torch.eye(L, dtype=torch.bool)), everywhere, own))
            if not spec.positional:
                index = torch.randint(L, (B, H, L), generator=subject.generator)
                pairs = torch.arange(L) == index[..., None]
                cases.append(("pairs (B, H, L, S) with one True a row", Mask(pairs=pairs), everywhere, index))
        for name, mask, rows, index in cases:
            want = v.gather(2, index[..., None].expand(-1, -1, -1, v.shape[-1]))
            for need_weights in (False, True):
                out = module(q, k, v, mask, need_weights).out
                near(
                    out[rows].double(),
                    want[rows].double(),
                    f"{name}, {dtype}: out is not the value of the only key",
                    tolerance,
                )


def no_future_leak(subject: Subject) -> None:
    """causal: token j moves no row before it, in values and gradients, also in training; without the future all is the same."""
    spec = subject.spec
    claim(spec.causal, "causal")
    module = subject.module()
    for L in (2, 5, 67):
        masks = [(name, mask) for name, mask in subject.masks(2, 4, L, L) if mask.causal]
        tokens = tuple(range(1, L)) if L < 10 else (1, 63, 64, 66)
        for name, mask in masks if L < 10 else masks[:1]:
            for need_weights in (False, True) if mask is masks[-1][1] else (False,):
                _no_leak(subject, module, name, mask, (L, L), tokens, need_weights)
        for need_weights in (False, True):
            q, k, v = subject.qkv(B=2, L=L)
            whole = module(q, k, v, Mask(causal=True), need_weights).out
            for n in tokens:
                part = module(q[:, :, :n], k[:, :, :n], v[:, :, :n], Mask(causal=True), need_weights).out
                near(whole[:, :, :n], part, f"future leak: the first {n} rows, with and without the tokens after them")
    few = subject.fewest_heads
    _no_leak(subject, subject.module(few), "causal", Mask(True), (300, 300), (128, 256, 299), False)
    narrow = subject.module(few, dtype=torch.bfloat16)
    _no_leak(subject, narrow, "causal, bfloat16", Mask(True), (260, 260), (257,), False, torch.bfloat16)
    _no_leak(subject, module.train(), "causal, in training", Mask(True), (5, 5), range(1, 5), False)
    module.eval()
    if spec.decode:
        for L, S in ((2, 5), (5, 2)):
            for name, mask in subject.masks(2, 4, L, S):
                if mask.causal:
                    _no_leak(subject, module, name, mask, (L, S), range(S), False)


def _no_leak(
    subject: Subject,
    module: Attention,
    name: str,
    mask: Mask,
    lengths: tuple[int, int],
    tokens: range | tuple[int, ...],
    need_weights: bool,
    dtype: torch.dtype = torch.float64,
) -> None:
    L, S = lengths
    shift = S - L  # row i stands at position i + shift
    B = 2 if L < 100 else 1
    q, k, v = leaves(*subject.qkv(B, H=module.num_heads, L=L, S=S, dtype=dtype))
    torch.manual_seed(0)  # in training a mechanism may draw; each call then draws the same
    base, weights = module(q, k, v, mask, need_weights)
    for j in tokens:
        first = min(max(j - shift, 0), L)  # rows before this one must not know token j
        for size in (1.0, HUGE) if L < 100 else (HUGE,):
            changed = [x.detach().clone() for x in (q, k, v)]
            for x in changed[1:]:
                x[:, :, j] = size * subject.draw(*x[:, :, j].shape, dtype=dtype)
            if j - shift in range(L):
                changed[0][:, :, j - shift] = size * subject.draw(*q[:, :, 0].shape, dtype=dtype)
            torch.manual_seed(0)
            got = module(*changed, mask, need_weights)
            for what, now, then in (("out", got.out, base), ("weights", got.weights, weights)):
                if now is not None and then is not None:
                    moved, place = largest(now[:, :, :first] - then[:, :, :first])
                    demand(
                        moved <= TIGHT,
                        f"future leak ({name}): changing token {j} moves row {_axis(place)} of {what} by {moved:.2g}",
                    )
    for i in range(L) if L < 10 else sorted({0, *(max(j - shift - 1, 0) for j in tokens)}):
        for what, found in zip("qkv", gradients(base[:, :, i], (q, k, v), torch.ones(1, dtype=q.dtype)), strict=True):
            later = found[:, :, max(i + 1, 0) :] if what == "q" else found[:, :, max(i + shift + 1, 0) :]
            moved, place = largest(later)
            demand(
                moved <= TIGHT,
                f"future leak ({name}): row {i} has gradient {moved:.2g} in {what} of a later token",
            )


def _axis(place: tuple[int, ...]) -> int | str:
    """The row in an index (b, h, i, ...)."""
    return place[2] if len(place) > 2 else "?"


def causal_is_bottom_right(subject: Subject) -> None:
    """causal with L != S: query i stands at S-L+i, as in the square; rows before every key are 0."""
    claim(subject.spec.causal and subject.spec.decode, "causal with L != S (decode)")
    module = subject.module()
    spec = subject.spec
    for L, S in ((1, 7), (3, 7), (7, 3), (5, 70), (65, 129), (70, 5)):
        q, k, v = subject.qkv(L=max(L, S), S=S)
        keys = subject.draw_bool(3, S, share=0.8) if spec.padding and S < 10 else None
        pairs = subject.draw_bool(S, S, share=0.8) if spec.pairs and S < 10 else None
        for need_weights in (False, True):
            if L < S:
                for some_keys, some_pairs in dict.fromkeys([(None, None), (keys, None), (None, pairs), (keys, pairs)]):
                    square = module(q, k, v, Mask(True, some_keys, some_pairs), need_weights).out
                    part = None if some_pairs is None else some_pairs[S - L :]
                    got = module(q[:, :, S - L :], k, v, Mask(True, some_keys, part), need_weights).out
                    which = "".join(f", {name}" for name, one in (("keys", some_keys), ("pairs", some_pairs)) if one is not None)
                    near(got, square[:, :, S - L :], f"L {L}, S {S}{which}: against the last rows of the square")
            else:
                got = module(q, k, v, Mask(causal=True), need_weights).out
                square = module(q[:, :, L - S :], k, v, Mask(causal=True), need_weights).out
                near(got[:, :, L - S :], square, f"L {L}, S {S}: the last rows, against the square")
                near(
                    got[:, :, : L - S],
                    torch.zeros_like(got[:, :, : L - S]),
                    f"L {L}, S {S}: rows before every key",
                    0.0,
                )


def padding_equals_removal(subject: Subject) -> None:
    """padding: hidden keys, whatever they hold, are as if they were not there, forward and backward."""
    spec = subject.spec
    claim(spec.padding, "padding")
    for L, H, count in ((8, 4, (2, 0, 5)), (70, 2, (5, 66, 0))):
        module = subject.module(H)
        hidden = torch.arange(L) >= L - torch.tensor(count)[:, None]
        sides = {"right": ~hidden}
        if not spec.positional:
            sides["left"] = ~hidden.flip(1)
            sides["middle"] = ~hidden.roll(-1, 1)
        for side, keys in sides.items():
            for causal in (False, True) if spec.causal else (False,):
                for need_weights in (False, True):
                    name = f"{side} padding{' under causal' if causal else ''}"
                    q, k, v = subject.qkv(H=H, L=L)
                    _removal(module, subject, name, (q, k, v), Mask(causal, keys), GARBAGE, need_weights)
                    if L < 10 and not need_weights:
                        _removal(module, subject, name, (q, k, v), Mask(causal, keys), math.nan, need_weights)
                        low = (q.abs() * EXTREME, -k.abs() * EXTREME, v)
                        _removal(module, subject, f"{name}, very low scores", low, Mask(causal, keys), 1.0, need_weights)
    if spec.positional:  # no removal, but what is hidden must not matter, wherever it stands
        module = subject.module()
        for L, count in ((8, (2, 0, 5)), (200, (140, 66, 0))):
            for keys in (torch.arange(L) >= torch.tensor(count)[:, None], subject.draw_bool(3, L)):
                q, k, v = subject.qkv(L=L)
                hidden = ~keys[:, None, :, None]
                other = [torch.where(hidden, GARBAGE * subject.draw(*x.shape), x) for x in (k, v)]
                for causal in (False, True) if spec.causal else (False,):
                    out = module(q, k, v, Mask(causal, keys)).out
                    near(module(q, *other, Mask(causal, keys)).out, out, f"other contents of hidden keys, causal {causal}, L {L}")
                    demand(bool(out.isfinite().all()), f"padding, causal {causal}, L {L}: out is not finite")
    if spec.cross:
        module = subject.module()
        q, k, v = subject.qkv(L=5, S=8)
        keys = torch.arange(8) < torch.tensor([3, 8, 1])[:, None]
        out = module(q, k, v, Mask(keys=keys)).out
        for b, n in enumerate((3, 8, 1)):
            near(
                out[b : b + 1],
                module(q[b : b + 1], k[b : b + 1, :, :n], v[b : b + 1, :, :n]).out,
                f"cross, batch row {b}",
            )


def _removal(
    module: Attention,
    subject: Subject,
    name: str,
    inputs: tuple[Tensor, ...],
    mask: Mask,
    content: float,
    need_weights: bool,
) -> None:
    """Fill what `mask.keys` hides with garbage, and compare every batch row with the same row without it."""
    keys = mask.keys
    assert keys is not None
    hidden = ~keys[:, None, :, None]
    finite = GARBAGE if math.isnan(content) else content
    fills = [finite * subject.draw(*x.shape) for x in inputs]
    if math.isnan(content):
        fills[1:] = [torch.full_like(inputs[1], math.nan), torch.full_like(inputs[2], math.inf)]
        name += " of NaN and infinity"
    q, k, v = leaves(*(torch.where(hidden, fill, x) for x, fill in zip(inputs, fills, strict=True)))
    out, weights = module(q, k, v, mask, need_weights)
    direction = subject.draw(*out.shape) * keys[:, None, :, None]
    grads = gradients(out, (q, k, v), direction)
    for which, grad in zip("kv", grads[1:], strict=True):
        near(grad.masked_fill(~hidden, 0.0), torch.zeros_like(grad), f"{name}: gradient of hidden {which}")
    for b in range(len(keys)):
        kept = keys[b]
        alone = leaves(*(x[b : b + 1, :, kept] for x in (q, k, v)))
        want = module(*alone, Mask(mask.causal), need_weights)
        where = f"{name}, batch row {b} ({int((~kept).sum())} of {len(kept)} hidden)"
        near(out[b : b + 1, :, kept], want.out, f"{where}: out against removal")
        if weights is not None and want.weights is not None:
            near(weights[b : b + 1, :, kept][..., kept], want.weights, f"{where}: weights against removal")
            near(
                weights[b, :, :, ~kept],
                torch.zeros_like(weights[b, :, :, ~kept]),
                f"{where}: weights of hidden keys",
                0.0,
            )
        if "low scores" not in name:  # there a softmax is a maximum, whose gradient is rounding
            expected = gradients(want.out, alone, direction[b : b + 1, :, kept])
            for which, grad, exact in zip("qkv", grads, expected, strict=True):
                near(grad[b : b + 1, :, kept], exact, f"{where}: gradient of {which} against removal")


def pairs_hide(subject: Subject) -> None:
    """pairs: a hidden key has no influence on its row, in every shape of mask; all masks combine by AND."""
    spec = subject.spec
    claim(spec.pairs, "pairs")
    module = subject.module()
    B, H, L = 3, 4, 7
    shapes = [(L, L), (1, 1, L, L), (B, 1, L, L), (1, H, L, L), (B, H, L, L), (B, 1, 1, L), (1, H, L, 1), (1, 1, 1, 1)]
    for shape in shapes:
        for causal in (False, True) if spec.causal else (False,):
            pairs = torch.ones(shape, dtype=torch.bool) if shape == (1, 1, 1, 1) else subject.draw_bool(*shape)
            keys = subject.draw_bool(B, L, share=0.8) if spec.padding else None
            mask = Mask(causal, keys, pairs)
            name = f"{'causal, ' if causal else ''}{'keys, ' if spec.padding else ''}pairs {shape}"
            visible = visibility(mask, B, H, L, L)
            # A positional mechanism reads `causal` for its own pattern too, so it stays; the rest is written out.
            written = Mask(causal and spec.positional, None, visible)
            for low in (False, True) if shape in ((L, L), (B, H, L, L)) else (False,):
                q, k, v = subject.qkv(B, H, L=L)
                if low:
                    q, k, name = q.abs() * EXTREME, -k.abs() * EXTREME, f"{name}, very low scores"
                for need_weights in (False, True):
                    q, k, v = leaves(q, k, v)
                    out, weights = module(q, k, v, mask, need_weights)
                    near(out, module(q, k, v, written, need_weights).out, f"{name}: against the combination written out")
                    for j in range(L) if shape == (B, H, L, L) else (1, L - 1):
                        _hidden_key(subject, module, name, (q, k, v), mask, visible, j, out, need_weights)
                    if weights is not None:
                        hidden = weights.masked_fill(visible, 0.0)
                        near(hidden, torch.zeros_like(hidden), f"{name}: weights of hidden pairs", 0.0)
    unseen = torch.ones(L, L, dtype=torch.bool)
    unseen[:, 3] = False
    q, k, v = subject.qkv(B, H, L=L)
    want = module(q, k, v, Mask(pairs=unseen)).out
    k[:, :, 3], v[:, :, 3] = math.nan, math.inf
    q, k, v = leaves(q, k, v)
    out = module(q, k, v, Mask(pairs=unseen)).out
    near(out, want, "NaN and infinity in a key that pairs hide from every query")
    for which, grad in zip("qkv", gradients(out, (q, k, v), torch.ones_like(out)), strict=True):
        demand(
            bool(grad.isfinite().all()),
            f"NaN in a key that pairs hide from every query: gradient of {which} is not finite",
        )


def _hidden_key(
    subject: Subject,
    module: Attention,
    name: str,
    inputs: tuple[Tensor, ...],
    mask: Mask,
    visible: Tensor,
    j: int,
    out: Tensor,
    need_weights: bool,
) -> None:
    q, k, v = (x.detach().clone() for x in inputs)
    k[:, :, j] = GARBAGE * subject.draw(*k[:, :, j].shape)
    v[:, :, j] = GARBAGE * subject.draw(*v[:, :, j].shape)
    changed = module(q, k, v, mask, need_weights).out
    moved, place = largest((changed - out).masked_fill(visible[..., j, None], 0.0))
    if moved > TIGHT:
        raise ViolationError(f"{name}: changing key {j}, hidden from (b, h, i) = {place[:3]}, moves its out by {moved:.2g}")


def empty_row_is_zero(subject: Subject) -> None:
    """A query without a visible key gives out 0, weights 0 and finite gradients; other rows do not notice."""
    spec = subject.spec
    claim(spec.padding or spec.pairs or (spec.causal and spec.decode), "any mask that can hide every key")
    B, H, L = 3, 4, 7
    some_keys, all_keys = torch.ones(B, L, dtype=torch.bool), torch.ones(B, L, dtype=torch.bool)
    some_keys[1] = False
    left = torch.arange(L) >= torch.tensor([0, 2, 5])[:, None]
    some_pairs = torch.ones(L, L, dtype=torch.bool)
    some_pairs[4] = False
    evens = torch.arange(L) % 2 == 0
    cases: list[tuple[str, int, Mask]] = []
    if spec.padding:
        cases.append(("keys all False in batch row 1", L, Mask(keys=some_keys)))
    if spec.padding and spec.causal:
        cases.append(("causal with left padding", L, Mask(True, left)))
    if spec.pairs:
        cases.append(("pairs with an empty row", L, Mask(pairs=some_pairs)))
        full = some_pairs.expand(B, H, L, L).clone()
        full[2, 1, 0] = False
        cases.append(("pairs (B, H, L, S) with empty rows", L, Mask(pairs=full)))
    if spec.pairs and spec.padding:
        pairs = torch.ones(L, L, dtype=torch.bool)
        pairs[3] = ~evens
        cases.append(("keys and pairs that leave nothing together", L, Mask(keys=evens & all_keys, pairs=pairs)))
    if spec.causal and spec.decode:
        cases.append(("causal with more queries than keys", 3, Mask(True)))
    if spec.padding:
        for one in subject.module()(*subject.qkv(B, H, L=1), Mask(keys=torch.zeros(B, 1, dtype=torch.bool)), True):
            if one is not None:
                near(one, torch.zeros_like(one), "one token, hidden: an empty row is not 0", 0.0)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        module = subject.module(dtype=dtype)
        tolerance = TIGHT if dtype == torch.float64 else 8 * torch.finfo(dtype).eps
        for name, S, mask in cases:
            visible = visibility(mask, B, H, L, S)
            empty = ~visible.any(-1)
            for need_weights in (False, True):
                q, k, v = leaves(*subject.qkv(B, H, L=L, S=S, dtype=dtype))
                out, weights = module(q, k, v, mask, need_weights)
                demand(bool(out.isfinite().all()), f"{name}, {dtype}: out is not finite")
                near(out[empty], torch.zeros_like(out[empty]), f"{name}, {dtype}: out of an empty row is not 0", 0.0)
                if weights is not None:
                    near(
                        weights[empty],
                        torch.zeros_like(weights[empty]),
                        f"{name}, {dtype}: weights of an empty row",
                        0.0,
                    )
                for which, grad in zip("qkv", gradients(out, (q, k, v), torch.ones_like(out)), strict=True):
                    demand(bool(grad.isfinite().all()), f"{name}, {dtype}: gradient of {which} is not finite")
                if spec.pairs and not spec.positional:
                    filled = module(q, k, v, Mask(pairs=visible | empty[..., None]), need_weights).out
                    near(out[~empty], filled[~empty], f"{name}, {dtype}: rows beside an empty one", tolerance)
