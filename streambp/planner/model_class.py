"""The class that a configuration is built with, and the loss of a counted step."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from streambp.admission.stacks import is_bidirectional

LANGUAGE_MODELS = ("LM", "PreTraining", "LMHeadModel", "ConditionalGeneration")
PREFIX_TYPE = "paligemma"


def build_as(config: PreTrainedConfig, **options: Any) -> PreTrainedModel:
    """Return a model of a configuration. The class is the one of a causal language model, unless
    the configuration says otherwise.

    Attention is bidirectional if the configuration has is_causal=False or
    use_bidirectional_attention, or if its models are masked language models. Such a model has a
    language-model head, unless `architectures` names a class without one, as embedding models do.
    Models of images and text get no images.

    Args:
        config: the configuration, which is not changed.
        options: arguments of `from_config`, such as the dtype.
    """
    kind = type(config)
    is_decoder = getattr(config, "is_decoder", False)
    is_masked = kind in AutoModelForMaskedLM._model_mapping and not is_decoder
    auto: Any = AutoModelForCausalLM
    if is_masked:
        auto = AutoModelForMaskedLM
    elif (
        kind not in AutoModelForCausalLM._model_mapping
        and kind in AutoModelForImageTextToText._model_mapping
    ):
        auto = AutoModelForImageTextToText
    if (is_masked or says_bidirectional(config)) and _has_no_head(config):
        auto = AutoModel
    model: PreTrainedModel = auto.from_config(copy.deepcopy(config), **options)
    if getattr(config, "is_causal", True) is False:
        # transformers reads the field for masks alone; programs set the modules' attribute, too
        for module in model.modules():
            if hasattr(module, "is_causal"):
                module.is_causal = False
    return model


def says_bidirectional(config: PreTrainedConfig) -> bool:
    """True if a field of the configuration makes the attention of a decoder bidirectional."""
    bidirectional = getattr(config, "use_bidirectional_attention", None)
    return getattr(config, "is_causal", True) is False or bidirectional in (True, "all")


def _has_no_head(config: PreTrainedConfig) -> bool:
    """True if `architectures` names a class that is no language model."""
    names: Sequence[str] = getattr(config, "architectures", None) or ()
    return bool(names) and not names[0].endswith(LANGUAGE_MODELS)


def inputs_of(model: nn.Module, ids: Tensor) -> dict[str, Any]:
    """Return the arguments of a model's forward for a batch of token ids [B, T] without data.

    Args:
        model: the model.
        ids: the token ids.
    """
    inputs: dict[str, Any] = {"input_ids": ids}
    if _has_prefix(model):
        inputs["token_type_ids"] = torch.zeros_like(ids)
    return inputs


def _has_prefix(model: nn.Module) -> bool:
    """True if each row of the model has a bidirectional prefix, as PaliGemma's rows have."""
    configs = (getattr(module, "config", None) for module in model.modules())
    return any(getattr(config, "model_type", "") == PREFIX_TYPE for config in configs)


def loss_of(model: nn.Module, ids: Tensor, has_head: bool) -> Tensor:
    """Run a model's forward on token ids [B, T], all of them labelled, and return the loss. The
    loss of a model without a language-model head is the mean of its hidden states.

    Args:
        model: the model.
        ids: the token ids.
        has_head: True if the model has a language-model head.
    """
    inputs = inputs_of(model, ids)
    if has_head:
        return model(**inputs, labels=ids, use_cache=False).loss
    if hasattr(getattr(model, "config", None), "use_cache"):
        inputs["use_cache"] = False
    hidden: Tensor = model(**inputs)[0]
    return hidden.mean(1).float().mean()


def assumptions(model: nn.Module, layers: Iterable[nn.Module], has_head: bool) -> tuple[str, ...]:
    """Return texts on what a count assumes of a model that is no causal language model.

    Args:
        model: the model.
        layers: its streamed layers.
        has_head: True if the model has a language-model head.
    """
    if _has_prefix(model):
        return (
            "the rows have no images; the prefix is counted as causal; the model builds a mask "
            "[T, T], whose bytes are right near 8,192 tokens alone",
        )
    kinds = [layer for layer in layers if is_bidirectional(layer)]
    if not kinds:
        return ()
    texts = ["attention is bidirectional, so queries read all keys of their row or window"]
    if not has_head:
        texts.append("the loss is the mean of the hidden states, without a language-model head")
    dropout = 0.0
    windows = False
    for layer in kinds:
        for module in layer.modules():
            windows = windows or bool(getattr(module, "sliding_window", None))
            config = getattr(module, "config", None)
            dropout = max(dropout, getattr(config, "attention_probs_dropout_prob", 0.0) or 0.0)
            dropout = max(dropout, getattr(config, "attention_dropout", 0.0) or 0.0)
    if dropout:
        texts.append(
            f"attention drops weights with probability {dropout:g}, so streamed layers attend by "
            "plain products"
        )
    if windows:
        texts.append(
            "windows are computed by plain products in tiles; the scan of their masks, of T^2 "
            "elements a step, is not counted"
        )
    return tuple(texts)
