"""The first looks at a model, made when the program asks for them: before its hooks are set, before its first step.

A first step finds out how each layer can be cut, measures what layers save, tries whether rows can share
prefixes, compiles kernels and sets host memory aside. All of it follows from a step, so a warm-up is one: the program's own
forward and a backward, of which nothing stays but what was found out. Gradients are asked for by `torch.autograd.grad`: no
`.grad` is written, and nothing that waits for one (an optimizer inside of backward) runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor, nn

from streambp.admission.generators import leaving_no_trace
from streambp.distributed.engines import engine_of
from streambp.errors import StreamBPError
from streambp.instance_forward import forwards
from streambp.layer.recompute import Autocast, RandomState
from streambp.layer.site import Warm
from streambp.lazy.tensor import LazyLogits
from streambp.model.causal_lm import CausalLMForward
from streambp.model.wrappers import BackboneForward, LayerForward

TOLD = ("last", "lazy", "trained", "unlabelled", "predicted")  # of a head's calls


def warm_up(model: nn.Module, **inputs: Any) -> None:
    """Make all first looks at a patched model now, as a first step with these inputs would, before hooks are set.

    A first call of each kind runs layers on a few random tokens and differentiates them; hooks that add something up
    (statistics for calibration, K-FAC, influence) would keep these. After `warm_up` no trial runs with hooks that are set
    later and that only look on: they see the batches' tokens and gradients alone. It also takes the time of first looks off
    the first step: planning, trials, the compilation of kernels, pinned host memory.

    Args:
        model: as given to `patch`, or a module around it or inside. Call it as in training: in the mode, under the autocast
            and, for evaluation, under the `torch.no_grad()` of the calls to come; once for each kind of them.
        inputs: of the model's forward, such as input_ids [B, T] and labels [B, T], as large as a usual batch's.

    Afterwards gradients, buffers, what modules and hooks keep in Python, the record of the last step and the states of
    random generators are what they were. A hook that is set later and changes what it is given, or keeps it with its
    graph, ends its first step with an error that names it; the step can be repeated. Set such hooks before `warm_up`.

    Raises:
        StreamBPError: the model is not patched, or an engine (DDP, DeepSpeed, FSDP) holds its parameters, which waits for
            gradients that a warm-up does not give: call it before.
    """
    wrappers = [f for module in model.modules() for f in forwards(module)]
    layers = [wrapper for wrapper in wrappers if isinstance(wrapper, LayerForward) and not wrapper.retired]
    if not layers:
        raise StreamBPError(f"This {type(model).__name__} is not patched. Call streambp.patch before streambp.warm_up.")
    engine = engine_of(model)
    if engine is not None:
        raise StreamBPError(
            f"{engine} holds the parameters of this {type(model).__name__} and waits for gradients that a warm-up does not "
            "give. Call streambp.warm_up before the engine gets the model."
        )
    # What is drawn from torch's generators does not count, nor do the notes that `describe` and `last_step` read.
    before = [RandomState.capture(device) for device in {p.device for p in model.parameters()} or {torch.device("cpu")}]
    heads = [w for w in wrappers if isinstance(w, CausalLMForward)]
    told = [(w, {name: getattr(w, name) for name in TOLD}) for w in heads]
    noting = [w.state.steps for w in wrappers if isinstance(w, CausalLMForward | BackboneForward)]
    try:
        with contextlib.ExitStack() as kept:
            kept.enter_context(leaving_no_trace(model))
            for steps in {id(each): each for each in noting}.values():
                kept.enter_context(steps.unnoted())
            output = model(**inputs)
            leaves = [p for p in (*model.parameters(), *inputs.values()) if isinstance(p, Tensor) and p.requires_grad]
            loss = _loss_of(output)
            if torch.is_grad_enabled() and leaves and loss is not None:
                with Autocast.capture(loss.device).off():
                    torch.autograd.grad(loss, leaves, allow_unused=True)
    finally:
        for state in before:
            state.restore()
        for head, fields in told:
            vars(head).update(fields)
    warm = next((w.site.warm for w in layers if w.site.warm is not None and w.site.warm.on), Warm())
    for wrapper in layers:
        wrapper.site.warm = warm
        wrapper.site.forget(None)  # what modules set at their first call is not set any more


def _loss_of(output: Any) -> Tensor | None:
    """What a program might differentiate of a model's output: its loss, or something of its logits [B, T, V], a number."""
    fields = output if isinstance(output, Mapping) else {"": output}
    found = [x for value in fields.values() for x in (value if isinstance(value, tuple | list) else (value,))]
    wanted = [x for x in found if isinstance(x, Tensor) and x.requires_grad]
    if isinstance(fields.get("loss"), Tensor):
        wanted = [x for x in wanted if x is fields["loss"]]
    lazy = next((x for x in wanted if isinstance(x, LazyLogits)), None)
    if lazy is not None:
        labels = torch.zeros(lazy.shape[:-1], dtype=torch.long, device=lazy.device)  # [B, T]
        return F.cross_entropy(lazy.flatten(0, -2), labels.flatten())
    return torch.stack([x.sum().float() for x in wanted]).sum() if wanted else None
