"""Finds tensors made on another device than the inputs', without a GPU: on `meta`, and under fake CUDA tensors."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from core.contract.subject import ViolationError

# A number given to an operation, such as the 0.0 of `torch.where(x > 0, x, 0.0)`, becomes a tensor on the CPU within it.
_NUMBERS = (torch.ops.aten.scalar_tensor,)
_COPIES = (torch.ops.aten._to_copy, torch.ops.aten.copy_)  # what brings a tensor to the right device


class OneDevice(TorchDispatchMode):
    """Within it, an operation that makes or takes a tensor on another device type raises ViolationError.

    `meta` itself would let some through, such as a matrix product, and CUDA takes indices and single numbers from the CPU.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket not in _NUMBERS + _COPIES:
            for one in tree_leaves((args, kwargs)):
                if isinstance(one, Tensor) and one.dim() > 0 and one.device.type != self.device:
                    raise ViolationError(f"{func} gets a tensor on {one.device} where the inputs are on {self.device}")
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket not in _NUMBERS:
            for one in tree_leaves(result):
                if isinstance(one, Tensor) and one.device.type != self.device:
                    raise ViolationError(f"{func} makes a tensor on {one.device} where the inputs are on {self.device}")
        return result


@contextlib.contextmanager
def fake_cuda() -> Iterator[None]:
    """Within it tensors have shapes and devices but no data, and `cuda` is there on every machine. No backward: it aborts."""
    log = logging.getLogger("torch._subclasses.fake_tensor")  # reports a failed operation before it raises
    disabled, log.disabled = log.disabled, True
    try:
        with FakeTensorMode(), _WithoutGuards(), torch.no_grad():
            yield
    finally:
        log.disabled = disabled


def names_devices(error: Exception) -> bool:
    """Whether this error is about devices; where there is no data, much else can fail that is no fault of a mechanism."""
    return isinstance(error, ViolationError) or any(
        words in str(error) for words in ("two devices", "same device", "different devices", "on the device", "is on cpu")
    )


class _WithoutGuards(TorchFunctionMode):
    """Some operations ask the driver for the device of their tensor before a fake one can answer; these do not."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__:
            return _get(args[0], args[1])
        if func is Tensor.__setitem__:
            return _set(args[0], args[1], args[2])
        if func is Tensor.copy_:
            return torch.ops.aten.copy_.default(args[0], args[1])
        if func is Tensor.__invert__:
            return torch.bitwise_not(args[0])
        if getattr(func, "__module__", None) == "torch.nn.init":  # fills what has no data
            return kwargs["tensor"] if kwargs and "tensor" in kwargs else args[0]
        return func(*args, **(kwargs or {}))


def _get(x: Tensor, index: Any) -> Tensor:
    """x[index], by operations."""
    x, tensors = _view(x, index)
    return torch.ops.aten.index.Tensor(x, tensors) if tensors else x


def _set(x: Tensor, index: Any, value: Any) -> None:
    """x[index] = value, by operations."""
    x, tensors = _view(x, index)
    given = value if isinstance(value, Tensor) else torch.tensor(value, dtype=x.dtype, device=x.device)
    if tensors:
        torch.ops.aten.index_put_.default(x, tensors, given.to(x.dtype))
    else:
        torch.ops.aten.copy_.default(x, given)


def _view(x: Tensor, index: Any) -> tuple[Tensor, list[Tensor | None]]:
    """The part of x that slices and numbers in the index leave, and the tensors in the index by axis of it."""
    parts = list(index) if isinstance(index, tuple) else [index]
    taken = sum(part.dim() if _is_bool(part) else part is not None and part is not Ellipsis for part in parts)
    rest = [slice(None)] * (x.dim() - taken)
    here = next((place for place, part in enumerate(parts) if part is Ellipsis), len(parts))
    axis = 0
    tensors: dict[int, Tensor] = {}
    for part in [*parts[:here], *rest, *parts[here + 1 :]]:
        if part is None:
            x, axis = x.unsqueeze(axis), axis + 1
        elif isinstance(part, slice):
            x = torch.ops.aten.slice.Tensor(x, axis, part.start, part.stop, 1 if part.step is None else part.step)
            axis += 1
        elif isinstance(part, int) and not isinstance(part, bool):
            x = torch.ops.aten.select.int(x, axis, part)
        else:
            tensors[axis] = part if isinstance(part, Tensor) else torch.tensor(part, device=x.device)
            axis += part.dim() if _is_bool(part) else 1
    return x, [tensors.get(place) for place in range(max(tensors) + 1)] if tensors else []


def _is_bool(part: Any) -> bool:
    return isinstance(part, Tensor) and part.dtype == torch.bool
