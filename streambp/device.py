"""CUDA's devices as this process finds them: how much memory it may have there, and errors that wait to be reported."""

from __future__ import annotations

import contextlib

import torch


def memory_limit(device: torch.device) -> int:
    """Bytes that this process may have reserved on a CUDA device, those that it has among them.

    The smaller of what `torch.cuda.set_per_process_memory_fraction` grants it and what other processes (an inference
    server beside a trainer, say) leave over now.
    """
    free, total = torch.cuda.mem_get_info(device)
    granted = torch.cuda.get_per_process_memory_fraction(device) * total
    return min(int(granted), free + torch.cuda.memory_reserved(device))


def forget_error(device: torch.device) -> None:
    """Clear the error that a failed call to CUDA's runtime left behind.

    The runtime keeps it until it is asked for, and torch asks after every launch of a kernel: the next one, which has
    nothing to do with it, would raise. So a launch that nobody needs comes first. An error of the device itself stays: the
    launch after it raises as well.
    """
    with contextlib.suppress(RuntimeError):
        torch.empty(1, device=device).fill_(1.0)
