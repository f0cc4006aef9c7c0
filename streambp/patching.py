"""`patch`, `unpatch` and `describe`."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from streambp.chunks import AUTO_RULE
from streambp.config import StreamConfig
from streambp.errors import StreamBPError, UnsupportedModelError
from streambp.wrappers import BackboneForward, CausalLMForward, InstanceForward, LayerForward, PatchState

Model = TypeVar("Model", bound=nn.Module)

FINAL_NORMS = ("norm", "final_layernorm", "ln_f", "final_norm", "norm_f", "final_layer_norm")


def patch(model: Model, config: StreamConfig | None = None) -> Model:
    """Make `model` stream: its decoder layers in chunks of the sequence, its loss in blocks of the logits.

    Args:
        model: a transformers model, or a module that holds one (a PeftModel, say). Changed in place.
        config: how; `StreamConfig()` if None. A patched model is patched anew with it.

    Returns:
        The same object.

    Raises:
        UnsupportedModelError: it has no decoder layers that can be streamed exactly. The model is left as it was.
    """
    config = StreamConfig() if config is None else config
    if not isinstance(config, StreamConfig):
        raise StreamBPError(f"config is {type(config).__name__}; pass a streambp.StreamConfig, or leave it out.")
    stacks = _find_stacks(model)
    for module in model.modules():
        if hasattr(module, "_streambp"):
            unpatch(model)
            break
    state = PatchState(config)
    wrappers: list[InstanceForward] = []
    for backbone, layers in stacks:
        wrappers.append(BackboneForward(backbone, state, layers, _final_norm(backbone)))
        wrappers.extend(LayerForward(layer, state) for layer in layers)
    backbones = {id(backbone) for backbone, _ in stacks}
    for module in model.modules():
        if _is_causal_lm(module) and id(module) not in backbones:
            wrappers.append(CausalLMForward(module, state))  # type: ignore[arg-type]
    for wrapper in wrappers:
        wrapper.install()
    model._streambp = Patch(state, wrappers)  # type: ignore[assignment]
    return model


@dataclasses.dataclass
class Patch:
    """What `unpatch` takes off; kept on the module that was given to `patch`."""

    state: PatchState
    wrappers: list[InstanceForward]


def unpatch(model: Model) -> Model:
    """Take off everything `patch` put on; the model is exactly what it was. Nothing happens to an unpatched model."""
    for module in model.modules():
        found = module.__dict__.pop("_streambp", None)
        if found is not None:
            for wrapper in reversed(found.wrappers):
                wrapper.remove()
    return model


def _find_stacks(model: nn.Module) -> list[tuple[PreTrainedModel, list[nn.Module]]]:
    """Backbones with their decoder layers."""
    stacks: list[tuple[PreTrainedModel, list[nn.Module]]] = []
    reasons: list[str] = []
    for module in model.modules():
        if not isinstance(module, PreTrainedModel):
            continue
        for child in module.children():
            if isinstance(child, nn.ModuleList) and len(child) and isinstance(child[0], GradientCheckpointingLayer):
                problem = next(filter(None, (_why_not(module, layer) for layer in child)), None)
                if problem is None:
                    stacks.append((module, list(child)))
                else:
                    reasons.append(f"{type(module).__name__}: {problem}")
    if reasons or not stacks:
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be streamed. "
            + ("; ".join(reasons) if reasons else "It has no stack of transformers decoder layers")
            + ". Use gradient checkpointing for it."
        )
    return stacks


def _why_not(backbone: PreTrainedModel, layer: nn.Module) -> str | None:
    """Why a layer of this stack cannot be streamed exactly, as far as its structure tells; None if nothing speaks
    against it."""
    name = type(layer).__name__
    if not isinstance(layer, GradientCheckpointingLayer):
        return f"{name} is not a GradientCheckpointingLayer"
    if not getattr(backbone, "_supports_attention_backend", False):
        return "its attention does not go through transformers' attention interface"
    if getattr(backbone.config, "is_encoder_decoder", False) or getattr(backbone.config, "is_causal", True) is False:
        return "its attention is bidirectional, a chunk would read what later chunks hold"
    attentions = [m for m in layer.modules() if hasattr(m, "is_causal")]
    if not attentions:
        return f"{name} has no causal attention module"
    if not all(m.is_causal for m in attentions):
        return f"{type(attentions[0]).__name__} is bidirectional, a chunk would read what later chunks hold"
    if "router_logits" in (getattr(backbone, "_can_record_outputs", None) or {}):
        return "mixture-of-experts layers with router outputs are not supported yet"
    return None


def _final_norm(backbone: nn.Module) -> nn.Module | None:
    return next((getattr(backbone, name) for name in FINAL_NORMS if hasattr(backbone, name)), None)


def _is_causal_lm(module: nn.Module) -> bool:
    if not isinstance(module, PreTrainedModel):
        return False
    head = module.get_output_embeddings()
    return head is not None and any(child is head for child in module.children())


@dataclasses.dataclass(frozen=True)
class LayerDescription:
    """One decoder layer: where it is, what it is, how its forward runs and why."""

    name: str
    kind: str
    path: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Description:
    """What a patched model does; `str()` is a table."""

    layers: tuple[LayerDescription, ...]
    chunk_size: str
    saves: tuple[str, ...]
    attention: str
    head: str
    notes: tuple[str, ...]

    def __str__(self) -> str:
        rows = [("layers", self._summary()), ("chunk_size", self.chunk_size)]
        rows += [("saves", ", ".join(self.saves) or "nothing but each layer's input"), ("attention", self.attention)]
        rows += [("head", self.head), *(("note", note) for note in self.notes)]
        return "\n".join(f"{name:<11} {value}" for name, value in rows)

    def _summary(self) -> str:
        groups: dict[tuple[str, str, str], list[str]] = {}
        for layer in self.layers:
            groups.setdefault((layer.path, layer.kind, layer.reason), []).append(layer.name)
        lines = []
        for (path, kind, reason), names in groups.items():
            span = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"
            lines.append(f"{path}: {len(names)} x {kind} ({span})" + (f", {reason}" if reason else ""))
        return ("\n" + " " * 12).join(lines)


def describe(model: nn.Module) -> Description:
    """Which layers of a patched model stream, how large the chunks are, what is saved, and what costs memory.

    Raises:
        StreamBPError: the model is not patched.
    """
    found = next((m.__dict__["_streambp"] for m in model.modules() if "_streambp" in m.__dict__), None)
    if found is None:
        raise StreamBPError(f"This {type(model).__name__} is not patched. Call streambp.patch(model) first.")
    config = found.state.config
    names = {id(module): name for name, module in model.named_modules()}
    layers = tuple(
        LayerDescription(names[id(w.module)], type(w.module).__name__, "streams", "")
        for w in found.wrappers
        if isinstance(w, LayerForward)
    )
    chunk = AUTO_RULE if config.chunk_size == "auto" else str(config.chunk_size)
    return Description(layers, chunk, config.saves, config.attention, _describe_head(found), _notes(model, found))


def _describe_head(found: Patch) -> str:
    if not any(isinstance(wrapper, CausalLMForward) for wrapper in found.wrappers):
        return "none (no language-model head)"
    if not found.state.config.head:
        return "builds the logits (head=False)"
    if found.state.head_built_for is not None:
        return f"builds the logits: the loss uses {found.state.head_built_for} on them, costs memory"
    return "blockwise loss, no logits when labels are given"


def _notes(model: nn.Module, found: Patch) -> tuple[str, ...]:
    hooked = sum(
        bool(m._forward_hooks or m._forward_pre_hooks)
        for wrapper in found.wrappers
        if isinstance(wrapper, LayerForward)
        for m in wrapper.module.modules()
        if m is not wrapper.module
    )
    return (f"hooks on {hooked} modules inside layers run once per chunk",) if hooked else ()
