"""Describe how a patched model runs, with `describe`."""

from __future__ import annotations

import dataclasses
import math
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from streambp.admission.stacks import find_stacks
from streambp.admission.third_party import third_party_hooks
from streambp.attention.kernels import MATH
from streambp.attention.spans import BlockKind
from streambp.chunks import AUTO_RULE
from streambp.distributed.engines import belongs_to_engine
from streambp.distributed.host import HostUse, engine_host_use
from streambp.errors import UnsupportedModelError
from streambp.foreign import REGION_ATTRIBUTE, compiled_module_names, is_compiled
from streambp.instance_forward import forwards
from streambp.known_names import COMPILED_MODULE_ATTRIBUTE, FORWARD_HOOKS, LIGER
from streambp.model.adapters import adapter_notes
from streambp.model.few_bits import few_bits_notes
from streambp.model.fused_layers import fused_modules
from streambp.model.last_step import head_text, patch_of, record_of
from streambp.model.record import (
    NOT_TRIED,
    OUTCOME_UNCHUNKED,
    OUTCOME_UNPATCHED,
    StepRecord,
    size_text,
)
from streambp.model.state import PatchState
from streambp.model.wrappers import BackboneForward, LayerForward
from streambp.offload.free_memory import local_ranks
from streambp.offload.host_choice import HostChoice
from streambp.offload.weights import HostWeights
from streambp.prefixes.calls import UNREPORTED_REASONS
from streambp.reporting import report_safely

BLOCK_TEXTS = MappingProxyType(
    {
        BlockKind.FULL: "what other kernels leave over",
        BlockKind.CAUSAL: "what other kernels leave over",
        BlockKind.BAND: "the near edges of sliding windows",
        BlockKind.MASK: "attention masks that are no intervals",
    }
)
REASON_ADDED_LATER = (
    "patch the model again to stream it: it came into the model after streambp.patch, and costs "
    "memory"
)
LIGER_TEXT = "Liger's kernels"
REGIONS_TEXT = "compiled regions"
MIN_SAVED_SECONDS = 0.1  # seconds a step that offload="cpu" must save before a note proposes it
UNKNOWN_TEXT = "could not be told"
OTHER_CALLER_TEXT = (
    "not noted: another module than their backbone called the layers, which trained as below"
)
REASON_TAKEN_OUT = "it was taken out of the model after streambp.patch"


@dataclasses.dataclass(frozen=True)
class LayerDescription:
    """Description of one decoder layer for `describe`.

    Attributes:
        name: the layer's name in the model, or "layer" and its index if it was removed.
        kind: name of the layer's class.
        path: "streams" (chunk by chunk), "checkpoints" (unchunked, under torch's checkpoint),
            "unpatched" (the layer was added after `patch`) or "removed" (the layer is no longer in
            the model).
        reason: the reason for this path. A layer that streams has notes here on extra costs, packed
            documents and limits on its chunks, or "".
    """

    name: str
    kind: str
    path: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Description:
    """Summary of how a patched model runs; `str()` is a table.

    Attributes:
        layers: descriptions of the decoder layers, in the model's order.
        chunk_size: text on the setting, and on the size in the last step.
        saves: names or texts, one for each kind of tensor that layers save for backward.
        offload: text on tensors that are moved to host memory.
        attention: text on the kernels that computed attention.
        head: text on how the output projection and the loss were computed.
        notes: texts on everything else, for example hooks, fused kernels and adapters.
        last_step: record of the last step; None before the first micro-batch with gradients.
        bypasses_backbone: True if a module other than the backbone (the base model) calls the
            layers in training; such steps have no record.
    """

    layers: tuple[LayerDescription, ...]
    chunk_size: str
    saves: tuple[str, ...]
    offload: str
    attention: str
    head: str
    notes: tuple[str, ...]
    last_step: StepRecord | None = None
    bypasses_backbone: bool = False

    def __str__(self) -> str:
        step = self.last_step
        margin = "\n" + " " * 12
        groups: dict[tuple[str, str, str], list[str]] = {}
        for layer in self.layers:
            groups.setdefault((layer.path, layer.kind, layer.reason), []).append(layer.name)
        lines = []
        for (path, kind, reason), names in groups.items():
            span = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"
            if path == "streams" and reason.startswith(NOT_TRIED):
                path = NOT_TRIED
                reason = reason.removeprefix(NOT_TRIED).removeprefix("; ")
            elif path == "streams" and step is not None and step.way == OUTCOME_UNPATCHED:
                path = OUTCOME_UNPATCHED
                reason = "; ".join(filter(None, ("longer steps stream", reason)))
            lines.append(
                f"{path}: {len(names)} x {kind} ({span})" + (f", {reason}" if reason else "")
            )
        peak = None if step is None else step.peak
        saves = (
            margin if step is not None and any(" " in name for name in self.saves) else ", "
        ).join(self.saves)
        rows = [
            ("layers", margin.join(lines)),
            ("chunk_size", self.chunk_size),
            ("saves", saves or "nothing but each layer's input"),
            ("offload", self.offload),
            ("attention", self.attention),
            *((("memory", f"{size_text(peak)} at the peak so far"),) if peak is not None else ()),
            ("head", self.head),
            *(("note", note) for note in self.notes),
        ]
        called = any(
            not layer.reason.startswith(NOT_TRIED)
            for layer in self.layers
            if layer.path == "streams"
        )
        last = NOT_TRIED if step is None else str(step)
        if step is None and self.bypasses_backbone:
            last = OTHER_CALLER_TEXT
        elif step is None and called:
            last = "none with gradients yet"
        return "\n".join((f"last step: {last}", *(f"{name:<11} {value}" for name, value in rows)))


def describe(model: nn.Module) -> Description:
    """Return how a patched model runs, and the record of its last step.

    The description covers the layers that are computed chunk by chunk, the chunk size, the saved
    tensors, and everything that costs memory. If an entry cannot be made, its text is the reason.

    Args:
        model: the module that was passed to `patch`, or a module around it. A part of that module
            is accepted if the part contains every module whose forward `patch` replaced.

    Raises:
        StreamBPError: the model is not patched, or other parts of the patched model are outside of
            `model`.
    """
    state: PatchState = patch_of(model)
    lost: list[str] = []

    def lost_text(why: str) -> str:
        return f"{UNKNOWN_TEXT} ({why})"

    def several(why: str) -> tuple[str, ...]:
        return (lost_text(why),)

    record: StepRecord | str | None = report_safely(record_of, state, otherwise=lost_text)
    if isinstance(record, str):
        lost.append(f"the last step {record}")
        record = None
    layers: Any = report_safely(_layers, model, state, otherwise=lost_text)
    if isinstance(layers, str):
        lost.append(f"layers {layers}")
        layers = ()
    notes = report_safely(_notes, model, state, otherwise=several)
    return Description(
        layers,
        report_safely(_chunk_size, state, record, otherwise=lost_text),
        report_safely(_saves_texts, state, record, otherwise=several),
        report_safely(_describe_offload, state, record, otherwise=lost_text),
        report_safely(_describe_attention, state, record, otherwise=lost_text),
        report_safely(head_text, state, otherwise=lost_text),
        (*lost, *notes),
        record,
        state.steps.bypasses_backbone,
    )


def _chunk_size(state: PatchState, record: StepRecord | None) -> str:
    """Return the configured chunk size as text. The text for "auto" has the size in the last step,
    and the rule by which the size is chosen.

    Args:
        state: state of the model's patch.
        record: record of the last step; None before the first step.
    """
    if state.config.chunk_size != "auto":
        no_chunks = record is not None and record.way in (OUTCOME_UNPATCHED, OUTCOME_UNCHUNKED)
        return f"{state.config.chunk_size:,}" + (" where layers stream" if no_chunks else "")
    rule = str(state.saves_policy or AUTO_RULE)
    if record is None:
        return rule
    size = f"{record.chunk_size:,}" if record.chunks > 1 else "the whole sequence"
    return f"{size} ({rule})"


def _layers(model: nn.Module, state: PatchState) -> tuple[LayerDescription, ...]:
    """Return a description of each decoder layer in the model, in the model's order, and then of
    each patched layer that was removed from the model."""
    names = {id(module): name for name, module in model.named_modules()}
    positions = {module: position for position, module in enumerate(names)}
    wrappers = [w for w in state.wrappers if isinstance(w, LayerForward)]
    present = [w for w in wrappers if id(w.module) in names]
    described = [(id(w.module), _describe_layer(names[id(w.module)], w)) for w in present]
    try:  # the stacks that `patch` would stream now
        stacks = () if state.root is None else find_stacks(state.root, state.config.towers).stacks
    except UnsupportedModelError:
        stacks = ()
    present_ids = {id(w.module) for w in present}
    current_layers = (layer for stack in stacks for layer in stack.layers)
    other_layers = [
        layer for layer in current_layers if id(layer) in names and id(layer) not in present_ids
    ]
    for layer in other_layers:
        outer_wrappers = [
            f
            for m in layer.modules()
            for f in forwards(m)
            if isinstance(f, LayerForward) and not f.retired
        ]
        if not outer_wrappers:
            unpatched = LayerDescription(
                names[id(layer)], type(layer).__name__, "unpatched", REASON_ADDED_LATER
            )
            described.append((id(layer), unpatched))
        elif (
            outer_wrappers[0].module is layer
        ):  # a copy of a streamed layer; an outer one is described
            described.append((id(layer), _describe_layer(names[id(layer)], outer_wrappers[0])))
    if other_layers:
        described.sort(key=lambda pair: positions[pair[0]])
    removed_wrappers = [w for w in wrappers if id(w.module) not in names]
    removed = (
        LayerDescription(
            f"layer {w.layer_state.index}", type(w.module).__name__, "removed", REASON_TAKEN_OUT
        )
        for w in removed_wrappers
    )
    return (*(layer for _, layer in described), *removed)


def _describe_layer(name: str, wrapper: LayerForward) -> LayerDescription:
    """Return the description of a patched layer. The field `reason` says why the layer runs
    unchunked. If the layer runs in chunks, `reason` names extra costs, packed documents and limits
    on the chunks.

    Args:
        name: the layer's name in the model.
        wrapper: the replacement of the layer's forward.
    """
    layer_state = wrapper.layer_state
    kind = type(wrapper.module).__name__
    last = layer_state.last_call.report
    costs = layer_state.kind.attention.costs
    if last.reason:
        return LayerDescription(name, kind, "checkpoints", last.reason)
    was_tested = last.plan is not None or any(
        result.is_tested for result in layer_state.tests.results.values()
    )
    parts = [*(() if was_tested else (NOT_TRIED,)), *(() if costs is None else (costs,))]
    if last.document_arguments and last.rows is not None:
        how = f"told to its kernels as {' and '.join(last.document_arguments)}"
        parts.append(
            f"{last.rows.number} documents of packed rows as position_ids mark them, {how}"
        )
    elif last.document_arguments:
        parts.append(
            f"documents of packed rows as {' and '.join(last.document_arguments)} tell its kernels"
        )
    elif last.rows is not None:
        parts.append(
            f"{last.rows.number} documents of packed rows, told by position_ids: its mixers are "
            "called for one after the other, which takes longer where they are short"
            + (
                ", and hooks inside see one document at a time"
                if third_party_hooks(layer_state.layer)
                else ""
            )
        )
    if last.longest is not None:
        parts.append(f"chunks of up to {last.longest[0]} tokens: {last.longest[1]}")
    if layer_state.tests.max_tested_tokens is not None:
        names = ", ".join(layer_state.tests.third_party_modules)
        parts.append(
            f"{names} tried on {layer_state.tests.max_tested_tokens} tokens at once, "
            "no more did fit"
        )
    return LayerDescription(name, kind, "streams", "; ".join(parts))


def _saves_texts(state: PatchState, record: StepRecord | None) -> tuple[str, ...]:
    """Return texts on the tensors that layers save for backward, such as ("attn_out",).

    The texts are the names in `StreamConfig.saves`. If saves="auto", the texts are about the
    tensors chosen for the last step, with sizes or with the reason why none is saved. Before the
    first step, there is a text that says so, or () if saved tensors move to host memory.

    Args:
        state: state of the model's patch.
        record: record of the last step; None before the first step.
    """
    config = state.config
    if config.saves != "auto":
        return config.named_saves
    if state.config.always_moves or (record is not None and record.host is not None):
        return _names(record)
    figures = None if state.saves_policy is None else state.saves_policy.figures
    if figures is not None and figures.need is None and figures.why:
        return (f"nothing (auto: {figures.why})",)
    return (f"{NOT_TRIED} (auto)",) if record is None else record.saves()


def _names(record: StepRecord | None) -> tuple[str, ...]:
    """Return the names of the tensors that the last step saved; () before the first step."""
    return () if record is None else tuple(saved.name for saved in record.saved)


def _describe_attention(state: PatchState, record: StepRecord | None) -> str:
    """Return text on attention for `streambp.describe`: the value of `StreamConfig.attention`, and
    the kernels that computed attention in the last chunked call of each layer.

    Plain matrix products are slower than the other kernels. If plain products computed attention,
    the text has the reason, or names the part of attention, for example "the near edges of sliding
    windows".

    Args:
        state: state of the model's patch.
        record: record of the last step; None before the first step.
    """
    parts: list[str] = [state.config.attention]
    if parts == ["auto"] and not torch.backends.cuda.flash_sdp_enabled():
        parts = [
            "auto: FlashAttention is switched off (torch.backends.cuda), so plain products attend "
            "where others cannot"
        ]
    counts: dict[str, int] = {}
    for wrapper in state.wrappers:
        if isinstance(wrapper, LayerForward):
            kernel_texts = set()
            for use in wrapper.layer_state.last_call.kernels:
                if use.kernel != MATH.name:
                    kernel_texts.add(use.kernel)
                elif use.reason:
                    kernel_texts.add(f"plain products, because {use.reason},")
                else:
                    kernel_texts.add(f"plain products for {BLOCK_TEXTS[use.kind]}")
            for kernel_text in sorted(kernel_texts):
                counts[kernel_text] = counts.get(kernel_text, 0) + 1
    kernels = "; ".join(
        (
            *parts,
            *(
                f"{kernel_text} in {count} layer{'s' * (count > 1)}"
                for kernel_text, count in counts.items()
            ),
        )
    )
    if record is not None and record.way == OUTCOME_UNPATCHED:
        return f"the model's own; where layers stream: {kernels}"
    return kernels


def _describe_offload(state: PatchState, record: StepRecord | None) -> str:
    """Return text on offloading: which tensors are moved to host memory, how much host memory is
    allowed and allocated, and what was chosen for the last step.

    Args:
        state: state of the model's patch.
        record: record of the last step; None before the first step.
    """
    manager = state.offloader
    config = state.config
    if manager is None:
        if state.weights is None:
            return "nothing leaves the device"
        return "no saved tensor leaves the device"
    host = state.host
    if not config.always_moves and (record is None or record.host is None):
        return f"nothing leaves the device{_host_time_text(host)}"
    limit = config.host_memory
    if limit is None:
        part = "half" if manager.on_demand else "nine tenths"
        budget = f"{part} of the host memory available"
    else:
        budget = f"{size_text(int(limit))} of host memory"
        arena = manager.arena
        if arena is not None and manager.on_demand and arena.limit < int(limit):
            budget += f", of which {size_text(arena.limit)} are available"
    ranks = local_ranks()
    if ranks > 1:
        budget += (
            f", shared by the {ranks} ranks of this machine"
            if limit is None
            else f" on each of {ranks} ranks"
        )
    names = config.named_saves if config.saves != "auto" else _names(record)
    tensors = ", ".join(("layer inputs", *names))
    stats = manager.stats()
    use = HostUse() if state.root is None else engine_host_use(state.root)
    # an engine's own offloading
    sizes = {"parameters": use.parameters, "optimizer state": use.optimizer}
    engine = " and ".join(
        f"{size_text(size)} of {content}" for content, size in sizes.items() if size
    )
    if engine:
        if use.to_come:
            coming = f", and {size_text(use.to_come)} are set aside for its gradients and states"
        else:
            coming = ""
        engine = f", beside the engine's {engine}{coming}"
    parts = [
        f"{tensors} to the host, at most {budget} ({size_text(stats['host_bytes'])} "
        f"allocated){engine}"
    ]
    if manager.gpu_memory is not None and not manager.on_demand:
        parts.append(
            f"{size_text(manager.gpu_memory)} on the device for keys, values and their gradients, "
            "which stream beyond that, and for the last layers"
        )
    if stats["left"]:
        parts.append(f"{stats['left']:.0f} tensors did not fit ({config.on_host_full})")
    if state.saves_policy is not None and state.saves_policy.link is not None:
        choice = None if record is None or record.host is None else record.host.choice
        if choice is None:
            parts.append("auto: the first step measures, with layer inputs alone on the host")
        elif config.saves == "auto":
            parts.append(choice)
    if host is not None and record is not None and record.host is not None:
        parts.append(record.host.choice or "")
        if math.isfinite(host.gain):
            parts.append(
                f"by prediction {host.gain:.1f} s a step faster than with all on the device"
            )
        else:
            parts.append("by prediction the step would not fit on the device otherwise")
    return "; ".join(parts)


def _host_time_text(host: HostChoice | None) -> str:
    """Return text for offload="if_faster" while saved tensors still stay on the device; "" if they
    are moved, or stay for another reason.

    Pinning host memory costs seconds once. Tensors are moved only after the predicted gain of
    faster steps, in seconds, has reached this cost. The text has the gain of one step, and the
    seconds that are missing. [Note: host by seconds]

    Args:
        host: decides in each micro-batch if tensors move; None: the settings decide.
    """
    if host is None or not host.unpaid_seconds:
        return ""
    return (
        f" yet: if tensors went to the host, a step would be {host.gain:.1f} s faster by prediction; "
        f"they do once such steps have paid for pinning the host's memory ("
        f"{host.unpaid_seconds:.1f} s are missing)"
    )


def _weights_text(weights: HostWeights) -> str:
    layers = weights.ranges.layers
    staying = len(weights.ranges.staying)
    if not layers and not staying:
        return f"weights of layers go to the host in the first forward ({NOT_TRIED})"
    if not layers:
        return f"weights of all {staying} layers have room on the device"
    staying_text = f"; those of {staying} layers have room on the device" if staying else ""
    if weights.ranges.gradient_bytes:
        leaving = f"; gradients have {size_text(weights.ranges.gradient_bytes)} of the host"
    else:
        leaving = ""
    return (
        f"{size_text(weights.ranges.bytes)} of weights of {len(layers)} layers live on the host, "
        f"beside two layers' memory ({size_text(weights.device_bytes)}) on the device: "
        f"{sum(weights.loads.values()):,} copies of a layer so far, for which the device waited "
        f"{weights.seconds_waited:.1f} s; a token that is generated takes one of each layer"
        f"{staying_text}{leaving}"
    )


def _fused_layer_lines(state: PatchState) -> list[str]:
    """Return a line about weights in few bits, and lines about modules inside layers whose forward
    is another library's (Liger's, for example) or compiled code. A line names the modules and the
    number of layers with such modules.
    Forwards that the program itself has set are included.

    More lines follow on compiled graphs, and on modules for which the setting `kernels` changes
    nothing.
    """
    layers: dict[tuple[str, tuple[str, ...]], int] = {}
    for wrapper in state.wrappers:
        if isinstance(wrapper, LayerForward):
            for home, names in fused_modules(wrapper.module).items():
                layers[home, tuple(names)] = layers.get((home, tuple(names)), 0) + 1
    sources = {LIGER: LIGER_TEXT, REGION_ATTRIBUTE: REGIONS_TEXT}
    fused = state.fused
    choice = state.config.kernels
    notes = few_bits_notes(w.module for w in state.wrappers if isinstance(w, LayerForward))
    notes += [
        f"{sources.get(home, f'forwards of {home}')} compute {', '.join(names)} of {number} layers"
        for (home, names), number in layers.items()
    ]
    if (by := fused.compiler) is not None:
        notes.append(
            f"{by.graphs.total()} graphs of regions so far, compiled in {by.seconds:.1f} s"
        )
    if fused.why_own is not None:
        notes.append(
            f"kernels='{choice}' leaves all modules as they are: {fused.why_own.rstrip('.')}."
        )
    whose = REGIONS_TEXT if choice == "compiled" else LIGER_TEXT
    if fused.skipped_classes:
        notes.append(
            f"{whose} compute otherwise than {', '.join(fused.skipped_classes)}, which stay as "
            "they are"
        )
    return notes


def _notes(model: nn.Module, state: PatchState) -> tuple[str, ...]:
    hooked = sum(
        any(
            not belongs_to_engine(hook)
            for table in FORWARD_HOOKS
            for hook in getattr(m, table).values()
        )
        for wrapper in state.wrappers
        if isinstance(wrapper, LayerForward) and wrapper.layer_state.last_call.report.reason is None
        for m in wrapper.module.modules()
        if m is not wrapper.module
    )
    notes = [f"hooks on {hooked} modules inside layers run once per chunk"] if hooked else []
    split = state.history.split
    if split is not None:
        notes.append(
            f"sequences are split over {split.size} ranks ({split.by}), each streams its shard"
        )
    notes += [] if state.weights is None else [_weights_text(state.weights)]
    notes += _fused_layer_lines(state)
    notes += adapter_notes(
        wrapper.layer_state for wrapper in state.wrappers if isinstance(wrapper, LayerForward)
    )
    faster = 0.0 if state.saves_policy is None else state.saves_policy.faster_on_host()
    if faster >= MIN_SAVED_SECONDS:
        notes.append(
            f"offload='cpu' would be about {faster:.1f} s a step faster, by the device's rates: "
            "attn_out would fit"
        )
    reports = (
        wrapper.layer_state.last_call.report
        for wrapper in state.wrappers
        if isinstance(wrapper, LayerForward)
    )
    packed = next((report.documents for report in reports if report.documents), None)
    if packed is not None:
        how = "restart" if packed[0] == "position_ids" else "are given"
        notes.append(
            f"{packed[0]} {how}: attention kept the {packed[1]} documents of the last call's rows "
            "apart"
        )
    backbones = [
        w.prefixes
        for w in state.wrappers
        if isinstance(w, BackboneForward) and w.prefixes is not None
    ]
    tells = (
        prefixes.last
        for prefixes in backbones
        if prefixes.rows == "packed" or prefixes.last not in UNREPORTED_REASONS
    )
    for last in tells:
        if isinstance(last, str):
            notes.append(f"rows: computed as given: {last}")
        elif last is not None:
            size = f"{last.tokens_of_rows:,} tokens" + (
                f" and {last.padding:,} of padding" if last.padding else ""
            )
            notes.append(
                f"rows: the last call's {last.rows} rows of {size} were computed as {last.tokens:,}"
            )
    if state.history.unasked_cache:
        notes.append(
            "pass use_cache=False to stream calls in eval mode with gradients: without it they "
            "return a cache, and ran unpatched"
        )
    if state.history.named_cache:
        notes.append(
            "calls in training that asked for a cache (use_cache=True) ran unpatched; without it "
            "they stream"
        )
    if state.history.given_cache:
        notes.append("calls in training that were given a cache (prefix tuning) ran unpatched")
    if state.unpatched is not None and state.unpatched.drew:
        notes.append(
            "short steps stream, too: a forward without gradients drew random numbers (dropout), "
            "and a step may have to draw the same"
        )
    notes += _compiled_module_lines(model, state)
    return (*notes, *(f"left as it is: {reason}" for reason in state.left_alone))


def _compiled_module_lines(model: nn.Module, state: PatchState) -> list[str]:
    """Return lines about torch.compile: the names of the modules outside and inside of chunked
    layers that run compiled code. Empty if no module is compiled."""
    notes: list[str] = []
    layers = [wrapper.module for wrapper in state.wrappers if isinstance(wrapper, LayerForward)]
    named_modules = [pair for layer in layers for pair in layer.named_modules() if pair[0]]
    inner_names = sorted(
        {
            name.removesuffix(f".{COMPILED_MODULE_ATTRIBUTE}")
            for name, module in named_modules
            if is_compiled(module)
        }
    )
    outer_names = compiled_module_names(
        model, state.root, layers, [w.module for w in state.wrappers]
    )
    if outer_names is not None:
        if outer_names:
            surroundings = f"{', '.join(sorted(outer_names))} run compiled"
        else:
            surroundings = "what is around them is eager, too"
        notes.append(f"streamed layers stay eager under torch.compile; {surroundings}")
    if inner_names:
        suffix = "run compiled inside of streamed layers; outputs of Linears in there are not saved"
        notes.append(f"{', '.join(inner_names)} {suffix}")
    return notes
