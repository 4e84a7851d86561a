"""Where jobs run. An executor takes Jobs and gives back a stream of Events; nothing else of it is known to the driver."""

from __future__ import annotations

from typing import Protocol

from experiments.config import Event, Job


class Executor(Protocol):
    """The contract of every executor.

    After `submit`, the job's events come out of `poll` in order, the last of them being "end", or "lost" where the worker
    vanished without one. An executor never raises for what a job does.
    """

    def submit(self, job: Job) -> None:
        """Start a job now."""

    def poll(self, timeout: float) -> list[Event]:
        """Events that have come, after waiting at most `timeout` seconds for the first."""

    def stop(self, key: str) -> None:
        """Ask a job to write its checkpoint and end."""

    def kill(self, key: str) -> None:
        """End a job at once; it comes out as "lost"."""

    def close(self) -> None:
        """End whatever still runs."""
