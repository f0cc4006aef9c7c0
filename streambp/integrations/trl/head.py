"""Giving TRL's trainers models that stream, with our head (`fused_head.py`) where they would put their own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import ModuleType

from torch import nn
from trl.trainer.utils import add_fused_lm_head as add_trls_head

from streambp.config import StreamConfig
from streambp.errors import UnsupportedModelError
from streambp.fused_head import FusedHead
from streambp.patching import patch, streamed_head


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
        if causal.foreign is not None and head_class is FusedHead:
            add_trls_head(model, temperature, cast_lm_head_to_fp32, outputs)  # it calls the backbone, not that forward
            return
        causal.refuse_foreign()
        head_class(causal, temperature, cast_lm_head_to_fp32, outputs).add()

    return add_fused_lm_head
