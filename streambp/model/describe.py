"""`describe`: what a patched model does."""

from __future__ import annotations

import dataclasses
from types import MappingProxyType

import torch
from torch import nn
from transformers import PreTrainedModel

from streambp.admission.stacks import find_stacks
from streambp.attention.backend import Used
from streambp.attention.kernels import MATH
from streambp.attention.spans import Kind
from streambp.chunks import AUTO_RULE
from streambp.distributed.engines import belongs_to_engine
from streambp.distributed.host import HostUse, engine_host_use
from streambp.errors import StreamBPError, UnsupportedModelError
from streambp.foreign import foreign_forward, trls_head, wrapped_functions
from streambp.instance_forward import forwards
from streambp.known_names import COMPILED, FORWARD_HOOKS, LIGER
from streambp.layer.site import LayerSite
from streambp.model.causal_lm import BLOCKWISE, CausalLMForward
from streambp.model.fused_layers import fused_modules
from streambp.model.patching import Patch
from streambp.model.wrappers import BackboneForward, LayerForward
from streambp.offload.arena import local_ranks

BLOCKS = MappingProxyType(
    {
        Kind.FULL: "what other kernels leave over",
        Kind.CAUSAL: "what other kernels leave over",
        Kind.BAND: "the near edges of sliding windows",
        Kind.MASK: "attention masks that are no intervals",
    }
)
CAME_LATER = "it came into the model after streambp.patch and costs memory; patch the model again to stream it"
LIGERS = "Liger's kernels"
TAKEN_OUT = "it was taken out of the model after streambp.patch"


@dataclasses.dataclass(frozen=True)
class LayerDescription:
    """One decoder layer: where it is, what it is, how its forward runs and why.

    path: "streams", "checkpoints", "unpatched" (it came into the model after `patch`) or "removed" (it is not in it now).
    """

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
    layers = _layers(model, found)
    chunk = str(found.state.policy or AUTO_RULE) if config.chunk_size == "auto" else str(config.chunk_size)
    return Description(
        layers,
        chunk,
        _saves(found),
        _describe_offload(found),
        _describe_attention(found),
        _describe_head(found),
        _notes(model, found),
    )


def _layers(model: nn.Module, found: Patch) -> tuple[LayerDescription, ...]:
    """Those that are in the model now, in its order, then those of `patch` that no longer are."""
    names = {id(module): name for name, module in model.named_modules()}
    places = {module: place for place, module in enumerate(names)}
    wrappers = [w for w in found.state.wrappers if isinstance(w, LayerForward)]
    here = [w for w in wrappers if id(w.module) in names]
    described = [(id(w.module), _streamed(names[id(w.module)], w)) for w in here]
    later = [layer for layer in _decoder_layers(found) if id(layer) in names and not any(layer is w.module for w in here)]
    for layer in later:
        own = [f for module in layer.modules() for f in forwards(module) if isinstance(f, LayerForward) and not f.retired]
        if not own:
            unpatched = LayerDescription(names[id(layer)], type(layer).__name__, "unpatched", CAME_LATER)
            described.append((id(layer), unpatched))
        elif own[0].module is layer:  # a copy of a streamed layer; others stand around one that is described
            described.append((id(layer), _streamed(names[id(layer)], own[0])))
    if later:
        described.sort(key=lambda pair: places[pair[0]])
    gone = [w for w in wrappers if id(w.module) not in names]
    removed = (LayerDescription(f"layer {w.site.index}", type(w.module).__name__, "removed", TAKEN_OUT) for w in gone)
    return (*(layer for _, layer in described), *removed)


def _streamed(name: str, wrapper: LayerForward) -> LayerDescription:
    path = "checkpoints" if wrapper.site.last.because else "streams"
    return LayerDescription(name, type(wrapper.module).__name__, path, _reason(wrapper.site))


def _decoder_layers(found: Patch) -> list[nn.Module]:
    """What `patch` would stream now; where it would refuse the model, none."""
    try:
        stacks = [] if found.state.root is None else find_stacks(found.state.root).stacks
    except UnsupportedModelError:
        return []
    return [layer for stack in stacks for layer in stack.layers]


def _reason(site: LayerSite) -> str:
    """Why a layer does not stream, or what its streaming costs."""
    last, costs = site.last, site.kind.attention.costs
    if last.because:
        return last.because
    parts = [] if costs is None else [costs]
    if last.told and last.rows is not None:
        how = f"told to its kernels as {' and '.join(last.told)}"
        parts.append(f"{last.rows.number} documents of packed rows as position_ids mark them, {how}")
    elif last.told:
        parts.append(f"documents of packed rows as {' and '.join(last.told)} tell its kernels")
    elif last.rows is not None:
        parts.append(
            f"{last.rows.number} documents of packed rows, told by position_ids: its mixers are called for one "
            "after the other, which takes longer where they are short"
        )
    if last.longest is not None:
        parts.append(f"chunks of up to {last.longest} tokens: its attention mask has no end sooner (an image, a prefix)")
    if site.foreign_until is not None:
        parts.append(f"{', '.join(site.foreign)} tried on {site.foreign_until} tokens at once, no more did fit")
    return "; ".join(parts)


def _saves(found: Patch) -> tuple[str, ...]:
    """As configured, or as chosen for the last forward."""
    manager, config = found.state.offloader, found.state.config
    if manager is None and config.saves == "auto":
        return (_chosen(found),)
    if config.saves == "auto" and manager is not None and manager.auto is not None and manager.auto.latest is not None:
        return manager.auto.latest.saves
    return config.named_saves


def _chosen(found: Patch) -> str:
    """What saves="auto" did in the last micro-batch, if nothing is offloaded."""
    policy = found.state.policy
    if policy is None or policy.latest is not None:
        return "auto: nothing yet" if policy is None else str(policy.latest)
    why = policy.known.why if policy.known.need is None else ""
    return f"auto: nothing ({why})" if why else "auto: nothing yet"


def _describe_attention(found: Patch) -> str:
    """As configured, what "auto" does without, and which kernels attended in each layer's last call.

    Plain products are named with the blocks that they attended: other kernels are faster.
    """
    parts: list[str] = [found.state.config.attention]
    if parts == ["auto"] and not torch.backends.cuda.flash_sdp_enabled():
        parts = ["auto: FlashAttention is switched off (torch.backends.cuda), so plain products attend where others cannot"]
    counts: dict[str, int] = {}
    for wrapper in found.state.wrappers:
        if isinstance(wrapper, LayerForward):
            for what in sorted({_attended(used) for used in wrapper.site.attended}):
                counts[what] = counts.get(what, 0) + 1
    return "; ".join((*parts, *(f"{what} in {count} layer{'s' * (count > 1)}" for what, count in counts.items())))


def _attended(used: Used) -> str:
    if used.kernel != MATH.name:
        return used.kernel
    if used.because:
        return f"plain products, because {used.because},"
    return f"plain products for {BLOCKS[used.kind]}"


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
        elif config.saves == "auto":
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
        other = _other_head(found)
        return f"builds the logits: the head is a {other}, costs memory" if other else "none (no language-model head)"
    told = [_what_became_of(head) for head in heads]
    if len(set(told)) == 1:
        return told[0]
    return "; ".join(f"{type(head.module).__name__}: {what}" for head, what in zip(heads, told, strict=True))


def _other_head(found: Patch) -> str | None:
    """The kind of a head that gives logits otherwise than by one weight (a ModuleList of several); None: there is none."""
    models = [] if found.state.root is None else [m for m in found.state.root.modules() if isinstance(m, PreTrainedModel)]
    heads = [head for head in (m.get_output_embeddings() for m in models) if head is not None]  # type: ignore[operator]
    return next((type(head).__name__ for head in heads if not hasattr(head, "weight")), None)


def _what_became_of(head: CausalLMForward) -> str:
    """What a head did in the last step; before the first, what it will do."""
    if not head.reached:
        return f"as another library computes it: {_outermost(head)} replaced the model's forward after streambp.patch"
    if head.foreign is not None:
        return f"as another library computes it: {head.foreign}"
    if not head.state.config.head:
        return "builds the logits (head=False)"
    use = head.use
    if use.told is None:
        return f"{BLOCKWISE} when labels are given; no call yet in training or with labels"
    missing = f" ({use.unlabelled} of {use.trained} training calls came without labels)" if use.unlabelled else ""
    return use.told + missing


def _outermost(head: CausalLMForward) -> str:
    """Who replaced the forward of a patched model: TRL's head is known, others tell by where they were written."""
    forward = head.module.__dict__.get(head.slot)
    if any(trls_head(function) is not None for function in wrapped_functions(forward)):
        return "TRL's fused head"
    return foreign_forward(type(head.module), forward) or "something"


def _fused_layers(found: Patch) -> list[str]:
    """A line for each set of modules that another library's kernels compute, whoever has put it there."""
    layers: dict[tuple[str, tuple[str, ...]], int] = {}
    for wrapper in found.state.wrappers:
        if isinstance(wrapper, LayerForward):
            for home, names in fused_modules(wrapper.module).items():
                layers[home, tuple(names)] = layers.get((home, tuple(names)), 0) + 1
    notes = [
        f"{LIGERS if home == LIGER else f'forwards of {home}'} compute {', '.join(names)} of {number} layers"
        for (home, names), number in layers.items()
    ]
    left = found.fused.left
    return notes + ([f"{LIGERS} compute otherwise than {', '.join(left)}, which stay as they are"] if left else [])


def _notes(model: nn.Module, found: Patch) -> tuple[str, ...]:
    hooked = sum(
        any(not belongs_to_engine(hook) for table in FORWARD_HOOKS for hook in getattr(m, table).values())
        for wrapper in found.state.wrappers
        if isinstance(wrapper, LayerForward)
        for m in wrapper.module.modules()
        if m is not wrapper.module
    )
    notes = [f"hooks on {hooked} modules inside layers run once per chunk"] if hooked else []
    if found.state.split is not None:
        split = found.state.split
        notes.append(f"sequences are split over {split.size} ranks ({split.by}), each streams its shard")
    notes += _fused_layers(found)
    reports = (wrapper.site.last for wrapper in found.state.wrappers if isinstance(wrapper, LayerForward))
    packed = next((report.documents for report in reports if report.documents), None)
    if packed is not None:
        how = "do not grow by one" if packed[0] == "position_ids" else "are given"
        notes.append(f"{packed[0]} {how}: attention took the last call's rows for {packed[1]} documents")
    backbones = (w.prefixes for w in found.state.wrappers if isinstance(w, BackboneForward))
    notes += [f"share_prefixes: {prefixes.told}" for prefixes in backbones if prefixes is not None and prefixes.told]
    if found.state.unasked_cache:
        notes.append(
            "calls in eval mode with gradients and without use_cache ran as unpatched, because they return a cache; pass "
            "use_cache=False to stream them"
        )
    if found.state.given_cache:
        notes.append("calls in training that were given a cache (prefix tuning) ran as unpatched")
    if hasattr(model, COMPILED) or any(m._compiled_call_impl is not None for m in model.modules()):
        notes.append("streamed layers stay eager under torch.compile; the rest of the model is compiled")
    return (*notes, *(f"left as it is: {reason}" for reason in found.left_alone))
