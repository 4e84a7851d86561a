"""What a run may use on this machine: threads, device, GPUs."""

from __future__ import annotations

import os

from experiments.sweep import Sweep


def threads(sweep: Sweep) -> int:
    wanted = sweep.file.resources.cpus
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // sweep.file.budget.parallel) if wanted == "auto" else max(1, wanted)


def devices(sweep: Sweep) -> tuple[str, tuple[int, ...]]:
    """The device of runs, and the GPUs that are dealt.

    Raises:
        InputError: more GPUs asked for than there are, or a precision that needs one.
    """
    import torch

    count = torch.cuda.device_count()  # asks the driver library; makes no CUDA context
    wanted, parallel = sweep.file.resources.gpus, sweep.file.budget.parallel
    each = (1 if count else 0) if wanted == "auto" else wanted
    if each * (parallel if wanted != "auto" or count else 1) > count:
        raise sweep.error(
            ("resources",), f"gpus: {parallel} parallel runs of {each} need {each * parallel} GPUs, this machine has {count}"
        )
    if not each:
        half = sweep.file.parameters.get("train.precision")
        if sweep.file.base.train.precision == "fp16" or (half is not None and "fp16" in (half.values or [])):
            raise sweep.error(("base", "train", "precision"), "fp16 needs a CUDA device; use bf16 or fp32")
    return ("cuda", tuple(range(count))) if each else ("cpu", ())
