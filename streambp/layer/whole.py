"""A layer that cannot be cut: it runs whole, and torch's checkpoint recomputes it in backward."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from streambp.attention.interface import routed
from streambp.attention.masks import LazyMask
from streambp.errors import UnsupportedModelError
from streambp.layer.arguments import CACHES
from streambp.layer.recompute import checkpointing_off
from streambp.layer.site import LayerSite, attention_configs


def run_whole(site: LayerSite, args: Any, kwargs: Any) -> Any:
    """What the layer's forward returns. Costs the memory of gradient checkpointing, and is named by `describe`.

    Raises:
        UnsupportedModelError: the layer reads the model's attention mask itself instead of handing it on.
    """
    kwargs = {name: None if name in CACHES else value for name, value in kwargs.items()}
    configs = [] if site.cache else attention_configs(site.layer)

    def run(*args: Any, **kwargs: Any) -> Any:
        with routed(configs), checkpointing_off(site.layer):  # the recomputation runs after the model's forward is over
            return site.forward(site.layer, *args, **kwargs)

    try:
        if not torch.is_grad_enabled():
            return run(*args, **kwargs)
        return checkpoint(run, *args, use_reentrant=False, **kwargs)
    except (AttributeError, TypeError) as error:
        if LazyMask.__name__ not in str(error):
            raise
        raise UnsupportedModelError(
            f"{type(site.layer).__name__} cannot stream: {site.because}. Nor can it run whole, because it reads the "
            f"attention mask itself ({error}). Use gradient checkpointing for this model (streambp.unpatch(model))."
        ) from error
