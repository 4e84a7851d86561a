"""MLflow as a mirror of the store: written by a thread of the driver, from a cursor, so that an outage only delays it.

Everything is sent in a form in which twice is the same as once: a run is found again by its tag, a metric has the step and
time of the store. Training never waits for it. The only file that imports mlflow.
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import json
import logging
import os
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from experiments import store as stores
from experiments.config import describe, digest, flatten
from experiments.errors import InputError
from experiments.store import RunRow

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
# A server that is away shall cost seconds: the records wait in the store, so nothing is gained by insisting.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")

SCHEMES = ("sqlite", "http", "https", "postgresql", "mysql", "mssql")
STATUS = {
    "running": "RUNNING",
    "finished": "FINISHED",
    "failed": "FAILED",
    "stopped": "KILLED",
    "lost": "FAILED",
    "skipped": "KILLED",
}
ARTIFACTS = (".md", ".csv", ".json", ".png")  # files of the study folder that belong to its parent run
MAX_NAME = 250
MAX_PARAM = 5_000  # MLflow cuts silently at 6,000
_METRICS_A_BATCH, _PARAMS_A_BATCH = 1_000, 100
_RUN_TAG = "experiments.run"
# Runs of which the target does not know everything.
_AHEAD = """
LEFT JOIN mirror ON mirror.run = runs.id AND mirror.target = ?
WHERE runs.state != 'waiting' AND (
    mirror.run IS NULL OR mirror.version < runs.version
    OR mirror.seq < (SELECT COALESCE(MAX(metrics.seq), 0) FROM metrics WHERE metrics.run = runs.id)
)
"""


def default_target(home: Path) -> str:
    """The tracking address where nothing else is said: a SQLite file in the home folder."""
    return f"sqlite:///{(home / 'mlflow.db').resolve()}"


def check_target(target: str) -> str:
    """The address, if it can be one.

    Raises:
        InputError: a scheme that MLflow's server side does not take.
    """
    scheme = urlparse(target).scheme.split("+")[0]
    if scheme not in SCHEMES:
        raise InputError(
            f"tracking address {target!r}: must begin with one of {', '.join(f'{s}:' for s in SCHEMES)} "
            "(MLflow no longer takes plain folders)"
        )
    return target


def clean_name(name: str) -> str:
    """A metric or parameter name in MLflow's alphabet, different for different names.

    Any other character becomes _u, its code point in hex, and _; an underscore before a u is written so too. A name that is
    too long is cut and ends in its digest.
    """
    escaped = re.sub(r"_(?=u)|[^\w\-. /:]", lambda match: f"_u{ord(match[0]):x}_", name, flags=re.ASCII)
    # MLflow takes names for paths: no part of one may be empty, `.` or `..`.
    parts = [{"": "_u_", ".": "_u2e_", "..": "_u2e_u2e_"}.get(part, part) for part in escaped.split("/")]
    escaped = "/".join(parts)
    return escaped if len(escaped) <= MAX_NAME else f"{escaped[: MAX_NAME - 13]}-{digest(name)}"


class Mirror:
    """Tells a tracking server what the store holds.

    Args:
        path: the study's SQLite file.
        home: where artifacts go when the target is the default file.
        target: the tracking address.
        experiment: the MLflow experiment.
        note: called with one line when the server is lost or found again.
    """

    def __init__(self, path: Path, home: Path, target: str, experiment: str, note: Callable[[str], None]) -> None:
        self.target, self.experiment = target, experiment
        self.experiment_id: str | None = None
        self._path, self._home, self._note = path, home, note
        self._news = threading.Condition()
        self._asked = self._told = 0  # news so far, and how many of them the server knows
        self._stop = self._failing = False
        self._client: Any = None
        self._parent_sent = ""
        self._thread = threading.Thread(target=self._loop, name="mirror", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """There is news."""
        with self._news:
            self._asked += 1
            self._news.notify_all()

    def flush(self, patience: float) -> bool:
        """Wait until everything is told; give up where the server has been silent for `patience` seconds."""
        self.wake()
        wanted = self._asked
        with self._news:
            silent_since = time.monotonic()
            while self._told < wanted and self._thread.is_alive():
                self._news.wait(0.05)
                if not self._failing:
                    silent_since = time.monotonic()
                elif time.monotonic() - silent_since > patience:
                    return False
        return self._told >= wanted

    def close(self, patience: float = 2.0) -> bool:
        """Flush, and end the thread; False where records still wait in the store."""
        told = self.flush(patience)
        with self._news:
            self._stop = True
            self._news.notify_all()
        self._thread.join(timeout=5 if told else 0.1)
        return told

    def _loop(self) -> None:
        pause = 1.0
        while True:
            with self._news:
                self._news.wait_for(lambda: self._stop or self._told < self._asked)
                if self._stop:
                    return
                asked = self._asked
            try:
                with contextlib.closing(stores.connect(self._path)) as db:
                    self._sync(db)
            except Exception as error:  # telemetry never stops a study
                self._report(error)
                self._wait(pause)
                pause = min(2 * pause, 30.0)
                continue
            if self._failing:
                self._failing = False
                self._say(f"MLflow at {self.target} takes records again")
            pause = 1.0
            with self._news:
                self._told = asked
                self._news.notify_all()
            self._wait(0.5)  # what comes in between travels together

    def _wait(self, seconds: float) -> None:
        with self._news:
            self._news.wait_for(lambda: self._stop, seconds)

    def _report(self, error: Exception) -> None:
        if not self._failing:
            self._failing = True
            line = " ".join(str(error).split())[:200]
            self._say(f"MLflow at {self.target} does not take records ({line}); they wait in the study folder")

    def _say(self, line: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # the terminal may be gone
            self._note(line)

    def _sync(self, db: sqlite3.Connection) -> None:
        client = self._connect()
        study = {key: json.loads(value) for key, value in db.execute("SELECT key, value FROM meta")}
        if "name" not in study:
            return
        parent, _, _ = self._remote(db, 0, lambda: self._create_parent(client, study))
        trials = {trial.number: trial for trial in stores.read_trials(db)}
        failed: Exception | None = None
        for run in stores.read_runs(db, _AHEAD, (self.target,)):
            try:
                self._mirror_run(client, db, study, parent, run, trials[run.trial])
            except Exception as error:  # one run that a server refuses keeps back no other
                failed = error
        self._tell_parent(client, db, parent, study, list(trials.values()))
        if failed is not None:
            raise failed

    def _mirror_run(
        self, client: Any, db: sqlite3.Connection, study: dict[str, Any], parent: str, run: RunRow, trial: stores.Trial
    ) -> None:
        last = db.execute("SELECT COALESCE(MAX(seq), 0) FROM metrics WHERE run = ?", (run.id,)).fetchone()[0]
        remote, version, seq = self._remote(db, run.id, lambda: self._create_child(client, study, parent, run, trial))
        try:
            if version < 0:
                self._describe_child(client, remote, run, trial)
            self._tell_run(client, db, remote, run, seq)
        except Exception:
            if client.get_run(remote).info.lifecycle_stage != "deleted":
                raise
            # Somebody deleted it: that is their choice, and nothing more is told of it.
        self._remember(db, run.id, remote, run.version, last)

    def _connect(self) -> Any:
        if self._client is None:
            from mlflow.tracking import MlflowClient

            for name in ("mlflow", "mlflow.store.db.utils", "alembic"):  # tables that are made are no news
                logging.getLogger(name).setLevel(logging.ERROR)
            self._home.mkdir(parents=True, exist_ok=True)
            with _one_at_a_time(self._home / "mlflow.lock"):  # MLflow breaks when two processes create its file
                if self.target == default_target(self._home):
                    _make_database(self._home / "mlflow.db")
                client = MlflowClient(tracking_uri=self.target)
                self.experiment_id = self._find_experiment(client)
            self._client = client
        return self._client

    def _find_experiment(self, client: Any) -> str:
        found = client.get_experiment_by_name(self.experiment)
        if found is None:
            local = self.target == default_target(self._home)
            location = (self._home / "artifacts").resolve().as_uri() if local else None
            return str(client.create_experiment(self.experiment, artifact_location=location))
        if found.lifecycle_stage == "deleted":
            raise InputError(
                f"experiment {self.experiment!r} was deleted; restore it with `mlflow experiments restore "
                f"--experiment-id {found.experiment_id}`, or set another `experiment:`"
            )
        return str(found.experiment_id)

    def _remote(self, db: sqlite3.Connection, run: int, create: Callable[[], str]) -> tuple[str, int, int]:
        row = db.execute("SELECT remote, version, seq FROM mirror WHERE target = ? AND run = ?", (self.target, run)).fetchone()
        if row is not None:
            return row[0], row[1], row[2]
        remote = create()
        self._remember(db, run, remote, -1, 0)
        return remote, -1, 0

    def _remember(self, db: sqlite3.Connection, run: int, remote: str, version: int, seq: int) -> None:
        db.execute("INSERT OR REPLACE INTO mirror VALUES (?, ?, ?, ?, ?)", (self.target, run, remote, version, seq))

    def _create(self, client: Any, key: str, name: str, start: int | None, tags: dict[str, str]) -> str:
        """A run with this key: the one that is there, if an earlier answer was lost on its way, else a new one."""
        found = client.search_runs([self.experiment_id], f"tags.`{_RUN_TAG}` = '{key}'", max_results=1)
        if found:
            return str(found[0].info.run_id)
        tags = {_RUN_TAG: key, "mlflow.user": _user(), "mlflow.source.name": "experiments", **tags}
        created = client.create_run(self.experiment_id, start_time=start, tags=tags, run_name=name)
        return str(created.info.run_id)

    def _create_parent(self, client: Any, study: dict[str, Any]) -> str:
        tags = {"study": study["name"], "study_id": study["study_id"], **study.get("tags", {})}
        # The time tells studies of one name apart.
        name = f"{study['name']} {time.strftime('%Y-%m-%d %H:%M', time.localtime(study['started'] / 1000))}"
        remote = self._create(client, f"{study['study_id']}/study", name, study["started"], tags)
        client.log_text(remote, study["sweep"], "sweep.yaml")
        self._log_params(client, remote, flatten(study["identity"]["base"]))
        return remote

    def _create_child(self, client: Any, study: dict[str, Any], parent: str, run: RunRow, trial: stores.Trial) -> str:
        tags = {
            "mlflow.parentRunId": parent,
            "study": study["name"],
            "study_id": study["study_id"],
            "trial": str(run.trial),
            "kind": trial.kind,
            **study.get("tags", {}),
        }
        name = f"{run.trial:04d} {describe(trial.assignment)} seed {run.seed}"
        return self._create(client, f"{study['study_id']}/{run.id}", name[:250], run.started, tags)

    def _describe_child(self, client: Any, remote: str, run: RunRow, trial: stores.Trial) -> None:
        self._log_params(client, remote, {**flatten(trial.config), "seed": run.seed, "config_hash": trial.config_hash})
        client.log_text(remote, json.dumps(trial.config, indent=2, sort_keys=True), "config.json")

    def _log_params(self, client: Any, remote: str, settings: dict[str, Any]) -> None:
        from mlflow.entities import Param

        params = []
        for name, value in settings.items():
            text = value if isinstance(value, str) else json.dumps(value)
            cut = "" if len(text) <= MAX_PARAM else f"… (cut from {len(text)} characters; whole in config.json)"
            params.append(Param(clean_name(name), text[:MAX_PARAM] + cut))
        for start in range(0, len(params), _PARAMS_A_BATCH):
            client.log_batch(remote, params=params[start : start + _PARAMS_A_BATCH])

    def _tell_run(self, client: Any, db: sqlite3.Connection, remote: str, run: RunRow, seq: int) -> None:
        from mlflow.entities import Metric, RunTag

        rows = db.execute(
            "SELECT name, value, time, step FROM metrics WHERE run = ? AND seq > ? ORDER BY seq", (run.id, seq)
        ).fetchall()
        metrics = [Metric(clean_name(name), value, when, step) for name, value, when, step in rows]
        for start in range(0, len(metrics), _METRICS_A_BATCH):
            client.log_batch(remote, metrics=metrics[start : start + _METRICS_A_BATCH])
        tags = {**run.tags, "state": run.state, "attempts": str(run.attempts)}
        if run.cause:
            tags |= {"cause": run.cause, "message": (run.message or "")[:MAX_PARAM]}
        client.log_batch(remote, tags=[RunTag(name, value) for name, value in tags.items()])
        if run.state == "running":
            client.update_run(remote, status="RUNNING")
        else:
            client.set_terminated(remote, STATUS[run.state], end_time=run.ended)

    def _tell_parent(
        self, client: Any, db: sqlite3.Connection, parent: str, study: dict[str, Any], trials: list[stores.Trial]
    ) -> None:
        """Best value by completed trial, counts by state, the table and the status."""
        counts = {state: sum(trial.state == state for trial in trials) for state in ("running", "complete", "failed", "skipped")}
        content = json.dumps([counts, study.get("state"), study.get("summary"), len(trials)])
        if content == self._parent_sent:
            return
        from mlflow.entities import Metric, RunTag

        goal = study["identity"]["objectives"][0]
        better = min if goal["goal"] == "minimize" else max
        metrics, best = [], None
        done = sorted(
            (t for t in trials if t.state == "complete" and t.value is not None), key=lambda t: (t.ended or 0, t.number)
        )
        for index, trial in enumerate(done):
            assert trial.value is not None
            best = trial.value if best is None else better(best, trial.value)
            metrics.append(Metric(clean_name(f"best/{goal['metric']}"), best, trial.ended or 0, index))
            metrics.append(Metric("trials/complete", index + 1, trial.ended or 0, index))
        for start in range(0, len(metrics), _METRICS_A_BATCH):
            client.log_batch(parent, metrics=metrics[start : start + _METRICS_A_BATCH])
        tags = {f"trials_{state}": str(count) for state, count in counts.items()}
        if study.get("summary"):
            tags["mlflow.note.content"] = study["summary"][:MAX_PARAM]
            for file in sorted(file for file in self._path.parent.iterdir() if file.suffix in ARTIFACTS):
                client.log_artifact(parent, str(file))
        client.log_batch(parent, tags=[RunTag(name, value) for name, value in tags.items()])
        state = study.get("state", "running")
        if state == "running":
            client.update_run(parent, status="RUNNING")
        else:
            client.set_terminated(parent, STATUS[state], end_time=study.get("ended"))
        self._parent_sent = content


def _make_database(path: Path) -> None:
    """MLflow's tables, whole or not at all: a kill while it makes them would leave a file that it refuses for ever."""
    for left in path.parent.glob(f"{path.name}.*.part*"):
        left.unlink(missing_ok=True)
    if path.exists():
        return
    from mlflow.tracking import MlflowClient

    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    MlflowClient(tracking_uri=f"sqlite:///{part.resolve()}").search_experiments(max_results=1)
    part.rename(path)


@contextlib.contextmanager
def _one_at_a_time(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "unknown"
