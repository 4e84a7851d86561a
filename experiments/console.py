"""What a person sees while a study runs: lines, and on a terminal a bar below them."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

_EVERY = 10.0  # seconds between progress lines where there is no terminal


class Terminal:
    """Shows a study on a stream; piped output stays plain lines."""

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream, highlight=False, markup=False, soft_wrap=True)
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._last = time.monotonic()

    def __enter__(self) -> Terminal:
        if self._console.is_terminal:
            columns = (BarColumn(20), MofNCompleteColumn(), TextColumn("runs  {task.description}"))
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._task = self._bar.add_task("", total=None)
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, line: str) -> None:
        """One line."""
        self._console.print(line)
        self._console.file.flush()

    def progress(self, done: int, total: int, running: int, best: str, seconds_left: float | None) -> None:
        """Where the study stands."""
        left = "time left unknown" if seconds_left is None else f"about {words(seconds_left)} left"
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, total=total, description=f"{running} running  {best}  {left}")
        elif time.monotonic() - self._last > _EVERY:
            self._last = time.monotonic()
            self.say(f"{done} of {total} runs, {running} running, {best}, {left}")


def words(seconds: float) -> str:
    """A time as a person says it."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
