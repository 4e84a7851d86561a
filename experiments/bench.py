"""Time and peak memory of one attention call by length: paired, interleaved, in one process, as ratios to torch's fused kernel.

A round calls everything once, and each round begins with another; a ratio is taken within a round, so that a drift of the machine
meets both sides. Given are medians and quartiles over rounds. Peak memory is what is allocated beside the inputs.
"""

from __future__ import annotations

import gc
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from experiments.contenders import Call, Contender
from experiments.errors import InputError
from experiments.measure import peak_memory, seconds

MODES = ("forward+backward", "forward")
LONG = 0.3  # seconds; what takes longer is called in FEW rounds only
FEW = 3
SAMPLE = 0.01  # seconds that one sample takes at least, by repeated calls


@dataclass(frozen=True)
class Settings:
    """What is measured, and how.

    Args:
        lengths, heads: each length with each number of heads.
        batch, head_dim: of the inputs (batch, heads, length, head_dim).
        rounds: samples of each.
        limit: seconds that all samples of one contender at one length may be expected to take, judged by the length before; what
            would take longer is left out, and said to be.
    """

    lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192)
    heads: tuple[int, ...] = (4,)
    batch: int = 1
    head_dim: int = 64
    rounds: int = 9
    limit: float = 20.0
    device: str = "cpu"
    dtype: str = "float32"


def settings(
    lengths: tuple[int, ...],
    heads: tuple[int, ...],
    batch: int,
    head_dim: int,
    rounds: int,
    limit: float,
    device: str,
    dtype: str,
    threads: int | None,
) -> Settings:
    """Settings that this machine can serve; sets torch's threads.

    Raises:
        InputError: a device that is not there, a dtype or a number of threads that is none.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise InputError(f"--device: must be cpu, cuda or auto, got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: torch finds no CUDA device here")
    if dtype not in ("float32", "bfloat16", "float16"):
        raise InputError(f"--dtype: must be float32, bfloat16 or float16, got {dtype!r}")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if threads is not None and threads > cores:
        raise InputError(f"--threads: this machine has {cores}, got {threads}")
    torch.set_num_threads(threads or cores)
    device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    return Settings(lengths, heads, batch, head_dim, rounds, limit, device, dtype)


@dataclass
class Entry:
    """One contender at one length: seconds by mode and round, peak bytes by mode (None: unknown)."""

    contender: str
    heads: int
    length: int
    times: dict[str, list[float]] = field(default_factory=dict)
    peak: dict[str, int | None] = field(default_factory=dict)
    skipped: str = ""
    spent: float = 0.0  # seconds, for all that was called

    def median(self, mode: str) -> float | None:
        """Median seconds; None where it was not measured."""
        return statistics.median(self.times[mode]) if self.times.get(mode) else None


@dataclass
class Bench:
    """All that was measured.

    Args:
        rate: floating-point operations a second of a matrix product, median over the rounds.
    """

    settings: Settings
    contenders: list[Contender]
    entries: list[Entry] = field(default_factory=list)
    rate: float | None = None

    def entry(self, name: str, heads: int, length: int) -> Entry | None:
        """What was measured of this contender there."""
        return next((e for e in self.entries if (e.contender, e.heads, e.length) == (name, heads, length)), None)


class _Runner:
    """Calls one contender on given inputs."""

    def __init__(self, contender: Contender, settings: Settings, heads: int, inputs: Sequence[Tensor], grad: Tensor) -> None:
        self.inputs, self.grad, self.device = inputs, grad, inputs[0].device
        made = contender.make(heads, settings.head_dim, inputs[0].shape[2], self.device, inputs[0].dtype)
        self.call: Call = made[0]
        self.parameters: list[nn.Parameter] = made[1]

    def forget(self) -> None:
        for one in (*self.inputs, *self.parameters):
            one.grad = None

    def run(self, mode: str) -> None:
        if mode == "forward":
            with torch.no_grad():
                self.call(*self.inputs)
        else:
            self.call(*self.inputs).backward(self.grad)

    def sample(self, mode: str, calls: int) -> float:
        """Seconds of one call, from so many."""
        total = 0.0
        for _ in range(calls):
            self.forget()
            total += seconds(self.device, lambda: self.run(mode))
        return total / calls

    def peak(self, mode: str) -> int | None:
        """Bytes allocated beside the inputs."""
        self.forget()
        gc.collect()
        before = torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0
        with peak_memory(self.device, 0) as found:
            self.run(mode)
        self.forget()
        return None if found.nbytes is None else found.nbytes - before


def measure(contenders: list[Contender], settings: Settings, say: Callable[[str], None]) -> Bench:
    """Measure all of them at all lengths; `say` is told where it stands."""
    bench, rates = Bench(settings, contenders), []
    for heads in settings.heads:
        for length in settings.lengths:
            started = time.monotonic()
            rates += _measure_length(bench, heads, length)
            skipped = [e.contender for e in bench.entries if (e.heads, e.length) == (heads, length) and e.skipped]
            left_out = f" (left out: {', '.join(skipped)})" if skipped else ""
            say(f"{heads} heads, length {length}: {time.monotonic() - started:.0f} s{left_out}")
    bench.rate = statistics.median(rates)
    return bench


def _measure_length(bench: Bench, heads: int, length: int) -> list[float]:
    """Adds an entry for each contender; operations a second of a matrix product, by round."""
    settings, device = bench.settings, torch.device(bench.settings.device)
    dtype = getattr(torch, settings.dtype)
    generator = torch.Generator(device).manual_seed(length)
    shape = settings.batch, heads, length, settings.head_dim
    q, k, v, grad = (torch.randn(shape, device=device, generator=generator).to(dtype) for _ in range(4))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    runners: dict[str, tuple[_Runner, Entry, dict[str, int]]] = {}
    for contender in bench.contenders:
        entry = Entry(contender.name, heads, length, {mode: [] for mode in MODES})
        entry.skipped = _too_much(bench, contender.name, heads, length)
        bench.entries.append(entry)
        if entry.skipped:
            continue
        started = time.monotonic()
        try:
            runner = _Runner(contender, settings, heads, inputs, grad)
            first = {mode: runner.sample(mode, 1) for mode in MODES}
            for mode in MODES:
                entry.peak[mode] = runner.peak(mode)
        except (ValueError, RuntimeError, AssertionError, MemoryError) as error:  # a length that it does not serve, or no room
            entry.skipped = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            continue
        calls = {mode: min(max(math.ceil(SAMPLE / first[mode]), 1), 20) for mode in MODES}
        if first[MODES[0]] < LONG:
            for mode in MODES:
                runner.sample(mode, calls[mode])  # once more before it counts
        entry.spent = time.monotonic() - started
        runners[contender.name] = runner, entry, calls
    matrix = torch.randn(1024, 1024, device=device).to(dtype)
    rates, order = [], list(runners.values())
    for round_ in range(settings.rounds):
        rates.append(2 * 1024**3 / seconds(device, lambda: matrix @ matrix))
        first_now = round_ % max(len(order), 1)
        for runner, entry, calls in order[first_now:] + order[:first_now]:
            if round_ >= FEW and entry.times[MODES[0]][0] > LONG:
                continue
            started = time.monotonic()
            for mode in MODES:
                entry.times[mode].append(runner.sample(mode, calls[mode]))
            entry.spent += time.monotonic() - started
    for runner, _, _ in order:
        runner.forget()
    return rates


def _too_much(bench: Bench, name: str, heads: int, length: int) -> str:
    """Why this would take too long or too much memory, judged by the length before; "" if it would not."""
    before = [e for e in bench.entries if e.contender == name and e.heads == heads and e.length < length]
    if not before:
        return ""
    last = max(before, key=lambda e: e.length)
    if last.skipped:
        return last.skipped
    more = (length / last.length) ** 2
    if last.spent * more > bench.settings.limit and last.spent > bench.settings.limit / 20:
        return f"its samples would take about {last.spent * more:.0f} s"
    room = _room(torch.device(bench.settings.device))
    needed = last.peak.get(MODES[0])
    if needed is not None and room is not None and needed * more > room:
        return f"it would need about {needed * more / 2**30:.1f} GiB"
    return ""


def _room(device: torch.device) -> float | None:
    """Bytes that one call may take: 6 of 10 that the machine has free."""
    if device.type == "cuda":
        return 0.6 * torch.cuda.mem_get_info(device)[0]
    try:
        return 0.6 * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None
