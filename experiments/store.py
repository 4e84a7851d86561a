"""The study folder, the only truth: one SQLite file, written by the driver alone, beside checkpoints and logs.

A *trial* is one configuration, a *run* one (configuration, seed). Every write is one transaction, so a kill leaves the state
before or after it. A metric is kept once per run, name and step: what a resumed run sends again is already there.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import sqlite3
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from experiments.errors import InputError, StoreError

VERSION = 1

TrialState = Literal["running", "complete", "failed", "skipped"]
RunState = Literal["waiting", "running", "finished", "failed", "stopped", "lost", "skipped"]

_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE trials (
    number INTEGER PRIMARY KEY,      -- from 0, in the order they were asked for
    kind TEXT NOT NULL,              -- baseline or search
    assignment TEXT NOT NULL,        -- JSON: dotted path -> value
    config TEXT NOT NULL,            -- JSON: the complete configuration
    config_hash TEXT NOT NULL UNIQUE,
    state TEXT NOT NULL,
    value REAL,                      -- mean of the objective over seeds
    started INTEGER NOT NULL,        -- milliseconds since 1970, here and below
    ended INTEGER
);
CREATE TABLE runs (
    id INTEGER PRIMARY KEY,
    trial INTEGER NOT NULL REFERENCES trials(number),
    seed INTEGER NOT NULL,
    state TEXT NOT NULL,
    cause TEXT,                      -- why it did not finish: oom, diverged, error, timeout, lost, stopped
    message TEXT,
    attempts INTEGER NOT NULL DEFAULT 0,
    lost INTEGER NOT NULL DEFAULT 0, -- attempts whose worker vanished
    started INTEGER,
    ended INTEGER,
    tags TEXT NOT NULL DEFAULT '{}', -- JSON
    figures TEXT NOT NULL DEFAULT '{}', -- JSON: what the run came to
    version INTEGER NOT NULL DEFAULT 0, -- counts changes of this row, for the mirror
    UNIQUE (trial, seed)
);
CREATE TABLE metrics (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    run INTEGER NOT NULL REFERENCES runs(id),
    name TEXT NOT NULL,
    step INTEGER NOT NULL,
    value REAL NOT NULL,
    time INTEGER NOT NULL,
    UNIQUE (run, name, step)
);
CREATE INDEX metrics_of_run ON metrics (run, seq);
CREATE TABLE mirror (                -- how far a tracking server has been told; run 0 is the study itself
    target TEXT NOT NULL,
    run INTEGER NOT NULL,
    remote TEXT NOT NULL,
    version INTEGER NOT NULL,
    seq INTEGER NOT NULL,
    PRIMARY KEY (target, run)
);
"""


@dataclass(frozen=True)
class Trial:
    """One configuration of the study."""

    number: int
    kind: str
    assignment: dict[str, Any]
    config: dict[str, Any]
    config_hash: str
    state: TrialState
    value: float | None
    started: int
    ended: int | None


@dataclass(frozen=True)
class RunRow:
    """One (configuration, seed)."""

    id: int
    trial: int
    seed: int
    state: RunState
    cause: str | None
    message: str | None
    attempts: int
    lost: int
    started: int | None
    ended: int | None
    tags: dict[str, str]
    figures: dict[str, float]
    version: int

    @property
    def key(self) -> str:
        """The run's name in events, logs and tables: trial/seed."""
        return f"{self.trial}/{self.seed}"


class Store:
    """One study's folder.

    Args:
        folder: made if missing.

    Raises:
        StoreError: another driver has it, it is damaged, of another version, or cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = _lock(folder)
        except OSError as error:
            raise StoreError(f"{folder}: cannot be written ({error.strerror})") from None
        self.path = folder / "study.db"
        try:
            self._db = connect(self.path, create=True)
            if not self._db.execute("SELECT name FROM sqlite_master WHERE name = 'meta'").fetchone():
                first = f"""INSERT INTO meta VALUES ('version', '{VERSION}'), ('study_id', '"{uuid.uuid4().hex}"');"""
                self._db.executescript(f"BEGIN;{_SCHEMA}{first}COMMIT;")
            self._inode = self.path.stat().st_ino
            version = self.meta("version")
        except (sqlite3.DatabaseError, OSError) as error:
            self._release()
            raise StoreError(f"{self.path}: cannot be used ({error}); run with --new to keep it aside") from None
        if version != VERSION:
            self._release()
            raise StoreError(f"{self.path}: is of version {version}, this program writes {VERSION}; use --new")
        for part in (folder / "checkpoints").glob("*.part"):  # of a worker that was killed while it wrote
            part.unlink(missing_ok=True)

    def close(self) -> None:
        """Fold the journal into the file, and free the folder for another driver."""
        with contextlib.suppress(sqlite3.Error):
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._db.close()
        self._release()

    def _release(self) -> None:
        os.close(self._lock)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """All or nothing.

        Raises:
            StoreError: the disk is full, or the file cannot be written.
        """
        try:
            if not self.path.exists() or self.path.stat().st_ino != self._inode:
                raise StoreError(f"{self.path}: was removed or replaced while this study ran")
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
            except BaseException:
                if self._db.in_transaction:  # SQLite has rolled back by itself where the disk is full
                    self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")
        except sqlite3.OperationalError as error:
            raise StoreError(f"{self.path}: cannot be written ({error})") from None

    def meta(self, key: str) -> Any:
        """A stored value, or None."""
        row = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return None if row is None else json.loads(row[0])

    def set_meta(self, key: str, value: Any) -> None:
        """Store a plain value."""
        with self.transaction() as db:
            db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, json.dumps(value)))

    def add_trial(
        self, kind: str, assignment: dict[str, Any], config: dict[str, Any], config_hash: str, seeds: list[int]
    ) -> Trial:
        """A new trial with its runs, all waiting."""
        with self.transaction() as db:
            number = db.execute("SELECT COUNT(*) FROM trials").fetchone()[0]
            db.execute(
                "INSERT INTO trials VALUES (?, ?, ?, ?, ?, 'running', NULL, ?, NULL)",
                (number, kind, json.dumps(assignment), json.dumps(config), config_hash, _now()),
            )
            db.executemany("INSERT INTO runs (trial, seed, state) VALUES (?, ?, 'waiting')", [(number, s) for s in seeds])
        return self.trial(number)

    def add_seeds(self, number: int, seeds: list[int]) -> None:
        """Further runs of a trial, which is open again until they have ended."""
        with self.transaction() as db:
            db.executemany("INSERT INTO runs (trial, seed, state) VALUES (?, ?, 'waiting')", [(number, s) for s in seeds])
            db.execute("UPDATE trials SET state = 'running', value = NULL, ended = NULL WHERE number = ?", (number,))

    def end_trial(self, number: int, state: TrialState, value: float | None) -> None:
        """The verdict on a trial whose runs have all ended."""
        with self.transaction() as db:
            db.execute("UPDATE trials SET state = ?, value = ?, ended = ? WHERE number = ?", (state, value, _now(), number))

    def start_run(self, run: int) -> None:
        """A new attempt begins."""
        with self.transaction() as db:
            db.execute(
                "UPDATE runs SET state = 'running', cause = NULL, message = NULL, attempts = attempts + 1, ended = NULL, "
                "started = COALESCE(started, ?), version = version + 1 WHERE id = ?",
                (_now(), run),
            )

    def end_run(
        self, run: int, state: RunState, cause: str | None, message: str | None, figures: dict[str, float] | None = None
    ) -> None:
        """An attempt has ended; "stopped" and "lost" runs may begin again."""
        with self.transaction() as db:
            db.execute(
                "UPDATE runs SET state = ?, cause = ?, message = ?, ended = ?, lost = lost + ?, version = version + 1 "
                "WHERE id = ?",
                (state, cause, message, _now(), state == "lost", run),
            )
            if figures:
                self._add_figures(db, run, figures)

    def add_figures(self, run: int, figures: dict[str, float], tags: dict[str, str] | None = None) -> None:
        """Figures and tags beside those that are there."""
        with self.transaction() as db:
            self._add_figures(db, run, figures, tags)

    def _add_figures(
        self, db: sqlite3.Connection, run: int, figures: dict[str, float], tags: dict[str, str] | None = None
    ) -> None:
        db.execute(
            "UPDATE runs SET figures = json_patch(figures, ?), tags = json_patch(tags, ?), version = version + 1 WHERE id = ?",
            (json.dumps({name: value for name, value in figures.items() if _finite(value)}), json.dumps(tags or {}), run),
        )

    def add_metrics(self, run: int, step: int, time_ms: int, values: dict[str, float]) -> None:
        """Values of one step; a value that is no number is left out, the run's cause tells of it."""
        rows = [(run, name, step, float(value), time_ms) for name, value in values.items() if _finite(value)]
        with self.transaction() as db:
            db.executemany("INSERT OR IGNORE INTO metrics (run, name, step, value, time) VALUES (?, ?, ?, ?, ?)", rows)

    def trial(self, number: int) -> Trial:
        """One trial."""
        return read_trials(self._db, "WHERE number = ?", (number,))[0]

    def trials(self) -> list[Trial]:
        """All trials, by number."""
        return read_trials(self._db)

    def runs(self, trial: int | None = None) -> list[RunRow]:
        """All runs, or those of one trial, in the order they were added."""
        return read_runs(self._db) if trial is None else read_runs(self._db, "WHERE trial = ?", (trial,))

    def close_orphans(self) -> list[RunRow]:
        """Runs that a driver left running when it died: closed as stopped, to be gone on with. Called under the lock."""
        orphans = read_runs(self._db, "WHERE state = 'running'")
        for run in orphans:
            self.end_run(run.id, "stopped", "interrupted", "the driver died while this run was going")
        return orphans


def connect(path: Path, *, readonly: bool = False, create: bool = False) -> sqlite3.Connection:
    """A connection that commits only on demand and waits for a busy file; without `create` the file must be there."""
    mode = "ro" if readonly else "rwc" if create else "rw"
    db = sqlite3.connect(f"{path.resolve().as_uri()}?mode={mode}", uri=True, timeout=30, isolation_level=None)
    if not readonly:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
    return db


def read_trials(db: sqlite3.Connection, where: str = "", values: tuple[Any, ...] = ()) -> list[Trial]:
    """Trials from a connection."""
    columns = "number, kind, assignment, config, config_hash, state, value, started, ended"
    return [
        Trial(n, kind, json.loads(assignment), json.loads(config), *rest)
        for n, kind, assignment, config, *rest in db.execute(f"SELECT {columns} FROM trials {where} ORDER BY number", values)
    ]


def read_runs(db: sqlite3.Connection, where: str = "", values: tuple[Any, ...] = ()) -> list[RunRow]:
    """Runs from a connection."""
    columns = [field.name for field in fields(RunRow)]
    found = []
    for row in db.execute(f"SELECT {', '.join(f'runs.{name}' for name in columns)} FROM runs {where} ORDER BY runs.id", values):
        cell = dict(zip(columns, row, strict=True))
        found.append(RunRow(**{**cell, "tags": json.loads(cell["tags"]), "figures": json.loads(cell["figures"])}))
    return found


def set_aside(folder: Path) -> Path | None:
    """Move an existing study folder away, to NAME-1, NAME-2, …; None where there is none.

    Raises:
        StoreError: a driver is running it.
    """
    if not folder.exists():
        return None
    os.close(_lock(folder))
    target = next(t for n in range(1, 1_000_000) if not (t := folder.with_name(f"{folder.name}-{n}")).exists())
    folder.rename(target)
    return target


def _lock(folder: Path) -> int:
    """An exclusive lock on the folder, held until its descriptor is closed or its process dies."""
    handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.read(handle, 200).decode(errors="replace").strip() or "unknown"
        os.close(handle)
        raise StoreError(f"{folder}: another driver is running this study ({owner})") from None
    os.ftruncate(handle, 0)
    os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    return handle


def write_text(path: Path, text: str) -> None:
    """Write a file so that a reader finds the old one or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise StoreError(f"{path}: cannot be written ({error.strerror})") from None
    finally:
        part.unlink(missing_ok=True)


def _finite(value: float) -> bool:
    return float("-inf") < value < float("inf")


def _now() -> int:
    return time.time_ns() // 1_000_000


def study_folder(home: Path, name: str) -> Path:
    """Where a study lives.

    Raises:
        InputError: a name that leads outside.
    """
    folder = home / "studies" / name
    if folder.name != name or name == "..":
        raise InputError(f"study {name!r}: is no plain name")
    return folder
