"""Machines that nobody has at hand, as `choose_backend` sees them."""

from __future__ import annotations

import dataclasses

import torch

from streambp.attention.backend import choose_backend
from streambp.attention.rules import Platform

H200 = Platform("cuda", (9, 0), 92000, (2, 13))
H200_CUDNN_919 = Platform("cuda", (9, 0), 91900, (2, 11))
H200_OLD = Platform("cuda", (9, 0), 91002, (2, 11))  # the runtime of older wheels for CUDA 12
A100 = Platform("cuda", (8, 0), 92000, (2, 13))
RTX_4090 = Platform("cuda", (8, 9), 92000, (2, 13))
RTX_5090 = Platform("cuda", (12, 0), 92000, (2, 13))
B200 = Platform("cuda", (10, 0), 92000, (2, 13))
B200_NEW = Platform("cuda", (10, 0), 92400, (2, 14))
MI300 = Platform("cuda", (9, 4), 3_05_00, (2, 13), hip=True)  # torch calls MIOpen cuDNN
MI200 = Platform("cuda", (9, 0), 3_05_00, (2, 13), hip=True)
V100 = Platform("cuda", (7, 0), 92000, (2, 13))


def with_flash(platform: Platform, name: str, **changes: object) -> Platform:
    """With FlashAttention-3 or -4 behind torch's operators."""
    return dataclasses.replace(
        platform, flash=name, flash_4=(4, 0, 0, 18) if name == "FA4" else (), **changes
    )


def backend(platform, size, value_size=None, choice="auto", dtype=torch.bfloat16, **arguments):
    """What attends there with head sizes D and D_v."""
    q = torch.empty(1, 4, 2, size, dtype=dtype, device="meta")
    v = torch.empty(1, 2, 2, value_size or size, dtype=dtype, device="meta")
    return choose_backend(
        choice, q, v, arguments.pop("dropout", 0.0), platform=platform, **arguments
    )
