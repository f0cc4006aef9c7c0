"""Make models with random weights from a configuration, cut to a few layers.

A model's code is exact or not whatever its weights are. The first layers of a model, with random
weights, can therefore be judged before the weights are downloaded.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import TRANSFORMERS_DYNAMIC_MODULE_NAME

from streambp.errors import ConfigError, StreamBPError
from streambp.planner.configuration import build
from streambp.planner.skeleton import Skeleton, reduced_layers
from streambp.verify.compare import check_memory

DEFAULT_MAX_LAYERS = 8  # layers, unless more are asked for
CONSTANT_NOISE = 0.02  # standard deviation of the noise on parameters that are constant
SHARED_LAYERS_FIELD = "num_kv_shared_layers"  # last layers that read the keys of layers before


@dataclasses.dataclass(frozen=True)
class CutModel:
    """A model with random weights and only the first layers of a full model, to test the full
    model's structure in little memory.

    Attributes:
        model: the model.
        layers: number of its layers.
        depth: number of layers of the full model.
        min_layers: smallest number of first layers that include every kind of layer (sliding-window
            and full attention, for example).
    """

    model: PreTrainedModel
    layers: int
    depth: int
    min_layers: int

    def note(self) -> str:
        """Return a note for the verdict of `verify`: how many of the full model's layers were
        tested, and if every kind of layer is among them."""
        text = f"random weights; the first {self.layers} of {self.depth} layers"
        if self.layers < self.min_layers:
            return (
                f"{text}, which are not of every kind: pass --layers {self.min_layers} to judge "
                "all kinds of layers"
            )
        return f"{text}, among which are all kinds of layers"


def random_model(
    config: PreTrainedConfig, layers: int | None, dtype: torch.dtype | None, seed: int
) -> CutModel:
    """Return a model of random weights, on the host.

    Args:
        config: the model's configuration; not changed.
        layers: number of first layers to keep; None: enough for all kinds of layers, at most
            DEFAULT_MAX_LAYERS.
        dtype: dtype of the weights; None: the configuration's, or float32 if it has none.
        seed: seed of the weights.

    Raises:
        ConfigError: the model has fewer than `layers` layers.
        StreamBPError: the configuration is not that of a causal language model, its number of
            layers cannot be reduced, or its model does not fit into the memory of the host.
    """
    dtype = dtype or getattr(config, "dtype", None) or torch.float32
    skeleton = Skeleton(config, dtype, None, 16, "cuda")
    kinds = reduced_layers(skeleton.model).kinds
    min_layers = max(kinds.index(kind) for kind in set(kinds)) + 1
    number = layers or min(min_layers, DEFAULT_MAX_LAYERS)
    if number > len(kinds):
        raise ConfigError(
            f"--layers is {number}, and the model has {len(kinds)} layers. Pass a smaller number."
        )
    small_config = cut_config(config, number, len(kinds))
    with torch.device("meta"):
        empty = _build(small_config, dtype)
    if len(reduced_layers(empty).kinds) != number:
        raise StreamBPError(
            f"{type(config).__name__} does not say in num_hidden_layers how many layers it has. "
            f"Pass --layers {len(kinds)}."
        )
    wide = torch.float32 if torch.finfo(dtype).bits == 16 else torch.float64
    check_memory(empty, dtype, wide)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        model = _build(small_config, dtype)
        _vary_constants(model)
    return CutModel(model, number, len(kinds), min_layers)


def cut_config(config: PreTrainedConfig, layers: int, depth: int) -> PreTrainedConfig:
    """Return a copy of a configuration with fewer layers.

    Args:
        config: the configuration; a nested configuration of the language model is cut.
        layers: number of layers to keep, the first ones.
        depth: number of layers of the full model. Lists of this length in the configuration have a
            value for each layer, and are cut too.
    """
    if layers == depth:
        return config
    small_config = copy.deepcopy(config)
    text: Any = small_config.get_text_config()
    for name, value in list(vars(text).items()):
        if isinstance(value, list | tuple) and len(value) == depth:
            setattr(text, name, value[:layers])
    shared = getattr(text, SHARED_LAYERS_FIELD, 0) or 0
    if shared:
        setattr(text, SHARED_LAYERS_FIELD, max(0, shared - (depth - layers)))
    text.num_hidden_layers = layers
    return small_config


def _build(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Return a causal language model with random weights, created from a configuration.

    Raises:
        StreamBPError: transformers cannot create the model; the message names the invalid field.
    """
    trusted = type(config).__module__.partition(".")[0] == TRANSFORMERS_DYNAMIC_MODULE_NAME
    model: PreTrainedModel = build(
        config,
        lambda config: AutoModelForCausalLM.from_config(
            copy.deepcopy(config), dtype=dtype, trust_remote_code=trusted
        ),
    )
    return model


@torch.no_grad()
def _vary_constants(model: nn.Module) -> None:
    """Add noise to parameters of a new model whose elements are all equal, such as norm weights of
    1.

    A test of gradients needs this: parameters of zero, such as an initial bias, would hide missing
    terms of a gradient.
    """
    for parameter in model.parameters():
        flat = parameter.flatten()  # [n]
        if len(flat) and bool((flat == flat[0]).all()):
            parameter.add_(torch.randn_like(parameter) * CONSTANT_NOISE)
