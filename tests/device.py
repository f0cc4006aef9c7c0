"""The device that tests put their models on: STREAMBP_TEST_DEVICE, the CPU if unset.

"emulated" is an accelerator that needs no hardware (tests/emulated). It becomes the only one of the process, so it is asked
for before anything else is imported.
"""

from __future__ import annotations

import os

import torch

from tests.emulated import backend

ASKED = os.environ.get("STREAMBP_TEST_DEVICE", "cpu")
WHY_NOT = backend.why_not() if ASKED == backend.NAME else None
if ASKED == backend.NAME and WHY_NOT is None:
    backend.register()
DEVICE = torch.device("cpu" if WHY_NOT else ASKED)
EMULATED = DEVICE.type == backend.NAME
