"""The decoder layer as one autograd Function: forward without a graph, backward chunk by chunk (DESIGN.md 2 and 3)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from streambp.attention.prefix import Stage
from streambp.errors import BackwardError, UnsupportedModelError
from streambp.layer.call import LayerCall, LayerSite
from streambp.layer.engines import gradient_or_zeros
from streambp.layer.probe import check_chunks_agree
from streambp.layer.products import left_out, plain_linears
from streambp.layer.reuse import counts_when_alone, mark, may_overwrite, reference_counts
from streambp.layer.shadows import GradientSum, Parameters


def stream_layer(site: LayerSite, args: Any, kwargs: Any) -> Any:
    """What the layer's forward returns for these arguments, computed in chunks of the sequence.

    Args:
        site: a decoder layer whose only work across tokens is attention through transformers' interface.

    Raises:
        UnsupportedModelError, UnsupportedMaskError, StreamBPError: it cannot be streamed exactly; nothing was changed.
    """
    _refuse_inner_fsdp(site.layer)
    counts_when_alone()
    call = LayerCall(site, args, kwargs)
    hidden_states = call.hidden_states
    parameters = Parameters(site.layer, hidden_states.device)
    check_chunks_agree(call)
    if torch.is_grad_enabled() and (hidden_states.requires_grad or parameters.groups):
        call.hidden_states = hidden_states.detach()
        output = StreamedLayer.apply(call, parameters, hidden_states, *parameters.current())
        return call.wrap(output)
    return call.wrap(_run_forward(call, keep=False))


def _run_forward(call: LayerCall, keep: bool) -> Tensor:
    output: Tensor | None = None
    with torch.no_grad(), call.streaming():
        for chunk in call.plan:
            if keep:
                call.snapshot()
            hidden_chunk = call.hidden_states[:, chunk.start : chunk.stop]
            result, attended = call.compute(hidden_chunk, chunk, Stage.FORWARD)
            part = call.unwrap(result)
            if keep:
                call.keep(chunk, hidden_chunk, attended)
            if len(call.plan) == 1:
                output = part
                break
            if output is None:
                output = part.new_empty(part.shape[0], call.plan.length, *part.shape[2:])  # [B, T, h]
            output[:, chunk.start : chunk.stop] = part
            del part, result, attended
    assert output is not None
    if not keep or "kv" not in call.saves:
        call.prefix.drop_buffers()
    return output


class StreamedLayer(torch.autograd.Function):
    """hidden_states [B, T, h] and the layer's trainable parameters in, [B, T, h] out; their gradients back."""

    @staticmethod
    def forward(ctx: Any, call: LayerCall, parameters: Parameters, hidden_states: Tensor, *values: Tensor) -> Tensor:
        ctx.call, ctx.parameters = call, parameters
        ctx.version = hidden_states._version
        return _run_forward(call, keep=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        counts = reference_counts(grad)
        call, parameters = _begin_backward(ctx)
        needs_input = ctx.needs_input_grad[2]
        sums = GradientSum(len(parameters.groups), len(call.plan))
        grad_input = None  # [B, T, h]
        if needs_input:
            reuse = may_overwrite(grad, counts, call.hidden_states)
            grad_input = grad if reuse else mark(torch.empty_like(call.hidden_states))
        call.hidden_states = None  # type: ignore[assignment]
        with call.autocast.restored(), call.streaming(), parameters.shadowed() as shadows:
            linears = plain_linears(call.layer)
            unread = call.unread_products(linears, parameters.names, needs_input)
            with left_out(linears, unread.refill):
                _refill(call)
            with left_out(linears, unread.recompute):
                for chunk in call.plan.backward():
                    part = _chunk_backward(call, chunk, grad[:, chunk.start : chunk.stop], shadows, needs_input, sums)
                    if grad_input is not None:
                        assert part is not None
                        grad_input[:, chunk.start : chunk.stop] = part  # its chunk of `grad` has been read
                    del part
        call.prefix.drop_buffers()
        values = parameters.current()
        gradients = [gradient_or_zeros(g, p) for g, p in zip(sums.result(values), values, strict=True)]
        return None, None, grad_input, *gradients


def _begin_backward(ctx: Any) -> tuple[LayerCall, Parameters]:
    """Take the call out of the context: a backward pass uses up what forward saved."""
    call, ctx.call = ctx.call, None
    if call is None:
        raise BackwardError(
            "backward ran a second time through a streamed layer; what it needs was freed by the first. Compute the "
            "loss again, or add the losses up and call backward once."
        )
    if torch.is_grad_enabled():
        raise BackwardError(
            "backward was called with create_graph=True; streamed layers have no second derivatives. "
            "Run this part unpatched (streambp.unpatch(model))."
        )
    if call.hidden_states._version != ctx.version:
        raise BackwardError(
            "The input of a streamed layer was changed in place between forward and backward. "
            "Work on a copy (tensor.clone()) instead."
        )
    if call.layer.training != call.training:
        raise BackwardError(
            f"The layer was in {'train' if call.training else 'eval'} mode in forward and is in the other mode in "
            "backward, so its recomputation would differ. Call model.train() or model.eval() outside of a step."
        )
    ctx.parameters.check_unchanged()
    return call, ctx.parameters


def _refill(call: LayerCall) -> None:
    """Compute K and V of every chunk but the last again; the last chunk's are written by its own recomputation."""
    if call.prefix.filled_until:  # kept since forward
        return
    with torch.no_grad():
        for chunk in call.plan:
            if chunk.index == len(call.plan) - 1:
                return
            with call.random[chunk.index].replayed():
                call.compute(call.store.peek("x", chunk.index), chunk, Stage.REFILL)


def _chunk_backward(
    call: LayerCall, chunk: Any, grad: Tensor, shadows: list[Tensor], needs_input: bool, sums: GradientSum
) -> Tensor | None:
    """Recompute one chunk with a graph, differentiate it, add up; the gradient of its input [B, C, h], if wanted."""
    hidden_chunk = call.store.take("x", chunk.index).detach().requires_grad_(needs_input)
    with torch.enable_grad(), call.random[chunk.index].replayed():
        result, _ = call.compute(hidden_chunk, chunk, Stage.RECOMPUTE)
        output = call.unwrap(result)
    inputs = [hidden_chunk, *shadows] if needs_input else shadows
    gradients = torch.autograd.grad(output, inputs, grad, allow_unused=True)
    sums.add(list(gradients[1:] if needs_input else gradients))
    return gradients[0] if needs_input else None


def _refuse_inner_fsdp(layer: nn.Module) -> None:
    for name, module in layer.named_modules():
        if module is not layer and any(base.__name__ == "FSDPModule" for base in type(module).__mro__):
            raise UnsupportedModelError(
                f"{name} inside {type(layer).__name__} is an FSDP unit of its own; streamed layers would gather it once "
                "per chunk and lose gradients. Apply fully_shard to whole decoder layers only."
            )
