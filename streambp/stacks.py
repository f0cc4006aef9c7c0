"""Where a model's decoder layers are, and what their structure tells about streaming them."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from streambp.errors import UnsupportedModelError
from streambp.foreign import home_of, wrapped_functions
from streambp.layer.arguments import CACHES
from streambp.layer.states import PROTOCOL


@dataclasses.dataclass(frozen=True)
class Stack:
    """A backbone and the decoder layers it runs one after the other."""

    backbone: PreTrainedModel
    layers: tuple[nn.Module, ...]


@dataclasses.dataclass(frozen=True)
class Found:
    """The stacks of a model that can be streamed, and why others (a vision tower, say) are left as they are."""

    stacks: tuple[Stack, ...]
    left_alone: tuple[str, ...]


def find_stacks(model: nn.Module) -> Found:
    """Every stack of transformers decoder layers in a model.

    Raises:
        UnsupportedModelError: there is none that can be streamed exactly.
    """
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError(
            f"This is a {type(model).__name__}; pass a model, such as AutoModelForCausalLM.from_pretrained(...) returns."
        )
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    encoded = any(getattr(module.config, "is_encoder_decoder", False) for module in models)
    stacks: list[Stack] = []
    reasons: list[str] = []
    for module in models:
        for child in module.children():
            if isinstance(child, nn.ModuleList) and len(child) and isinstance(child[0], GradientCheckpointingLayer):
                _refuse_unsloth(module, *child)
                problem = _why_not(module, child, encoded)
                if problem is None:
                    stacks.append(Stack(module, tuple(child)))
                else:
                    reasons.append(f"{type(module).__name__}: {problem}")
    if not stacks:
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be streamed. "
            + ("; ".join(reasons) if reasons else "It has no stack of transformers decoder layers")
            + ". Use gradient checkpointing for it."
        )
    return Found(tuple(stacks), tuple(reasons))


def _refuse_unsloth(*modules: nn.Module) -> None:
    """It replaces the forwards of transformers' classes with ones that compute attention, cache and loss in its own way."""
    for module in modules:
        for home in map(home_of, wrapped_functions(type(module).forward)):
            if home.startswith("unsloth"):
                raise UnsupportedModelError(
                    f"Unsloth has replaced the forward of {type(module).__name__} (in {home}) with one that cannot be cut "
                    "into chunks. Load the model with transformers in a process that does not import unsloth, or train it "
                    "with Unsloth's own checkpointing, without streambp."
                )


def attends(layer: nn.Module) -> bool:
    """Whether the layer attends through transformers' attention interface."""
    return bool(_attentions(layer))


def cache_argument(layer: nn.Module) -> str | None:
    """The argument that takes the cache of a layer that attends by itself, over what its cache returns; None for others."""
    if attends(layer) or not any("update" in _names(m) and set(CACHES) & set(_locals(m)) for m in layer.modules()):
        return None
    return next((name for name in _locals(layer) if name in CACHES), None)


def states_argument(layer: nn.Module) -> str | None:
    """The argument that takes the cache of a layer that keeps states there; None if it keeps none. [Note: states]"""
    if not any(set(PROTOCOL) & set(_names(module)) for module in layer.modules()):
        return None
    return next((name for name in _locals(layer) if name in CACHES), None)


def counts_positions(layer: nn.Module) -> bool:
    """Whether a module of the layer asks its cache how many tokens came before (llama4's layers without rotary
    positions do; they would count from 0 in every chunk)."""
    asking = (module for module in layer.modules() if not getattr(module, "is_cross_attention", False))
    return any("get_seq_length" in _names(module) for module in asking)


def _why_not(backbone: PreTrainedModel, layers: nn.ModuleList, encoded: bool) -> str | None:
    """Why layers of this stack cannot be streamed exactly; None if nothing in their structure speaks against it.

    encoded: they are part of an encoder-decoder, whose decoder reads the encoder's output with a mask that cannot be cut.
    """
    if getattr(backbone.config, "is_encoder_decoder", False) or getattr(backbone.config, "is_causal", True) is False:
        return "its attention is bidirectional, a chunk would read what later chunks hold"
    for layer in layers:
        if not isinstance(layer, GradientCheckpointingLayer):
            return f"{type(layer).__name__} is not a GradientCheckpointingLayer"
        attentions = _attentions(layer)
        bidirectional = [a for a in attentions if getattr(a, "is_causal", True) is False]
        # Beside a causal one it reads nothing where there is no encoder (BartForCausalLM); the probe finds out if not.
        if bidirectional and (encoded or len(bidirectional) == len(attentions)):
            return f"{type(bidirectional[0]).__name__} is bidirectional, a chunk would read what later chunks hold"
        indexer = next((m for m in layer.modules() if "Indexer" in type(m).__name__), None)
        if indexer is not None:
            return f"its attention is sparse, {type(indexer).__name__} picks keys by their content"
    if not any(attends(layer) or cache_argument(layer) or states_argument(layer) for layer in layers):
        return (
            "its layers neither attend, through transformers' interface or over what a cache returns, nor keep states there"
        )
    return None


def _attentions(layer: nn.Module) -> list[nn.Module]:
    return [module for module in layer.modules() if "ALL_ATTENTION_FUNCTIONS" in _names(module)]


def _locals(module: nn.Module) -> tuple[str, ...]:
    """The arguments and variables of a module's forward."""
    forward: Any = inspect.unwrap(type(module).forward)
    return forward.__code__.co_varnames if hasattr(forward, "__code__") else ()


def _names(module: nn.Module) -> tuple[str, ...]:
    """The global names and attributes in the source of a module's forward."""
    forward: Any = inspect.unwrap(type(module).forward)
    return forward.__code__.co_names if hasattr(forward, "__code__") else ()
