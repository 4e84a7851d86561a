"""What a configuration costs and how its attention behaves: measured on real tensors, unknown where it cannot be.

Memory is the peak of one training step, in MiB. Operations are those of one training step, forward and backward. Attention is
looked at on validation data: entropy in nats, density (share of the visible keys with weight above 0), span (mean distance).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from core import Attention, Mask, MultiHeadAttention
from experiments.tasks import Batch, Task

MIB = 1024 * 1024
SEQUENCES = 4  # of a validation batch, for the attention figures
MAX_WEIGHTS = 2**26


class Peak:
    """Filled in when `peak_memory` ends: bytes, or None where they could not be measured."""

    nbytes: int | None = None


@contextmanager
def peak_memory(device: torch.device, resident: int) -> Iterator[Peak]:
    """The peak of what is allocated inside the block.

    On CPU it is read from the allocator's own events and added to `resident`, the bytes alive before (parameters and optimiser
    state); on CUDA the allocator counts everything itself.
    """
    peak = Peak()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        yield peak
        torch.cuda.synchronize(device)
        peak.nbytes = torch.cuda.max_memory_allocated(device)
        return
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        yield peak
    assert recorded.profiler is not None
    kineto: Any = recorded.profiler.kineto_results
    changes = sorted((event.start_ns(), event.nbytes()) for event in kineto.events() if event.name() == "[memory]")
    alive = highest = 0
    for _, change in changes:
        alive += change
        highest = max(highest, alive)
    peak.nbytes = resident + highest if changes else None


def resident_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of parameters, buffers and optimiser state."""
    tensors: list[Tensor] = [*model.parameters(), *model.buffers()]
    for state in optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, Tensor)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def _forward_operations(query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return sdpa_flop_count(query, key, value)


def _backward_operations(grad: Any, query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return 2 * sdpa_flop_count(query, key, value)


# torch counts nothing for its CPU flash kernel, and for the others it counts the scores that backward recomputes: that is a
# property of the kernel, not of the mechanism. Counted this way, a fused kernel costs what the plain products cost.
_FUSED = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _forward_operations,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _backward_operations,
    torch.ops.aten._scaled_dot_product_flash_attention_backward: _backward_operations,
    torch.ops.aten._scaled_dot_product_efficient_attention_backward: _backward_operations,
    torch.ops.aten._scaled_dot_product_cudnn_attention_backward: _backward_operations,
}


def flops_per_token(model: nn.Module, task: Task, batch: Batch) -> float:
    """Floating-point operations of forward and backward over the batch, per input token.

    Takes one forward and backward; random streams and gradients are left as they were.
    """
    devices = [batch.inputs.device] if batch.inputs.device.type == "cuda" else []
    with torch.random.fork_rng(devices), FlopCounterMode(display=False, custom_mapping=_FUSED) as counter:
        total, count = task.loss(model(batch.inputs, batch.keys), batch)
        (total / count.clamp(min=1)).backward()
    model.zero_grad(set_to_none=True)
    return counter.get_total_flops() / batch.inputs.numel()


def parameters(model: nn.Module) -> int:
    """Trainable numbers, shared ones once."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


@torch.no_grad()
def attention_figures(model: nn.Module, batch: Batch) -> dict[str, float]:
    """Entropy, density and span of the attention weights, averaged over the rows of all layers and heads.

    Rows without a visible key are left out. One sequence is looked at at a time, at most SEQUENCES of them. Nothing is returned
    where a variant has no weights, or where those of one sequence would hold more than MAX_WEIGHTS numbers.
    """
    sums = torch.zeros(3, dtype=torch.float64)
    rows = 0
    for index in range(min(SEQUENCES, len(batch.inputs))):
        keys = None if batch.keys is None else batch.keys[index : index + 1]
        for module, q, k, v, mask in _attention_calls(model, batch.inputs[index : index + 1], keys):
            if q.shape[1] * q.shape[2] * k.shape[2] > MAX_WEIGHTS:
                return {}
            weights = module(q, k, v, mask, need_weights=True).weights
            if weights is None:
                return {}
            per_row, some = _row_figures(weights.float(), mask)
            sums += torch.stack([figure[some].double().sum().cpu() for figure in per_row])
            rows += int(some.sum())
    if rows == 0:
        return {}
    return dict(zip(("attention/entropy", "attention/density", "attention/span"), (sums / rows).tolist(), strict=True))


def _attention_calls(
    model: nn.Module, inputs: Tensor, keys: Tensor | None
) -> list[tuple[Attention, Tensor, Tensor, Tensor, Mask]]:
    """What each mechanism of the model is called with in one forward."""
    calls: list[tuple[Attention, Tensor, Tensor, Tensor, Mask]] = []

    def remember(module: nn.Module, args: tuple[Any, ...]) -> None:
        assert isinstance(module, Attention)
        calls.append((module, *args[:4]))

    hooks = [m.register_forward_pre_hook(remember) for m in model.modules() if isinstance(m, Attention)]
    try:
        with torch.compiler.set_stance("force_eager"):  # a compiled model calls no hook
            model(inputs, keys)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _row_figures(weights: Tensor, mask: Mask) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """Entropy, density and span of each row, (B, H, L), and which rows have a visible key."""
    L, S = weights.shape[-2:]
    visible = mask.visible(L, S, weights.device)
    visible = torch.ones_like(weights, dtype=torch.bool) if visible is None else visible.expand_as(weights)
    distance = (torch.arange(S - L, S, device=weights.device)[:, None] - torch.arange(S, device=weights.device)).abs()
    density = (weights > 0).sum(-1) / visible.sum(-1).clamp(min=1)
    return (torch.special.entr(weights).sum(-1), density, (weights * distance).sum(-1)), visible.any(-1)


@torch.no_grad()
def decode_state_bytes(model: nn.Module, seq_len: int, dtype: torch.dtype = torch.float32) -> int | None:
    """Bytes that decoding keeps for one sequence of seq_len tokens, all layers together; None where a variant cannot."""
    total = 0
    for layer in model.modules():
        if not isinstance(layer, MultiHeadAttention):
            continue
        attention = layer.attention
        if not attention.spec.decode:
            return None
        device = next(model.parameters()).device
        q, k, v = (
            torch.zeros(1, heads, seq_len, attention.head_dim, device=device, dtype=dtype)
            for heads in (attention.num_heads, layer.num_kv_heads, layer.num_kv_heads)
        )
        total += attention.step(q, k, v, None)[1].nbytes
    return total


def synchronise(device: torch.device) -> None:
    """Wait until the device has done what was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(device: torch.device, call: Any) -> float:
    """Wall-clock seconds of one call, the device's work included."""
    synchronise(device)
    start = time.perf_counter()
    call()
    synchronise(device)
    return time.perf_counter() - start
