"""Rules on values: what the result is, and that every way to it gives the same."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from core.attention import Attention
from core.contract.subject import (
    NotClaimedError,
    Subject,
    claim,
    demand,
    leaves,
    near,
    reference,
    same_gradients,
    visibility,
)
from core.errors import ConfigError
from core.mask import Mask

LEARNED = 1e-5  # a learned temperature starts at a value rounded to float32


def batch_independence(subject: Subject) -> None:
    """A batch row alone gives what it gives in the batch, also in training, and reordering the batch reorders the result."""
    module = subject.module()
    B, H, L = 9, 4, 7
    order = torch.tensor([2, 0, 1, 8, 7, 3, 4, 6, 5])
    masks = subject.masks(B, H, L, L)
    cases = [(name, mask, need_weights, False) for name, mask in masks for need_weights in (False, True)]
    for name, mask, need_weights, training in [*cases, (f"{masks[0][0]}, in training", masks[0][1], False, True)]:
        q, k, v = subject.qkv(B, H, Hkv=2, L=L)
        q[1], v[2] = 50 * q[1], 50 * v[2]  # rows of different size, so that a shared mean or maximum shows
        module.train(training)
        before = torch.get_rng_state()
        out, weights = module(q, k, v, mask, need_weights)
        if torch.equal(before, torch.get_rng_state()):  # what is drawn in training differs from batch to batch
            for what, rows in [(f"batch row {b} alone", torch.tensor([b])) for b in (0, 1, 2, 8)] + [("reordered", order)]:
                got = module(q[rows], k[rows], v[rows], _batch_rows(mask, rows), need_weights)
                near(got.out, out[rows], f"{name}, {what}: out")
                if got.weights is not None and weights is not None:
                    near(got.weights, weights[rows], f"{name}, {what}: weights")


def _batch_rows(mask: Mask, rows: Tensor) -> Mask:
    per_batch = mask.pairs is not None and mask.pairs.dim() == 4
    pairs = mask.pairs[rows] if per_batch and mask.pairs is not None else mask.pairs
    return Mask(mask.causal, None if mask.keys is None else mask.keys[rows], pairs)


def weights_match_output(subject: Subject) -> None:
    """convex: weights @ v is out, rows sum to 1, hidden weights are 0, and gradients go through the weights."""
    claim(subject.spec.convex, "convex")
    B, H = 3, 4
    module = subject.module()
    q, k, v = subject.qkv(B, H, Dv=8)
    columns = subject.value_dim
    near(module(q, k, v).out[..., :columns], module(q, k, v[..., :columns]).out, "out with values as wide as keys, by column")
    cases = [(B, 7, name, mask) for name, mask in subject.masks(B, H, 7, 7)]
    for L in (129, 257):
        cases += [(1, L, f"{name}, L {L}", mask) for name, mask in subject.masks(1, H, L, L)[-1:]]
    for B, L, name, mask in cases:
        q, k, v = leaves(*subject.qkv(B, H, L=L))
        out, weights = module(q, k, v, mask, True)
        demand(weights is not None, f"{name}: weights are None")
        demand(bool((weights >= 0).all()), f"{name}: a weight is negative: {weights.detach().min().item():.2g}")
        near(torch.einsum("bhij,bhjd->bhid", weights, v), out, f"{name}: weights @ v against out")
        visible = visibility(mask, B, H, L, L)
        # A window may hide what the mask shows; a row's own key is in every window.
        sees = visible.diagonal(dim1=2, dim2=3) if subject.spec.positional else visible.any(-1)
        sums = weights.sum(-1)[sees]
        near(sums, torch.ones_like(sums), f"{name}: sum of a row")
        near(weights[~visible], torch.zeros_like(weights[~visible]), f"{name}: weight of a hidden key", 0.0)
        direction = subject.draw(*out.shape)
        inputs = {"q": q, "k": k, **dict(module.named_parameters())}
        # d out / d q and k goes through the weights alone, so weights cut off from the graph are seen here.
        through = torch.einsum("bhij,bhjd->bhid", weights, v.detach())
        same_gradients(through, out, inputs, direction, name, "through the weights against that of out")


LENGTHS = (1, 2, 63, 64, 65, 127, 128, 129, 256, 300)  # around the sizes of blocks
UNEQUAL = ((1, 129), (65, 129), (129, 65), (3, 64))


def fast_path_equals_plain(subject: Subject) -> None:
    """out and gradients without weights equal those with, for every mask and at lengths around block sizes."""
    few = subject.fewest_heads
    modules = {H: subject.module(H) for H in {few, max(few, 2)}}
    cases = [(3, 7, 7), (3, 5, 8), (3, 8, 5)]
    cases += [(1, length, length) for length in LENGTHS] + [(1, L, S) for L, S in UNEQUAL]
    for B, L, S in cases:
        H = few if max(L, S) > 100 else max(few, 2)
        module, masks = modules[H], subject.masks(B, H, L, S)
        if max(L, S) > 100:  # long ones cost most: without a mask, and with every part at once, causal or not in turn
            free = [pair for pair in masks if not pair[1].causal]
            masks = [*masks[:1], *(free[1:] if L % 2 else masks[max(len(free), 1) :])[-1:]]
        for name, mask in masks:
            q, k, v = leaves(*subject.qkv(B, H, L=L, S=S))
            fast, plain = module(q, k, v, mask).out, module(q, k, v, mask, True).out
            near(fast, plain, f"{name}, L {L}, S {S}: out without weights against out with weights")
            inputs = {"q": q, "k": k, "v": v, **dict(module.named_parameters())}
            where = f"{name}, L {L}, S {S}"
            same_gradients(fast, plain, inputs, subject.draw(*fast.shape), where, "without weights against with")


def equals_standard(subject: Subject) -> None:
    """At the settings of `equals_standard_when`, out, weights and gradients are those of softmax(q k^T / sqrt(D)) v."""
    limit = subject.spec.equals_standard_when
    claim(limit is not None, "equals_standard_when")
    assert limit is not None
    config = subject.with_settings(limit)
    _compare(subject, subject.module(config=config, trained=False), 1.0, "")
    for H, D in ((1, 8), (2, 7), (2, 12)):  # a single head, odd channels, values as wide as keys
        try:
            module = subject.module(H, D, config=config, trained=False)
        except ValueError:
            continue
        q, k, v = subject.qkv(2, H, L=9, D=D, Dv=D)
        near(module(q, k, v).out, reference(q, k, v, Mask()).out, f"H {H}, D {D}, Dv {D}: out against standard")


def temperature_divides_scores(subject: Subject) -> None:
    """A setting `temperature` T divides the scores: as q / T at T = 1, and q k^T / (T sqrt(D)) in the limit that is standard."""
    if "temperature" not in subject.variant.Config.model_fields:
        raise NotClaimedError("it has no setting named `temperature`")
    limit = subject.spec.equals_standard_when
    tried = False
    for temperature in (0.5, 2.5):
        with contextlib.suppress(ConfigError):
            warm, plain = (
                subject.module(config=subject.exactly({"temperature": value}), trained=False) for value in (temperature, 1.0)
            )
            q, k, v = subject.qkv()
            if _softmax_of_products(plain, q, k, v):
                tried = True
                for need_weights in (False, True):
                    got, want = warm(q, k, v, None, need_weights), plain(q / temperature, k, v, None, need_weights)
                    near(got.out, want.out, f"temperature {temperature}: out against that of q / {temperature}", LEARNED)
        if limit is not None:
            with contextlib.suppress(ConfigError):
                module = subject.module(config=subject.with_settings({**limit, "temperature": temperature}), trained=False)
                tried = True
                _compare(subject, module, temperature, f"temperature {temperature}, ")
    if not tried:
        raise NotClaimedError("no other temperature goes with these settings, or the weights are no softmax of products")


def _softmax_of_products(module: Attention, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether doubling q doubles the logarithms of the weights, up to a constant of the row: then q / T is temperature T."""
    logs = []
    for size in (1.0, 2.0):
        weights = module(size * q, k, v, None, True).weights
        if weights is None:
            return False
        logs.append(torch.where(weights > 0, weights, 1.0).log())
    some = (logs[0] != 0) & (logs[1] != 0)
    single, double = (
        (each - (each * some).sum(-1, keepdim=True) / some.sum(-1, keepdim=True).clamp(min=1)) * some for each in logs
    )
    return bool(((2 * single - double).abs() <= LEARNED).all())


def _compare(subject: Subject, module: Attention, temperature: float, prefix: str) -> None:
    for L, S in ((2, 2), (7, 7), (5, 9), (9, 5), (66, 66), (150, 150)):
        B = 3 if L < 10 else 1
        masks = subject.masks(B, 4, L, S)
        for name, mask in masks if L < 100 else masks[-1:]:
            q, k, v = leaves(*subject.qkv(B, L=L, S=S))
            if L == 2:  # scores far from 0
                q = (30 * q).detach().requires_grad_()
            wanted = reference(q, k, v, mask, temperature)
            for need_weights in (False, True):
                got = module(q, k, v, mask, need_weights)
                for what, mine, theirs in (("out", got.out, wanted.out), ("weights", got.weights, wanted.weights)):
                    if mine is None or theirs is None:
                        continue
                    near(mine, theirs, f"{prefix}{name}: {what} against standard")
                    inputs = {"q": q, "k": k, "v": v}
                    against = f"by {what} against standard"
                    same_gradients(mine, theirs, inputs, subject.draw(*mine.shape), prefix + name, against)


def keys_per_query(subject: Subject) -> None:
    """Exactly min(keep, visible) weights of a row are above 0; of equal scores the lowest indices are kept."""
    field = subject.spec.keys_per_query
    claim(field is not None, "keys_per_query")
    assert field is not None
    keep = getattr(subject.config, field)
    if not isinstance(keep, int):
        raise NotClaimedError(f"{field} is {keep!r}")
    module = subject.module()
    for L, S in ((7, 7), (5, 13), (3, 40), (2, 300)):
        masks = subject.masks(3, 4, L, S)
        for name, mask in masks if S < 100 else masks[-1:]:
            q, k, v = subject.qkv(L=L, S=S)
            _count(module, (q * subject.temperature, k, v), mask, keep, name)
            # One entry a key, a power of two, so that equal keys have equal scores to the last bit.
            levels = torch.tensor([1.0, 2.0, 1.0, 1.0, 2.0], dtype=q.dtype).repeat(60)[:S]
            tied = torch.zeros_like(k)
            tied[..., 0] = levels
            ahead = torch.zeros_like(q)
            ahead[..., 0] = subject.temperature
            weights = _count(module, (ahead, tied, v), mask, keep, f"{name}, tied scores")
            ranks = levels.masked_fill(~visibility(mask, 3, 4, L, S), -1.0).argsort(dim=-1, descending=True, stable=True)
            expected = torch.zeros_like(weights, dtype=torch.bool).scatter(-1, ranks[..., :keep], True)
            wrong = ((weights > 0) & ~expected).nonzero()
            if len(wrong):
                b, h, i = wrong[0][:3].tolist()
                chosen = (weights[b, h, i] > 0).nonzero().flatten().tolist()
                demand(
                    False,
                    f"{name}, tied scores: row {(b, h, i)} keeps keys {chosen}, not the highest, lowest index first",
                )


def _count(module: Attention, inputs: tuple[Tensor, ...], mask: Mask, keep: int, name: str) -> Tensor:
    weights = module(*inputs, mask, True).weights
    demand(weights is not None, f"{name}: weights are None")
    assert weights is not None
    B, H, L, S = weights.shape
    want = visibility(mask, B, H, L, S).sum(-1).clamp(max=keep)
    wrong = ((weights > 0).sum(-1) != want).nonzero()
    if len(wrong):
        b, h, i = wrong[0].tolist()
        found = int((weights[b, h, i] > 0).sum())
        demand(False, f"{name}, S {S}: {found} weights above 0 in row {(b, h, i)}, must be {int(want[b, h, i])}")
    return weights
