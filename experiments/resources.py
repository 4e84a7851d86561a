"""What a run may use on this machine: threads, device, GPUs."""

from __future__ import annotations

import os

from experiments.sweep import Sweep


def threads(sweep: Sweep) -> int:
    """CPU threads of a run.

    Raises:
        InputError: more than this machine has.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    wanted = sweep.file.resources.cpus
    if wanted == "auto":
        return max(1, cores // sweep.file.budget.parallel)
    if wanted > cores:
        raise sweep.error(("resources", "cpus"), f"this machine has {cores}, got {wanted}")
    return wanted


def devices(sweep: Sweep) -> tuple[str, tuple[str, ...]]:
    """The device of runs, and the GPUs that are dealt, one a run, by their names in CUDA_VISIBLE_DEVICES.

    Raises:
        InputError: more GPUs asked for than there are, or a precision that needs one.
    """
    import torch

    count = torch.cuda.device_count()  # asks the driver library; makes no CUDA context
    wanted = sweep.file.resources.gpus
    if wanted == 1 and count < sweep.file.budget.parallel:
        message = f"gpus: {sweep.file.budget.parallel} runs at a time need as many GPUs, this machine has {count}"
        raise sweep.error(("resources", "gpus"), message)
    if wanted != 0 and count:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return "cuda", tuple(visible.split(",")[:count] if visible else map(str, range(count)))
    asked = sweep.file.parameters.get("train.precision")
    precisions = [sweep.file.base.train.precision, *((asked.values or []) if asked is not None else [])]
    precisions += [line["train.precision"] for line in sweep.file.baseline if "train.precision" in line]
    if "fp16" in precisions:
        raise sweep.error(("base", "train", "precision"), "fp16 needs a CUDA device; use bf16 or fp32")
    return "cpu", ()
