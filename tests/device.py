"""The device that tests put their models on: STREAMBP_TEST_DEVICE, the CPU if unset.

"emulated" is an accelerator that needs no hardware (tests/emulated). It becomes the only one of the
process, so it is asked for before anything else is imported.
"""

from __future__ import annotations

import os

import torch

from tests.emulated import backend

REQUESTED_DEVICE = os.environ.get("STREAMBP_TEST_DEVICE", "cpu")
WHY_NOT = backend.why_not() if REQUESTED_DEVICE == backend.NAME else None
if REQUESTED_DEVICE == backend.NAME and WHY_NOT is None:
    backend.register()
DEVICE = torch.device("cpu" if WHY_NOT else REQUESTED_DEVICE)
EMULATED = DEVICE.type == backend.NAME
ACCELERATOR = torch.accelerator.current_accelerator() or torch.device("cpu")


def limit_memory(device: torch.device, size: int | None) -> None:
    """Let this process have so many bytes of an accelerator; None: as many as there are."""
    if device.type == backend.NAME:
        backend.extension().set_limit(device.index or 0, backend.LIMIT if size is None else size)
    else:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(
            1.0 if size is None else min(1.0, size / total), device
        )
