"""Rules on measurements: a claim that a measurement contradicts is a failure."""

from __future__ import annotations

from torch import Tensor

from core.attention import Attention
from core.contract import measure
from core.contract.measure import LENGTH, SHORT, Measured
from core.contract.subject import NotClaimedError, Subject, ViolationError
from core.registry import make_config

SLACK = 0.3  # of an exponent: terms of lower order are still felt at these lengths


def window_is_exact(subject: Subject) -> None:
    """A setting named `window` is W keys, the query's own included: 0 <= i-j < W, two-sided -((W-1)//2) <= j-i <= W//2."""
    window = getattr(subject.config, "window", None)
    if not isinstance(window, int) or isinstance(window, bool):
        raise NotClaimedError("it has no setting named `window`")
    for width in dict.fromkeys((window, 5, 6)):
        try:
            module = subject.module(config=make_config(subject.variant, {"window": width}))
        except ValueError:
            continue
        for causal in (False, True) if subject.spec.causal else (False,):
            for row in (LENGTH - 1, 201, 257) if causal else (LENGTH // 2, 201):
                _check_window(subject, module, width, causal, row)


def _check_window(subject: Subject, module: Attention, window: int, causal: bool, row: int) -> None:
    # At equal scores every key of a window weighs, and at random ones a sum that happens to be even does not hide one.
    found = measure.reach(module, subject, causal, row, scales=(subject.temperature, 0.0))
    touched = found["v"] | found["k"]
    back, front = (window - 1, 0) if causal else ((window - 1) // 2, window // 2)
    allowed = {j - row for j in range(max(row - back, 0), min(row + front + 1, LENGTH))}
    heads = [_wrong_window(touched[:, h], row, allowed) for h in range(touched.shape[1])]
    if all(heads):  # some heads may have no window, on purpose
        name = f"{'causal' if causal else 'two-sided'}, window {window}"
        raise ViolationError(f"{name}: row {row} attends {heads[0]}; right are {len(allowed)}, {_span(allowed)}")


def _wrong_window(touched: Tensor, row: int, allowed: set[int]) -> str:
    """What is wrong with the keys (B, S) that a row of one head depends on; "" where nothing is."""
    ahead = {j - row for j in touched.any(0).nonzero().flatten().tolist()}
    run = _run_around_own_key(ahead)

    def every(distances: set[int]) -> bool:
        return bool(touched[:, [row + distance for distance in sorted(distances)]].all())

    # Keys apart from the run around the query may be global tokens, or those of a pattern with holes; where a row selects
    # among the keys of its window, what few rows select says nothing of its size.
    narrow = run and every(run) and run != allowed and ahead & allowed == run and len(ahead) < len(allowed)
    others = allowed - {0}
    if not run and others and others <= ahead and every(others):
        return "all but itself"
    return f"{len(run)} keys, {_span(run)}" if run - allowed or narrow else ""


def _run_around_own_key(ahead: set[int]) -> set[int]:
    """The unbroken run of distances that holds 0; empty where the own key is not attended."""
    run: set[int] = set()
    for direction in (-1, 1):
        distance = 0
        while distance in ahead:
            run.add(distance)
            distance += direction
    return run


def _span(distances: set[int]) -> str:
    return f"j-i from {min(distances):+d} to {max(distances):+d}" if distances else "none"


def costs_as_claimed(subject: Subject) -> None:
    """At the default settings, elements written and peak bytes grow with the claimed exponents of the length."""
    if not subject.first:
        raise NotClaimedError("measured at the first settings only")
    subject.measured = _reach_and_density(subject) + _costs(subject)
    faults = [f"{one.what}: {one.fault}" for one in subject.measured if one.fault]
    if faults and subject.config == make_config(subject.variant, {}):
        raise ViolationError("; ".join(faults))


def _reach_and_density(subject: Subject) -> list[Measured]:
    rows, module = [], subject.module()
    window, keep = getattr(subject.config, "window", None), subject.spec.keys_per_query
    for causal in (False, True) if subject.spec.causal else (False,):
        name = "causal" if causal else "two-sided"
        row = LENGTH - 1 if causal else LENGTH // 2
        found = measure.reach(module, subject, causal, row, scales=(subject.temperature,))
        ahead = [j - row for j in found["v"].any(1).any(0).nonzero().flatten().tolist()]
        span = f"{len(ahead)} keys, {_span(set(ahead))}" if ahead else "nothing"
        rows.append(Measured(f"window ({name}, L {LENGTH})", span, "" if window is None else f"window {window}"))
        counts = {which: found[which].double().sum(-1).mean().item() for which in "kv"}
        rows.append(
            Measured(
                f"receptive field ({name})", f"{counts['k']:.4g} keys through k, {counts['v']:.4g} through v, for a head and row"
            )
        )
        share = measure.density(module, subject, causal)
        claimed = "" if keep is None else f"min({getattr(subject.config, keep)}, visible) keys a row"
        rows.append(
            Measured(f"density ({name})", "unknown" if share is None else f"{100 * share:.4g} % of the visible keys", claimed)
        )
    return rows


def _costs(subject: Subject) -> list[Measured]:
    rows: list[Measured] = []
    try:
        grown = measure.growth(subject)
    except ValueError as error:  # longer than this mechanism serves
        return [Measured("costs", f"unknown: {error}")]
    for what, key, claimed in (
        ("elements written", "written", subject.spec.time),
        ("peak bytes", "peak", subject.spec.memory),
    ):
        (short, long), lengths = grown[key], f"L {SHORT} to {4 * SHORT}"
        found = measure.exponent(short, long)
        if key == "peak" and claimed is not None and found > claimed + SLACK:
            # A buffer of bounded size may still be filling up; what goes on growing is what the claim is about.
            (short, long), lengths = measure.growth(subject, 4 * SHORT)[key], f"L {4 * SHORT} to {16 * SHORT}"
            found = measure.exponent(short, long)
        fault = ""
        # A fixed part, such as a buffer for a chunk, keeps the peak from growing as claimed: that is no fault.
        if claimed is not None and (found > claimed + SLACK or (key == "written" and found < claimed - 2 * SLACK)):
            fault = f"grow as L^{found:.2f} from {short:,.0f} to {long:,.0f} ({lengths}), claimed is L^{claimed:g}"
        said = "" if claimed is None else f"L^{claimed:g}"
        rows.append(Measured(f"{what} ({lengths})", f"L^{found:.2f}, {short:,.0f} to {long:,.0f}", said, fault))
    rows.append(Measured(f"forward and backward (L {4 * SHORT})", f"{grown['seconds'][1]:.2g} s"))
    if subject.spec.decode and subject.spec.causal:
        short_state, long_state = (measure.state_bytes(subject, tokens) for tokens in (64, 256))
        if short_state is None or long_state is None:
            words = "unknown"
        else:
            words = f"{short_state:,} bytes after 64 tokens, {long_state:,} after 256"
        rows.append(Measured("decoding state (4 heads of 8)", words))
    return rows
