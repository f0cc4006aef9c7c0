"""Run one training step and record each phase: live bytes at its start and end, and its peak.

The step runs on models without data (`Skeleton`) to predict, and on real models to measure. The
same hooks separate the phases.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from streambp.attention.interface import attention_configs
from streambp.known_names import IMPLEMENTATION, SDPA
from streambp.planner.count import AllocatedBytes, KernelReplay, LiveBytes, add_flops
from streambp.planner.work import Work, aten
from streambp.tensors import replace_attribute

EMBEDDING, HEAD, HEAD_BACKWARD, EMBEDDING_BACKWARD = (
    "embedding",
    "head",
    "head backward",
    "embedding backward",
)
FUSED_ATTENTION = "streambp_fused"
LOGITS_TILE = (2048, 32768)  # rows and columns of a tile of logits in `counted_head`


@dataclasses.dataclass(frozen=True)
class Span:
    """Memory and cost of one phase of a training step: for example a layer's forward, or the head's
    backward. The step runs on a device, or on tensors without data to count its memory. Bytes are
    relative to those before the step.

    Attributes:
        name: the phase's name: "embedding", "forward", "head", "head backward", "backward" or
            "embedding backward".
        layer: index of the layer, or None if the phase is outside of layers.
        start: bytes of device memory in use at the start.
        peak: maximum of the bytes of device memory in use.
        end: bytes of device memory in use at the end.
        host: bytes of host memory in use at the end.
        gradients: bytes of parameters' `.grad` at the end.
        work: FLOPs, bytes read and written, and dispatches in the phase.
        max_other_bytes: dict from bytes in use for other ranks' keys and values to the largest
            number of all other bytes in use at the same time. {} without sequence sharding.
        links: five numbers of bytes exchanged with other ranks or reordered for them, as in
            `splits.SplitCount.links`. () without sequence sharding.
    """

    name: str
    layer: int | None
    start: int
    peak: int
    end: int
    host: int
    gradients: int
    work: Work
    max_other_bytes: Mapping[float, float] = dataclasses.field(default_factory=dict)
    links: tuple[float, ...] = ()


class Phases:
    """Divides a training step into phases, and records the bytes and FLOPs of each phase (`Span`).

    A phase is the forward or backward of one layer, of the head or of the embedding. `enter` ends
    the current phase and begins the next.

    Args:
        count: counts the bytes of device memory that are in use, and their peak.
        parameters: the model's parameters, whose `.grad` bytes are recorded.
        host: function that returns the bytes of host memory that are in use.

    Attributes:
        spans: the `Span`s of the phases that have ended, in order.
        backward: True once the step's backward runs.
    """

    def __init__(
        self,
        count: LiveBytes | AllocatedBytes,
        parameters: list[nn.Parameter],
        host: Callable[[], int],
    ) -> None:
        self.spans: list[Span] = []
        self._count = count
        self._parameters = parameters
        self._host = host
        self._current: tuple[str, int | None] | None = None
        self._start = 0
        self._work = Work()
        self._links: tuple[float, ...] = ()
        self.backward = False

    def enter(self, name: str | None, layer: int | None = None) -> None:
        """End the current phase of the step, append its memory and FLOPs (`Span`) to `spans`, and
        begin another phase. A phase is a layer's forward or backward, for example.

        Args:
            name: name of the next phase; None: the step ends.
            layer: index of the phase's layer; None: the phase is outside of layers.
        """
        count = self._count
        work = getattr(count, "work", Work())
        links = tuple(getattr(count, "links", ()))
        if self._current is not None:
            gradients = sum(p.grad.nbytes for p in self._parameters if p.grad is not None)
            phase_work = work.plus(self._work, -1)
            span = Span(
                *self._current,
                self._start,
                count.peak,
                count.live,
                self._host(),
                gradients,
                phase_work,
            )
            linked = tuple(
                current - previous for current, previous in zip(links, self._links, strict=True)
            )
            self.spans.append(
                dataclasses.replace(
                    span, max_other_bytes=getattr(count, "max_other_bytes", {}), links=linked
                )
            )
        if name is None:
            self._current = None
        else:
            self._current = (name, layer)
        self._start = count.live
        self._work = work
        self._links = links
        count.reset_peak()


def run_step(
    model: nn.Module,
    layers: tuple[nn.Module, ...],
    loss: Callable[[], Tensor],
    count: LiveBytes | AllocatedBytes,
    host: Callable[[], int] = lambda: 0,
) -> list[Span]:
    """Run forward and backward of one batch [B, T]. Return the memory and FLOPs of each phase in
    order: the forward or backward of a layer, of the head or of the embedding. Gradients are
    accumulated in `.grad`.

    Args:
        model: the model.
        layers: the model's decoder layers, in order.
        loss: runs the forward and returns a scalar tensor.
        count: counts the bytes in use; entered here as a context manager.
        host: function that returns the bytes of host memory in use; by default they count as 0.
    """
    phases = Phases(count, list(model.parameters()), host)

    def enter_layer(index: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Begin the phase of the layer's forward, to measure its memory. Called as a forward
        pre-hook of layer number `index`. The hook does nothing in backward, where layers run again
        to recompute."""
        if phases.backward:
            return  # a recomputation
        if index == 0:
            if args:
                hidden_states = args[0]
            else:
                hidden_states = kwargs["hidden_states"]
            if hidden_states.requires_grad:
                hidden_states.register_hook(lambda grad: phases.enter(EMBEDDING_BACKWARD))
        phases.enter("forward", index)

    def leave_layer(index: int, module: nn.Module, args: Any, output: Any) -> None:
        """Register a hook on the layer's output that begins the phase of the layer's backward.
        Called as a forward hook of layer number `index`. After the last layer, also begin the phase
        of the head."""
        if phases.backward:
            return
        if isinstance(output, tuple):
            hidden_states = output[0]
        else:
            hidden_states = output
        if hidden_states.requires_grad:
            hidden_states.register_hook(lambda grad: phases.enter("backward", index))
        if index == len(layers) - 1:
            phases.enter(HEAD)

    handles = []
    for index, layer in enumerate(layers):
        handles.append(
            layer.register_forward_pre_hook(functools.partial(enter_layer, index), with_kwargs=True)
        )
        handles.append(layer.register_forward_hook(functools.partial(leave_layer, index)))
    try:
        with count:
            phases.enter(EMBEDDING)
            value = loss()
            phases.enter(HEAD_BACKWARD)
            phases.backward = True
            value.backward()
            del value
            phases.enter(None)
    finally:
        for handle in handles:
            handle.remove()
    return phases.spans


@contextlib.contextmanager
def fused_attention(model: nn.Module) -> Iterator[None]:
    """Context manager in which the attention of an unpatched model on meta tensors allocates what
    FlashAttention allocates on a GPU, to count memory. The sdpa of transformers would allocate a
    [T, T] matrix on meta tensors."""
    AttentionInterface.register(FUSED_ATTENTION, _flash)
    with replace_attribute(
        attention_configs(model), IMPLEMENTATION, itertools.repeat(FUSED_ATTENTION)
    ):
        yield


@contextlib.contextmanager
def fused_sdpa() -> Iterator[None]:
    """Context manager in which `F.scaled_dot_product_attention` on meta tensors allocates what
    FlashAttention allocates on a GPU, to count memory.

    An encoder-decoder under streambp needs this for the layers of an encoder that does not run
    chunk by chunk, and for attention to the encoder's output.
    """
    with replace_attribute([F], "scaled_dot_product_attention", [_flash_as_sdpa]):
        yield


def _flash_as_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *_: Any,
    is_causal: bool = False,
    scale: float | None = None,
    **__: Any,
) -> Tensor:
    """Return the output [B, H, T, D] of torch's FlashAttention operation on tensors without data,
    to count memory as on a GPU. Replaces `F.scaled_dot_product_attention` and has the same
    arguments: query [B, H, T, D], key and value [B, H_kv, S, D]. A mask of booleans and dropout are
    ignored.

    A mask of numbers, [1, H, T, S], is T5's bias of all pairs of positions. FlashAttention adds no
    bias, so torch's memory-efficient attention takes its place for such a mask. The backward of
    this attention allocates the bias's gradient for each row.
    """
    if attn_mask is not None and attn_mask.is_floating_point():
        pairs = (*query.shape[:3], key.shape[2])
        biased: Tensor = aten._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask.expand(pairs), True, 0.0, is_causal, scale=scale
        )[0]
        return biased
    result: Tensor = aten._scaled_dot_product_flash_attention(
        query, key, value, 0.0, is_causal, scale=scale
    )[0]
    return result


def _flash(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    sliding_window: int | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return the output [B, T, H, D_v] of torch's FlashAttention operation, and None in place of
    attention weights. The operation allocates, on meta tensors, what the kernel allocates on a GPU,
    and the planner counts this memory.

    The function is registered in transformers' `AttentionInterface`, and has the usual arguments:
    query [B, H, T, D], key [B, H_kv, S, D] and value [B, H_kv, S, D_v]. A mask and a softcap are
    ignored. A module with is_causal=False reads all keys, or the keys of a window
    to both sides; any other module is causal. If there is a `position_bias` [1, H, T, S],
    as in T5, transformers' sdpa function adds the bias to its mask.
    """
    if position_bias is not None:
        with fused_sdpa():
            return ALL_ATTENTION_FUNCTIONS[SDPA](
                module, query, key, value, None, scaling=scaling, position_bias=position_bias
            )
    causal = getattr(module, "is_causal", True) is not False
    size = value.shape[-1]
    wide = max(size, query.shape[-1])  # the kernel supports a single head size
    query, key, value = (
        x if x.shape[-1] == wide else F.pad(x, (0, wide - x.shape[-1])) for x in (query, key, value)
    )
    if sliding_window is None or sliding_window >= key.shape[2]:
        out = aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, causal, scale=scaling
        )[0]
        return out[..., :size].transpose(1, 2), None
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))  # [B, T, H, D]
    lengths = None, None, query.shape[1], key.shape[1]
    right = 0 if causal else sliding_window - 1
    window = {"window_size_left": sliding_window - 1, "window_size_right": right}
    out = aten._flash_attention_forward(
        query, key, value, *lengths, 0.0, causal, False, scale=scaling, **window
    )[0]
    return out[..., :size], None


def _counted_head(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
    """Allocate the tensors of an output projection with a fused loss, which has one block of the
    logits in memory at a time, to count memory. Return an uninitialized float32 scalar in place of
    the loss. Shapes: hidden [N, h] for N tokens, weight [V, h]."""
    for rows in hidden.split(LOGITS_TILE[0]):
        for columns in weight.split(LOGITS_TILE[1]):
            add_flops(0, (rows @ columns.mT).nbytes)  # one kernel reads the tile
    statistics = []
    for _ in range(7):
        statistics.append(hidden.new_empty(hidden.shape[0], dtype=torch.float32))
    ctx.save_for_backward(hidden, weight, statistics[0])
    return statistics[1].sum()


def _counted_head_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Allocate the tensors of the backward of an output projection with a fused loss, to count
    memory. Return gradients without values of hidden [N, h], for N tokens, and of weight [V, h], in
    the dtypes of these. The gradient of a frozen weight is None."""
    hidden, weight, _ = ctx.saved_tensors
    d_hidden = torch.zeros_like(hidden, dtype=torch.float32)  # [N, h]
    if ctx.needs_input_grad[3]:
        d_weight = torch.zeros_like(weight, dtype=torch.float32)
    else:
        d_weight = None
    for rows in hidden.split(LOGITS_TILE[0]):
        for columns in weight.split(LOGITS_TILE[1]):
            tile = rows @ columns.mT  # [rows, columns]
            add_flops(0, 2 * tile.nbytes)  # one kernel overwrites the tile with its gradient
            tile @ columns
            if d_weight is not None:
                tile.mT @ rows
            del tile
    return d_hidden.to(hidden.dtype), None if d_weight is None else d_weight.to(weight.dtype)


# hidden [N, h], weight [V, h] -> a loss, with the memory of common fused heads: labelled rows are
# copied, logits exist in tiles, and the gradients of hidden and weight are float32 for all of N
# until the end.
counted_head = functools.partial(KernelReplay.apply, _counted_head, _counted_head_backward)
