"""One job in this process: what it says when it ends well, and when it does not."""

import gc
import os
import sys
import weakref

import pytest
import torch

from experiments import worker
from experiments.config import Job
from experiments.train import DivergedError
from experiments.worker import name_cause, run_job
from tests.experiments.small import run_of


def events_of(job, stop=lambda: False):
    events = []
    run_job(job, events.append, stop)
    return events


def raised(error, place=True):
    try:
        raise error
    except BaseException as caught:
        return name_cause(caught)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        MemoryError(),
        MemoryError("no room"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried to allocate 4 bytes."),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("hipErrorOutOfMemory: Out Of Memory"),
    ],
)
def test_out_of_memory_is_known(error):
    cause, message = raised(error)
    assert cause == "oom"
    assert message.startswith(type(error).__name__)


def test_real_exhaustion_is_known():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert name_cause(caught.value)[0] == "oom"


def test_divergence_is_known():
    assert raised(DivergedError("the loss is nan")) == ("diverged", "the loss is nan")


def test_another_error_names_its_place_in_one_line():
    cause, message = raised(ValueError("first\n  second"))
    assert cause == "error"
    assert message.startswith("ValueError: first second (test_worker.py:")
    assert raised(KeyError("out of memory"))[0] == "error"  # a word alone is no cause
    assert raised(SystemExit(3)) == ("error", raised(SystemExit(3))[1])
    assert raised(SystemExit(3))[1].startswith("SystemExit: 3 (test_worker.py:")
    assert name_cause(ValueError("x")) == ("error", "ValueError: x")


def test_a_message_is_text_whatever_it_names():
    _, message = raised(OSError("cannot read \udcff"))
    assert message.encode().startswith(b"OSError: cannot read ")


def test_a_run_from_start_to_end(tmp_path):
    run = run_of(train={"steps": 6, "log_every": 2, "eval_every": 3})
    path = tmp_path / "checkpoints" / "r.pt"
    events = events_of(Job("4/1", "train", (run,), seed=1, checkpoint=str(path)))
    assert {event["key"] for event in events} == {"4/1"}
    assert [event["type"] for event in events] == ["begin"] + ["metrics"] * (len(events) - 3) + ["info", "end"]
    times = [event["time"] for event in events]
    assert times == sorted(times)
    end = events[-1]
    assert (end["state"], end["cause"], end["message"]) == ("finished", None, None)
    expected = {
        "val/loss", "val/perplexity", "val/accuracy", "test/loss", "test/perplexity", "test/accuracy", "memory/peak_mb",
        "memory/state_bytes", "cost/flops_per_token", "cost/params", "attention/entropy", "attention/density", "attention/span",
    }  # fmt: skip
    assert end["values"].keys() == expected
    assert end["values"]["memory/state_bytes"] == 2 * 6 * 8 * 4 * 2
    series = {}
    for event in events[1:-2]:
        for name, value in event["values"].items():
            series.setdefault(name, []).append((event["step"], value))
    assert [step for step, _ in series["train/loss"]] == [2, 4, 6]
    assert [step for step, _ in series["val/loss"]] == [3, 6, 6]
    assert series["val/loss"][-1][1] == end["values"]["val/loss"]
    assert {name for name in series if name.startswith("test/")} == {"test/loss", "test/perplexity", "test/accuracy"}
    tags = events[-2]["tags"]
    assert tags["device"].startswith("cpu: ")
    assert (tags["threads"], tags["backend"], tags["torch"]) == ("1", "sdpa", torch.__version__)
    assert tags["compiled"] == "no"
    assert torch.load(path, weights_only=True).keys() >= {"model", "identity", "step"}


def test_two_variants_report_the_same_order_of_data():
    digests = {
        next(
            event["tags"] for event in events_of(Job("0/0", "train", (run_of({"variant": variant}),))) if event["type"] == "info"
        )["data_order_digest"]
        for variant in ("standard", "linear")
    }
    assert len(digests) == 1


def test_the_same_job_comes_to_the_same_figures():
    ends = [events_of(Job("0/0", "train", (run_of(model={"dropout": 0.2}),), seed=3))[-1]["values"] for _ in range(2)]
    assert ends[0] == ends[1]
    assert events_of(Job("0/0", "train", (run_of(model={"dropout": 0.2}),), seed=4))[-1]["values"] != ends[0]


def test_a_stop_writes_a_checkpoint_that_is_gone_on_from(tmp_path):
    run = run_of(train={"steps": 8, "log_every": 1})
    path = str(tmp_path / "r.pt")
    asked = iter([False] * 5 + [True])
    first = events_of(Job("0/0", "train", (run,), checkpoint=path), lambda: next(asked))
    assert (first[-1]["state"], first[-1]["cause"]) == ("stopped", "stopped")
    assert first[-1]["message"] == "stopped after step 5 of 8"
    second = events_of(Job("0/0", "train", (run,), checkpoint=path))
    # What the driver was told before is told again, as it was told: it may have died before it stored it.
    told = [event for event in second if event["type"] == "metrics"]
    before = [event for event in first if event["type"] == "metrics"]
    assert told[: len(before)] == before
    assert [event["step"] for event in told if "train/loss" in event["values"]] == list(range(1, 9))
    whole = events_of(Job("0/0", "train", (run,)))
    assert second[-1]["values"] == whole[-1]["values"]


VARIANT = """
import sys
import torch
from core import Attention, AttentionConfig, AttentionOutput, Mask, Spec, register

@register("{name}")
class Plugin(Attention):
    spec = Spec(causal=True, padding=True, pairs=True, cross=True, decode=True)

    def attend(self, q, k, v, mask, need_weights):
        {body}
"""


def plugin_of(folder, name, body):
    path = folder / f"{name}.py"
    path.write_text(VARIANT.format(name=name, body=body))
    return Job("1/0", "train", (run_of({"variant": name}),), plugins=(str(path),))


@pytest.mark.parametrize(
    ("name", "body", "cause", "words"),
    [
        ("raising", "raise ValueError('cannot do this')", "error", "ValueError: cannot do this (raising.py:11)"),
        ("leaving", "sys.exit('bye')", "error", "SystemExit: bye (leaving.py:11)"),
        ("swelling", "return torch.empty(2**60)", "oom", "RuntimeError: "),
        ("doubtful", "return AttentionOutput(v / 0.0 * 0.0, None)", "diverged", "the training loss is nan at step 1 of 6"),
        ("unmasked", "return AttentionOutput(v[..., :1], None)", "error", "Error: "),
        ("silent", "return None", "error", "TypeError: "),
    ],
)
def test_a_plugin_that_fails_ends_its_run_with_a_cause(tmp_path, capfd, name, body, cause, words):
    end = events_of(plugin_of(tmp_path, name, body))[-1]
    assert (end["type"], end["state"], end["cause"]) == ("end", "failed", cause)
    assert words in end["message"]
    assert "\n" not in end["message"]
    assert "Traceback" in capfd.readouterr().err  # for the log of the run


@pytest.mark.parametrize(
    ("body", "words"),
    [("import nothing_of_this_name", "ModuleNotFoundError"), ("raise SystemExit(3)", "SystemExit 3"), ("x = (", "SyntaxError")],
)
def test_a_plugin_that_cannot_be_imported_ends_its_run_with_a_cause(tmp_path, capfd, body, words):
    path = tmp_path / "broken.py"
    path.write_text(body)
    [end] = events_of(Job("1/0", "train", (run_of(),), plugins=(str(path),)))
    assert (end["state"], end["cause"]) == ("failed", "error")
    assert words in end["message"]


def test_a_failed_run_holds_no_memory(tmp_path, capfd):
    """B7: the traceback keeps the tensors of the failed step alive until it is dropped."""
    job = plugin_of(tmp_path, "hoarding", "q.held = sys.modules['held_here'].append(q) or 1 / 0")
    held = []

    class Held:
        @staticmethod
        def append(tensor):
            held.append(weakref.ref(tensor))

    sys.modules["held_here"] = Held
    gc.disable()  # nothing else shall clean up in between
    try:
        alive = []
        # When the driver hears of the end, it may start the next run.
        run_job(job, lambda event: alive.append((event["state"], held[0]() is not None)), lambda: False)
        assert alive == [("failed", False)]
    finally:
        gc.enable()
        del sys.modules["held_here"]


def test_speed_is_measured_in_turns(monkeypatch):
    runs = tuple(run_of({"variant": variant}, train={"batch_size": 4, "accumulate": 2}) for variant in ("standard", "linear"))
    asked = []

    def seconds(run, task, device):
        asked.append(run.attention["variant"])
        return {"standard": [0.5, 0.1, 0.2], "linear": [0.4, 0.4, 9.0]}[asked[-1]][asked.count(asked[-1]) - 1]

    monkeypatch.setattr(worker, "_step_seconds", seconds)
    *told, end = events_of(Job("speed", "speed", runs))
    figures = [event for event in told if event["type"] == "metrics"]
    progress = [event["tags"] for event in told if event["type"] == "info"]
    assert progress == [{"done": str(done), "of": "6"} for done in range(6)]
    assert asked == ["standard", "linear"] * 3
    assert [event["step"] for event in figures] == [0, 1]
    tokens = 4 * 2 * 6
    assert figures[0]["values"] == {"speed/step_ms": 200.0, "speed/tokens_per_s": tokens / 0.2}  # medians
    assert figures[1]["values"] == {"speed/step_ms": 400.0, "speed/tokens_per_s": tokens / 0.4}
    assert (end["state"], end["values"]) == ("finished", {})


def test_real_steps_take_time():
    *told, end = events_of(Job("speed", "speed", (run_of(), run_of({"variant": "uniform"}))))
    assert end["state"] == "finished"
    figures = [event for event in told if event["type"] == "metrics"]
    assert len(figures) == 2
    for event in figures:
        assert 0.1 < event["values"]["speed/step_ms"] < 1000


def test_the_measurement_of_speed_can_be_stopped():
    assert events_of(Job("speed", "speed", (run_of(),)), lambda: True)[-1]["state"] == "stopped"


def test_one_configuration_without_speed_takes_none_from_the_others(monkeypatch):
    runs = tuple(run_of({"variant": variant}) for variant in ("standard", "linear"))

    def seconds(run, task, device):
        if run.attention["variant"] == "standard":
            raise MemoryError("no room")
        return 0.5

    monkeypatch.setattr(worker, "_step_seconds", seconds)
    told = events_of(Job("speed", "speed", runs))
    assert [event["step"] for event in told if event["type"] == "metrics"] == [1]
    assert told[-1]["state"] == "failed"
    assert "no room" in told[-1]["message"]


def test_a_full_disk_is_no_failure_of_the_run(monkeypatch):
    def full(self):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(worker.Trainer, "fit", full)
    end = events_of(Job("0/0", "train", (run_of(),)))[-1]
    assert (end["state"], end["cause"]) == ("stopped", "disk")


def test_a_probe_costs_three_steps():
    found = worker.probe(run_of(), torch.device("cpu"))
    assert found.keys() == {"cost/flops_per_token", "cost/params", "memory/peak_mb", "speed/step_ms"}
    end = events_of(Job("0/0", "train", (run_of(),)))[-1]["values"]
    assert all(found[name] == end[name] for name in ("cost/flops_per_token", "cost/params"))
    assert found["memory/peak_mb"] == pytest.approx(end["memory/peak_mb"], rel=0.01)


def test_gpus_are_dealt_by_the_environment(monkeypatch):
    monkeypatch.setitem(os.environ, "CUDA_VISIBLE_DEVICES", "7")
    worker.choose_gpus(Job("a", "train", ()))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "7"
    worker.choose_gpus(Job("a", "train", (), gpus=("2", "GPU-3")))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,GPU-3"
    worker.choose_gpus(Job("a", "train", (), gpus=()))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # inductor's own, while it is imported
def test_a_compiled_run_comes_to_what_an_eager_one_does_and_is_recorded():
    attention = {"variant": "topk", "keep": 2, "temperature": 1.0}
    results = []
    for compiled in (False, True):
        events = events_of(Job("0/0", "train", (run_of(attention, train={"compile": compiled}),)))
        assert events[-1]["state"] == "finished", events[-1]["message"]
        assert events[-2]["tags"]["compiled"] == ("the whole model" if compiled else "no")
        results.append(events[-1]["values"])
    assert results[1]["val/loss"] == pytest.approx(results[0]["val/loss"], rel=1e-4)
    assert results[1].keys() == results[0].keys()


def test_what_does_not_compile_whole_is_an_error_and_not_run_in_part():
    events = events_of(Job("0/0", "train", (run_of({"variant": "entmax"}, train={"compile": True}),)))
    assert (events[-1]["state"], events[-1]["cause"]) == ("failed", "error")
    assert events[-1]["message"].startswith("train.compile: this model does not compile whole: ")
