"""A chunk with its autograd graph: built in backward, or kept since forward if the call is one
chunk.

[Note: kept graphs] If a short sequence is one chunk and the device has enough memory, the layer
runs as in the unpatched model. Forward builds the graph for backward, and nothing is recomputed.
The graph starts at the layer's detached input and the parameters' shadows, like the graph of a
recomputation, so the rest of backward is the same. If the graph is freed, backward recomputes it.
The graph is kept only if its results cannot differ from a recomputation:

    no hooks and no engine hooks inside the layer
    no weights that an engine frees between forward and backward
    no states, no autocast, no writes through pointers
    no saved_tensors_hooks, for example of a checkpoint around the model

A tensor that requires a gradient can enter a layer without being a parameter or an argument: as a
plain attribute, in a closure, inside an object among the arguments, or as a view of FSDP1's flat
parameter. In the unpatched model its gradient flows through the graph. A chunk's graph ends inside
the layer's autograd Function, which would lose that gradient. The graph of a layer's last chunk is
therefore searched for such leaves.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from streambp.attention.prefix import Stage
from streambp.chunks import Chunk
from streambp.distributed.engines import engine_hooks, held
from streambp.errors import BackwardError, UnsupportedModelError
from streambp.known_names import ACCUMULATE_GRAD, FLAT_PARAMETER
from streambp.layer.call import LayerCall
from streambp.layer.oom import AT_ONCE
from streambp.layer.outputs import ChunkOutput
from streambp.layer.side_effects import KEEPS
from streambp.offload.costs import LayerSeen
from streambp.recurrent.states import States

LEAF_NODE = getattr(torch._C._functions, ACCUMULATE_GRAD)


class Origin:
    """Marker for the start of the graph of a trial run.

    Code that keeps a part of that graph keeps this object alive. A gradient that arrives here after
    the trial raises.

    Attributes:
        trying: True while the trial runs.
    """

    trying = True


class Started(torch.autograd.Function):
    """Identity of x that records the start of a trial's graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, origin: Origin, may_be_written: bool) -> Tensor:
        """Return x [..., B, C, h] as a view, or as a copy if the layer may write to it."""
        ctx.origin = origin
        return x.clone() if may_be_written else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient [..., B, C, h] unchanged.

        Raises:
            BackwardError: the trial is over.
        """
        if not ctx.origin.trying:
            raise BackwardError(
                "This loss uses a tensor that a hook inside a streamed layer stored while "
                "streambp tested the layer on random tokens, at its first call. Delete the stored "
                "tensors after the first forward, or use the last one only: from now on the layer "
                "runs unchunked, and its hooks run once."
            )
        return grad, None, None


def is_kept(origin: weakref.ref[Origin]) -> bool:
    """True if other code still holds the trial's graph after the trial has dropped its own
    references.
    """
    if origin() is not None:
        gc.collect()  # frees graphs in reference cycles
    return origin() is not None


@dataclasses.dataclass
class Graph:
    """A chunk's output and the leaves of its graph.

    Attributes:
        output: the outputs of the chunk.
        origin: the marker of the graph's start.
        hidden_chunk: [..., B, C, h], the leaf for hidden_states.
        leaves: the differentiable arguments.
        shadows: the parameters' shadows, as views of the current memory.
    """

    output: ChunkOutput
    origin: Origin
    hidden_chunk: Tensor
    leaves: list[Tensor]
    shadows: list[Tensor]


def can_keep_graph(call: LayerCall) -> bool:
    """True if the graph of this call may be kept from forward to backward. [Note: kept graphs]"""
    site = call.site
    hooked = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    return not (
        len(call.plan) > 1
        or call.autocast.on
        or hooked
        or held(call.site.layer).weights  # the graph would keep the weights gathered
        or site.on_host  # the graph would hold a slot that other layers' weights need next
        or site.tests.overwritten.inputs
        or site.kind.states.carries
        or site.kind.attention.picks_keys
        or not site.linears
        or site.of(engine_hooks)
    )


def computed_with_graph(
    call: LayerCall,
    x: Tensor,
    chunk: Chunk,
    wanted: tuple[bool, list[bool]],
    shadows: list[Tensor],
    states: States,
) -> Graph:
    """Run the layer's own forward on x [..., B, C, h] with a graph.

    Args:
        wanted: True for the input, and for each differentiable argument, that needs a gradient.
        shadows: the tensors in the parameters' slots.
    """
    needs_input, arguments = wanted
    hidden_chunk = x.detach().requires_grad_(needs_input)
    leaves = call.arguments.leaves(chunk, arguments)
    origin = Origin()
    with torch.enable_grad():
        given = (
            Started.apply(hidden_chunk, origin, False)
            if chunk.stop == call.plan.length
            else hidden_chunk
        )
        output, _ = call.compute(given, chunk, Stage.RECOMPUTE, leaves=leaves, states=states)
    assert output is not None
    return Graph(output, origin, hidden_chunk, leaves, shadows)


@contextlib.contextmanager
def counting(call: LayerCall, watch: LayerSeen, known: Iterable[Tensor]) -> Iterator[None]:
    """Context manager that counts the bytes that autograd saves and reports the sum to `watch`.
    Tensors that exist anyway are not counted: `known`, frozen weights and the call's arguments,
    such as cosines and sines.

    Args:
        known: tensors [...] that are alive without the graph.
    """
    if call.attempt is AT_ONCE:
        yield
        return
    arguments = [tensor for _, tensor, _ in call.arguments.seen if tensor.layout == torch.strided]
    # without shadows
    frozen = [weight for weight in call.site.layer.parameters() if not weight.requires_grad]
    there = {tensor.untyped_storage()._cdata for tensor in (*known, *frozen, *arguments)}
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            if storage._cdata not in there:
                sizes[storage._cdata] = storage.nbytes()
        return tensor.detach()  # the tensor itself would make a cycle of node and output

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
        yield
    watch.graph += sum(sizes.values())


def refuse_other_leaves(
    layer: nn.Module, outputs: Iterable[Tensor], differentiated: Iterable[Tensor]
) -> None:
    """Search the graph of a chunk's outputs for leaves that are not differentiated. A typical layer
    takes 0.2 ms.

    Args:
        outputs: hidden_states [..., B, C, h], extra outputs and end states.
        differentiated: the leaves that receive gradients.

    Raises:
        UnsupportedModelError: the graph ends at another leaf.
    """
    leaf = leaf_besides(outputs, differentiated)
    if leaf is not None:
        otherwise = (
            ", so that streaming would lose that gradient. Register it as a parameter of the "
            "layer, or set requires_grad to False, or run the model unpatched "
            "(streambp.unpatch(model)) with gradient checkpointing."
        )
        told = "" if getattr(leaf, FLAT_PARAMETER, False) else otherwise
        raise UnsupportedModelError(f"{type(layer).__name__} {depends(leaf)}{told}")


def nodes_behind(outputs: Iterable[Tensor]) -> list[Any]:
    """Return all autograd nodes that computed these tensors [...], each node once."""
    found: list[Any] = list(
        dict.fromkeys(output.grad_fn for output in outputs if output.grad_fn is not None)
    )
    seen: set[Any] = {None, *found}
    for node in found:  # the list grows during the loop
        for before, _ in node.next_functions:
            if before not in seen:
                seen.add(before)
                found.append(before)
    return found


def leaf_besides(outputs: Iterable[Tensor], differentiated: Iterable[Tensor]) -> Tensor | None:
    """Return a leaf [...] of these outputs' graph that is not differentiated; None if there is
    none.
    """
    known = {id(tensor) for tensor in differentiated}
    for node in nodes_behind(outputs):
        if type(node) is LEAF_NODE and id(node.variable) not in known:
            leaf: Tensor = node.variable
            return leaf
    return None


def depends(leaf: Tensor) -> str:
    """Return the error text for a layer that depends on an unregistered tensor `leaf` [...]. For
    FSDP1's flat parameter the text includes the remedy.
    """
    flat = (
        ": FSDP1 keeps the layer's parameters in it. Use FSDP2 (fully_shard; fsdp_version: 2 in "
        "accelerate's config), DeepSpeed ZeRO or DDP."
    )
    return (
        f"depends on a tensor of shape {tuple(leaf.shape)} that wants a gradient and is neither "
        "one of its parameters nor one of its "
        f"arguments{flat if getattr(leaf, FLAT_PARAMETER, False) else ''}"
    )


def refuse_kept(call: LayerCall, origin: weakref.ref[Origin]) -> None:
    """Raise if other code still holds part of a finished chunk's graph, for an auxiliary loss for
    example. Forward gave that loss tensors without a graph, so its gradient would be lost. [Note:
    side effects]

    Raises:
        BackwardError: the graph is still held. Later calls of this kind run unchunked.
    """
    if origin() is None or call.site.fingerprint.in_cycles:
        return
    if not is_kept(origin):
        call.site.fingerprint.in_cycles = (
            True  # a cycle of torch's own; collecting it in each step would be slow
        )
        return
    call.arguments.renamed(call.look.kind)  # forward may have excluded values from comparison
    call.site.tests.result(call.arguments.kind).judge(KEEPS)
    raise BackwardError(
        f"{type(call.site.layer).__name__}, or a hook inside it, stores tensors with their graph, and "
        "did not when the layer was tested. A common cause is a second loss that starts at a "
        "later step. This step's loss has no gradient through the stored tensors. Delete them, "
        "set gradients to zero and repeat the step: from now on the layer runs unchunked, which "
        "is exact."
    )
