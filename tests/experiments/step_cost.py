"""What a training step of this project costs beside a plain loop of the same model: `python -m tests.experiments.step_cost`.

The loops take turns of BLOCK steps, on the setting of sweeps/shakespeare.yaml. The project's loop tells everything to a driver in
a process of its own, which writes the store and the MLflow mirror, as in a run. With --nanogpt DIR a third takes part: the
unchanged train.py of a checkout of nanoGPT whose data/shakespeare_char is prepared, in a process that is stopped between its
turns; its seconds are those that it prints.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import variants  # noqa: F401
from experiments import config
from experiments.config import Event
from experiments.model import build_model
from experiments.tasks import tasks
from experiments.train import Trainer

BLOCK = 25
DIM, LAYERS, HEADS, LENGTH, BATCH = 128, 4, 4, 64, 12


class PlainBlock(nn.Module):
    """A pre-norm block, written directly."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM, bias=False), nn.LayerNorm(DIM, bias=False)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.up, self.down = nn.Linear(DIM, 4 * DIM, bias=False), nn.Linear(4 * DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        B, L, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(B, L, 3, HEADS, DIM // HEADS).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(B, L, DIM))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class PlainModel(nn.Module):
    """The same decoder, written directly."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(vocab_size, DIM), nn.Embedding(LENGTH, DIM)
        self.blocks = nn.ModuleList(PlainBlock() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(DIM, bias=False), nn.Linear(DIM, vocab_size, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def plain_step(stream: Tensor, vocab_size: int) -> Callable[[], None]:
    """One step of the plain loop: batch, forward, backward, clipping, schedule, fused AdamW."""
    model = PlainModel(vocab_size)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.02)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99), fused=True)
    done = 0

    def step() -> None:
        nonlocal done
        for group in optimizer.param_groups:
            group["lr"] = 1e-4 + 0.5 * 9e-4 * (1 + math.cos(math.pi * min(1.0, done / 2000)))
        starts = torch.randint(len(stream) - LENGTH, (BATCH,))
        windows = stream[starts[:, None] + torch.arange(LENGTH + 1)]
        logits = model(windows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        done += 1

    return step


def driver(connection: Connection, folder: str, run: config.Run) -> None:
    """Store what comes, and mirror it to MLflow."""
    from experiments.store import Store
    from experiments.tracking import Mirror, default_target

    home = Path(folder)
    store = Store(home / "studies" / "cost")
    for key, value in {"name": "cost", "started": 0, "sweep": "", "state": "running"}.items():
        store.set_meta(key, value)
    store.set_meta("identity", {"base": run.model_dump(), "objectives": [{"metric": "val/loss", "goal": "minimize"}]})
    mirror = Mirror(store.path, home, default_target(home), "cost", print)
    store.add_trial("search", {}, run.model_dump(), run.hash(), [0])
    store.start_run(1)
    mirror.flush(60)
    connection.send("ready")
    while (event := connection.recv()) is not None:
        store.add_metrics(1, event["step"], event["time"], event["values"])
        mirror.wake()
    connection.send(mirror.close(60))
    store.close()


class NanoGPT:
    """Its training script, which prints the milliseconds of every step."""

    def __init__(self, folder: Path, threads: int) -> None:
        command = [
            sys.executable, "-W", "ignore", "train.py", "config/train_shakespeare_char.py", "--device=cpu", "--compile=False",
            "--eval_iters=1", "--eval_interval=1000000", "--log_interval=1", f"--block_size={LENGTH}", f"--batch_size={BATCH}",
            f"--n_layer={LAYERS}", f"--n_head={HEADS}", f"--n_embd={DIM}", "--max_iters=1000000", "--lr_decay_iters=2000",
            "--dropout=0.0",
        ]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)
        self.steps(1)

    def steps(self, count: int) -> list[float]:
        """Seconds of so many steps; it stands still before and after."""
        self.process.send_signal(signal.SIGCONT)
        assert self.process.stdout is not None
        found: list[float] = []
        # What it has printed while it was being stopped, and the step in which it stood still, do not count.
        while len(found) < count + 3:
            line = self.process.stdout.readline()
            assert line, f"nanoGPT's script ended with {self.process.wait()}"
            match = re.match(r"iter \d+: .* time ([\d.]+)ms", line)
            if match:
                found.append(float(match[1]) / 1e3)
        self.process.send_signal(signal.SIGSTOP)
        return found[3:]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def measure(corpus: str, rounds: int, threads: int = 1, nanogpt: Path | None = None) -> dict[str, Any]:
    """Median milliseconds of a step of each loop, and the project's ratio to the others, turn by turn."""
    torch.set_num_threads(threads)
    cls = tasks.get("text")
    settings = {"corpus": corpus, "seq_len": LENGTH, "split": [0.9, 0.1, 0.0]}
    task = cls(cls.Config(**settings), BATCH)
    run = config.Run(
        task={"name": "text", **settings},
        model=config.Model(model_dim=DIM, num_layers=LAYERS, num_heads=HEADS, bias=False, tied=True),
        attention={"variant": "standard", "backend": "auto", "chunk_size": None},
        train=config.Train(steps=10**6, batch_size=BATCH, lr=1e-3, min_lr=1e-4, warmup_steps=100),
    )
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    with tempfile.TemporaryDirectory() as folder:
        process = multiprocessing.get_context("spawn").Process(target=driver, args=(theirs, folder, run))
        process.start()
        assert ours.recv() == "ready"

        def tell(step: int, when: int, values: dict[str, float]) -> None:
            ours.send(Event(type="metrics", key="0/0", time=when, step=step, values=values))

        trainer = Trainer(run, task, build_model(run, task, 0), 0, torch.device("cpu"), tell, full=False)
        plain = plain_step(task.streams["train"], task.vocab_size)
        other = None if nanogpt is None else NanoGPT(nanogpt, threads)
        turns: dict[str, Callable[[], float]] = {"plain": lambda: timed(plain), "project": lambda: timed(trainer.advance)}
        if other is not None:
            turns["nanogpt"] = lambda: statistics.fmean(other.steps(BLOCK))
        seconds: dict[str, list[float]] = {name: [] for name in turns}
        for turn in range(rounds + 1):
            for name, take in turns.items():
                took = take()
                if turn:  # the first turn warms up
                    seconds[name].append(took)
        if other is not None:
            other.close()
        ours.send(None)
        mirrored = ours.recv()
        process.join()
    found: dict[str, Any] = {"mirrored": mirrored, "ms": {name: 1e3 * statistics.median(each) for name, each in seconds.items()}}
    for name in seconds.keys() - {"project"}:
        ratios = [ours_ / theirs_ for theirs_, ours_ in zip(seconds[name], seconds["project"], strict=True)]
        found[name] = statistics.quantiles(ratios, n=4)
    return found


def timed(step: Callable[[], None]) -> float:
    """Seconds of a step, over BLOCK of them."""
    start = time.perf_counter()
    for _ in range(BLOCK):
        step()
    return (time.perf_counter() - start) / BLOCK


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", default="python-docs")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--nanogpt", type=Path, help="a checkout whose data/shakespeare_char is prepared")
    arguments = parser.parse_args()
    found = measure(arguments.corpus, arguments.rounds, arguments.threads, arguments.nanogpt)
    print(f"torch {torch.__version__}, {arguments.threads} threads, {arguments.rounds} turns of {BLOCK} steps")
    for name, milliseconds in found["ms"].items():
        against = ""
        if name != "project":
            low, middle, high = found[name]
            against = f"; this project is {middle:.3f} of it (quartiles {low:.3f} to {high:.3f})"
        print(f"{name}: {milliseconds:.2f} ms a step{against}")
