"""The study folder: one writer, nothing half written, nothing lost when anybody is killed."""

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiments import store
from experiments.errors import InputError, StoreError
from experiments.store import Store, connect, read_trials, set_aside, study_folder, write_text
from tests.experiments.small import ROOT


@pytest.fixture
def opened(tmp_path):
    found = Store(tmp_path / "study")
    yield found
    found.close()


def add(target, number, seeds=(0,)):
    return target.add_trial("search", {"a": number}, {"attention": {"variant": "x"}}, f"hash{number}", list(seeds))


def test_what_is_written_is_read_again(tmp_path):
    first = Store(tmp_path / "study")
    trial = first.add_trial("baseline", {"a.b": [1, 2]}, {"c": {"d": None}}, "h", [3, 5])
    run = first.runs(0)[0]
    first.start_run(run.id)
    first.add_metrics(run.id, 10, 1234, {"val/loss": 1.5, "lr": 1e-3})
    first.end_run(run.id, "finished", None, None, {"val/loss": 1.25})
    first.add_figures(run.id, {"speed": 2.0}, {"device": "cpu"})
    first.end_trial(0, "complete", 1.25)
    identity = first.meta("study_id")
    first.close()
    again = Store(tmp_path / "study")
    assert again.meta("study_id") == identity
    assert (trial.number, trial.kind, trial.state, trial.value) == (0, "baseline", "running", None)
    trial = again.trial(0)
    assert (trial.assignment, trial.config, trial.config_hash) == ({"a.b": [1, 2]}, {"c": {"d": None}}, "h")
    assert (trial.state, trial.value) == ("complete", 1.25)
    assert trial.started <= trial.ended <= time.time() * 1000 + 1000
    done, waiting = again.runs()
    assert (done.key, done.state, done.attempts, done.figures) == ("0/3", "finished", 1, {"val/loss": 1.25, "speed": 2.0})
    assert done.tags == {"device": "cpu"}
    assert (waiting.key, waiting.state, waiting.attempts, waiting.started, waiting.figures) == ("0/5", "waiting", 0, None, {})
    again.close()


def test_every_change_of_a_run_is_counted(opened):
    """The mirror sends what has another number than before."""
    add(opened, 0)
    seen = [opened.runs()[0].version]
    for change in (
        lambda: opened.start_run(1),
        lambda: opened.add_figures(1, {"a": 1.0}),
        lambda: opened.end_run(1, "stopped", "stopped", "m"),
        lambda: opened.start_run(1),
        lambda: opened.end_run(1, "finished", None, None, {"a": 2.0}),
    ):
        change()
        seen.append(opened.runs()[0].version)
    assert seen == sorted(set(seen))


def test_a_new_attempt_clears_the_old_cause_and_keeps_the_beginning(opened):
    add(opened, 0)
    opened.start_run(1)
    began = opened.runs()[0].started
    opened.end_run(1, "lost", "lost", "killed")
    assert [(r.state, r.cause, r.message, r.attempts, r.lost) for r in opened.runs()] == [("lost", "lost", "killed", 1, 1)]
    opened.start_run(1)
    run = opened.runs()[0]
    assert (run.state, run.cause, run.message, run.attempts, run.lost, run.started, run.ended) == (
        "running", None, None, 2, 1, began, None,
    )  # fmt: skip


def test_seeds_that_come_later_open_the_trial_again(opened):
    add(opened, 0, [0, 1])
    opened.end_trial(0, "complete", 1.0)
    opened.add_seeds(0, [2])
    assert (opened.trial(0).state, opened.trial(0).value, opened.trial(0).ended) == ("running", None, None)
    assert [run.seed for run in opened.runs(0)] == [0, 1, 2]


def test_a_metric_is_kept_once(opened):
    add(opened, 0, [0, 1])
    for values in ({"a": 1.0, "b": 2.0}, {"a": 9.0, "c": 3.0}):
        opened.add_metrics(1, 5, 100, values)
    opened.add_metrics(1, 6, 200, {"a": 4.0})
    opened.add_metrics(2, 5, 300, {"a": 5.0})
    rows = opened._db.execute("SELECT run, name, step, value FROM metrics ORDER BY run, step, name").fetchall()
    assert rows == [(1, "a", 5, 1.0), (1, "b", 5, 2.0), (1, "c", 5, 3.0), (1, "a", 6, 4.0), (2, "a", 5, 5.0)]


def test_what_is_no_number_is_never_stored(opened):
    add(opened, 0)
    values = {"nan": float("nan"), "inf": float("inf"), "low": float("-inf"), "good": 1.0}
    opened.add_metrics(1, 1, 0, values)
    opened.add_figures(1, values)
    opened.end_run(1, "failed", "diverged", "m", values)
    assert opened._db.execute("SELECT name, value FROM metrics").fetchall() == [("good", 1.0)]
    assert opened.runs()[0].figures == {"good": 1.0}
    assert json.loads(opened._db.execute("SELECT figures FROM runs").fetchone()[0]) == {"good": 1.0}


def test_a_failed_transaction_leaves_nothing(opened):
    with pytest.raises(sqlite3.IntegrityError):
        opened.add_trial("search", {}, {}, "h", [0, 0])  # the trial goes in, its second run cannot
    assert opened.trials() == []

    def break_off():
        with opened.transaction() as db:
            db.execute("INSERT INTO meta VALUES ('x', '1')")
            raise KeyError("in between")

    with pytest.raises(KeyError):
        break_off()
    assert opened.meta("x") is None


def test_orphans_are_closed_and_others_left(opened):
    add(opened, 0, range(5))
    for run, state in zip(opened.runs(), ("running", "finished", "failed", "running", "waiting"), strict=True):
        if state != "waiting":
            opened.start_run(run.id)
        if state in ("finished", "failed"):
            opened.end_run(run.id, state, None, None)
    assert [run.seed for run in opened.close_orphans()] == [0, 3]
    assert [run.state for run in opened.runs()] == ["stopped", "finished", "failed", "stopped", "waiting"]
    assert [run.cause for run in opened.runs()] == ["interrupted", None, None, "interrupted", None]
    assert [run.lost for run in opened.runs()] == [0] * 5
    assert opened.close_orphans() == []


def test_a_second_driver_is_refused_until_the_first_has_closed(tmp_path):
    first = Store(tmp_path / "study")
    with pytest.raises(StoreError) as caught:
        Store(tmp_path / "study")
    assert f"process {os.getpid()} on " in str(caught.value)
    assert "another driver is running this study" in str(caught.value)
    Store(tmp_path / "other").close()
    first.close()
    Store(tmp_path / "study").close()


HOLD = """
import sys, time
from pathlib import Path
from experiments.store import Store
opened = Store(Path(sys.argv[1]))
opened.add_trial("search", {}, {}, "h", [0])
opened.start_run(1)
print("held", flush=True)
time.sleep(600)
"""


def test_a_killed_driver_holds_nothing(tmp_path):
    folder = tmp_path / "study"
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(StoreError, match=f"process {process.pid} on "):
            Store(folder)
        with pytest.raises(StoreError, match=f"process {process.pid} on "):
            set_aside(folder)
        assert folder.exists()
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    opened = Store(folder)
    assert [run.state for run in opened.close_orphans()] == ["running"]
    assert opened.runs()[0].cause == "interrupted"
    opened.close()


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A closed study of many pages."""
    folder = tmp_path_factory.mktemp("filled") / "study"
    opened = Store(folder)
    for number in range(60):
        opened.add_trial("search", {"a": "x" * 200}, {"b": "y" * 300}, f"hash{number}", [0, 1])
    opened.close()
    return folder


def use(folder):
    """All that a driver reads at its start."""
    opened = Store(folder)
    try:
        return len(opened.trials()), len(opened.runs())
    finally:
        opened.close()


def test_a_truncated_file_is_refused_in_one_line(filled, tmp_path):
    raw = (filled / "study.db").read_bytes()
    assert len(raw) > 10 * 4096
    assert use(shutil.copytree(filled, tmp_path / "whole")) == (60, 120)
    for length in [50, 100, 512, *range(4096, len(raw), 4096), len(raw) // 2 + 17]:
        folder = shutil.copytree(filled, tmp_path / str(length))
        (folder / "study.db").write_bytes(raw[:length])
        with pytest.raises(StoreError, match=r"study\.db: cannot be used") as caught:
            use(folder)
        assert "--new" in str(caught.value)
        assert "\n" not in str(caught.value)
        assert set_aside(folder) == folder.with_name(f"{folder.name}-1")  # the lock is free again


@pytest.mark.parametrize("raw", [b"this is no database at all" * 300, b"\x00" * 8192, b"SQLite format 3\x00" + b"\xff" * 8000])
def test_garbage_is_refused_in_one_line(tmp_path, raw):
    folder = tmp_path / "study"
    folder.mkdir()
    (folder / "study.db").write_bytes(raw)
    with pytest.raises(StoreError, match=r"study\.db: cannot be used \([^\n]*\); run with --new[^\n]*$"):
        Store(folder)
    assert (folder / "study.db").read_bytes() == raw
    assert set_aside(folder) is not None


def test_another_version_is_refused(tmp_path):
    folder = tmp_path / "study"
    opened = Store(folder)
    opened.set_meta("version", store.VERSION + 1)
    opened.close()
    with pytest.raises(StoreError, match=rf"is of version {store.VERSION + 1}, this program writes {store.VERSION}; use --new$"):
        Store(folder)
    assert set_aside(folder) is not None


def test_a_kill_at_the_first_moment_leaves_a_folder_that_can_be_used(tmp_path):
    folder = tmp_path / "study"
    folder.mkdir()
    (folder / "study.db").touch()
    (folder / "lock").write_text("process 1 on nowhere")
    assert use(folder) == (0, 0)


def test_a_place_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"cannot be written \(Not a directory\)$"):
        Store(tmp_path / "file" / "study")
    with pytest.raises(StoreError, match="cannot be written"):
        write_text(tmp_path / "file", "") or write_text(tmp_path, "")  # a folder stands where the file shall be

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(store.os, "open", refuse)  # permissions do not bind every user
    with pytest.raises(StoreError, match=r"study: cannot be written \(Permission denied\)$"):
        Store(tmp_path / "study")


def test_a_read_only_folder_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    # Permissions do not bind root, but no user makes folders among the processes.
    folder = tmp_path if os.geteuid() else Path("/proc")
    with pytest.raises(StoreError, match=r"study: cannot be written \("):
        Store(folder / "study")


def test_a_full_disk_is_told_in_one_line(opened):
    pages = opened._db.execute("PRAGMA page_count").fetchone()[0]
    opened._db.execute(f"PRAGMA max_page_count = {pages + 2}")

    def fill():
        for number in range(100):
            opened.add_trial("search", {"a": "x" * 1000}, {}, f"hash{number}", [0])

    with pytest.raises(StoreError, match=r"study\.db: cannot be written \(database or disk is full\)$"):
        fill()
    kept = len(opened.trials())
    assert len(opened.runs()) == kept  # the last one is not there by half
    opened._db.execute("PRAGMA max_page_count = 1000000")
    add(opened, 1000)
    assert len(opened.trials()) == kept + 1


def test_closing_folds_the_journal(tmp_path):
    opened = Store(tmp_path / "study")
    for number in range(20):
        add(opened, number)
    journal = tmp_path / "study" / "study.db-wal"
    assert journal.stat().st_size > 0
    reader = connect(opened.path, readonly=True)  # a dashboard that is left open
    assert len(read_trials(reader)) == 20
    opened.close()
    assert not journal.exists() or journal.stat().st_size == 0
    reader.close()
    copy = tmp_path / "copy.db"
    shutil.copy(tmp_path / "study" / "study.db", copy)  # the file alone is the whole study
    db = connect(copy, readonly=True)
    assert len(read_trials(db)) == 20
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        db.execute("DELETE FROM trials")
    db.close()


def test_parts_of_killed_workers_are_swept(tmp_path):
    checkpoints = tmp_path / "study" / "checkpoints"
    checkpoints.mkdir(parents=True)
    for name in ("0000-0.77.part", "0000-0.pt"):
        (checkpoints / name).write_bytes(b"x")
    Store(tmp_path / "study").close()
    assert [file.name for file in checkpoints.iterdir()] == ["0000-0.pt"]


POLL = """
import sys
from pathlib import Path
from experiments.store import connect, read_runs, read_trials
path, end = Path(sys.argv[1]), Path(sys.argv[2])
print("reading", flush=True)
reads = 0
while not end.exists():
    db = connect(path, readonly=True)
    trials = len(read_trials(db))
    runs = len(read_runs(db))  # read later, so there may be more of them
    db.close()
    assert runs % 5 == 0 and runs >= 5 * trials, (trials, runs)
    reads += 1
print(reads)
"""


def test_readers_never_disturb_the_writer(tmp_path):
    """Four trials of five runs, written while three processes read all the time, as dashboards do."""
    opened = Store(tmp_path / "study")
    command = [sys.executable, "-c", POLL, str(opened.path), str(tmp_path / "end")]
    readers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) for _ in range(3)]
    for reader in readers:
        assert reader.stdout.readline() == "reading\n"
    for number in range(4):
        add(opened, number, range(5))
        for run in opened.runs(number):
            opened.start_run(run.id)
            for step in range(20):
                opened.add_metrics(run.id, step, step, {"val/loss": 1.0 / (step + 1), "lr": 0.1})
            opened.end_run(run.id, "finished", None, None, {"val/loss": 0.05})
        opened.end_trial(number, "complete", 0.05)
    (tmp_path / "end").touch()
    for reader in readers:
        out, _ = reader.communicate(timeout=60)
        assert reader.returncode == 0
        assert int(out) > 10
    assert [run.state for run in opened.runs()] == ["finished"] * 20
    assert [trial.state for trial in opened.trials()] == ["complete"] * 4
    assert opened._db.execute("SELECT COUNT(*) FROM metrics").fetchone()[0] == 20 * 20 * 2
    opened.close()


def test_studies_are_set_aside_in_order(tmp_path):
    folder = tmp_path / "study"
    assert set_aside(folder) is None
    for number in (1, 2, 3):
        opened = Store(folder)
        opened.set_meta("number", number)
        opened.close()
        assert set_aside(folder) == tmp_path / f"study-{number}"
        assert not folder.exists()
    kept = Store(tmp_path / "study-2")
    assert kept.meta("number") == 2
    kept.close()


def test_a_study_lives_in_its_home(tmp_path):
    assert study_folder(tmp_path, "heads") == tmp_path / "studies" / "heads"


@pytest.mark.parametrize("name", ["..", "../heads", "a/b", "/etc", "a/../../b", ".", "", "a/.."])
def test_no_name_leads_out_of_it(tmp_path, name):
    with pytest.raises(InputError, match="is no plain name"):
        study_folder(tmp_path, name)


def test_a_text_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "new" / "report.md"
    write_text(path, "old é")
    assert path.read_text(encoding="utf-8") == "old é"

    def full(self, target):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(store.Path, "replace", full)
        with pytest.raises(StoreError, match=r"report\.md: cannot be written \(No space left on device\)"):
            write_text(path, "new")
    assert path.read_text(encoding="utf-8") == "old é"
    assert [file.name for file in path.parent.iterdir()] == ["report.md"]
