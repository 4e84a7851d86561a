"""The driver's loop: ask for a configuration, submit its runs, record what they say, tell the search, go on after anything."""

from __future__ import annotations

import math
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from experiments import BORN, report, resources, statistics, store
from experiments.config import Event, Job, Run, describe
from experiments.errors import InputError, StudyChangedError
from experiments.executors import Executor
from experiments.identity import changed, provenance
from experiments.proof import prove
from experiments.resolve import Resolver
from experiments.schema import Constraint, duration
from experiments.search import Search
from experiments.store import RunRow, Store
from experiments.sweep import Assignment, Sweep
from experiments.tracking import Mirror

MAX_TIMED = 100  # configurations whose speed is measured, the best first
_GRACE = 20.0  # seconds for a checkpoint when runs are asked to stop


class Watcher(Protocol):
    """Who is told what happens, to show it."""

    def say(self, line: str) -> None:
        """A line for the person in front of the terminal."""

    def progress(self, done: int, total: int, running: int, best: str, seconds_left: float | None) -> None:
        """Where the study stands."""


@dataclass(frozen=True)
class Outcome:
    """What an invocation came to. interrupted: the signal that ended it, if one did."""

    folder: Path
    summary: str
    failed_runs: int
    complete: int
    interrupted: int | None
    mirrored: bool
    experiment_id: str | None


class Study:
    """One invocation of `run`.

    Args:
        sweep: checked; `resolver` has checked its configurations too.
        home: the folder of all studies.
        target: MLflow's address.
        executor: where runs go.
        foresee: the constraint that a run would break on a device, in words; None: none, as far as is known.
    """

    def __init__(
        self,
        sweep: Sweep,
        resolver: Resolver,
        home: Path,
        target: str,
        executor: Executor,
        watcher: Watcher,
        foresee: Callable[[Run, str, Sequence[Constraint]], str | None],
    ) -> None:
        self.sweep, self.resolver, self.executor, self.watcher, self.foresee = sweep, resolver, executor, watcher, foresee
        self.budget = sweep.file.budget
        self.objective = sweep.file.objectives[0]
        self.device, self.gpus = resources.devices(sweep)
        self.threads = resources.threads(sweep)
        self.parallel = min(self.budget.parallel, len(self.gpus)) if self.gpus else self.budget.parallel
        self.folder = store.study_folder(home, sweep.file.name)
        self.store = Store(self.folder)
        try:
            known = self.store.meta("identity")
            self._begin(known)
            watcher.say(f"{'new study' if known is None else 'going on'}: {self.folder}")
            self._say_what_is_cut()
            self.mirror = Mirror(self.store.path, home, target, sweep.file.experiment or sweep.file.name, watcher.say)
        except BaseException:
            self.store.close()
            raise
        self.search = Search(sweep)
        self.hashes: set[str] = set()
        self.queue: deque[RunRow] = deque()
        self.running: dict[str, RunRow] = {}
        self.started: dict[str, float] = {}
        self.submitted: dict[str, int] = {}  # milliseconds since 1970
        self.start_ups: list[float] = []  # seconds from submitting a run to its first step
        self.first_step: float | None = None  # seconds from the start of this process
        self.durations: list[float] = []
        self.free_gpus = list(self.gpus)
        self.held_gpus: dict[str, tuple[str, ...]] = {}
        self.baselines = {resolver.run(line).hash(): line for line in sweep.file.baseline}
        self.signal: int | None = None
        self.unproven: dict[str, str] = {}  # variants that fail the contract suite, and how
        self.refused = ""  # why the search's last unusable proposal was one
        self.cut_short = False  # by a signal, or by the time of this invocation, with work left
        self.shown = 0.0
        self.exhausted = False
        self.deadline = time.monotonic() + duration(self.budget.timeout) if self.budget.timeout else None

    def run(self) -> Outcome:
        """Run until the budget is met, the time is up, or a signal comes."""
        try:
            with self._signals():
                self._restore()
                self.unproven = prove(self.store, self.resolver.code, self.watcher.say)
                self._loop()
                if not self.cut_short:
                    self._measure_speed()
                return self._finish()
        finally:
            self.executor.close()
            self.store.close()

    # --- beginning -----------------------------------------------------------------------------------------------------------

    def _begin(self, known: dict[str, Any] | None) -> None:
        identity = self.sweep.identity()
        if known is not None:
            changes = changed(known, identity)
            removed = set(self.store.meta("seeds")) - set(self.sweep.file.seeds)
            if removed:
                changes.append(f"seeds: {sorted(removed)} were there before and may not be taken away")
            for task, data in (self.store.meta("data") or {}).items():
                if self.resolver.data.get(task, data) != data:
                    changes.append(f"the data of its task: digest was {data}, is now {self.resolver.data[task]}")
            used = self._names_that_finished()
            for name, code in (self.store.meta("code") or {}).items():
                if name in used and self.resolver.code.get(name, code) != code:
                    changes.append(f"the code of {name}: digest was {code}, is now {self.resolver.code[name]}")
            if changes:
                raise StudyChangedError(
                    f"{self.sweep.document.source}: study {self.sweep.file.name!r} in {self.folder} was begun otherwise: "
                    f"{'; '.join(changes)}. Run with --new to begin a new study and keep the old, or give it another name"
                )
        else:
            self.store.set_meta("started", time.time_ns() // 1_000_000)
        for key, value in {
            "name": self.sweep.file.name,
            "sweep": self.sweep.text(),
            "seeds": self.sweep.file.seeds,
            "code": {**(self.store.meta("code") or {}), **self.resolver.code},
            "data": {**(self.store.meta("data") or {}), **self.resolver.data},
            "tags": provenance(),
            "identity": identity,
            "state": "running",
        }.items():
            self.store.set_meta(key, value)

    def _names_that_finished(self) -> set[str]:
        """Variants and tasks that a finished run has used: their code may not change under the study."""
        finished = {run.trial for run in self.store.runs() if run.state == "finished"}
        configs = [trial.config for trial in self.store.trials() if trial.number in finished]
        return {f"variant {config['attention']['variant']}" for config in configs} | {
            f"task {config['task']['name']}" for config in configs
        }

    def _say_what_is_cut(self) -> None:
        """What was asked for and will not be done."""
        if self.sweep.file.method == "grid" and self.sweep.size > self.sweep.trials:
            self.watcher.say(f"the grid has {self.sweep.size} configurations; the budget runs the first {self.sweep.trials}")
        if self.parallel < self.budget.parallel:
            self.watcher.say(f"{self.parallel} runs at a time, one on each GPU, instead of {self.budget.parallel}")

    def _restore(self) -> None:
        for run in self.store.close_orphans():
            self.watcher.say(f"trial {run.trial} seed {run.seed}: was interrupted; goes on")
        for trial in self.store.trials():
            self.hashes.add(trial.config_hash)
            missing = [seed for seed in self.sweep.file.seeds if seed not in {r.seed for r in self.store.runs(trial.number)}]
            if missing and trial.state not in ("failed", "skipped"):
                self.store.add_seeds(trial.number, missing)
                trial = self.store.trial(trial.number)
            if trial.kind == "search":
                self.search.restore(
                    trial.number,
                    trial.assignment,
                    trial.value,
                    trial.state == "running",
                    self._figures(trial.number),
                    trial.state == "skipped",
                )
            if trial.state == "running":
                rows = self.store.runs(trial.number)
                if any(row.attempts for row in rows) or not self._skip(trial.number, Run(**trial.config)):
                    self.queue += [row for row in rows if row.state in ("waiting", "stopped", "lost")]
                self._close_trial(trial.number)
        self.target = self.sweep.trials

    # --- the loop ------------------------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        while self.signal is None and not self._late():
            while len(self.running) < self.parallel and (self.queue or self._ask()):
                if self.queue:  # a new trial may have been skipped
                    self._submit(self.queue.popleft())
            if not self.running:
                return
            for event in self.executor.poll(0.2):
                self._handle(event)
            self._progress()
        self.cut_short = self.signal is not None or bool(self.running) or bool(self.queue) or self._wanted()
        self._stop_all()

    def _wanted(self) -> bool:
        """Whether the budget asks for a further trial."""
        return not self.exhausted and sum(trial.state != "failed" for trial in self.store.trials()) < self.target

    def _ask(self) -> bool:
        """Begin a trial; False where the budget is met or the space has no more."""
        if not self._wanted():
            return False
        failed = sum(trial.state == "failed" for trial in self.store.trials())
        if failed >= max(self.target, 10) and self.sweep.file.method != "grid":
            self.watcher.say(f"{failed} trials failed; no more are tried")
            self.exhausted = True
            return False
        baseline = next((line for name, line in self.baselines.items() if name not in self.hashes), None)
        if baseline is not None:
            kind, assignment = "baseline", baseline
        else:
            proposed = self.search.ask(self._is_new)
            if proposed is None:
                self.exhausted = True
                if self.sweep.file.method != "grid":
                    why = f" (the last one refused: {self.refused})" if self.refused else ""
                    self.watcher.say(f"the space holds no further configuration{why}")
                return False
            kind, assignment = "search", proposed
        run = self.resolver.run(assignment)
        trial = self.store.add_trial(kind, assignment, run.model_dump(), run.hash(), self.sweep.file.seeds)
        if kind == "search":
            self.search.begin(trial.number)
        self.hashes.add(trial.config_hash)
        if not self._skip(trial.number, run):
            self.queue += self.store.runs(trial.number)
        return True

    def _skip(self, number: int, run: Run) -> bool:
        """End a trial before it begins, if it is foreseen to break a constraint."""
        message = self.foresee(run, self.device, self.sweep.file.constraints)
        if message is None:
            return False
        for row in self.store.runs(number):
            self.store.end_run(row.id, "skipped", "memory", message)
        self.store.end_trial(number, "skipped", None)
        self.search.tell(number, None, skipped=True)
        self.watcher.say(f"trial {number} ({describe(self.store.trial(number).assignment)}): skipped: {message}")
        self.mirror.wake()
        return True

    def _is_new(self, assignment: Assignment) -> bool:
        try:
            return self.resolver.run(assignment).hash() not in self.hashes
        except InputError as error:  # settings that exclude each other, in the inside of a space whose corners are fine
            self.refused = str(error)
            return False

    def _submit(self, run: RunRow) -> None:
        gpus = None
        if self.gpus:
            gpus = (self.free_gpus.pop(0),)
            self.held_gpus[run.key] = gpus
        self.store.start_run(run.id)
        name = report.log_name(run)
        job = Job(
            key=run.key,
            kind="train",
            runs=(Run(**self.store.trial(run.trial).config),),
            seed=run.seed,
            plugins=self.sweep.plugins,
            threads=self.threads,
            device=self.device,
            gpus=gpus,
            checkpoint=str((self.folder / "checkpoints" / name).with_suffix(".pt")),
            log=str(self.folder / "logs" / name),
        )
        self.running[run.key] = run
        self.started[run.key] = time.monotonic()
        self.submitted[run.key] = time.time_ns() // 1_000_000
        self.executor.submit(job)
        self.mirror.wake()

    def _handle(self, event: Event) -> None:
        run = self.running.get(event["key"])
        if run is None:
            return
        if event["type"] == "begin":
            self.start_ups.append((event["time"] - self.submitted[run.key]) / 1e3)
            if self.first_step is None:
                self.first_step = event["time"] / 1e3 - BORN
        elif event["type"] == "metrics":
            self.store.add_metrics(run.id, event["step"], event["time"], event["values"])
        elif event["type"] == "info":
            self.store.add_figures(run.id, {}, event["tags"])
        else:
            self._end(run, event)
        self.mirror.wake()

    def _end(self, run: RunRow, event: Event) -> None:
        del self.running[run.key]
        self.free_gpus += self.held_gpus.pop(run.key, ())
        seconds = time.monotonic() - self.started.pop(run.key)
        message = event.get("message")
        if event["type"] == "lost":
            attempts_lost = _row(self.store, run).lost + 1
            if self._stopping():
                self.store.end_run(run.id, "stopped", "stopped", message)
            elif attempts_lost <= self.budget.retries:
                self.store.end_run(run.id, "lost", "lost", message)
                self.watcher.say(f"trial {run.trial} seed {run.seed}: {message}; trying again")
                self.queue.appendleft(_row(self.store, run))
                return
            else:
                self.store.end_run(run.id, "failed", "lost", message)
        elif event["state"] == "finished":
            self._end_finished(run, event["values"], seconds)
        elif event["state"] == "stopped":
            cause = "timeout" if event["cause"] == "stopped" and self.signal is None else event["cause"]
            self.store.end_run(run.id, "stopped", cause, message)
            if cause == "disk":
                self.watcher.say(f"trial {run.trial} seed {run.seed}: the disk is full; the same command goes on with it")
        else:
            self.store.end_run(run.id, "failed", event["cause"], message)
        row = _row(self.store, run)
        if row.state == "failed":
            what = describe(self.store.trial(run.trial).assignment)
            self.watcher.say(f"trial {run.trial} seed {run.seed} ({what}): failed: {row.cause}: {row.message}")
            self.watcher.say(f"  log: {self.folder / 'logs' / report.log_name(run)}")
        self._close_trial(run.trial)

    def _end_finished(self, run: RunRow, figures: dict[str, float], seconds: float) -> None:
        metric = self.objective.metric
        if metric not in figures:
            known = ", ".join(sorted(figures))
            self.store.end_run(run.id, "failed", "error", f"objective {metric!r} was not recorded (there are: {known})", figures)
            return
        if not math.isfinite(figures[metric]):
            self.store.end_run(run.id, "failed", "diverged", f"objective {metric} is {figures[metric]}", figures)
            return
        self.durations.append(seconds)
        self.store.end_run(run.id, "finished", None, None, figures)
        what = describe(self.store.trial(run.trial).assignment)
        self.watcher.say(f"trial {run.trial} seed {run.seed} ({what}): {metric} {figures[metric]:.4f}, {seconds:.1f} s")

    def _close_trial(self, number: int) -> None:
        """Where all runs of a trial have ended, its value is their mean; a trial with a failed run has none."""
        runs = self.store.runs(number)
        if not all(run.state in ("finished", "failed") for run in runs) or self.store.trial(number).state != "running":
            return
        failed = any(run.state == "failed" for run in runs)
        value = None if failed else statistics.mean([run.figures[self.objective.metric] for run in runs])
        self.store.end_trial(number, "failed" if failed else "complete", value)
        self.search.tell(number, value, self._figures(number))
        self.mirror.wake()

    def _figures(self, number: int) -> dict[str, float]:
        """Means over the finished runs of a trial."""
        found = [run.figures for run in self.store.runs(number) if run.state == "finished"]
        names = set.intersection(*(set(figures) for figures in found)) if found else set()
        return {name: statistics.mean([figures[name] for figures in found]) for name in names}

    # --- stopping ------------------------------------------------------------------------------------------------------------

    def _late(self) -> bool:
        return self.deadline is not None and time.monotonic() > self.deadline

    def _stopping(self) -> bool:
        return self.signal is not None or self._late()

    def _stop_all(self) -> None:
        """Every run writes its checkpoint and ends; one that does not is killed."""
        if self.running:
            why = "the time of this invocation is up" if self.signal is None else "stopping (once more to stop at once)"
            self.watcher.say(f"{why}: {len(self.running)} runs write their checkpoints")
        self._drain(list(self.running), lambda: bool(self.running), self._handle)

    def _drain(self, keys: list[str], going: Callable[[], bool], handle: Callable[[Event], None]) -> None:
        """Ask jobs to stop, and take their last events; kill what has not ended in time."""
        for key in keys:
            self.executor.stop(key)
        limit = time.monotonic() + _GRACE
        while going():
            for event in self.executor.poll(0.1):
                handle(event)
            if time.monotonic() > limit:
                for key in keys:
                    self.executor.kill(key)
                limit = float("inf")

    @contextmanager
    def _signals(self) -> Iterator[None]:
        def on_signal(number: int, frame: FrameType | None) -> None:
            if self.signal is not None:  # the second time: at once. What was recorded is safe.
                os.write(2, b"stopped at once; the same command goes on\n")
                os._exit(128 + number)
            self.signal = number  # the loop sees it; nothing is printed here, where a line may be half written

        before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    # --- the end -------------------------------------------------------------------------------------------------------------

    def _measure_speed(self) -> None:
        """Speed of every complete configuration, where one has none yet; nothing else runs meanwhile."""
        runs = self.store.runs()
        table = report.lines(self.store.trials(), runs, self.objective)[:MAX_TIMED]
        if all("speed/tokens_per_s" in line.figures for line in table):
            return
        self.mirror.flush(2.0)
        self.watcher.say(f"measuring speed: {len(table)} configurations, each alone, in turns")
        round_number = (self.store.meta("speed_rounds") or 0) + 1  # the step of these values: those of an earlier round stay
        self.store.set_meta("speed_rounds", round_number)
        configs = tuple(Run(**line.trial.config) for line in table)
        job = Job(
            "speed",
            "speed",
            configs,
            plugins=self.sweep.plugins,
            threads=self.threads,
            device=self.device,
            gpus=self.gpus[:1] or None,
        )
        ended = False

        def handle(event: Event) -> None:
            nonlocal ended
            if event["type"] == "metrics":
                measured = table[event["step"]].trial.number
                for run in runs:
                    if run.trial == measured and run.state == "finished":
                        self.store.add_metrics(run.id, round_number, event["time"], event["values"])
                        self.store.add_figures(run.id, event["values"])
            elif event["type"] == "info":
                self.watcher.progress(int(event["tags"]["done"]), int(event["tags"]["of"]), 1, "measuring speed", None)
            elif event["type"] in ("end", "lost"):
                ended = True
                if event.get("state") != "finished":
                    self.watcher.say(f"speed is unknown: {event.get('message')}")

        self.executor.submit(job)
        while not ended and not self._stopping():
            for event in self.executor.poll(0.2):
                handle(event)
        self._drain(["speed"], lambda: not ended, handle)

    def _finish(self) -> Outcome:
        trials, runs = self.store.trials(), self.store.runs()
        complete = sum(trial.state == "complete" for trial in trials)
        file = self.sweep.file
        summary = report.summary(
            file.name,
            trials,
            runs,
            self.objective,
            file.constraints,
            next(iter(self.baselines), None),
            self.unproven,
            str(self.folder),
        )
        store.write_text(self.folder / "report.md", summary)
        store.write_text(self.folder / "trials.csv", report.trials_csv(runs, trials))
        self.store.set_meta("summary", summary)
        self.store.set_meta("ended", time.time_ns() // 1_000_000)
        self.store.set_meta("state", "stopped" if self.cut_short else "finished" if complete else "failed")
        mirrored = self.mirror.close()
        if self.first_step is not None:
            runs_here = f"{statistics.median(self.start_ups):.2f} s a run (median of {len(self.start_ups)})"
            self.watcher.say(f"start-up: {self.first_step:.1f} s until the first step of the first run; {runs_here}")
        failed = sum(run.state in ("failed", "lost") or run.cause == "disk" for run in runs)
        return Outcome(self.folder, summary, failed, complete, self.signal, mirrored, self.mirror.experiment_id)

    def _progress(self) -> None:
        if time.monotonic() - self.shown < 1.0:  # it reads the whole store
            return
        self.shown = time.monotonic()
        trials, runs = self.store.trials(), self.store.runs()
        done = sum(run.state in ("finished", "failed", "skipped") for run in runs)
        failed = sum(trial.state == "failed" for trial in trials)
        total = max(len(runs), (self.target + failed) * len(self.sweep.file.seeds))
        values = [trial.value for trial in trials if trial.value is not None]
        better: Callable[[list[float]], float] = min if self.objective.goal == "minimize" else max
        best = f"best {self.objective.metric} {better(values):.4f}" if values else "no trial complete yet"
        left = None
        if self.durations:
            left = (total - done) * statistics.mean(self.durations) / self.parallel
        self.watcher.progress(done, total, len(self.running), best, left)


def as_json(outcome: Outcome) -> dict[str, Any]:
    """An outcome as plain data; runs are in trials.csv and study.db of the folder."""
    return {**asdict(outcome), "folder": str(outcome.folder)}


def _row(from_store: Store, run: RunRow) -> RunRow:
    return next(row for row in from_store.runs(run.trial) if row.id == run.id)
