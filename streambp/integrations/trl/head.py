"""Giving TRL's trainers models that stream, with our head (`fused_head.py`) where they would put their own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import ModuleType

from torch import nn

from streambp.config import StreamConfig
from streambp.errors import UnsupportedModelError
from streambp.model.fused_head import FusedHead, add_head
from streambp.model.patching import streamed_head
from streambp.planner.auto import patch


@contextlib.contextmanager
def streamed_heads(
    trainer_module: ModuleType, config: StreamConfig, head_class: type[FusedHead] = FusedHead
) -> Iterator[None]:
    """Within, TRL's trainers of this module stream the models that they would give their own fused head."""
    theirs = trainer_module.add_fused_lm_head
    trainer_module.add_fused_lm_head = adder(config, head_class)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        trainer_module.add_fused_lm_head = theirs  # type: ignore[attr-defined]


def adder(config: StreamConfig, head_class: type[FusedHead] = FusedHead) -> Callable[..., None]:
    """A function called like TRL's `add_fused_lm_head`, for models that are to stream with `config`."""

    def add_fused_lm_head(
        model: nn.Module,
        temperature: float = 1.0,
        cast_lm_head_to_fp32: bool = False,
        outputs: tuple[str, ...] = ("log_probs",),
    ) -> None:
        causal = streamed_head(model)
        if causal is None:  # a model that its user patched keeps its own settings
            causal = streamed_head(patch(model, config))
        if causal is None:
            raise UnsupportedModelError(
                f"{type(model).__name__} has no language-model head of its own, so TRL's losses have nothing to score. "
                "Pass a causal language model."
            )
        add_head(causal, temperature, cast_lm_head_to_fp32, outputs, head_class)

    return add_fused_lm_head
