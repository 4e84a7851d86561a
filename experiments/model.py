"""The models that carry a mechanism. Every variant gets the same model around it, with the same initial parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core import Attention, Mask, MultiHeadAttention
from core.positions import LearnedPositions
from experiments import config
from experiments.seeding import derive
from experiments.tasks import Batch, Task


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, settings: config.Model, attention: Mapping[str, Any]) -> None:
        super().__init__()
        dim, hidden = settings.model_dim, round(settings.model_dim * settings.mlp_ratio)
        own = {key: value for key, value in attention.items() if key != "variant"}
        self.attention_norm = nn.LayerNorm(dim, bias=settings.bias)
        self.attention = MultiHeadAttention(
            dim,
            settings.num_heads,
            settings.num_kv_heads,
            variant=attention["variant"],
            config=own,
            dropout=settings.dropout,
            bias=settings.bias,
            rotary=settings.positions == "rotary",
            checkpoint=settings.checkpoint,
        )
        self.mlp_norm = nn.LayerNorm(dim, bias=settings.bias)
        self.mlp_in = nn.Linear(dim, hidden, bias=settings.bias)
        self.mlp_out = nn.Linear(hidden, dim, bias=settings.bias)
        self.dropout = settings.dropout

    def forward(self, x: Tensor, mask: Mask) -> Tensor:
        x = x + self.attention(self.attention_norm(x), mask=mask)
        hidden = self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))
        return x + F.dropout(hidden, self.dropout, self.training)


class Decoder(nn.Module):
    """A causal language model: (B, L) tokens -> (B, L, vocab_size) logits.

    Args:
        seq_len: the longest input, for learned positions.
    """

    def __init__(self, settings: config.Model, attention: Mapping[str, Any], vocab_size: int, seq_len: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, settings.model_dim)
        learned = settings.positions == "learned"
        self.positions = LearnedPositions(seq_len, settings.model_dim) if learned else None
        self.blocks = nn.ModuleList(Block(settings, attention) for _ in range(settings.num_layers))
        self.norm = nn.LayerNorm(settings.model_dim, bias=settings.bias)
        self.head = nn.Linear(settings.model_dim, vocab_size, bias=False)
        if settings.tied:
            self.head.weight = self.embedding.weight
        self.dropout = settings.dropout

    def forward(self, tokens: Tensor, keys: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions(tokens.shape[1])
        x = F.dropout(x, self.dropout, self.training)
        mask = Mask(causal=True, keys=keys)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


def build_model(run: config.Run, task: Task, seed: int, device: torch.device | str = "cpu") -> Decoder:
    """The model of a configuration. Parameters that two variants share start equal under one seed.

    Raises:
        ValueError: a task whose kind no model here serves, and what the variant refuses.
    """
    if task.kind != "decoder":
        raise ValueError(f"task {task.name}: kind {task.kind} has no model here (there are: decoder)")
    torch.manual_seed(derive("variant", seed))  # what a variant draws for parameters of its own
    with torch.device(device):
        model = Decoder(run.model, run.attention, task.vocab_size, task.seq_len)
    initialise(model, run.model, seed)
    return model


@torch.no_grad()
def initialise(model: Decoder, settings: config.Model, seed: int) -> None:
    """GPT-2's initialisation: normal init_std, biases 0, projections into the residual stream scaled by 1 / sqrt(2 layers).

    Each parameter has a generator of its own, named by its place, so that what a variant adds shifts no other. Drawn on the CPU,
    so that every device starts from the same numbers.
    """
    own = {id(p) for module in model.modules() if isinstance(module, Attention) for p in module.parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) in own or parameter.is_meta:
            continue
        if "norm" in name:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        elif name.endswith("bias"):
            parameter.zero_()
        else:
            residual = name.endswith(("out_proj.weight", "mlp_out.weight"))
            std = settings.init_std / math.sqrt(2 * settings.num_layers) if residual else settings.init_std
            draw = torch.Generator().manual_seed(derive("init", seed, name))
            parameter.copy_(torch.randn(parameter.shape, generator=draw) * std)


def forward_loss(model: nn.Module, task: Task, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Output, summed loss and counted targets of one batch."""
    output = model(batch.inputs, batch.keys)
    total, count = task.loss(output, batch)
    return output, total, count
