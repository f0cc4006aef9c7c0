from __future__ import annotations

import pytest
import torch

from tests.oracle import lift_float32_casts

torch.set_num_threads(1)


@pytest.fixture
def float64_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    """float64 with transformers' inner float32 casts lifted."""
    lift_float32_casts(monkeypatch)
