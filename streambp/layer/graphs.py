"""A chunk with its graph: made in backward, or kept since forward where a whole call is one chunk.

[Note: kept graphs] A short sequence that is one chunk, on a device with room for everything, is computed as unpatched: its
forward makes the graph that backward differentiates, and nothing is recomputed. The graph stands in front of the layer's
own input and the parameters' shadows, as a recomputation's does, so that the rest of backward is the same; if it is let go
of, backward recomputes. It is kept only where that cannot be told apart from a recomputation: no hooks and no engine's
hooks inside, no weights that an engine takes away between forward and backward, no states, no autocast, nothing written
through pointers, and nobody who takes what graphs save (a checkpoint around the model).

A tensor that wants a gradient can get into a layer without being one of its parameters or arguments:
as a plain attribute, in a closure, inside an object among the arguments, as a view of FSDP1's flat parameter. Unpatched its
gradient goes through the graph; a chunk's graph ends inside the layer's autograd Function, where it would be lost. So the
graph of a layer's last chunk is gone through.
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
from streambp.layer.outputs import ChunkOutput
from streambp.layer.side_effects import KEEPS
from streambp.offload.costs import LayerSeen
from streambp.recurrent.states import States

LEAF_NODE = getattr(torch._C._functions, ACCUMULATE_GRAD)


class Origin:
    """Where the graph of a run on trial starts.

    Whoever keeps a part of that graph keeps this object; a gradient that comes here from elsewhere than the trial raises.
    """

    trying = True


class Started(torch.autograd.Function):
    """x with the graph's start behind it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, origin: Origin, may_be_written: bool) -> Tensor:
        """x [..., B, C, h]: a view, a copy where it may be written to."""
        ctx.origin = origin
        return x.clone() if may_be_written else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """The gradient [..., B, C, h] as it is.

        Raises:
            BackwardError: nobody is trying any more.
        """
        if not ctx.origin.trying:
            raise BackwardError(
                "This loss uses a tensor that a hook inside a streamed layer kept when streambp tried the layer on random "
                "tokens, at its first call. Empty what your hooks collect after a first forward, or keep the last entry "
                "alone: from now on the layer runs whole, and its hooks see the sequence once."
            )
        return grad, None, None


def is_kept(origin: weakref.ref[Origin]) -> bool:
    """Whether somebody still holds a graph that starts there, when those who tried have let go of it."""
    if origin() is not None:
        gc.collect()  # of graphs in cycles
    return origin() is not None


@dataclasses.dataclass
class Graph:
    """What a chunk gave, and what it depends on: hidden_states [..., B, C, h], the differentiable arguments, and the
    parameters' shadows, as they lie in memory."""

    output: ChunkOutput
    origin: Origin
    hidden_chunk: Tensor
    leaves: list[Tensor]
    shadows: list[Tensor]


def can_keep_graph(call: LayerCall) -> bool:
    """[Note: kept graphs]"""
    site = call.site
    hooked = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    return not (
        len(call.plan) > 1
        or call.autocast.on
        or hooked
        or held(call.layer).weights  # the graph would keep them gathered
        or site.on_host  # it would hold a slot, where those of other layers come next
        or site.overwritten.inputs
        or site.kind.states.carries
        or site.kind.attention.picks_keys
        or not site.linears
        or site.of(engine_hooks)
    )


def computed_with_graph(
    call: LayerCall, x: Tensor, chunk: Chunk, wanted: tuple[bool, list[bool]], shadows: list[Tensor], states: States
) -> Graph:
    """The layer's own forward on x [..., B, C, h], with a graph.

    Args:
        wanted: whether the input and each differentiable argument wants a gradient. shadows: in the parameters' slots.
    """
    needs_input, arguments = wanted
    hidden_chunk = x.detach().requires_grad_(needs_input)
    leaves = call.arguments.leaves(chunk, arguments)
    origin = Origin()
    with torch.enable_grad():
        given = Started.apply(hidden_chunk, origin, False) if chunk.stop == call.plan.length else hidden_chunk
        output, _ = call.compute(given, chunk, Stage.RECOMPUTE, leaves=leaves, states=states)
    assert output is not None
    return Graph(output, origin, hidden_chunk, leaves, shadows)


@contextlib.contextmanager
def counting(call: LayerCall, watch: LayerSeen, known: Iterable[Tensor]) -> Iterator[None]:
    """Within, what graphs save is told to the call's watch, in bytes: without known tensors [...], frozen weights and the
    call's arguments, such as cosines and sines, which are there anyway."""
    if not call.repeats:
        yield
        return
    arguments = [tensor for _, tensor, _ in call.arguments.seen if tensor.layout == torch.strided]
    frozen = [weight for weight in call.layer.parameters() if not weight.requires_grad]  # which have no shadow
    there = {tensor.untyped_storage()._cdata for tensor in (*known, *frozen, *arguments)}
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            if storage._cdata not in there:
                sizes[storage._cdata] = storage.nbytes()
        return tensor.detach()  # the tensor itself would tie a node to its own output

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
        yield
    watch.graph += sum(sizes.values())


def refuse_other_leaves(layer: nn.Module, outputs: Iterable[Tensor], differentiated: Iterable[Tensor]) -> None:
    """Go through the graph of a chunk's outputs, a fifth of a millisecond for a usual layer.

    Args:
        outputs: hidden_states [..., B, C, h], extra outputs and end states.

    Raises:
        UnsupportedModelError: it ends at a leaf that is not among those that are differentiated.
    """
    leaf = leaf_besides(outputs, differentiated)
    if leaf is not None:
        otherwise = (
            ", so that streaming would lose that gradient. Register it as a parameter of the layer, or set requires_grad "
            "to False, or run the model unpatched (streambp.unpatch(model)) with gradient checkpointing."
        )
        told = "" if getattr(leaf, FLAT_PARAMETER, False) else otherwise
        raise UnsupportedModelError(f"{type(layer).__name__} {depends(leaf)}{told}")


def nodes_behind(outputs: Iterable[Tensor]) -> list[Any]:
    """All nodes of the autograd graph that these tensors, of any shape [...], were computed by, each once."""
    found: list[Any] = list(dict.fromkeys(output.grad_fn for output in outputs if output.grad_fn is not None))
    seen: set[Any] = {None, *found}
    for node in found:  # which grows
        for before, _ in node.next_functions:
            if before not in seen:
                seen.add(before)
                found.append(before)
    return found


def leaf_besides(outputs: Iterable[Tensor], differentiated: Iterable[Tensor]) -> Tensor | None:
    """A leaf [...] that the graph of these outputs ends at and that is not among those that are differentiated."""
    known = {id(tensor) for tensor in differentiated}
    for node in nodes_behind(outputs):
        if type(node) is LEAF_NODE and id(node.variable) not in known:
            leaf: Tensor = node.variable
            return leaf
    return None


def depends(leaf: Tensor) -> str:
    """What a layer does that has such a leaf [...]; of FSDP1's flat parameter also what to do."""
    flat = (
        ": FSDP1 keeps the layer's parameters in it. Use FSDP2 (fully_shard; fsdp_version: 2 in accelerate's config), "
        "DeepSpeed ZeRO or DDP."
    )
    return (
        f"depends on a tensor of shape {tuple(leaf.shape)} that wants a gradient and is neither one of its parameters nor "
        f"one of its arguments{flat if getattr(leaf, FLAT_PARAMETER, False) else ''}"
    )


def refuse_kept(call: LayerCall, origin: weakref.ref[Origin]) -> None:
    """Raise if somebody keeps a part of the graph of a chunk that is done: for a loss beside the model's, to which forward
    has given tensors without a graph. [Note: side effects]

    Raises:
        BackwardError: from now on such calls run whole.
    """
    if origin() is None or call.site.fingerprint.in_cycles:
        return
    if not is_kept(origin):
        call.site.fingerprint.in_cycles = True  # torch's own garbage: to collect it in each step would take long
        return
    call.arguments.renamed(call.look.kind)  # forward may have taught what does not count
    call.site.found(call.arguments.kind).judge(KEEPS)
    raise BackwardError(
        f"{type(call.layer).__name__}, or a hook inside it, keeps tensors with their graph, and did not when it was "
        "tried (does it collect for another loss from a later step on?). This step's loss has no gradient through them. "
        "Empty what was kept, set gradients to zero and repeat the step: from now on the layer runs whole, which is exact."
    )
