"""Base class of the streamed trainers: `StreamedTrainer` patches the models of a TRL trainer."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any, ClassVar

from torch import nn

from streambp.config import StreamConfig
from streambp.errors import StreamBPError, UnsupportedModelError
from streambp.integrations.trl.settings import StreamArguments
from streambp.known_names import SPLIT_SIZES
from streambp.launch.groups import keep_groups
from streambp.model.fused_head import FusedHead, add_head
from streambp.model.installed_patch import streamed_head
from streambp.model.trainer_logs import StreamCallback
from streambp.planner.auto import patch
from streambp.tensors import replace_attribute


def add_streamed_head(
    config: StreamConfig, head_class: type[FusedHead], model: nn.Module, *args: Any, **kwargs: Any
) -> None:
    """Patch a model, and make its forward accept `fused_lm_head=True`. The forward then returns
    per-token values, such as log-probabilities, in place of logits. A streamed trainer calls this
    function where TRL calls its own `add_fused_lm_head`.

    Args:
        config: settings of the patch; not used if the model is patched already.
        head_class: class of the forward that computes the per-token values.
        model: the model.
        args, kwargs: arguments of TRL's `add_fused_lm_head`.

    Raises:
        UnsupportedModelError: the model has no language-model head.
    """
    causal = streamed_head(model)
    if causal is None:
        causal = streamed_head(patch(model, config))
    if causal is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no language-model head of its own, so TRL's losses have "
            "nothing to score. Pass a causal language model."
        )
    add_head(causal, *args, **{**kwargs, "head_class": head_class})


class StreamedTrainer:
    """Mixin that makes a TRL trainer patch its models. Arguments and behaviour are those of the TRL
    trainer, which follows the mixin among a class's bases.

    Policy and reference are computed chunk by chunk. TRL's function for per-token values in place
    of logits (`add_fused_lm_head`) is replaced by streambp's. A model that was patched before keeps
    its own settings. If a model has rows="packed", the completions of a prompt stay in one
    micro-batch (see `launch/groups.py`). `StreamCallback` adds tokens, chunk size and memory of
    each step to the logs.

    Attributes:
        trl_module: Python module that defines the TRL trainer; its name `add_fused_lm_head` is
            replaced.
        head_class: class of the forward that replaces TRL's.
        splits_sequences: True if TRL's trainer can train on sequences that are split over ranks.

    Raises:
        StreamBPError: sequences are to be split over ranks, and TRL's trainer does not support
            splitting.
    """

    trl_module: ClassVar[ModuleType]
    head_class: ClassVar[type[FusedHead]] = FusedHead
    splits_sequences: ClassVar[bool] = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        settings = kwargs.get("args")
        if not isinstance(settings, StreamArguments):
            settings = next(
                (value for value in args if isinstance(value, StreamArguments)), StreamArguments()
            )
        self._refuse_split(getattr(settings, "parallelism_config", None))
        add = functools.partial(add_streamed_head, settings.stream_config(), self.head_class)
        with replace_attribute([self.trl_module], "add_fused_lm_head", [add]):
            super().__init__(*args, **kwargs)
        self._refuse_split(self.accelerator.parallelism_config)  # type: ignore[attr-defined]  # accelerate launch may ask
        keep_groups(self)
        StreamCallback.add_to(self)

    def _refuse_split(self, parallelism: Any) -> None:
        """Raise StreamBPError if sequences are split over ranks, and TRL's trainer does not support
        split sequences.

        TRL's trainer would fail in its first step: the mask covers full rows, but each rank has the
        log-probabilities of a part of each row.

        Args:
            parallelism: accelerate's `ParallelismConfig`; None: nothing is split.
        """
        sizes = {name: getattr(parallelism, name, 1) for name in SPLIT_SIZES}
        if not self.splits_sequences and max(sizes.values()) > 1:
            degrees = " and ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)
            raise StreamBPError(
                f"The parallelism_config of {type(self).__name__} has {degrees}, which splits each "
                "sequence over ranks. TRL's trainer builds its loss from completion masks of whole "
                "rows, which are not split; only StreamSFTTrainer trains on split sequences. Set "
                f"{' and '.join(SPLIT_SIZES)} to 1, and shard parameters over the ranks instead "
                "(FSDP2 "
                "or ZeRO-3)."
            )
