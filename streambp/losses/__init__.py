"""PPO's objective and its building blocks: functions of per-token log-probabilities [B, T].

Inputs come from `streambp.head.token_log_probs` or from `model(..., labels=...,
output_log_probs=True)`. Gradients flow back through the objectives, so a custom function can
replace each objective. `examples/objectives.py` has more.
"""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from typing import Any

from streambp.losses.ppo import PPOLoss, gae, ppo_loss, whiten

__all__ = ["PPOLoss", "gae", "ppo_loss", "whiten"]

DEPRECATED_NAMES = (
    "DPO_LOSSES",
    "F_DIVERGENCES",
    "GRPO_LOSSES",
    "SFT_LOSSES",
    "dpo_loss",
    "grpo_loss",
    "sft_loss",
)


def __getattr__(name: str) -> Any:
    """Return the deprecated function or constant `name` of this module, such as "dpo_loss" or
    "DPO_LOSSES". A FutureWarning says that the next release removes the name from
    `streambp.losses`. The code is in examples/objectives.py."""
    if name not in DEPRECATED_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(
        f"Copy examples/objectives.py, which has {name}: streambp.losses has it for the last time.",
        FutureWarning,
        stacklevel=2,
    )
    # A built distribution has the example beside this file (setup.py), a clone in its own folder.
    __path__[1:] = [str(Path(__file__).parents[2] / "examples")]
    return getattr(importlib.import_module(f"{__name__}.objectives"), name)
