"""Packed rows as transformers' collators hand them to layers with states."""

from __future__ import annotations

from typing import Any

import torch

from tests.device import DEVICE
from tests.families import Device, make_batch


def packed_batch(
    boundaries: list[list[int]],
    ids: bool = True,
    ends: bool = True,
    seed: int = 1,
    device: Device = DEVICE,
) -> dict[str, Any]:
    """Random tokens in documents that start and end at `boundaries`, a list for each row, whose
    first tokens are not labelled.

    Args:
        ids: with seq_idx [B, T]. ends: with cu_seq_lens of the first row.
    """
    length = boundaries[0][-1]
    batch: dict[str, Any] = make_batch(
        "plain", length=length, rows=len(boundaries), seed=seed, device="cpu"
    )
    starts = torch.stack(
        [torch.isin(torch.arange(length), torch.tensor(row)) for row in boundaries]
    )
    numbers = starts.cumsum(-1) - 1  # [B, T]
    first = torch.stack(
        [torch.tensor(row)[of] for row, of in zip(boundaries, numbers, strict=True)]
    )
    batch["position_ids"] = torch.arange(length) - first
    batch["labels"][starts] = -100
    if ids:
        batch["seq_idx"] = numbers.to(torch.int32)
    if ends:
        cu_seq_lens = torch.tensor(boundaries[0], dtype=torch.int32)
        longest = int(cu_seq_lens.diff().max())
        batch |= {
            "cu_seq_lens_q": cu_seq_lens,
            "cu_seq_lens_k": cu_seq_lens,
            "max_length_q": longest,
            "max_length_k": longest,
        }
    return {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in batch.items()}
