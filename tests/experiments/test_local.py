"""Jobs as real processes: how they end, whatever ends them, and that none outlives its driver."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from experiments.config import Job
from experiments.executors.local import LocalExecutor, _end_of
from tests.experiments.small import ROOT, run_of
from tests.experiments.test_worker import VARIANT

LONG = {"steps": 1_000_000, "log_every": 1, "eval_every": 1_000_000}


@pytest.fixture(scope="module", autouse=True)
def threads():
    """Before the fork server loads torch in it, so that this file takes one core."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def executor(threads):
    made = LocalExecutor()
    yield made
    made.close()


def poll_until(executor, done, seconds=60.0):
    """Events until `done(events)`."""
    events, limit = [], time.monotonic() + seconds
    while not done(events):
        assert time.monotonic() < limit, events
        events += executor.poll(0.2)
    return events


def ended(*keys):
    def done(events):
        return {event["key"] for event in events if event["type"] in ("end", "lost")} >= set(keys)

    return done


def plugin_of(folder, name, body, key, **settings):
    path = folder / f"{name}.py"
    path.write_text("import os, signal, time\n" + VARIANT.format(name=name, body=body))
    return Job(key, "train", (run_of({"variant": name}),), plugins=(str(path),), **settings)


def test_two_jobs_finish_beside_each_other(executor, tmp_path):
    for seed in (0, 1):
        executor.submit(Job(f"0/{seed}", "train", (run_of(),), seed=seed, checkpoint=str(tmp_path / f"{seed}.pt")))
    events = poll_until(executor, ended("0/0", "0/1"))
    for seed in (0, 1):
        own = [event for event in events if event["key"] == f"0/{seed}"]
        assert own[-1]["state"] == "finished"
        assert [event["type"] for event in own].count("end") == 1
        steps = [event["step"] for event in own if event["type"] == "metrics"]
        assert steps == sorted(steps)
        assert torch.load(tmp_path / f"{seed}.pt", weights_only=True)["step"] == 6
    assert executor.poll(0.01) == []


def test_what_a_run_prints_is_in_its_log(executor, tmp_path, capfd):
    log = tmp_path / "logs" / "r.log"
    body = "print('said', flush=False); os.write(2, b'written'); raise ValueError('in the end')"
    executor.submit(plugin_of(tmp_path, "printing", body, "1/0", log=str(log)))
    end = poll_until(executor, ended("1/0"))[-1]
    assert (end["state"], end["cause"]) == ("failed", "error")
    assert end["message"] == "ValueError: in the end (printing.py:12)"
    text = log.read_text()
    assert "said" in text
    assert "written" in text
    assert "Traceback" in text
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("name", "body", "message"),
    [
        ("quitting", "os._exit(5)", "the worker ended without a word (exit code 5)"),
        (
            "killed",
            "os.kill(os.getpid(), signal.SIGKILL)",
            "the worker was killed by SIGKILL; the system kills so when memory runs out",
        ),
        ("crashing", "os.kill(os.getpid(), signal.SIGSEGV)", "the worker was killed by SIGSEGV"),
        ("aborting", "os.abort()", "the worker was killed by SIGABRT"),
    ],
)
def test_a_vanished_worker_is_lost_with_its_signal(executor, tmp_path, name, body, message):
    executor.submit(plugin_of(tmp_path, name, body, f"{name}/0"))
    last = poll_until(executor, ended(f"{name}/0"))[-1]
    assert (last["type"], last["key"], last["message"]) == ("lost", f"{name}/0", message)


def test_the_ends_of_processes_in_words():
    assert _end_of(-15) == "the worker was killed by SIGTERM"
    assert _end_of(-35) == "the worker was killed by signal 35"
    assert _end_of(None) == "the worker ended without a word (exit code None)"


def test_what_a_worker_said_before_it_vanished_is_kept(executor, tmp_path):
    body = (
        "sys.count = getattr(sys, 'count', 0) + 1\n"
        "        if sys.count > 60: time.sleep(0.5); os.kill(os.getpid(), signal.SIGKILL)\n"
        "        if sys.count > 40: time.sleep(0.05)\n"
        "        return AttentionOutput(v, None)"
    )
    job = plugin_of(tmp_path, "late", body, "2/0")
    run = run_of({"variant": "late"}, train={"steps": 500, "log_every": 1})
    executor.submit(Job("2/0", "train", (run,), plugins=job.plugins))
    events = poll_until(executor, ended("2/0"))
    assert events[-1]["type"] == "lost"
    steps = [event["step"] for event in events if event["type"] == "metrics"]
    assert len(steps) > 10
    assert steps == list(range(1, len(steps) + 1))


def test_a_stop_is_obeyed_after_a_checkpoint(executor, tmp_path):
    path = tmp_path / "r.pt"
    executor.submit(Job("3/0", "train", (run_of(train=LONG),), checkpoint=str(path)))
    poll_until(executor, lambda events: any(event["type"] == "metrics" for event in events))
    executor.stop("3/0")
    executor.stop("3/0")  # twice is once
    end = poll_until(executor, ended("3/0"))[-1]
    assert (end["state"], end["cause"]) == ("stopped", "stopped")
    state = torch.load(path, weights_only=True)
    assert end["message"] == f"stopped after step {state['step']} of 1000000"
    assert state["step"] > 0
    executor.stop("3/0")  # a job that has ended
    executor.kill("nobody")


def test_signals_are_the_drivers_business(executor, tmp_path):
    executor.submit(Job("4/0", "train", (run_of(train=LONG),)))
    poll_until(executor, lambda events: any(event["type"] == "metrics" for event in events))
    process = executor._running["4/0"][0].pid
    os.kill(process, signal.SIGINT)
    os.kill(process, signal.SIGTERM)
    events = poll_until(executor, lambda events: len(events) > 5)
    assert {event["type"] for event in events} == {"metrics"}
    executor.kill("4/0")
    last = poll_until(executor, ended("4/0"))[-1]
    assert (last["type"], last["message"].split(";")[0]) == ("lost", "the worker was killed by SIGKILL")
    assert not alive(process)


def test_gpus_are_dealt_before_torch_looks(executor, tmp_path):
    body = "raise ValueError(os.environ.get('CUDA_VISIBLE_DEVICES'))"
    executor.submit(plugin_of(tmp_path, "looking", body, "5/0", gpus=("1", "3")))
    assert "ValueError: 1,3" in poll_until(executor, ended("5/0"))[-1]["message"]


def test_the_server_never_touches_a_gpu(executor, tmp_path):
    """A process that has initialised CUDA cannot be forked into one that uses it."""
    body = "raise ValueError(f'{torch.cuda.is_initialized()} {\"xformers\" in sys.modules} {threading.active_count()}')"
    executor.submit(plugin_of(tmp_path, "asking", "import threading; " + body, "6/0"))
    # The two threads are the worker's own; had the server any, forking it would not be safe.
    assert "ValueError: False False 2 " in poll_until(executor, ended("6/0"))[-1]["message"]


def test_closing_ends_what_runs(tmp_path):
    own = LocalExecutor()
    own.submit(Job("7/0", "train", (run_of(train=LONG),)))
    poll_until(own, lambda events: bool(events))
    process = own._running["7/0"][0].pid
    own.close()
    assert not alive(process)
    assert own.poll(0.01) == []


def alive(process):
    """Whether a process runs; one that has ended and waits for its parent does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_the_path_of_the_server_is_no_setting_of_driver_or_worker(executor, tmp_path, monkeypatch):
    """It is begun with that of this process; what a driver or a plugin starts has the person's."""
    monkeypatch.setenv("PYTHONPATH", "a_folder")
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    log = tmp_path / "log"
    body = 'raise RuntimeError(f\'{os.environ.get("PYTHONPATH")} {os.environ.get("PYTHONSAFEPATH")}\')'
    executor.submit(plugin_of(tmp_path, "telling", body, "7/0", log=str(log)))
    events = poll_until(executor, ended("7/0"))
    assert "RuntimeError: a_folder None" in events[-1]["message"]
    assert (os.environ["PYTHONPATH"], os.environ.get("PYTHONSAFEPATH")) == ("a_folder", None)


DRIVER = """
import sys
from experiments.config import Job
from experiments.executors.local import LocalExecutor
from tests.experiments.small import run_of

if __name__ == "__main__":
    executor = LocalExecutor()
    run = run_of(train={"steps": 1_000_000, "log_every": 1, "eval_every": 1_000_000})
    for seed in (0, 1):
        executor.submit(Job(f"0/{seed}", "train", (run,), seed=seed))
    seen = set()
    while len(seen) < 2:
        seen |= {event["key"] for event in executor.poll(1.0)}
    print(*(process.pid for process, _ in executor._running.values()), flush=True)
    while True:
        executor.poll(1.0)
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_no_worker_outlives_a_killed_driver(tmp_path):
    driver = tmp_path / "driver.py"
    driver.write_text(DRIVER)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, str(driver)], stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
    try:
        workers = [int(pid) for pid in process.stdout.readline().split()]
        assert len(workers) == 2
        assert all(alive(worker) for worker in workers)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    limit = time.monotonic() + 20
    while any(alive(worker) for worker in workers):
        assert time.monotonic() < limit
        time.sleep(0.05)
