"""Checks before and during a layer's recomputation that its inputs, parameters and hooks are
unchanged since forward.

The recomputation's results are compared as well. [Note: witness]
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from typing import Any

import torch

from streambp.errors import BackwardError
from streambp.fingerprint.hooks import HookKey, described, watching
from streambp.fingerprint.looks import changed
from streambp.layer.arguments import refuse_written
from streambp.layer.call import LayerCall
from streambp.layer.recompute import check_mode
from streambp.layer.shadows import Parameters, slots_of

NOBODY: contextlib.AbstractContextManager[AbstractSet[HookKey]] = contextlib.nullcontext(
    frozenset()
)


def begin_backward(ctx: Any) -> tuple[LayerCall, Parameters]:
    """Remove the call from the context and return it: a backward pass uses up the saved tensors.

    Raises:
        BackwardError: it is the second backward, second derivatives are wanted, or a value changed
            since forward.
    """
    call, ctx.call = ctx.call, None
    if call is None:
        raise BackwardError(
            "backward ran a second time through a streamed layer, but the first backward has "
            "freed the saved tensors. Compute the loss again, or add the losses up and call "
            "backward once. Zero-bubble pipelines (torch's ScheduleZBVZeroBubble, "
            "ScheduleInterleavedZeroBubble, ScheduleDualPipeV) run backward twice, for inputs and "
            "for weights; 1F1B, interleaved 1F1B and GPipe run it once."
        )
    if torch.is_grad_enabled():
        raise BackwardError(
            "backward was called with create_graph=True; streamed layers have no second "
            "derivatives. Run this part unpatched (streambp.unpatch(model))."
        )
    if not call.kept.store.copies and call.hidden_states._version != ctx.version:
        raise BackwardError(
            "The input of a streamed layer was changed in place between forward and backward. "
            "Work on a copy (tensor.clone()) instead."
        )
    check_mode(call.site.layer, call.backward.training)
    call.look = call.site.fingerprint.look(call.site.layer)
    same = call.look is ctx.parameters.look and call.look.trained == ctx.parameters.trained
    ctx.parameters.check_unchanged([] if same else call.site.of(slots_of))
    refuse_written(call.arguments.seen)
    call.site.fingerprint.check(call.site.layer, call.backward.seen, call.look)
    return call, ctx.parameters


@contextlib.contextmanager
def recomputing(call: LayerCall) -> Iterator[None]:
    """Context manager for the layer's recomputation.

    Raises:
        BackwardError: a hook inside modifies values in backward only, or in forward only.
    """
    assert call.backward.seen is not None
    site = call.site
    hooks = call.look.hooks
    with watching(hooks) if hooks.places else NOBODY as acted:
        yield
    for key in sorted(acted ^ call.backward.seen.acted):
        now, then = (
            ("changes what", "changed nothing") if key in acted else ("changes nothing that", "did")
        )
        raise changed(call.site.layer, f"{described(key)} {now} it is given, and {then} in forward")
    if site.fingerprint.pending:
        site.fingerprint.learn(call.site.layer, call.look)
