"""One Job, from start to end, in a process of its own: build, train, measure, and name the cause of a failure."""

from __future__ import annotations

import errno
import gc
import os
import platform
import statistics
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

import variants  # noqa: F401  registers the house's own
from core import Attention
from core.registry import load_plugin, make_config
from experiments import config, measure
from experiments.config import Event, Job
from experiments.model import build_model
from experiments.tasks import Task, tasks
from experiments.train import DivergedError, StoppedError, Trainer

Send = Callable[[Event], None]
Stop = Callable[[], bool]

_NO_MEMORY = ("out of memory", "not enough memory", "can't allocate memory")  # CUDA; the CPU's allocator on Windows, elsewhere
SPEED_ROUNDS = 3
SPEED_WARMUP = 2
SPEED_STEPS = 3


def now() -> int:
    """Milliseconds since 1970."""
    return time.time_ns() // 1_000_000


def run_job(job: Job, send: Send, stop: Stop) -> None:
    """Do the job; whatever happens inside becomes an "end" event with a cause."""
    try:
        torch.set_num_threads(job.threads)
        for plugin in job.plugins:
            load_plugin(plugin)
        device = torch.device(job.device)
        if job.kind == "train":
            values = _train(job, device, send, stop)
            send(Event(type="end", key=job.key, time=now(), state="finished", cause=None, message=None, values=values))
        else:
            _speed(job, device, send, stop)
            send(Event(type="end", key=job.key, time=now(), state="finished", cause=None, message=None, values={}))
    except StoppedError as error:
        send(Event(type="end", key=job.key, time=now(), state="stopped", cause="stopped", message=str(error), values={}))
    except (Exception, SystemExit) as error:
        cause, message = name_cause(error)
        state = "stopped" if cause == "disk" else "failed"  # room can be made, and the run goes on
        traceback.print_exc()  # goes to the log of the run
        # The traceback keeps every tensor of the failed step alive.
        error.__traceback__ = None
        gc.collect()
        send(Event(type="end", key=job.key, time=now(), state=state, cause=cause, message=message, values={}))


def name_cause(error: BaseException) -> tuple[str, str]:
    """(cause, one line): oom, diverged, disk (it is full), or error with the place in the code where it was raised."""
    # A message may name a file in bytes that are no text, and what is stored must be text.
    line = " ".join(f"{type(error).__name__}: {error}".split()).encode(errors="replace").decode()
    if isinstance(error, DivergedError):
        return "diverged", str(error)
    words = str(error).lower()
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and any(each in words for each in _NO_MEMORY)
    ):
        return "oom", line
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "disk", line
    if type(error).__module__.startswith("torch._dynamo"):
        line = f"train.compile: this model does not compile whole: {line.partition(' Explanation:')[0]}"
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return "error", line + place


def make_task(run: config.Run) -> Task:
    """The task of a resolved configuration."""
    cls = tasks.get(run.task["name"])
    settings = {key: value for key, value in run.task.items() if key != "name"}
    return cls(make_config(cls, settings), run.train.batch_size)


def compile_whole(run: config.Run, model: torch.nn.Module) -> None:
    """torch.compile, where the run asks for it: all of the model or an error, never a part of it without a word."""
    if run.train.compile:
        torch.compiler.reset()  # the speed pass compiles many models in one process, and torch keeps 8 of one code
        model.compile(fullgraph=True)


def _train(job: Job, device: torch.device, send: Send, stop: Stop) -> dict[str, float]:
    run = job.runs[0]
    task = make_task(run)
    model = build_model(run, task, job.seed, device)

    def record(step: int, when: int, values: dict[str, float]) -> None:
        send(Event(type="metrics", key=job.key, time=when, step=step, values=values))

    checkpoint = None if job.checkpoint is None else Path(job.checkpoint)
    trainer = Trainer(run, task, model, job.seed, device, record, checkpoint, stop)
    with trainer.autocast():
        operations = measure.flops_per_token(model, task, trainer.batch("train", 0))
    compile_whole(run, model)
    send(Event(type="begin", key=job.key, time=now()))
    figures = trainer.fit()
    figures |= trainer.evaluate("test")
    tags = _tags(job, task, trainer, model)  # before the weights are asked for, which takes the plain path
    figures["cost/flops_per_token"] = operations
    figures["cost/params"] = measure.parameters(model)
    if trainer.peak_bytes is not None:
        figures["memory/peak_mb"] = trainer.peak_bytes / measure.MIB
    state_bytes = measure.decode_state_bytes(model, task.seq_len, trainer.dtype)
    if state_bytes is not None:
        figures["memory/state_bytes"] = state_bytes
    model.eval()
    with trainer.autocast():
        figures |= measure.attention_figures(model, trainer.batch("val", 0))
    record(run.train.steps, now(), figures)
    trainer.save_weights()
    send(Event(type="info", key=job.key, time=now(), tags=tags))
    return figures


def _tags(job: Job, task: Task, trainer: Trainer, model: torch.nn.Module) -> dict[str, str]:
    backends = sorted({m.backend_used for m in model.modules() if isinstance(m, Attention) and m.backend_used})
    name = torch.cuda.get_device_name() if trainer.device.type == "cuda" else _processor()
    return {
        "device": f"{trainer.device.type}: {name}",
        "threads": str(job.threads),
        "backend": ", ".join(backends) or "unknown",
        "compiled": "the whole model" if trainer.train.compile else "no",
        "torch": torch.__version__,
        "data_digest": str(task.describe().get("digest", "generated")),
        "data_order_digest": trainer.order,
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _speed(job: Job, device: torch.device, send: Send, stop: Stop) -> None:
    """Seconds of a training step of each configuration, alone on the machine and in turns, so that a drift meets all."""
    made: dict[str, Task] = {}
    for run in job.runs:
        made.setdefault(_task_key(run), make_task(run))
    measured: list[list[float]] = [[] for _ in job.runs]
    unknown: dict[int, str] = {}
    for turn in range(SPEED_ROUNDS):
        for index, run in enumerate(job.runs):
            done = {"done": str(turn * len(job.runs) + index), "of": str(SPEED_ROUNDS * len(job.runs))}
            send(Event(type="info", key=job.key, time=now(), tags=done))
            if stop():
                raise StoppedError("stopped while speed was measured")
            if index in unknown:
                continue
            try:
                measured[index].append(_step_seconds(run, made[_task_key(run)], device))
            except Exception as error:  # one that cannot be measured takes no figure from the others
                unknown[index] = name_cause(error)[1]
                error.__traceback__ = None
                gc.collect()
    for index, run in enumerate(job.runs):
        if index in unknown:
            continue
        step_seconds = statistics.median(measured[index])
        tokens = run.train.batch_size * run.train.accumulate * made[_task_key(run)].seq_len
        values = {"speed/step_ms": step_seconds * 1e3, "speed/tokens_per_s": tokens / step_seconds}
        send(Event(type="metrics", key=job.key, time=now(), step=index, values=values))
    if unknown:
        raise RuntimeError("; ".join(f"configuration {job.runs[index].hash()}: {why}" for index, why in unknown.items()))


def _task_key(run: config.Run) -> str:
    return config.digest([run.task, run.train.batch_size])


def _step_seconds(run: config.Run, task: Task, device: torch.device) -> float:
    model = build_model(run, task, 0, device)
    trainer = Trainer(run, task, model, 0, device, lambda step, when, values: None, full=False)
    compile_whole(run, model)
    for _ in range(SPEED_WARMUP):
        trainer.advance()
    return statistics.median(measure.seconds(device, trainer.advance) for _ in range(SPEED_STEPS))


def probe(run: config.Run, device: torch.device) -> dict[str, float]:
    """What one configuration costs, from three real steps: memory/peak_mb, cost/*, speed/step_ms (beside other work)."""
    task = make_task(run)
    model = build_model(run, task, 0, device)
    trainer = Trainer(run, task, model, 0, device, lambda step, when, values: None)
    figures: dict[str, float] = {"cost/params": measure.parameters(model)}
    with trainer.autocast():
        figures["cost/flops_per_token"] = measure.flops_per_token(model, task, trainer.batch("train", 0))
    trainer.advance()
    trainer.advance()
    if trainer.peak_bytes is not None:
        figures["memory/peak_mb"] = trainer.peak_bytes / measure.MIB
    figures["speed/step_ms"] = min(measure.seconds(device, trainer.advance) for _ in range(2)) * 1e3
    return figures


def choose_gpus(job: Job) -> None:
    """Before torch touches a device: the GPUs of this job."""
    if job.gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(job.gpus)
