"""A run as data: its task, model, attention and training, and the hash that names it. No torch here."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any, Literal, Required, TypedDict

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Strict(BaseModel):
    """No conversion between types, no unknown key, no NaN, no change after it is made."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)


class ModelSettings(Strict):
    """A pre-norm transformer: widths, depth, heads and positions."""

    model_dim: int = Field(64, ge=1, description="width C of the residual stream")
    num_layers: int = Field(2, ge=1)
    num_heads: int = Field(4, ge=1, description="query heads; must divide model_dim")
    num_kv_heads: int | None = Field(None, ge=1, description="key/value heads; must divide num_heads; none: as many")
    mlp_ratio: float = Field(4.0, gt=0, description="hidden width of the MLP over model_dim")
    positions: Literal["none", "learned", "rotary"] = "learned"
    dropout: float = Field(0.0, ge=0, lt=1, description="after embedding, attention and MLP, in training only")
    init_std: float = Field(0.02, gt=0, description="of weights and embeddings; into the residual stream / sqrt(2 layers)")
    bias: bool = Field(True, description="biases in linear layers and norms")
    tied: bool = Field(False, description="the output layer is the embedding")
    checkpoint: bool = Field(False, description="recompute the attention in backward instead of keeping it")


class Model(ModelSettings):
    """Settings that fit together."""

    @model_validator(mode="after")
    def _consistent(self) -> Model:
        kv_heads = self.num_kv_heads or self.num_heads
        if self.model_dim % self.num_heads:
            raise ValueError(f"model_dim {self.model_dim} is not divisible by num_heads {self.num_heads}")
        if self.num_heads % kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is not divisible by num_kv_heads {kv_heads}")
        if self.positions == "rotary" and self.model_dim // self.num_heads % 2:
            raise ValueError(
                f"rotary positions need an even head dim, got model_dim {self.model_dim} / num_heads {self.num_heads}"
            )
        return self


class TrainSettings(Strict):
    """How a run is trained. Step s of `steps` uses the learning rate that is logged for it."""

    steps: int = Field(300, ge=1)
    batch_size: int = Field(16, ge=1, description="sequences a batch")
    accumulate: int = Field(1, ge=1, description="batches a step")
    lr: float = Field(3e-3, gt=0, description="peak learning rate of AdamW")
    min_lr: float = Field(0.0, ge=0, description="where linear and cosine end")
    schedule: Literal["constant", "linear", "cosine"] = Field("cosine", description="after warm-up")
    warmup_steps: int = Field(0, ge=0, description="step s of them uses lr * (s + 1) / warmup_steps")
    grad_clip: float | None = Field(1.0, gt=0, description="largest gradient norm; none: no clipping")
    weight_decay: float = Field(0.1, ge=0, description="on matrices only, not on biases and norms")
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.99, ge=0, lt=1)
    precision: Literal["fp32", "bf16", "fp16"] = Field("fp32", description="autocast; fp16 needs CUDA")
    compile: bool = Field(False, description="torch.compile the model")
    eval_every: int | None = Field(None, ge=1, description="steps between validations; none: five in a run")
    log_every: int = Field(10, ge=1, description="steps between records of training loss, lr and gradient norm")
    checkpoint_seconds: float = Field(30.0, ge=0, description="least time between checkpoints; 0: after every step")


class Train(TrainSettings):
    """Settings that fit together."""

    @model_validator(mode="after")
    def _consistent(self) -> Train:
        if self.warmup_steps > self.steps:
            raise ValueError(f"warmup_steps {self.warmup_steps} is more than steps {self.steps}")
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr {self.min_lr} is above lr {self.lr}")
        return self


class Run(Strict):
    """One configuration, complete: every setting of its task and variant stands in it."""

    task: dict[str, Any]
    model: Model
    attention: dict[str, Any]
    train: Train

    def flat(self) -> dict[str, Any]:
        """Settings by dotted path."""
        return flatten(self.model_dump())

    def hash(self) -> str:
        """Twelve hex digits that name this configuration."""
        return digest(self.model_dump())


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one mapping by dotted path."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat


def digest(data: Any) -> str:
    """Twelve hex digits of plain data, independent of the order of keys."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:12]


def describe(assignment: dict[str, Any]) -> str:
    """An assignment in a few words: variant first, then the last part of each path with its value."""
    variant = assignment.get("attention.variant")
    rest = [f"{path.rsplit('.', 1)[-1]} {value}" for path, value in assignment.items() if path != "attention.variant"]
    return ", ".join([str(variant), *rest] if variant is not None else rest) or "base"


@dataclass(frozen=True)
class Job:
    """What a worker is given: everything resolved, nothing to look up.

    Args:
        key: names the job in events ("3/1": trial 3, seed 1).
        kind: train one run, or measure the speed of several configurations, each alone and in turns.
        runs: one configuration to train, or those to measure.
        plugins: plugin files to import first.
        threads: CPU threads.
        device: "cpu" or "cuda".
        gpus: entries of CUDA_VISIBLE_DEVICES; None: leave it.
        checkpoint, log: files of this run; None: none.
    """

    key: str
    kind: Literal["train", "speed"]
    runs: tuple[Run, ...]
    seed: int = 0
    plugins: tuple[str, ...] = ()
    threads: int = 1
    device: str = "cpu"
    gpus: tuple[str, ...] | None = None
    checkpoint: str | None = None
    log: str | None = None


class Event(TypedDict, total=False):
    """What a worker sends. `type` and `key` are always there; `time` is in milliseconds since 1970.

    begin: the first step comes now. metrics: step, values. info: tags.
    end: state ("finished", "failed", "stopped"), cause, message, values.
    lost: message; sent by an executor in the name of a worker that vanished.
    """

    type: Required[Literal["begin", "metrics", "info", "end", "lost"]]
    key: Required[str]
    time: int
    step: int
    values: dict[str, float]
    tags: dict[str, str]
    state: str
    cause: str | None
    message: str | None
