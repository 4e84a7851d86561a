"""Jobs as processes on this machine, forked from a server that has torch loaded, so that each begins in milliseconds.

A worker lives no longer than its driver: it ends as soon as the pipe to the driver is closed, whatever killed the driver.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from experiments.config import Event, Job

_SEND_EVERY = 0.2  # seconds: metrics in between travel together


class LocalExecutor:
    """See `Executor`. One process a job."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        # torch._dynamo is imported by the first optimiser of a process, which costs over a second.
        self._context.set_forkserver_preload(["experiments.worker", "torch._dynamo"])
        # The server loads while the driver still reads its file. Ctrl-C reaches it too, and is the driver's business.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            with _path_of_this_process():
                forkserver.ensure_running()
        finally:
            signal.signal(signal.SIGINT, before)
        self._failed: list[Event] = []
        self._running: dict[str, tuple[ForkServerProcess, Connection]] = {}

    def submit(self, job: Job) -> None:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_main, args=(job, theirs, _path_settings()), name=f"run {job.key}", daemon=True)
        try:
            with _path_of_this_process():  # if the server was killed, this begins a new one
                process.start()
        except (OSError, EOFError) as error:
            self._failed.append(Event(type="lost", key=job.key, message=f"no worker could be started ({error})"))
            return
        finally:
            theirs.close()
        self._running[job.key] = (process, ours)

    def poll(self, timeout: float) -> list[Event]:
        if self._failed:
            failed, self._failed = self._failed, []
            return failed
        if not self._running:
            time.sleep(timeout)
            return []
        ready = wait([connection for _, connection in self._running.values()], timeout)
        events: list[Event] = []
        for key, (process, connection) in list(self._running.items()):
            if connection not in ready:
                continue
            try:
                while connection.poll():
                    events += connection.recv()
            except (EOFError, OSError):
                process.join(timeout=10)
                if process.is_alive():  # it closed the pipe and lives on
                    process.kill()
                    process.join()
                if not any(event["type"] == "end" and event["key"] == key for event in events):
                    events.append(Event(type="lost", key=key, message=_end_of(process.exitcode)))
            if any(event["type"] in ("end", "lost") and event["key"] == key for event in events):
                self._forget(key)
        return events

    def _forget(self, key: str) -> None:
        process, connection = self._running.pop(key)
        process.join(timeout=10)
        if process.is_alive():  # it has said its last word, so nothing is lost
            process.kill()
            process.join()
        process.close()
        connection.close()

    def stop(self, key: str) -> None:
        if key in self._running:
            with contextlib.suppress(OSError):  # it is gone already; poll will say so
                self._running[key][1].send("stop")

    def kill(self, key: str) -> None:
        if key in self._running:
            self._running[key][0].kill()

    def close(self) -> None:
        for process, connection in self._running.values():
            process.kill()
            process.join()
            connection.close()
        self._running.clear()


def _end_of(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        named = {number.value: number.name for number in signal.Signals}  # real-time signals have no name
        name = named.get(-exitcode, f"signal {-exitcode}")
        memory = "; the system kills so when memory runs out" if name == "SIGKILL" else ""
        return f"the worker was killed by {name}{memory}"
    return f"the worker ended without a word (exit code {exitcode})"


def _path_settings() -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in ("PYTHONPATH", "PYTHONSAFEPATH")}


def _set_path(settings: Mapping[str, str | None]) -> None:
    for name, value in settings.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


@contextlib.contextmanager
def _path_of_this_process() -> Iterator[None]:
    """A fork server that begins inside finds what this process finds; alone it would look into the working directory first."""
    before = _path_settings()
    _set_path({"PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path), "PYTHONSAFEPATH": "1"})
    try:
        yield
    finally:
        _set_path(before)


def _main(job: Job, connection: Connection, path_settings: Mapping[str, str | None]) -> None:
    """A worker's life."""
    _set_path(path_settings)  # what a plugin starts is no part of the server
    # Signals are the driver's business: it asks for a checkpoint through the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _redirect_output(job.log)
    faulthandler.enable()
    stopping = threading.Event()
    threading.Thread(target=_listen, args=(connection, stopping), daemon=True).start()
    outbox = _Outbox(connection)
    from experiments import worker

    worker.choose_gpus(job)
    worker.run_job(job, outbox.send, stopping.is_set)
    # Not through interpreter exit, where the threads of a plugin could hold the process.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _redirect_output(log: str | None) -> None:
    if log is None:
        target = os.open(os.devnull, os.O_WRONLY)
    else:
        Path(log).parent.mkdir(parents=True, exist_ok=True)
        target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(target, 1)
    os.dup2(target, 2)


def _listen(connection: Connection, stopping: threading.Event) -> None:
    try:
        while True:
            connection.recv()
            stopping.set()
    except (EOFError, OSError):
        os._exit(1)  # the driver is gone


class _Outbox:
    """Sends events in order, metrics in batches."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._waiting: list[Event] = []
        self._sent = 0.0

    def send(self, event: Event) -> None:
        """Send an event, or keep it for a moment if it is a metric."""
        self._waiting.append(event)
        if event["type"] == "metrics" and time.monotonic() - self._sent < _SEND_EVERY:
            return
        try:
            self._connection.send(self._waiting)
        except OSError:
            os._exit(1)  # the driver is gone
        self._waiting, self._sent = [], time.monotonic()
