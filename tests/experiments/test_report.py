"""From stored runs to words: what is in the table, what is left out, and what is said of it."""

import csv
import io
import math
import statistics as reference

import pytest

from experiments import report
from experiments.schema import Constraint, Objective
from experiments.store import RunRow, Trial

LOSS = Objective(metric="val/loss", goal="minimize")
ACCURACY = Objective(metric="val/accuracy", goal="maximize")
COSTS = {"memory/peak_mb": 12.34, "speed/tokens_per_s": 45678.9, "cost/flops_per_token": 1234567.0, "cost/params": 8192.0}


class Study:
    """Trials and runs as the store gives them back."""

    def __init__(self):
        self.trials, self.runs = [], []

    def add(self, variant, losses, state="complete", kind="search", heads=4, figures=None, **own):
        number = len(self.trials)
        config = {
            "task": {"name": "copy", "length": 3},
            "model": {"num_heads": heads, "num_kv_heads": None},
            "attention": {"variant": variant, **own},
        }
        self.trials.append(Trial(number, kind, {}, config, f"hash{number}", state, None, 0, 1))
        for seed, loss in enumerate(losses):
            row = {"state": "finished", "cause": None, "message": None, "figures": {}}
            if isinstance(loss, float):
                row["figures"] = {"val/loss": loss, "val/accuracy": 1 - loss, **(COSTS if figures is None else figures)}
            else:
                row |= dict(zip(("state", "cause", "message"), loss, strict=True))
            self.runs.append(RunRow(len(self.runs) + 1, number, seed, **_row(row)))
        return self

    def lines(self, objective=LOSS):
        return report.lines(self.trials, self.runs, objective)

    def summary(self, objective=LOSS, **more):
        return report.summary("heads", self.trials, self.runs, objective, baseline="hash0", folder="studies/heads", **more)

    def comparisons(self, objective=LOSS):
        lines = self.lines(objective)
        return report.comparisons(lines, next((line for line in lines if line.trial.number == 0), None))


def _row(given):
    filled = {"attempts": 1, "lost": 0, "started": 0, "ended": 1, "tags": {}, "version": 1}
    return filled | given


def table_of(summary):
    """The cells of a Markdown table, headings first."""
    rows = [line for line in summary.splitlines() if line.startswith("|")]
    assert set(rows[1]) == {"|", "-"}
    assert len({len(row) for row in rows}) == 1  # readable as plain text too
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in (rows[0], *rows[2:])]


@pytest.fixture
def study():
    made = Study().add("uniform", [0.9, 0.92, 0.91], kind="baseline", heads=1)
    made.add("standard", [0.51, 0.52, 0.53], backend="auto")
    made.add("topk", [0.6, 0.61, 0.9], keep=2)
    made.add("topk", [0.4, 0.41, 0.42], keep=4)
    return made


def test_the_table_is_ordered_by_the_objective(study):
    assert [line.trial.number for line in study.lines()] == [3, 1, 2, 0]
    assert [line.trial.number for line in study.lines(ACCURACY)] == [3, 1, 2, 0]
    assert [line.trial.number for line in study.lines(Objective(metric="val/loss", goal="maximize"))] == [0, 2, 1, 3]
    best = study.lines()[0]
    assert best.values == {0: 0.4, 1: 0.41, 2: 0.42}
    assert best.mean == pytest.approx(0.41)
    assert best.figures["cost/params"] == 8192.0
    assert [line.trial.number for line in report.best_of_each(study.lines())] == [3, 1, 0]


def test_equals_stand_in_the_order_they_were_run():
    made = Study().add("topk", [0.5]).add("standard", [0.5]).add("linear", [0.4])
    assert [line.trial.number for line in made.lines()] == [2, 0, 1]


def test_the_table(study):
    head, *rows = table_of(study.summary())
    assert head == [
        "trial", "variant", "heads", "keep", "val/loss (± sd over seeds)", "n",
        "peak memory MiB", "tokens/s", "FLOPs/token", "parameters",
    ]  # fmt: skip
    sd = reference.stdev([0.4, 0.41, 0.42])
    assert rows[0] == ["3", "topk", "4", "4", f"0.4100 ± {sd:.4f}", "3", "12.3", "45,679", "1,234,567", "8,192"]
    assert [row[1:4] for row in rows] == [["topk", "4", "4"], ["standard", "4", "-"], ["topk", "4", "2"], ["uniform", "1", "-"]]


def test_what_is_unknown_stays_unknown():
    made = Study().add("standard", [0.5], figures={"cost/params": 10.0})
    assert table_of(made.summary())[1] == ["0", "standard", "4", "0.5000", "1", "unknown", "unknown", "unknown", "10"]
    assert report.number(None, 2) == "unknown"
    assert report.number(0.0, 1) == "0.0"
    assert report.text(None) == "none"


def test_failed_trials_are_left_out_and_listed(study):
    study.add("linear", [0.1, ("failed", "oom", "RuntimeError: no room"), 0.1], state="failed")
    study.add("local_global", [("failed", "lost", "the worker was killed by SIGKILL")], state="failed")
    study.add("temperature", [0.01, ("waiting", None, None)], state="running")
    text = study.summary()
    assert [row[1] for row in table_of(text)[1:]] == ["topk", "standard", "topk", "uniform"]
    assert "- trial 4 seed 1 (base): oom: RuntimeError: no room\n  log: studies/heads/logs/0004-1.log\n" in text
    assert "- trial 5 seed 0 (base): lost: the worker was killed by SIGKILL\n" in text
    assert "trial 6" not in text
    assert text.startswith(
        "# heads\n\n15 of 18 runs have finished, 4 of 7 trials are complete.\n\n"
        "Best val/loss: 0.4100 (trial 3: attention.variant topk, model.num_heads 4, attention.keep 4; 3 seeds).\n"
    )


def test_a_study_without_a_result_says_so():
    text = Study().add("standard", [("failed", "diverged", "the loss is nan")], state="failed").summary()
    assert "No configuration finished." in text
    assert "- trial 0 seed 0 (base): diverged: the loss is nan" in text
    assert "Best" not in text
    assert "No configuration finished." in Study().summary()


def test_comparisons_with_the_baseline_by_hand(study):
    found = study.comparisons()
    assert [(each.line.trial.number, each.baseline.trial.number) for each in found] == [(3, 0), (1, 0)]
    differences = [0.4 - 0.9, 0.41 - 0.92, 0.42 - 0.91]
    mean, sd = sum(differences) / 3, reference.stdev(differences)
    p = 1 - 0.05 / (2 * 3)  # three configurations could have been compared
    half = (2 * p - 1) / math.sqrt(2 * p * (1 - p)) * sd / math.sqrt(3)  # t of 2 degrees in closed form
    assert found[0].difference.mean == pytest.approx(mean)
    assert found[0].difference.low == pytest.approx(mean - half, abs=1e-6)
    assert found[0].difference.high == pytest.approx(mean + half, abs=1e-6)
    text = study.summary()
    assert "Difference in val/loss from uniform, best of each variant:" in text
    assert f"- topk (trial 3): {mean:+.4f} [{mean - half:+.4f}, {mean + half:+.4f}]: better than uniform\n" in text


def sentences(study, objective=LOSS):
    return [report.sentence(each, objective) for each in study.comparisons(objective)]


def test_verdicts_in_words():
    made = Study().add("uniform", [0.5, 0.6, 0.7], kind="baseline")
    made.add("linear", [0.8, 0.901, 1.0]).add("topk", [0.2, 0.301, 0.4]).add("standard", [0.5, 0.9, 0.4])
    found = {sentence.split()[0]: sentence for sentence in sentences(made)}
    assert found["topk"].endswith(": better than uniform")
    assert found["linear"].endswith(": worse than uniform")
    assert found["standard"].endswith(": not distinguishable from uniform with 3 seeds")
    found = {sentence.split()[0]: sentence for sentence in sentences(made, ACCURACY)}
    assert found["topk"].endswith(": better than uniform")
    assert found["linear"].endswith(": worse than uniform")


def test_only_shared_seeds_are_compared():
    made = Study().add("uniform", [0.5, 0.6, 0.7, 0.8], kind="baseline").add("topk", [0.1, 0.2])
    assert sentences(made) == ["topk (trial 1): -0.4000 against uniform; 2 shared seeds are too few to tell"]
    assert "Too few seeds" not in made.summary()
    few = Study().add("uniform", [0.5], kind="baseline").add("topk", [0.1])
    assert "Too few seeds (1) to tell a difference from noise; give at least 3." in few.summary()


def test_without_a_baseline_nothing_is_compared():
    made = Study().add("uniform", [0.5, 0.6, 0.7]).add("topk", [0.1, 0.2, 0.3])
    assert report.comparisons(made.lines(), None) == []
    assert "Difference in" not in report.summary("heads", made.trials, made.runs, LOSS)
    failed = Study().add("uniform", [("failed", "oom", "x")], kind="baseline", state="failed").add("topk", [0.1, 0.2, 0.3])
    assert failed.comparisons() == []


def test_a_baseline_of_the_swept_variant_is_compared_too():
    made = Study().add("topk", [0.5, 0.6, 0.7], kind="baseline", keep=1).add("topk", [0.1, 0.2, 0.31], keep=2)
    assert [each.line.trial.number for each in made.comparisons()] == [1]


def test_what_could_be_as_good_as_the_best(study):
    study.add("linear", [0.39, 0.43, 0.42])
    text = study.summary()
    assert "Not distinguishable from it with these seeds: " in text
    (alike,) = [line for line in text.splitlines() if line.startswith("Not distinguishable from it")]
    assert "4" in alike.split("trials ")[1]
    assert "0" not in alike.split("trials ")[1]
    alone = Study().add("uniform", [0.9, 0.92, 0.91]).add("topk", [0.4, 0.41, 0.42])
    assert "It is distinguishable from every other." in alone.summary()


def test_what_breaks_a_constraint_or_the_contract_does_not_count(study):
    tight = [Constraint(metric="memory/peak_mb", max=12.0)]
    study.trials[1].config["model"]["num_heads"] = 4
    cheap = {**COSTS, "memory/peak_mb": 11.0}
    study.add("linear", [0.55, 0.56, 0.57], figures=cheap).add("leaky", [0.1, 0.1, 0.1], figures=cheap)
    text = study.summary(constraints=tight, unproven={"leaky": "no_future_leak: token 1 moves row 0"})
    assert "Best val/loss: 0.5600 (trial 4:" in text
    last = {row[0]: row[-1] for row in table_of(text)[1:]}
    assert last["4"] == ""
    assert last["5"] == "fails the contract"
    assert last["3"] == "memory/peak_mb 12.34 > 12"
    assert "- leaky: no_future_leak: token 1 moves row 0" in text
    unknown = [Constraint(metric="memory/state_bytes", max=12.0)]
    assert "memory/state_bytes unknown" in study.summary(constraints=unknown)
    assert "No configuration counts" in study.summary(constraints=unknown)


def test_it_says_what_it_cannot_tell(study):
    text = study.summary()
    assert "What it cannot tell" in text
    assert "± is the standard deviation over seeds" in text


def test_every_run_is_in_the_table_of_runs(study):
    study.add("linear", [0.3, ("failed", "error", 'ValueError: "a", b')], state="failed", kernel=[1, 2])
    rows = list(csv.DictReader(io.StringIO(report.trials_csv(study.runs, study.trials))))
    assert len(rows) == 14
    first, last = rows[0], rows[-1]
    assert (first["trial"], first["seed"], first["kind"], first["state"], first["config_hash"]) == (
        "0",
        "0",
        "baseline",
        "finished",
        "hash0",
    )
    assert (first["attention.variant"], first["model.num_heads"], first["attention.keep"]) == ("uniform", "1", "")
    assert float(first["val/loss"]) == 0.9
    assert float(first["cost/params"]) == 8192.0
    assert (last["state"], last["cause"], last["val/loss"], last["attention.kernel"]) == ("failed", "error", "", "[1, 2]")


def test_columns_for_a_terminal():
    rows = [["trial", "configuration", "n"], ["0", "topk, keep 4", "1,000"], ["10", "x", "5"]]
    assert report.aligned(rows) == [
        "trial  configuration      n",
        "0      topk, keep 4   1,000",
        "10     x                  5",
    ]
