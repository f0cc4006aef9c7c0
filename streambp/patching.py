"""`patch`, `unpatch` and `describe`."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

from torch import nn
from transformers import PreTrainedModel

from streambp.chunks import AUTO_RULE
from streambp.config import SAVES, StreamConfig
from streambp.distributed.host import HostUse, engine_host_use
from streambp.errors import ConfigError, StreamBPError
from streambp.instance_forward import InstanceForward, forwards
from streambp.layer.products import matching
from streambp.layer.site import LayerSite
from streambp.offload.arena import local_ranks
from streambp.offload.auto import Auto
from streambp.offload.manager import OffloadManager
from streambp.stacks import Found, find_stacks
from streambp.wrappers import BackboneForward, CausalLMForward, LayerForward, PatchState

Model = TypeVar("Model", bound=nn.Module)

OWN_ATTENTION = "its own attention: the model builds its [T, T] mask, and a chunk's scores against all before exist"
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
        StreamBPError: it is part of a model that is patched already.

    Layers that turn out to mix tokens elsewhere than in their attention (convolutions, recurrences) run under gradient
    checkpointing; their first call of each kind finds out, and `describe` names them.
    """
    config = StreamConfig() if config is None else config
    if not isinstance(config, StreamConfig):
        raise StreamBPError(f"config is {type(config).__name__}; pass a streambp.StreamConfig, or leave it out.")
    found = find_stacks(model)
    for module in model.modules():
        if hasattr(module, "_streambp"):
            unpatch(model)
            break
    _check_products(found, config)
    _check_unwrapped(model)
    layers = [layer for stack in found.stacks for layer in stack.layers]
    state = PatchState(config, root=model)
    if config.offload != "none":
        host_memory, gpu_memory = (None if m is None else int(m) for m in (config.host_memory, config.gpu_memory))
        sets_budget = config.offload == "auto" and gpu_memory is None
        auto = Auto(config.chooses_saves, sets_budget) if config.chooses_saves or sets_budget else None
        state.offloader = OffloadManager(host_memory, config.on_host_full, len(layers), gpu_memory, auto)
    wrappers = state.wrappers
    for stack in found.stacks:
        wrappers.append(BackboneForward(stack.backbone, state, stack.layers))
        norm = _final_norm(stack.backbone)
        for layer in stack.layers:
            last = layer is stack.layers[-1]
            wrappers.append(LayerForward(layer, state, layers.index(layer), norm if last else None))
    backbones = {id(stack.backbone) for stack in found.stacks}
    for module in model.modules():
        if _is_causal_lm(module) and id(module) not in backbones:
            wrappers.append(CausalLMForward(module, state))  # type: ignore[arg-type]
    for wrapper in wrappers:
        wrapper.install()
    model._streambp = Patch(state, found.left_alone)  # type: ignore[assignment]
    return model


def streamed_head(model: nn.Module) -> CausalLMForward | None:
    """What computes a patched model's loss, whichever module around or inside the model was given to `patch`."""
    return next((f for f in forwards(model) if isinstance(f, CausalLMForward) and not f.retired), None)


def _check_unwrapped(model: nn.Module) -> None:
    """Two patches on the same layers would leave it open whose settings count."""
    ours = (f for module in model.modules() for f in forwards(module) if isinstance(f, InstanceForward))
    if any(not wrapper.retired for wrapper in ours):
        raise StreamBPError(
            f"This {type(model).__name__} is part of a model that is patched already. Patch that model again to change its "
            "settings, or call streambp.unpatch on it first."
        )


def _check_products(found: Found, config: StreamConfig) -> None:
    """Every glob among `saves` must name a Linear of some layer."""
    layers = [layer for stack in found.stacks for layer in stack.layers]
    names = {name: None for layer in layers for name, m in layer.named_modules() if type(m) is nn.Linear}
    for glob in config.products:
        if not matching(names, [glob]):
            shown = ", ".join(name.removesuffix(".base_layer") for name in list(names)[:16])
            raise ConfigError(
                f"saves names {glob!r}, which is neither of {list(SAVES)} nor the name of a Linear in the model's layers. "
                f"These are: {shown or 'none'}."
            )


@dataclasses.dataclass
class Patch:
    """What `unpatch` takes off; kept on the module that was given to `patch`."""

    state: PatchState
    left_alone: tuple[str, ...]


def unpatch(model: Model) -> Model:
    """Take off everything `patch` put on; the model is exactly what it was. Nothing happens to an unpatched model."""
    for module in model.modules():
        found = module.__dict__.pop("_streambp", None)
        if found is not None:
            for wrapper in reversed(found.state.wrappers):
                wrapper.remove()
    return model


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
    offload: str
    attention: str
    head: str
    notes: tuple[str, ...]

    def __str__(self) -> str:
        rows = [("layers", self._summary()), ("chunk_size", self.chunk_size)]
        rows += [
            ("saves", ", ".join(self.saves) or "nothing but each layer's input"),
            ("offload", self.offload),
            ("attention", self.attention),
        ]
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
        LayerDescription(
            names[id(w.module)],
            type(w.module).__name__,
            "checkpoints" if w.site.because else "streams",
            _reason(w.site),
        )
        for w in found.state.wrappers
        if isinstance(w, LayerForward)
    )
    chunk = str(found.state.chunk_rule or AUTO_RULE) if config.chunk_size == "auto" else str(config.chunk_size)
    return Description(
        layers,
        chunk,
        _saves(found),
        _describe_offload(found),
        config.attention,
        _describe_head(found),
        _notes(model, found),
    )


def _reason(site: LayerSite) -> str:
    """Why a layer does not stream, or what its streaming costs."""
    if site.because:
        return site.because
    parts = [OWN_ATTENTION] if site.cache else []
    if site.longest is not None:
        parts.append(f"chunks of up to {site.longest} tokens: its attention mask has no end sooner (an image, a prefix)")
    return "; ".join(parts)


def _saves(found: Patch) -> tuple[str, ...]:
    """As configured, or as chosen for the last forward."""
    manager, config = found.state.offloader, found.state.config
    if config.chooses_saves and manager is not None and manager.auto is not None and manager.auto.latest is not None:
        return manager.auto.latest.saves
    return config.named_saves


def _describe_offload(found: Patch) -> str:
    manager, config = found.state.offloader, found.state.config
    if manager is None:
        return "nothing leaves the device"
    limit = config.host_memory
    budget = "nine tenths of the host memory available" if limit is None else f"{int(limit) / 2**30:.1f} GiB of host memory"
    ranks = local_ranks()
    if ranks > 1:
        budget += f", shared by the {ranks} ranks of this machine" if limit is None else f" on each of {ranks} ranks"
    moved = ", ".join(("layer inputs", *_saves(found)))
    stats = manager.stats()
    parts = [f"{moved} to the host, at most {budget} ({stats['host_bytes'] / 2**30:.2f} GiB allocated){_beside(found)}"]
    if manager.gpu_memory is not None:
        parts.append(
            f"{manager.gpu_memory / 2**30:.2f} GiB on the device for keys, values and their gradients, which stream beyond "
            f"that, and for the last layers"
        )
    if stats["left"]:
        parts.append(f"{stats['left']:.0f} tensors did not fit ({config.on_host_full})")
    if manager.auto is not None:
        chosen = manager.auto.latest
        if chosen is None:
            parts.append("auto: the first step measures, with layer inputs alone on the host")
        elif config.chooses_saves:
            parts.append(str(chosen))
    return "; ".join(parts)


def _beside(found: Patch) -> str:
    """What an engine's own offloading takes of the same host memory."""
    use = HostUse() if found.state.root is None else engine_host_use(found.state.root)
    parts = [
        f"{size / 2**30:.2f} GiB of {what}"
        for size, what in ((use.parameters, "parameters"), (use.optimizer, "optimizer state"))
        if size
    ]
    if not parts:
        return ""
    coming = f", and {use.to_come / 2**30:.2f} GiB are set aside for its gradients and states" if use.to_come else ""
    return f", beside the engine's {' and '.join(parts)}{coming}"


def _describe_head(found: Patch) -> str:
    heads = [wrapper for wrapper in found.state.wrappers if isinstance(wrapper, CausalLMForward)]
    if not heads:
        return "none (no language-model head)"
    if not any(head.reached for head in heads):
        return "as another library computes it: it replaced the model's forward after streambp.patch"
    if not found.state.config.head:
        return "builds the logits (head=False)"
    if found.state.head_built_for is not None:
        return f"builds the logits: the loss uses {found.state.head_built_for} on them, costs memory"
    return "blockwise loss, no logits when labels are given"


def _notes(model: nn.Module, found: Patch) -> tuple[str, ...]:
    hooked = sum(
        bool(m._forward_hooks or m._forward_pre_hooks)
        for wrapper in found.state.wrappers
        if isinstance(wrapper, LayerForward)
        for m in wrapper.module.modules()
        if m is not wrapper.module
    )
    notes = [f"hooks on {hooked} modules inside layers run once per chunk"] if hooked else []
    if found.state.split_over > 1:
        notes.append(f"sequences are split over {found.state.split_over} ranks (DeepSpeed Ulysses), each streams its shard")
    if hasattr(model, "_orig_mod") or any(m._compiled_call_impl is not None for m in model.modules()):
        notes.append("streamed layers stay eager under torch.compile; the rest of the model is compiled")
    return (*notes, *(f"left as it is: {reason}" for reason in found.left_alone))
