"""Build the record of a patched model's last micro-batch with gradients, with `last_step`."""

from __future__ import annotations

import math
from collections import Counter

from torch import nn
from transformers import PreTrainedModel

import streambp.model.installed_patch as installed
from streambp.device import allocator_bytes, reports_memory
from streambp.errors import StreamBPError
from streambp.foreign import foreign_forward, trls_head, wrapped_functions
from streambp.instance_forward import forwards
from streambp.model.causal_lm import LOSS_BLOCKWISE, LOSS_OF_PREDICTIONS, CausalLMForward
from streambp.model.record import (
    OUTCOME_KEPT_GRAPH,
    OUTCOME_STREAMED,
    OUTCOME_UNCHUNKED,
    OUTCOME_UNPATCHED,
    HostTraffic,
    SavedTensors,
    StepMemory,
    StepRecord,
    offload_text,
)
from streambp.model.state import PatchState
from streambp.model.steps import Step
from streambp.offload.costs import GRAPH, SavesChoice, UnpatchedChoice, was_moved
from streambp.offload.engines import FROM_HOST_QUEUE, TO_HOST_QUEUE


def last_step(model: nn.Module) -> StepRecord | None:
    """Return the record of a patched model's last micro-batch with gradients; `str()` of the record
    is a sentence.

    The call waits for the device if saved tensors are offloaded, so call it between steps.

    Returns:
        The record; None before the first micro-batch with gradients.

    Raises:
        StreamBPError: the model is not patched.
    """
    return record_of(patch_of(model))


def patch_of(model: nn.Module) -> PatchState:
    """Return the state of a model's patch. `patch` may have been called on a module inside or
    around the model.

    Raises:
        StreamBPError: the model is not patched, or the patch also covers layers outside of `model`.
    """
    module_and_state = installed.find_patch(model)
    if module_and_state is None:
        raise StreamBPError(
            f"This {type(model).__name__} is not patched. Call streambp.patch(model) first."
        )
    return module_and_state[1]


def record_of(state: PatchState) -> StepRecord | None:
    """Return the record of a patched model's last micro-batch with gradients; None before the first
    one. `streambp.last_step` and the log use this function."""
    steps = state.steps
    step = state.steps.last_decided_step()
    if step is None:
        return None
    plans = [report.plan for report in step.reports if report.plan is not None]
    longest = max(plans, key=len, default=None)
    choice = step.choice if isinstance(step.choice, SavesChoice) else None
    saved = _saved_tensors(state, step, choice)
    graphs = next((entry for entry in saved if entry.name == GRAPH), None)
    if graphs and graphs.layers == len(step.reports) and step.drop_reason is None:
        way = OUTCOME_KEPT_GRAPH
    else:
        way = OUTCOME_STREAMED
    if step.unpatched:
        way = OUTCOME_UNPATCHED
    elif step.reports and all(report.reason is not None for report in step.reports):
        way = OUTCOME_UNCHUNKED
    counted = 0 if step.over else 1
    unchunked = [
        (s, r.reason)
        for s, r in zip(steps.layer_states, step.reports, strict=False)
        if r.reason is not None
    ]
    if state.root is None or not unchunked:
        names = {}
    else:
        names = {id(module): name for name, module in state.root.named_modules()}
    split = state.history.split
    return StepRecord(
        number=step.number,
        tokens=step.tokens,
        rows=max(rows for rows, _ in step.shapes.values()),
        way=way,
        chunk_size=max(length for _, length in step.shapes.values())
        if longest is None
        else longest.size,
        chunks=1 if longest is None else len(longest),
        layers=len(steps.layer_states),
        head=head_text(state),
        saved=saved,
        memory=_step_memory(state, step),
        host=_host_traffic(state, step),
        shared=step.shared,
        whole=tuple(
            (names.get(id(layer_state.layer), f"layer {layer_state.index}"), reason)
            for layer_state, reason in unchunked
        ),
        split_by=None if split is None or step.unpatched else split.by,
        unpatched_steps=steps.unpatched + counted * step.unpatched,
        short_steps=steps.short + counted * (step.drop_reason is not None),
    )


def _step_memory(state: PatchState, step: Step) -> StepMemory:
    """Return the device memory that a step needed, and the device memory that was free, for the
    step's record.

    Args:
        state: the model's patch.
        step: notes on the step.
    """
    choice = step.choice
    layer_states = state.steps.layer_states
    device = (
        next((p.device for p in layer_states[0].layer.parameters()), None) if layer_states else None
    )
    least_free = choice.min_free_bytes if isinstance(choice, SavesChoice) else math.inf
    return StepMemory(
        needed=choice.bytes if isinstance(choice, UnpatchedChoice) else None,
        free=None if choice is None or moves_to_host(state, step) else choice.headroom,
        least_free=None if least_free == math.inf else least_free,
        peak=allocator_bytes(device, "peak")
        if device is not None and reports_memory(device)
        else None,
        let_go=step.drop_reason,
    )


def _saved_tensors(
    state: PatchState, step: Step, choice: SavesChoice | None
) -> tuple[SavedTensors, ...]:
    """Return the tensors that layers saved for backward in a step, one entry for each kind.

    Args:
        state: the model's patch.
        step: notes on the step.
        choice: the tensors that saves="auto" chose to save in the step; None: the user named the
            tensors to save.
    """
    if step.unpatched:
        return ()
    if choice is not None and state.config.saves == "auto":
        return tuple(
            SavedTensors(name, choice.layers[name], size) for name, size in choice.bytes.items()
        )
    # Saves that the user named, by layer.
    names: Counter[str] = Counter()
    for layer_state, report in zip(state.steps.layer_states, step.reports, strict=True):
        if report.reason is None:
            names.update(layer_state.config.named_saves)
    return tuple(SavedTensors(name, layers) for name, layers in names.items())


def moves_to_host(state: PatchState, step: Step) -> bool:
    """True if saved tensors of a step go to the host: by the setting offload="cpu" or "auto", or by
    a choice for this step.

    Args:
        state: the model's patch.
        step: notes on the step.
    """
    return state.config.always_moves or was_moved(step.choice)


def _host_traffic(state: PatchState, step: Step) -> HostTraffic | None:
    """Return the number of bytes that a step moved to host memory and back, for the step's record;
    None if the step moves no saved tensors to the host.

    Args:
        state: the model's patch.
        step: notes on the step.
    """
    if state.offloader is None or not moves_to_host(state, step):
        return None
    stats = state.offloader.stats()
    choice = None
    if isinstance(step.choice, SavesChoice) and step.choice.measured is not None:
        choice = offload_text(step.choice)
    return HostTraffic(
        step.moved_bytes.get(TO_HOST_QUEUE, 0.0),
        step.moved_bytes.get(FROM_HOST_QUEUE, 0.0),
        stats["host_bytes"],
        stats["stall_out"] + stats["stall_back"],
        int(stats["left"]),
        choice,
    )


def head_text(state: PatchState) -> str:
    """Return text on how the last step computed output projection and loss. Before the first step
    the text says how they will be computed."""
    heads = [wrapper for wrapper in state.wrappers if isinstance(wrapper, CausalLMForward)]
    if not heads:
        if state.root is None:
            models = []
        else:
            models = [m for m in state.root.modules() if isinstance(m, PreTrainedModel)]
        embeddings = [
            head for head in (m.get_output_embeddings() for m in models) if head is not None
        ]  # type: ignore[operator]
        # A head that computes logits without a single weight (a ModuleList of heads).
        head_class = next(
            (type(head).__name__ for head in embeddings if not hasattr(head, "weight")), None
        )
        if head_class:
            return f"builds the logits: the head is a {head_class}, costs memory"
        return "none (no language-model head)"
    texts = [_head_outcome_text(head) for head in heads]
    if len(set(texts)) == 1:
        return texts[0]
    return "; ".join(
        f"{type(head.module).__name__}: {text}" for head, text in zip(heads, texts, strict=True)
    )


def _head_outcome_text(head: CausalLMForward) -> str:
    """Return text on how one language model computed output projection and loss in the last step.
    Before the first step the text says how they will be computed."""
    # calls of the module bypass the head
    if all(forward is not head for forward in forwards(head.module)):
        forward = head.module.__dict__.get(head.slot)
        cause = foreign_forward(type(head.module), forward) or "something"  # the name of its module
        if any(trls_head(function) is not None for function in wrapped_functions(forward)):
            cause = "TRL's fused head"
        return (
            f"as another library computes it: {cause} replaced the model's forward after "
            "streambp.patch"
        )
    if head.third_party_forward is not None:
        return f"as another library computes it: {head.third_party_forward}"
    if not head.state.config.head:
        return "builds the logits (head=False)"
    text = head.last
    lazy = head.lazy
    if lazy is not None:
        opening = "" if text is None else f"{text}; besides, "
        if lazy.outcome.built_for is not None:
            text = (
                f"{opening}builds the logits: the program uses {lazy.outcome.built_for} on them, "
                "costs "
                "memory"
            )
        elif lazy.outcome.computed:
            text = f"{opening}no logits: computed blockwise for {', '.join(lazy.outcome.computed)}"
        else:
            text = text or "no logits: none were used"
    if text is None:
        return f"{LOSS_BLOCKWISE} when labels are given; no call yet in training or with labels"
    predicted = f"; {LOSS_OF_PREDICTIONS}" if head.predicted else ""
    if head.unlabelled:
        unlabelled = f" ({head.unlabelled} of {head.trained} training calls came without labels)"
    else:
        unlabelled = ""
    return f"{text}{predicted}{unlabelled}"
