"""Run the first trials of a model at the program's request, before its hooks are set and before its
first step.

A first step determines how each layer can be chunked, measures what layers save, and tests if rows
can share prefixes. The step also compiles kernels and allocates host memory. A warm-up is such a
step: the program's own forward and a backward, of which only the findings remain.
`torch.autograd.grad` computes the gradients, so no `.grad` is written and no code that waits for a
gradient (an optimizer inside backward) runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor, nn

from streambp.admission.generators import restore_module_state
from streambp.device import RandomState
from streambp.distributed.engines import engine_of
from streambp.errors import StreamBPError
from streambp.instance_forward import check_is_module, forwards
from streambp.layer.layer_state import WarmUp
from streambp.layer.recompute import Autocast
from streambp.lazy.tensor import LazyLogits
from streambp.model.causal_lm import CausalLMForward
from streambp.model.wrappers import BackboneForward, LayerForward

HEAD_CALL_ATTRIBUTES = (
    "last",
    "lazy",
    "trained",
    "unlabelled",
    "predicted",
)  # attributes about a head's calls


def warm_up(model: nn.Module, **inputs: Any) -> None:
    """Run a patched model once on these inputs, so that the tests of its layers are done before you
    register hooks.

    The first call of each kind (training or evaluation, dtype, arguments) tests the layers on a few
    random tokens, with backward. Hooks that accumulate values (calibration statistics, K-FAC,
    influence functions) would include these tokens. Hooks that you register after `warm_up`, and
    that only observe, get the batches' tokens and gradients alone. The first step also becomes
    faster, because planning, tests, compilation of kernels and pinning of host memory are done.

    `warm_up` restores gradients, buffers, Python state of modules and hooks, the record of the last
    step and random generators. Hooks that change their inputs, or store inputs with the graph, must
    be registered before `warm_up`. Otherwise the first step ends with an error that names the hook,
    and can be repeated.

    Args:
        model: the module that was passed to `patch`, or a module around it or inside. Call
            `warm_up` in the training mode and under the autocast of the calls to come, and for
            evaluation under `torch.no_grad()`; once for each kind of call.
        inputs: arguments of the model's forward (input_ids [B, T] and labels [B, T], for example)
            of the usual size.

    Raises:
        StreamBPError: the model is not patched, or an engine (DDP, DeepSpeed, FSDP) already holds
            its parameters and waits for gradients that `warm_up` does not produce.
    """
    check_is_module(model)
    wrappers = [f for module in model.modules() for f in forwards(module)]
    layers = [
        wrapper for wrapper in wrappers if isinstance(wrapper, LayerForward) and not wrapper.retired
    ]
    if not layers:
        raise StreamBPError(
            f"This {type(model).__name__} is not patched. Call streambp.patch before "
            "streambp.warm_up."
        )
    engine = engine_of(model)
    if engine is not None:
        raise StreamBPError(
            f"{engine} holds the parameters of this {type(model).__name__} and waits for gradients "
            "that a warm-up does not give. Call streambp.warm_up before the engine gets the model."
        )
    # Restore torch's generators afterwards, and the notes that `describe` and `last_step` read.
    buffers = [
        RandomState.capture(device)
        for device in {p.device for p in model.parameters()} or {torch.device("cpu")}
    ]
    heads = [w for w in wrappers if isinstance(w, CausalLMForward)]
    saved_fields = [(w, {name: getattr(w, name) for name in HEAD_CALL_ATTRIBUTES}) for w in heads]
    noting = [w.state.steps for w in wrappers if isinstance(w, CausalLMForward | BackboneForward)]
    try:
        with contextlib.ExitStack() as restored:
            restored.enter_context(restore_module_state(model))
            for steps in {id(noting_steps): noting_steps for noting_steps in noting}.values():
                restored.enter_context(steps.pause_recording())
            output = model(**inputs)
            leaves = [
                p
                for p in (*model.parameters(), *inputs.values())
                if isinstance(p, Tensor) and p.requires_grad
            ]
            loss = _scalar_of_output(output)
            if torch.is_grad_enabled() and leaves and loss is not None:
                with Autocast.capture(loss.device).disable():
                    torch.autograd.grad(loss, leaves, allow_unused=True)
    finally:
        for state in buffers:
            state.restore()
        for head, fields in saved_fields:
            vars(head).update(fields)
    warm_up_record = _earlier_warm_up(layers)
    for wrapper in layers:
        tests = wrapper.layer_state.tests
        tests.warm_up = warm_up_record
        tests.forget(None)  # attributes that modules set in their first call were reset


def _earlier_warm_up(layers: list[LayerForward]) -> WarmUp:
    """Return the `WarmUp` object that an earlier call of `warm_up` has stored for these layers.
    Return a new object if there is none, or if the stored object was switched off because a later
    hook has modified a value of a layer."""
    for wrapper in layers:
        warm_up_record = wrapper.layer_state.tests.warm_up
        if warm_up_record is not None and warm_up_record.on:
            return warm_up_record
    return WarmUp()


def _scalar_of_output(output: Any) -> Tensor | None:
    """Return a scalar for `warm_up` to differentiate: the output's loss, or else a value computed
    from its logits [B, T, V] or from its other tensors. None if no tensor of the output requires a
    gradient."""
    fields = output if isinstance(output, Mapping) else {"": output}
    values = [
        x
        for value in fields.values()
        for x in (value if isinstance(value, tuple | list) else (value,))
    ]
    differentiable = [x for x in values if isinstance(x, Tensor) and x.requires_grad]
    if isinstance(fields.get("loss"), Tensor):
        differentiable = [x for x in differentiable if x is fields["loss"]]
    lazy = next((x for x in differentiable if isinstance(x, LazyLogits)), None)
    if lazy is not None:
        labels = torch.zeros(lazy.shape[:-1], dtype=torch.long, device=lazy.device)  # [B, T]
        return F.cross_entropy(lazy.flatten(0, -2), labels.flatten())
    return torch.stack([x.sum().float() for x in differentiable]).sum() if differentiable else None
