"""What a benchmark came to: ratios, growth, the share of the arithmetic limit; as JSON, as tables, and as a study of its own."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from experiments import figures, store, tracking
from experiments.bench import MODES, Bench, Entry
from experiments.config import digest
from experiments.contenders import SDPA, Contender
from experiments.identity import provenance
from experiments.measure import MIB
from experiments.report import markdown, number

NAME = "bench"
TIME = "time/forward_backward_ms"
GROWTH_FROM = 2048  # exponents are fitted from here, where there are two lengths or more


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Median and quartiles; None of nothing."""
    if not values:
        return None
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return {"median": middle, "q1": low, "q3": high}


def ratio(a: Entry, b: Entry, mode: str) -> dict[str, float] | None:
    """Time of a over that of b, round by round."""
    return spread([x / y for x, y in zip(a.times.get(mode, []), b.times.get(mode, []), strict=False)])


def memory_ratio(a: Entry, b: Entry, mode: str) -> float | None:
    """Peak of a over that of b."""
    x, y = a.peak.get(mode), b.peak.get(mode)
    return None if x is None or not y else x / y


def exponent(points: Sequence[tuple[float, float]]) -> float | None:
    """e of the power law y = c x^e that fits best by least squares of the logarithms; None of fewer than two points."""
    if len(points) < 2:
        return None
    xs, ys = [math.log(x) for x, _ in points], [math.log(y) for _, y in points]
    x_mean, y_mean = statistics.fmean(xs), statistics.fmean(ys)
    return sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True)) / sum((x - x_mean) ** 2 for x in xs)


def growth(bench: Bench, name: str, heads: int) -> dict[str, Any]:
    """Exponents of time and peak memory in the length, forward and backward, and the lengths that they were fitted to."""
    found = [e for e in bench.entries if (e.contender, e.heads) == (name, heads) and not e.skipped]
    long = [e for e in found if e.length >= GROWTH_FROM]
    used = long if len(long) > 1 else found
    times = [(e.length, m) for e in used if (m := e.median(MODES[0])) is not None]
    peaks = [(e.length, p) for e in used if (p := e.peak.get(MODES[0]))]
    lengths = [e.length for e in used]
    return {
        "time": exponent(times),
        "memory": exponent(peaks),
        "from": min(lengths, default=None),
        "to": max(lengths, default=None),
    }


def share_of_limit(bench: Bench, contender: Contender, entry: Entry) -> float | None:
    """Seconds that the operations it needs would take at the rate of a matrix product, over those that it took."""
    took = entry.median(MODES[0])
    if contender.needs is None or bench.rate is None or took is None:
        return None
    needed = contender.needs(entry.length, bench.settings.head_dim) * entry.heads * bench.settings.batch
    return needed / bench.rate / took


def as_json(bench: Bench) -> dict[str, Any]:
    """Everything that was measured and derived."""
    by_name = {contender.name: contender for contender in bench.contenders}
    entries, pairs = [], []
    for entry in bench.entries:
        contender, base = by_name[entry.contender], bench.entry(SDPA, entry.heads, entry.length)
        line: dict[str, Any] = {"contender": entry.contender, "heads": entry.heads, "length": entry.length}
        if entry.skipped:
            entries.append({**line, "skipped": entry.skipped})
            continue
        for mode in MODES:
            peak = entry.peak.get(mode)
            line[mode] = {"seconds": spread(entry.times[mode]), "peak_mib": None if peak is None else peak / MIB}
        entries.append({**line, "share_of_limit": share_of_limit(bench, contender, entry)})
        for name in (SDPA, *contender.against):
            other = base if name == SDPA else bench.entry(name, entry.heads, entry.length)
            if other is None or other.skipped or other is entry:
                continue
            compared = {mode: {"time": ratio(entry, other, mode), "memory": memory_ratio(entry, other, mode)} for mode in MODES}
            pairs.append(
                {"contender": entry.contender, "against": name, "heads": entry.heads, "length": entry.length, **compared}
            )
    grown = [
        {"contender": contender.name, "heads": heads, **growth(bench, contender.name, heads)}
        for heads in bench.settings.heads
        for contender in bench.contenders
    ]
    return {
        "settings": asdict(bench.settings),
        "threads": torch.get_num_threads(),
        "device": _device_name(bench.settings.device),
        "versions": {name: value for name, value in provenance().items() if name.startswith("version.")},
        "matrix_gflops": None if bench.rate is None else bench.rate / 1e9,
        "entries": entries,
        "pairs": pairs,
        "growth": grown,
    }


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


def tables(found: dict[str, Any]) -> list[str]:
    """The tables, as lines."""
    settings = found["settings"]
    lines = [
        f"causal, {settings['dtype']} on {found['device']}, {found['threads']} threads, batch {settings['batch']}, head dim "
        f"{settings['head_dim']}, {settings['rounds']} rounds, torch {found['versions']['version.torch']}; a matrix product of "
        f"1024 ran at {number(found['matrix_gflops'], 0)} GFLOP/s",
    ]
    for heads in settings["heads"]:
        for length in settings["lengths"]:
            lines += ["", f"length {length}, {heads} heads: forward and backward, then forward alone; ratios are to {SDPA}", ""]
            lines += markdown(_length_rows(found, heads, length))
        rows = [["against another", "length", "other", "time", "quartiles", "memory"]]
        for pair in found["pairs"]:
            if pair["heads"] == heads and pair["against"] != SDPA:
                both = pair[MODES[0]]
                rows.append(
                    [pair["contender"], str(pair["length"]), pair["against"], *_ratio(both["time"]), number(both["memory"], 3)]
                )
        if len(rows) > 1:
            lines += [
                "",
                f"against its plain path, the same pattern as a dense mask, and peers, {heads} heads, forward and backward",
                "",
            ]
            lines += markdown(rows)
        rows = [["growth", "time", "peak memory", "lengths"]]
        for grown in found["growth"]:
            if grown["heads"] == heads and grown["from"] is not None:
                powers = (("unknown" if grown[key] is None else f"L^{grown[key]:.2f}") for key in ("time", "memory"))
                rows.append([grown["contender"], *powers, f"{grown['from']} to {grown['to']}"])
        lines += ["", *markdown(rows)]
    return lines


def _length_rows(found: dict[str, Any], heads: int, length: int) -> list[list[str]]:
    rows = [["mechanism", "ms", "ratio", "quartiles", "peak MiB", "ratio", "of the limit", "forward ms", "ratio", "peak MiB"]]
    pairs = {p["contender"]: p for p in found["pairs"] if (p["heads"], p["length"], p["against"]) == (heads, length, SDPA)}
    for entry in found["entries"]:
        if (entry["heads"], entry["length"]) != (heads, length):
            continue
        if "skipped" in entry:
            rows.append([entry["contender"], f"left out: {entry['skipped']}", *[""] * 8])
            continue
        pair = pairs.get(entry["contender"])
        both, forward = (entry[mode] for mode in MODES)
        share = entry["share_of_limit"]
        rows.append(
            [
                entry["contender"],
                number(both["seconds"]["median"] * 1e3, 2),
                *(_ratio(pair[MODES[0]]["time"]) if pair else ("1", "")),
                number(both["peak_mib"], 1),
                number(pair[MODES[0]]["memory"], 3) if pair else "1",
                "unknown" if share is None else f"{100 * share:.0f} %",
                number(forward["seconds"]["median"] * 1e3, 2),
                _ratio(pair[MODES[1]]["time"])[0] if pair else "1",
                number(forward["peak_mib"], 1),
            ]
        )
    return rows


def _ratio(found: dict[str, float] | None) -> tuple[str, str]:
    return ("unknown", "") if found is None else (number(found["median"], 3), f"{found['q1']:.3f} to {found['q3']:.3f}")


def record(bench: Bench, found: dict[str, Any], home: Path, target: str, say: Callable[[str], None]) -> Path:
    """Keep it as a study of its own, with the tables and a figure, and tell MLflow; an earlier one is set aside."""
    folder = store.study_folder(home, NAME)
    store.set_aside(folder)
    kept = store.Store(folder)
    try:
        text = "\n".join(tables(found)) + "\n"
        (folder / "report.md").write_text(text)
        (folder / "bench.json").write_text(json.dumps(found, indent=1))
        figures.by_length(_series(bench), folder / "bench.png")
        settings = {**asdict(bench.settings), "threads": torch.get_num_threads()}
        for key, value in {
            "started": time.time_ns() // 1_000_000,
            "name": NAME,
            "sweep": "".join(f"{name}: {json.dumps(value)}\n" for name, value in settings.items()),
            "tags": provenance(),
            "identity": {"base": {"bench": settings}, "objectives": [{"metric": TIME, "goal": "minimize"}]},
            "state": "running",
        }.items():
            kept.set_meta(key, value)
        for contender in bench.contenders:
            for heads in bench.settings.heads:
                _record_one(kept, bench, contender, heads)
        kept.set_meta("summary", text)
        kept.set_meta("state", "finished")
        kept.set_meta("ended", time.time_ns() // 1_000_000)
        mirror = tracking.Mirror(kept.path, home, target, NAME, say)
        if not mirror.close(patience=10.0):
            say(f"MLflow at {target} has not taken all records")
    finally:
        kept.close()
    return folder


def _record_one(kept: store.Store, bench: Bench, contender: Contender, heads: int) -> None:
    assignment = {"attention.variant": contender.name, "heads": heads}
    config = {"attention": {"contender": contender.name, **contender.config}, "heads": heads}
    trial = kept.add_trial("search", assignment, config, digest([config, bench.settings.device]), [0])
    (run,) = kept.runs(trial.number)
    kept.start_run(run.id)
    now, last, why = time.time_ns() // 1_000_000, None, ""
    for length in bench.settings.lengths:
        entry = bench.entry(contender.name, heads, length)
        if entry is None or entry.skipped:
            why = entry.skipped if entry is not None else why
            continue
        values: dict[str, float | None] = {
            TIME: entry.median(MODES[0]),
            "time/forward_ms": entry.median(MODES[1]),
            "memory/forward_backward_mb": entry.peak.get(MODES[0]),
            "memory/forward_mb": entry.peak.get(MODES[1]),
        }
        scaled = {name: value * 1e3 if "time" in name else value / MIB for name, value in values.items() if value is not None}
        base = bench.entry(SDPA, heads, length)
        against = None if base is None else ratio(entry, base, MODES[0])
        if against is not None:
            scaled["ratio/time_to_sdpa"] = against["median"]
        share = share_of_limit(bench, contender, entry)
        if share is not None:
            scaled["time/share_of_limit"] = share
        kept.add_metrics(run.id, length, now, scaled)
        last = scaled[TIME]
    grown = growth(bench, contender.name, heads)
    powers = {f"growth/{key}": grown[key] for key in ("time", "memory") if grown[key] is not None}
    kept.add_figures(run.id, powers, {"left_out": why} if why else {})
    if powers:
        kept.add_metrics(run.id, max(bench.settings.lengths), now, powers)
    kept.end_run(run.id, "finished" if last is not None else "failed", None if last is not None else "error", why or None)
    kept.end_trial(trial.number, "complete" if last is not None else "failed", last)


def _series(bench: Bench) -> dict[str, dict[str, list[tuple[float, float]]]]:
    found: dict[str, dict[str, list[tuple[float, float]]]] = {
        "forward and backward, ms": {},
        "peak memory beside the inputs, MiB": {},
    }
    for entry in bench.entries:
        name = entry.contender if len(bench.settings.heads) == 1 else f"{entry.contender}, {entry.heads} heads"
        times, peaks = (lines.setdefault(name, []) for lines in found.values())
        median, peak = entry.median(MODES[0]), entry.peak.get(MODES[0])
        if median is not None:
            times.append((entry.length, median * 1e3))
        if peak is not None:
            peaks.append((entry.length, peak / MIB))
    return found
