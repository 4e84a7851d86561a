"""Whole studies, as a person runs them: the table, MLflow, interruptions, failures, plugins, changes of the file."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.experiments.conftest import TINY, Command, start

STEPPED = TINY.replace("steps: 12,", "steps: 1000, checkpoint_seconds: 0.2,")


def rows(folder: Path, query: str) -> list[tuple[Any, ...]]:
    """What the store of the study in a folder holds."""
    path = next((folder / ".experiments" / "studies").iterdir()) / "study.db"
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as db:
        found = db.execute(query).fetchall()
    db.close()
    return found


def curves(folder: Path) -> list[tuple[Any, ...]]:
    """Every recorded value that a repetition on the same machine must give again."""
    return rows(
        folder,
        "SELECT trial, seed, name, step, value FROM metrics JOIN runs ON runs.id = run "
        "WHERE name NOT LIKE 'speed/%' ORDER BY trial, seed, name, step",
    )


def table(text: str) -> list[list[str]]:
    """The rows of the final table without the trial and what depends on the clock."""
    lines = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("| ")]
    drop = [index for index, heading in enumerate(lines[0]) if heading.strip() in ("trial", "tokens/s")]
    return [[cell.strip() for index, cell in enumerate(line) if index not in drop] for line in lines]


def wait_for(process: subprocess.Popen[str], words: str) -> None:
    """Read the output until a line holds the words."""
    assert process.stdout is not None
    for line in process.stdout:
        if words in line:
            return
    raise AssertionError(f"ended without saying {words!r}: {process.stderr.read() if process.stderr else ''}")


def mlflow_runs(folder: Path, experiment: str = "tiny") -> tuple[Any, list[Any], Any]:
    """(the study's run, the runs under it by trial and seed, a client), read back by MLflow's own client."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/.experiments/mlflow.db")
    found = client.get_experiment_by_name(experiment)
    assert found is not None
    runs = client.search_runs([found.experiment_id], max_results=1000)
    (parent,) = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    children = [run for run in runs if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    assert len(children) == len(runs) - 1
    return parent, sorted(children, key=lambda run: (int(run.data.tags["trial"]), int(run.data.params["seed"]))), client


def test_a_study_ends_with_a_table_and_says_what_it_means(command: Command, tiny: Path, tmp_path: Path) -> None:
    done = command("run", "tiny.yaml", "seeds=[0,1,2]")
    assert done.returncode == 0, done.stderr
    assert "new study: .experiments/studies/tiny" in done.stdout
    found = table(done.stdout)
    assert found[0][:3] == ["variant", "heads", "val/loss (± sd over seeds)"]
    assert {row[0] for row in found[1:]} == {"uniform", "standard", "linear"}
    assert all(row[3] == "3" for row in found[1:])
    assert not any("unknown" in cell for row in found for cell in row)
    assert "Best of each variant" in done.stdout
    assert len(re.findall(r"(?:standard|linear) \(trial \d\): [-+]\d\.\d{4} \[[-+]\d\.\d{4}, [-+]\d\.\d{4}\]", done.stdout)) == 2
    assert "What it cannot tell" in done.stdout
    assert "python -m experiments ui" in done.stdout
    again = command("run", "tiny.yaml", "seeds=[0,1,2]")
    assert again.returncode == 0
    assert "going on: .experiments/studies/tiny" in again.stdout
    assert "seed 0 (" not in again.stdout  # nothing is run again
    assert table(again.stdout) == found
    # The mean of the table is the mean of what the runs recorded last.
    values = rows(
        tmp_path, "SELECT value FROM metrics JOIN runs ON runs.id = run WHERE trial = 0 AND name = 'val/loss' AND step = 12"
    )
    mean = sum(value for (value,) in values) / 3
    assert next(row for row in found if row[0] == "uniform")[2].startswith(f"{mean:.4f} ±")


def test_mlflow_holds_what_finished(command: Command, tiny: Path, tmp_path: Path) -> None:
    assert command("run", "tiny.yaml").returncode == 0
    parent, children, client = mlflow_runs(tmp_path)
    assert parent.info.status == "FINISHED"
    assert parent.info.run_name.startswith("tiny 20")
    assert (parent.data.tags["trials_complete"], parent.data.tags["trials_failed"]) == ("3", "0")
    assert "Best val/loss" in parent.data.tags["mlflow.note.content"]
    assert {file.path for file in client.list_artifacts(parent.info.run_id)} >= {"report.md", "trials.csv", "sweep.yaml"}
    best = [(metric.step, metric.value) for metric in client.get_metric_history(parent.info.run_id, "best/val/loss")]
    assert [step for step, _ in sorted(best)] == [0, 1, 2]
    values = [value for _, value in sorted(best)]
    assert values == sorted(values, reverse=True)

    named = [(run.data.tags["trial"], run.data.params["seed"]) for run in children]
    assert named == [(str(trial), str(seed)) for trial in range(3) for seed in (0, 1)]
    expected = {
        "train/loss", "lr", "grad_norm",
        "val/loss", "val/perplexity", "val/accuracy", "test/loss", "test/perplexity", "test/accuracy",
        "memory/peak_mb", "memory/state_bytes", "speed/tokens_per_s", "speed/step_ms", "cost/flops_per_token", "cost/params",
        "attention/entropy", "attention/density", "attention/span",
    }  # fmt: skip
    for run in children:
        assert run.info.status == "FINISHED"
        assert run.info.end_time >= run.info.start_time
        assert expected <= run.data.metrics.keys()
        assert run.data.params["model.model_dim"] == "16"
        assert run.data.params["task.length"] == "4"
        assert run.data.params["train.lr"] == "0.003"
        assert run.data.tags["device"].startswith("cpu: ")
        assert run.data.tags["data_digest"] == "generated"
        assert run.data.tags["version.torch"]
        assert "mlflow.source.git.commit" in run.data.tags
    # Every variant of one seed saw the same batches in the same order, another seed others.
    orders = {(run.data.params["seed"], run.data.tags["data_order_digest"]) for run in children}
    assert len(orders) == 2
    # Every point of the store is there, once, and no other.
    stored = rows(tmp_path, "SELECT trial, seed, name, step, value, time FROM metrics JOIN runs ON runs.id = run")
    mirrored = [
        (int(run.data.tags["trial"]), int(run.data.params["seed"]), name, m.step, m.value, m.timestamp)
        for run in children
        for name in run.data.metrics
        for m in client.get_metric_history(run.info.run_id, name)
    ]
    assert sorted(mirrored) == sorted(stored)


def test_ctrl_c_keeps_checkpoints_and_the_same_command_goes_on(command: Command, tmp_path: Path) -> None:
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    for folder in (whole, halves):
        folder.mkdir()
        (folder / "tiny.yaml").write_text(STEPPED)
    expected = command("run", "tiny.yaml", folder=whole)
    assert expected.returncode == 0

    process = start(halves, "run", "tiny.yaml")
    wait_for(process, "trial 0 seed")  # at least one run has finished, others are under way
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted; the same command goes on" in err
    assert "Traceback" not in err
    states = rows(halves, "SELECT state, cause FROM runs")
    assert ("stopped", "stopped") in states
    assert "running" not in {state for state, _ in states}
    _, children, _ = mlflow_runs(halves)
    statuses = {run.info.status for run in children}
    assert "KILLED" in statuses
    assert statuses <= {"KILLED", "FINISHED"}

    finished = rows(halves, "SELECT trial, seed FROM runs WHERE state = 'finished'")
    done = command("run", "tiny.yaml", folder=halves)
    assert done.returncode == 0, done.stderr
    for trial, seed in finished:
        assert f"trial {trial} seed {seed} (" not in done.stdout
    assert table(done.stdout) == table(expected.stdout)
    assert curves(halves) == curves(whole)
    parent, children, _ = mlflow_runs(halves)
    assert {run.info.status for run in children} == {"FINISHED"}
    assert parent.info.status == "FINISHED"


def test_kill_9_loses_nothing(command: Command, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
        (folder / "tiny.yaml").write_text(STEPPED)
    expected = command("run", "tiny.yaml", folder=whole)
    for points in (0, 150, 900):  # before the first record, in the first runs, in the middle
        process = start(killed, "run", "tiny.yaml")
        wait_for(process, "new study" if points == 0 else "going on")
        while rows(killed, "SELECT COUNT(*) FROM metrics")[0][0] < points:
            time.sleep(0.02)
        process.kill()
        process.communicate(timeout=30)
        _no_process_of(process.pid)
    assert "running" in {state for (state,) in rows(killed, "SELECT state FROM runs")}
    done = command("run", "tiny.yaml", folder=killed)
    assert done.returncode == 0, done.stderr
    assert "was interrupted; goes on" in done.stdout
    assert table(done.stdout) == table(expected.stdout)
    assert curves(killed) == curves(whole)
    _, children, client = mlflow_runs(killed)
    assert len(children) == 6
    assert {run.info.status for run in children} == {"FINISHED"}
    for run in children:
        for name in ("train/loss", "val/loss"):
            steps = [metric.step for metric in client.get_metric_history(run.info.run_id, name)]
            assert len(steps) == len(set(steps))


def _no_process_of(session: int) -> None:
    """The workers of a killed driver end by themselves."""
    for _ in range(100):
        alive = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                except OSError:
                    continue
                if int(fields[3]) == session and fields[0] != "Z":
                    alive.append(entry.name)
        if not alive:
            return
        time.sleep(0.1)
    raise AssertionError(f"processes {alive} outlived their driver")


def test_a_second_driver_is_refused_by_pid(command: Command, tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(STEPPED)
    first = start(tmp_path, "run", "tiny.yaml")
    try:
        wait_for(first, "new study")
        second = command("run", "tiny.yaml")
        assert second.returncode == 1
        assert f"another driver is running this study (process {first.pid} on " in second.stderr
        assert len(second.stderr.splitlines()) == 1
    finally:
        os.killpg(first.pid, signal.SIGKILL)
        first.communicate(timeout=30)


PLUGIN = '''\
from core import Attention, AttentionConfig, AttentionOutput, Spec, register, tunable
from core.functional import average, masked_softmax, scaled_scores
from experiments.tasks import Batch, Task, TaskConfig, register_task
import torch


@register("halved")
class Halved(Attention):
    """Scores over 2."""

    spec = Spec(causal=True, padding=True, decode=True, convex=True)

    class Config(AttentionConfig):
        crash: bool = False

    def attend(self, q, k, v, mask, need_weights):
        if self.config.crash:
            raise RuntimeError("as asked")
        print("a plugin may print")
        weights = masked_softmax(scaled_scores(q, k, 2.0), mask.visible(q.shape[2], k.shape[2], q.device))
        return AttentionOutput(average(weights, v), weights.to(q.dtype) if need_weights else None)


@register_task("ones")
class Ones(Task):
    """Always the same token."""

    class Config(TaskConfig):
        length: int = 5

    vocab_size = 3

    def __init__(self, config, batch_size):
        super().__init__(config, batch_size)
        self.seq_len = config.length

    def batch(self, split, seed, step):
        tokens = torch.ones(self.batch_size, self.seq_len, dtype=torch.long)
        return Batch(tokens, tokens)
'''


def test_a_plugin_variant_and_task_take_part_and_a_failing_one_ends_with_its_cause(command: Command, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "own.py").write_text(PLUGIN)
    (tmp_path / "mine" / "own.yaml").write_text(
        """\
name: own
plugins: [own.py]
base:
  task: {name: ones, length: 5}
  model: {model_dim: 16, num_layers: 1, num_heads: 2}
  train: {steps: 5, batch_size: 2}
parameters:
  attention.variant: {values: [standard, halved]}
  attention.crash: {values: [false, true], when: {attention.variant: halved}}
seeds: [0, 1]
"""
    )
    done = command("run", "mine/own.yaml")
    assert done.returncode == 1
    assert {row[0] for row in table(done.stdout)[1:]} == {"standard", "halved"}
    line = PLUGIN.splitlines().index('            raise RuntimeError("as asked")') + 1
    assert f"trial 2 seed 0 (halved, crash True): failed: error: RuntimeError: as asked (own.py:{line})" in done.stdout
    assert "log: .experiments/studies/own/logs/0002-0.log" in done.stdout
    assert "a plugin may print" not in done.stdout
    log = tmp_path / ".experiments" / "studies" / "own" / "logs" / "0002-0.log"
    assert "Traceback" in log.read_text()
    assert "RuntimeError: as asked" in log.read_text()
    parent, children, _ = mlflow_runs(tmp_path, "own")
    failed = [run for run in children if run.info.status == "FAILED"]
    assert [(run.data.tags["trial"], run.data.tags["cause"]) for run in failed] == [("2", "error")] * 2
    assert all("as asked" in run.data.tags["message"] for run in failed)
    assert (parent.data.tags["trials_complete"], parent.data.tags["trials_failed"]) == ("2", "1")


def test_a_changed_file_is_refused_with_the_difference_and_new_keeps_the_old(
    command: Command, tiny: Path, tmp_path: Path
) -> None:
    assert command("run", "tiny.yaml", "budget.trials=1", "seeds=[0]").returncode == 0
    before = rows(tmp_path, "SELECT * FROM runs")
    changed = command("run", "tiny.yaml", "budget.trials=1", "seeds=[0]", "base.train.lr=0.1")
    assert changed.returncode == 2
    assert len(changed.stderr.splitlines()) == 1
    assert "base.train.lr: was 0.003, is now 0.1" in changed.stderr
    assert "--new" in changed.stderr
    assert rows(tmp_path, "SELECT * FROM runs") == before
    # Budget, seeds and wider lists may change.
    more = command("run", "tiny.yaml", "budget.trials=2", "seeds=[0, 1]")
    assert more.returncode == 0, more.stderr
    assert rows(tmp_path, "SELECT trial, seed, attempts FROM runs ORDER BY 1, 2") == [(0, 0, 1), (0, 1, 1), (1, 0, 1), (1, 1, 1)]
    begun = command("run", "tiny.yaml", "budget.trials=1", "seeds=[0]", "base.train.lr=0.1", "--new")
    assert begun.returncode == 0
    assert "the earlier study is kept in .experiments/studies/tiny-1" in begun.stdout
    assert (tmp_path / ".experiments/studies/tiny-1/study.db").exists()


LEAKY = '''\
from core import Attention, AttentionOutput, Spec, register
from core.functional import average, masked_softmax, scaled_scores


@register("leaky")
class Leaky(Attention):
    """Sees the future."""

    spec = Spec(causal=True, padding=True, decode=True, convex=True)

    def attend(self, q, k, v, mask, need_weights):
        weights = masked_softmax(scaled_scores(q, k), None)
        return AttentionOutput(average(weights, v), weights.to(q.dtype) if need_weights else None)
'''


def test_a_variant_that_fails_the_contract_does_not_count(command: Command, tmp_path: Path) -> None:
    (tmp_path / "leaky.py").write_text(LEAKY)
    (tmp_path / "tiny.yaml").write_text(
        TINY.replace("name: tiny", "name: tiny\nplugins: [leaky.py]").replace("linear]", "leaky]")
    )
    done = command("run", "tiny.yaml", "seeds=[0]")
    assert done.returncode == 0
    assert "leaky fails" in done.stdout
    assert "no_future_leak" in done.stdout
    found = table(done.stdout)
    assert {row[0]: row[-1] for row in found[1:]} == {"uniform": "", "standard": "", "leaky": "fails the contract"}
    best = done.stdout.split("Best of each variant:")[1].split("Not proven")[0]
    assert "leaky" not in best
    again = command("run", "tiny.yaml", "seeds=[0]")
    assert "checking leaky" not in again.stdout  # once for a version of its code
    assert table(again.stdout) == found

    # Other code under finished runs would put two mechanisms into one table.
    (tmp_path / "leaky.py").write_text(LEAKY.replace("scaled_scores(q, k)", "scaled_scores(q, k, 2.0)"))
    changed = command("run", "tiny.yaml", "seeds=[0]")
    assert changed.returncode == 2
    assert "the code of variant leaky: digest was" in changed.stderr
    assert len(changed.stderr.splitlines()) == 1


def test_a_baseline_that_is_added_later_is_run(command: Command, tmp_path: Path) -> None:
    without = TINY.replace("baseline: [{attention.variant: uniform}]\n", "")
    (tmp_path / "tiny.yaml").write_text(without)
    assert command("run", "tiny.yaml", "seeds=[0]").returncode == 0
    (tmp_path / "tiny.yaml").write_text(without + "baseline: [{attention.variant: uniform}, {attention.variant: linear}]\n")
    done = command("run", "tiny.yaml", "seeds=[0]")
    assert done.returncode == 0, done.stderr
    assert rows(tmp_path, "SELECT kind, COUNT(*) FROM trials GROUP BY kind ORDER BY kind") == [("baseline", 1), ("search", 2)]
    assert "Difference in val/loss from uniform" in done.stdout


def test_constraints_mark_what_does_not_count(command: Command, tiny: Path) -> None:
    done = command("run", "tiny.yaml", "seeds=[0]", "constraints=[{metric: cost/params, max: 10}]")
    assert done.returncode == 0
    assert "No configuration counts" in done.stdout
    assert all("cost/params" in row[-1] for row in table(done.stdout)[1:])


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("objectives=[{metric: val/los}]", "unknown metric 'val/los'; did you mean 'val/loss'?"),
        ("objectives=[{metric: test/loss}]", "a search must not see the test split"),
        ("objectives=[{metric: speed/step_ms}]", "cannot lead the search"),
        ("constraints=[{metric: memory/peak, max: 1}]", "did you mean 'memory/peak_mb'?"),
        ("resources={cpus: 5000}", "this machine has"),
        ("resources={gpus: 2}", "gpus"),
    ],
)
def test_what_cannot_be_kept_is_refused_before_anything_trains(
    override: str, words: str, command: Command, tiny: Path, tmp_path: Path
) -> None:
    done = command("run", "tiny.yaml", override)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert words in line
    assert [file.name for file in tmp_path.iterdir()] == ["tiny.yaml"]


def test_a_study_whose_folder_is_taken_away_says_so(command: Command, tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(STEPPED)
    process = start(tmp_path, "run", "tiny.yaml")
    wait_for(process, "new study")
    while not rows(tmp_path, "SELECT COUNT(*) FROM metrics")[0][0]:
        time.sleep(0.05)
    (tmp_path / ".experiments").rename(tmp_path / "away")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "study.db: was removed or replaced while this study ran" in err
    assert "Traceback" not in err
    shutil.rmtree(tmp_path / ".experiments", ignore_errors=True)  # a worker may have written its checkpoint
    (tmp_path / "away").rename(tmp_path / ".experiments")
    done = command("run", "tiny.yaml")
    assert done.returncode == 0, done.stderr
    assert "going on" in done.stdout


@pytest.mark.parametrize("method", ["random", "tpe"])
def test_a_search_is_the_same_whether_interrupted_or_not(method: str, command: Command, tmp_path: Path) -> None:
    text = TINY.replace("budget: {parallel: 2}", f"method: {method}\nbudget: {{trials: 6}}").replace(
        "parameters:", "parameters:\n  train.lr: {min: 1e-4, max: 1e-1, log: true}\n  model.dropout: {min: 0.0, max: 0.5}"
    )
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    for folder in (whole, halves):
        folder.mkdir()
        (folder / "tiny.yaml").write_text(text)
    assert command("run", "tiny.yaml", "seeds=[0]", folder=whole).returncode == 0
    for trials in (2, 6, 6):  # a total over all invocations: the last one starts none
        assert command("run", "tiny.yaml", "seeds=[0]", "--trials", str(trials), folder=halves).returncode == 0
    query = "SELECT number, assignment, state, value FROM trials ORDER BY number"
    assert rows(whole, query) == rows(halves, query)
    assert len(rows(whole, query)) == 6
    assert len({json.loads(assignment).get("train.lr") for _, assignment, _, _ in rows(whole, query)}) == 6


def test_a_lost_worker_is_tried_again_and_then_named(command: Command, tmp_path: Path) -> None:
    (tmp_path / "gone.py").write_text(PLUGIN.replace('raise RuntimeError("as asked")', "import os; os.kill(os.getpid(), 9)"))
    (tmp_path / "tiny.yaml").write_text(
        TINY.replace("name: tiny", "name: tiny\nplugins: [gone.py]")
        .replace("[standard, linear]", "[halved]")
        .replace("seeds: [0, 1]", "  attention.crash: {values: [true], when: {attention.variant: halved}}\nseeds: [0]")
    )
    done = command("run", "tiny.yaml")
    assert done.returncode == 1
    assert "killed by SIGKILL" in done.stdout
    assert "trying again" in done.stdout
    found = rows(tmp_path, "SELECT state, cause, attempts FROM runs WHERE trial = 1")
    assert found == [("failed", "lost", 2)]


def test_an_objective_that_is_no_number_fails_its_runs_and_not_the_study(command: Command, tmp_path: Path) -> None:
    metrics = """
    def metrics(self, output, batch):
        return {"oddity": (output.sum() * float("nan"), torch.ones(()))}
"""
    (tmp_path / "odd.py").write_text(PLUGIN + metrics)
    (tmp_path / "tiny.yaml").write_text(
        TINY.replace("name: tiny", "name: tiny\nplugins: [odd.py]\nobjectives: [{metric: val/oddity}]").replace(
            "{name: copy, length: 4, vocab: 6}", "{name: ones}"
        )
    )
    done = command("run", "tiny.yaml")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert set(rows(tmp_path, "SELECT state, cause FROM runs")) == {("failed", "diverged")}
    assert "No configuration finished" in done.stdout
    assert rows(tmp_path, "SELECT COUNT(*) FROM metrics WHERE name = 'val/oddity'") == [(0,)]


def test_a_full_time_budget_stops_and_goes_on(command: Command, tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(STEPPED.replace("steps: 400", "steps: 4000"))
    done = command("run", "tiny.yaml", "budget.timeout=4s")
    assert done.returncode in (0, 1)
    assert "the time of this invocation is up" in done.stdout
    assert {"timeout"} == {cause for (cause,) in rows(tmp_path, "SELECT cause FROM runs WHERE state = 'stopped'")}


def test_json_output_is_one_object(command: Command, tiny: Path) -> None:
    done = command("run", "tiny.yaml", "budget.trials=1", "seeds=[0]", "--json")
    assert done.returncode == 0
    found = json.loads(done.stdout)
    assert found["complete"] == 1
    assert found["failed_runs"] == 0
    assert found["mirrored"] is True
