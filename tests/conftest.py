from __future__ import annotations

import pytest
import torch

from streambp.attention import prefix
from tests.oracle import lift_float32_casts

torch.set_num_threads(1)


@pytest.fixture
def float64_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    """float64 with transformers' inner float32 casts lifted."""
    lift_float32_casts(monkeypatch)


@pytest.fixture
def attended_chunks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of the query chunks that streamed attention saw."""
    seen: list[int] = []
    real = prefix.ChunkMask.attend
    monkeypatch.setattr(prefix.ChunkMask, "attend", lambda self, q, *a: seen.append(q.shape[2]) or real(self, q, *a))
    return seen
