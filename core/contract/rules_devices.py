"""Rules on devices: every tensor is made where the inputs are."""

from __future__ import annotations

import torch

from core.contract.devices import OneDevice, fake_cuda, names_devices
from core.contract.subject import NotClaimedError, Subject, demand, leaves, near
from core.mask import Mask


def follows_device(subject: Subject) -> None:
    """Every tensor is on the device of the inputs: on `meta`, forward and backward, and on fake or real CUDA."""
    subject.numbers_do_not_matter()
    # A mechanism that must read data (`.item()`) cannot run where there is none.
    ran = [_where_no_data(subject, "meta"), _where_no_data(subject, "fake cuda")]
    if torch.cuda.is_available():
        _on_device(subject, "cuda")
        ran.append(True)
    if not any(ran):
        raise NotClaimedError("it does not run where there is no data, and there is no CUDA device to run it on")


def _where_no_data(subject: Subject, device: str) -> bool:
    try:
        if device == "meta":
            _on_device(subject, "meta")
        else:
            _on_fake_cuda(subject)
    except Exception as error:
        if names_devices(error):
            raise
        return False
    return True


def _on_device(subject: Subject, device: str) -> None:
    module, there = (subject.module(dtype=torch.float32) for _ in range(2))
    spec = subject.spec
    inputs = subject.qkv(dtype=torch.float32)
    there(*inputs)  # what a call leaves behind must not stay where it was
    there.to(device)
    masks = subject.masks(3, 4, 7, 7)
    for name, mask in (masks[0], masks[-1]):
        keys, pairs = (None if part is None else part.to(device) for part in (mask.keys, mask.pairs))
        for need_weights in (False, True):
            q, k, v = leaves(*(x.to(device) for x in inputs))
            with OneDevice(device):
                result = there(q, k, v, Mask(mask.causal, keys, pairs), need_weights)
                for what, got in zip(("out", "weights"), result, strict=True):
                    if got is not None:
                        demand(got.device.type == device, f"{name}: {what} is on {got.device}, the inputs on {device}")
                result.out.sum().backward()
            if device != "meta":
                want = module(*inputs, mask, need_weights).out
                near(result.out.cpu(), want, f"{name}: out on {device} against the CPU", 1e-4)
    if spec.decode and spec.causal:
        q, k, v = (x[:, :, :3].to(device) for x in inputs)
        with OneDevice(device):
            prompt = torch.ones(3, 3, dtype=torch.bool, device=device) if spec.padding else None
            state = there.step(q, k, v, None, prompt)[1]
            demand(there.step(q, k, v, state)[0].device.type == device, f"step leaves the device {device}")


def _on_fake_cuda(subject: Subject) -> None:
    """What branches on `q.is_cuda` is seen here only."""
    spec = subject.spec
    with fake_cuda():
        with torch.device("cuda"):
            module = subject.variant(4, 8, subject.config).eval()
            q, k, v = torch.empty(3, 4, 7, 8), torch.empty(3, 4, 7, 8), torch.empty(3, 4, 7, subject.value_dim)
            keys, pairs = torch.ones(3, 7, dtype=torch.bool), torch.ones(7, 7, dtype=torch.bool)
        masks = [Mask(), Mask(spec.causal, keys if spec.padding else None, pairs if spec.pairs else None)]
        for mask in masks:
            for need_weights in (False, True):
                for what, got in zip(("out", "weights"), module(q, k, v, mask, need_weights), strict=True):
                    if got is not None:
                        demand(got.is_cuda, f"{what} is on {got.device}, the inputs on cuda")
        if spec.decode and spec.causal:
            state = module.step(q, k, v, None)[1]
            demand(module.step(q, k, v, state)[0].is_cuda, "step leaves the device cuda")
