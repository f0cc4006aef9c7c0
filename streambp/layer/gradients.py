"""Checks of one layer call's backward: of the layer before and after the recomputation, of a chunk's
autograd graph, and of the incoming gradient's buffer.

The recomputation's results are compared as well. [Note: witness]

The backward of layer i returns dx, a buffer that streambp allocated, and autograd passes it to
layer i - 1 as its incoming gradient. Layer i - 1 may write its own dx into the buffer if no other
code needs it, which saves 8 KB a token on an 8B model. Other users are `autograd.grad(loss, [x,
h])`, a tensor hook, `retain_grad`, and operations that share the storage. Each of these users holds
a reference. The buffer is reused only if it has streambp's mark and if its tensor, Python and
storage reference counts equal the counts of a gradient that only the engine holds. These counts are
measured once, on a chain of two Functions. If the counts differ for another reason, the buffer is
not reused, which costs memory only.

[Note: kept graphs] If a short sequence is one chunk and the device has enough memory, the layer
runs as in the unpatched model. Forward builds the graph for backward, and nothing is recomputed.
The graph starts at the layer's detached input and the parameters' shadows, like the graph of a
recomputation, so the rest of backward is the same. If the graph is freed, backward recomputes it.
The graph is kept only if its results cannot differ from a recomputation:

    no hooks and no engine hooks inside the layer
    no weights that an engine frees between forward and backward
    no states, no autocast, no writes through pointers
    no saved_tensors_hooks, for example of a checkpoint around the model

A layer may read a tensor that requires a gradient and is neither a parameter nor an argument.
Examples are a plain attribute, a closure, an object among the arguments, and a view of FSDP1's flat
parameter. The unpatched model computes the tensor's gradient. A chunk's graph ends inside the
layer's autograd Function, and the gradient would be lost. The graph of a layer's last chunk is
therefore searched for such leaves.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import sys
import weakref
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor, nn

from streambp.distributed.engines import engine_hooks, engine_ownership
from streambp.errors import TWO_BACKWARDS, BackwardError, UnsupportedModelError
from streambp.fingerprint.hooks import HookKey, describe_hook, watch_hooks
from streambp.fingerprint.snapshots import change_error
from streambp.known_names import ACCUMULATE_GRAD, FLAT_PARAMETER, USE_COUNT
from streambp.layer.arguments import refuse_written
from streambp.layer.call import ChunkOutput, LayerCall
from streambp.layer.oom import RUN_ONCE
from streambp.layer.recompute import Parameters, check_mode, slots_of
from streambp.layer.side_effects import REASON_KEPT_GRAPH
from streambp.offload.costs import ObservedCosts

NO_HOOKS: contextlib.AbstractContextManager[AbstractSet[HookKey]] = contextlib.nullcontext(
    frozenset()
)


def begin_backward(ctx: Any) -> tuple[LayerCall, Parameters]:
    """Check that backward may run, and return the layer call and its parameters. The call is
    removed from `ctx`, so that a second backward raises: backward frees the saved tensors. A new
    snapshot of the layer is compared with that of forward, and stored in `call.snapshot`.

    Args:
        ctx: the autograd context of `StreamedLayer`, which stores call and parameters since
            forward.

    Raises:
        BackwardError: this is the second backward, second derivatives are wanted, or the layer, its
            input or another argument changed since forward.
    """
    call, ctx.call = ctx.call, None
    if call is None:
        raise BackwardError(
            "backward ran a second time through a streamed layer, but the first backward has "
            "freed the saved tensors. Compute the loss again, or add the losses up and call "
            f"backward once. {TWO_BACKWARDS}"
        )
    if torch.is_grad_enabled():
        raise BackwardError(
            "backward was called with create_graph=True; streamed layers have no second "
            "derivatives. Run this part unpatched (streambp.unpatch(model))."
        )
    if not call.saved.store.copies and call.hidden_states._version != ctx.version:
        raise BackwardError(
            "The input of a streamed layer was changed in place between forward and backward. "
            "Work on a copy (tensor.clone()) instead."
        )
    check_mode(call.layer_state.layer, call.backward.training)
    call.snapshot = call.layer_state.fingerprint.take_snapshot(call.layer_state.layer)
    is_unchanged = (
        call.snapshot is ctx.parameters.snapshot
        and call.snapshot.gradient_flags == ctx.parameters.trained
    )
    ctx.parameters.check_unchanged([] if is_unchanged else call.layer_state.cached_result(slots_of))
    refuse_written(call.arguments.versions)
    call.layer_state.fingerprint.check(
        call.layer_state.layer, call.backward.forward_snapshot, call.snapshot
    )
    return call, ctx.parameters


@contextlib.contextmanager
def check_recomputation(call: LayerCall) -> Iterator[None]:
    """Context manager for a layer's recomputation in backward. The end of the context checks that
    the same hooks have modified values in forward and in the recomputation.

    Raises:
        BackwardError: a hook inside the layer modifies values in backward only, or in forward only.
    """
    assert call.backward.forward_snapshot is not None
    layer_state = call.layer_state
    hooks = call.snapshot.hooks
    with watch_hooks(hooks) if hooks.locations else NO_HOOKS as modifying_hooks:
        yield
    for key in sorted(modifying_hooks ^ call.backward.forward_snapshot.modifying_hooks):
        in_backward, in_forward = (
            ("changes what", "changed nothing")
            if key in modifying_hooks
            else ("changes nothing that", "did")
        )
        raise change_error(
            call.layer_state.layer,
            f"{describe_hook(key)} {in_backward} it is given, and {in_forward} in forward",
        )
    if layer_state.fingerprint.pending:
        layer_state.fingerprint.learn(call.layer_state.layer, call.snapshot)


LEAF_NODE_TYPE = getattr(torch._C._functions, ACCUMULATE_GRAD)


class GraphMarker:
    """Object that shows if any code holds a part of a layer's autograd graph. The graph's node at
    the layer's input, which backward reaches last, references this object. The object is alive
    while a part of the graph is alive.

    Attributes:
        trying: False if the graph is from a test of the layer on random tokens that has ended. The
            node at the layer's input then raises if a gradient arrives. True for all other graphs.
    """

    trying = True


class MarkGraphStart(torch.autograd.Function):
    """Autograd Function that returns its input, and becomes the first node of a layer's autograd
    graph. The node references a `GraphMarker`. While this object is alive, some code holds a part
    of the graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, origin: GraphMarker, may_be_written: bool) -> Tensor:
        """Return x, on which the layer then runs, as the output of this Function's node. The node
        references `origin`, and thereby keeps this object alive with the graph.

        Args:
            x: the layer's input, [..., B, C, h].
            origin: the `GraphMarker` of the layer's graph.
            may_be_written: True: the layer may write to x in place, so return a copy; False: return
                a view.
        """
        ctx.origin = origin
        return x.clone() if may_be_written else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient [..., B, C, h] unchanged.

        Raises:
            BackwardError: the graph is from a test on random tokens that has ended. A hook has
                stored one of the test's tensors, and the loss uses this tensor.
        """
        if not ctx.origin.trying:
            raise BackwardError(
                "This loss uses a tensor that a hook inside a streamed layer stored while "
                "streambp tested the layer on random tokens, at its first call. Delete the stored "
                "tensors after the first forward, or use the last one only: from now on the layer "
                "runs unchunked, and its hooks run once."
            )
        return grad, None, None


def is_kept(origin: weakref.ref[GraphMarker]) -> bool:
    """True if other code, for example a hook that collects activations, still holds part of a
    layer's autograd graph. Called after streambp has dropped its own references. Such a layer runs
    unchunked.

    Args:
        origin: weak reference to the `GraphMarker` that the graph's first node references.
    """
    if origin() is not None:
        gc.collect()  # frees graphs in reference cycles
    return origin() is not None


@dataclasses.dataclass
class Graph:
    """A chunk's outputs with their autograd graph, and the leaves of this graph.

    Attributes:
        output: the outputs of the chunk.
        origin: object that the graph's first node references, to see later if other code holds a
            part of the graph.
        hidden_chunk: [..., B, C, h], the leaf for hidden_states.
        leaves: the leaves for the layer's arguments with requires_grad.
        shadows: the leaves for the layer's trainable parameters, detached aliases of them.
    """

    output: ChunkOutput
    origin: GraphMarker
    hidden_chunk: Tensor
    leaves: list[Tensor]
    shadows: list[Tensor]


def can_keep_graph(call: LayerCall) -> bool:
    """True if the autograd graph of this call may stay from forward to backward, so that nothing is
    recomputed. For example, the call must have one chunk, no autocast and no recurrent states.
    [Note: kept graphs]"""
    layer_state = call.layer_state
    hooked = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    return not (
        len(call.plan) > 1
        or call.autocast.on
        or hooked
        or engine_ownership(
            call.layer_state.layer
        ).weights  # the graph would keep the weights gathered
        or layer_state.on_host  # the graph would hold a slot that other layers' weights need next
        or layer_state.tests.overwritten.inputs
        or layer_state.kind.states.carries
        or layer_state.kind.attention.picks_keys
        or not layer_state.linears
        or layer_state.cached_result(engine_hooks)
    )


@contextlib.contextmanager
def count_graph_bytes(
    call: LayerCall, observed_costs: ObservedCosts, tensors: Iterable[Tensor]
) -> Iterator[None]:
    """Context manager that counts the bytes of the tensors that autograd saves for one chunk, and
    adds the bytes to `observed_costs.graph`. The policy for `saves="auto"` keeps a later call's
    graph from forward to backward if these bytes fit into device memory.

    Tensors that exist without the graph are not counted: `tensors`, frozen weights and the call's
    arguments, such as cosines and sines. Nothing is counted in a call whose chunks are not retried
    when memory runs out (`call.attempt` is `RUN_ONCE`).

    Args:
        call: the call of the layer.
        observed_costs: the recorded costs of the layer.
        tensors: the chunk's input and the parameters' aliases [...], which exist without the graph.
    """
    if call.attempt is RUN_ONCE:
        yield
        return
    arguments = [
        tensor for _, tensor, _ in call.arguments.versions if tensor.layout == torch.strided
    ]
    # without shadows
    frozen = [weight for weight in call.layer_state.layer.parameters() if not weight.requires_grad]
    existing_storages = {
        tensor.untyped_storage()._cdata for tensor in (*tensors, *frozen, *arguments)
    }
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            if storage._cdata not in existing_storages:
                sizes[storage._cdata] = storage.nbytes()
        return tensor.detach()  # the tensor itself would make a cycle of node and output

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        yield
    observed_costs.graph += sum(sizes.values())


def refuse_other_leaves(
    layer: nn.Module, outputs: Iterable[Tensor], differentiated: Iterable[Tensor]
) -> None:
    """Raise if the graph of a chunk's outputs has a leaf whose gradient is not computed: a tensor
    that is neither a parameter nor an argument of the layer. The search takes about 0.2 ms.

    Args:
        layer: the decoder layer, named in the error.
        outputs: the chunk's outputs: hidden_states [..., B, C, h], other outputs and end states.
        differentiated: the leaves whose gradients are computed.

    Raises:
        UnsupportedModelError: there is such a leaf.
    """
    leaf = find_other_leaf(outputs, differentiated)
    if leaf is not None:
        otherwise = (
            ", so that streaming would lose that gradient. Register it as a parameter of the "
            "layer, or set requires_grad to False, or run the model unpatched "
            "(streambp.unpatch(model)) with gradient checkpointing."
        )
        remedy = "" if getattr(leaf, FLAT_PARAMETER, False) else otherwise
        raise UnsupportedModelError(f"{type(layer).__name__} {dependence_message(leaf)}{remedy}")


def nodes_behind(outputs: Iterable[Tensor]) -> list[Any]:
    """Return all autograd nodes of the graph that computed these tensors [...], each node once; the
    nodes of leaves come last."""
    operations, leaf_nodes = walk_graph(outputs)
    return operations + leaf_nodes


def walk_graph(outputs: Iterable[Tensor]) -> tuple[list[Any], list[Any]]:
    """Return the autograd nodes of the graph that computed these tensors [...], each node once, as
    a pair (nodes of operations, nodes of leaves)."""
    operations: list[Any] = list(
        dict.fromkeys(output.grad_fn for output in outputs if output.grad_fn is not None)
    )
    leaf_nodes: list[Any] = []
    visited: set[Any] = {None, *operations}
    for node in operations:  # the list grows during the loop
        for predecessor, _ in node.next_functions:
            if predecessor in visited:
                continue
            visited.add(predecessor)
            # A leaf's node has no predecessors. Each step walks the graph of each layer.
            if type(predecessor) is LEAF_NODE_TYPE:
                leaf_nodes.append(predecessor)
            else:
                operations.append(predecessor)
    return operations, leaf_nodes


def find_other_leaf(outputs: Iterable[Tensor], differentiated: Iterable[Tensor]) -> Tensor | None:
    """Return a leaf [...] of the outputs' autograd graph that is not among `differentiated`, so
    that the leaf's gradient would be lost; None if there is no such leaf.

    Args:
        outputs: tensors [...] with a graph.
        differentiated: the leaves whose gradients are computed.
    """
    leaf_ids = {id(tensor) for tensor in differentiated}
    _, leaf_nodes = walk_graph(outputs)
    for node in leaf_nodes:
        if id(node.variable) not in leaf_ids:
            leaf: Tensor = node.variable
            return leaf
    return None


def dependence_message(leaf: Tensor) -> str:
    """Return text for an error or for `describe`: the layer's output depends on a tensor that is
    neither a parameter nor an argument of the layer. Chunks would lose the gradient of this tensor.
    If the tensor is FSDP1's flat parameter, the text includes a remedy.

    Args:
        leaf: the tensor [...], a leaf of the output's autograd graph.
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


def refuse_kept_graph(call: LayerCall, origin: weakref.ref[GraphMarker]) -> None:
    """Raise if other code still holds part of a chunk's graph after the chunk's backward. An
    example is a hook that collects an auxiliary loss: the hook got tensors without a graph in
    forward, so this loss gave no gradient. Before raising, store the decision that later calls of
    this kind run unchunked.

    Args:
        call: the layer call.
        origin: weak reference to the `GraphMarker` that the graph's first node references; the
            marker is alive while any code holds the graph.

    Raises:
        BackwardError: other code holds the graph.
    """
    if origin() is None or call.layer_state.fingerprint.in_cycles:
        return
    if not is_kept(origin):
        call.layer_state.fingerprint.in_cycles = (
            True  # a cycle of torch's own; collecting it in each step would be slow
        )
        return
    # forward may have excluded values from comparison
    call.arguments.replace_state(call.snapshot.kind)
    call.layer_state.tests.results[call.arguments.kind].set_result(REASON_KEPT_GRAPH)
    raise BackwardError(
        f"{type(call.layer_state.layer).__name__}, or a hook inside it, stores tensors with their graph, "
        "and did not when the layer was tested. A common cause is a second loss that starts at a "
        "later step. This step's loss has no gradient through the stored tensors. Delete them, "
        "set gradients to zero and repeat the step: from now on the layer runs unchunked, which "
        "is exact."
    )


ReferenceCounts = tuple[int, int, int]
UNKNOWN_USE_COUNT = 0


def reference_counts(gradient: Tensor) -> ReferenceCounts:
    """Return three reference counts of a gradient: of the C++ tensor, of its Python object and of
    its storage. `may_overwrite` decides by these counts if other code holds the gradient. Must be
    called directly in an autograd Function's `backward(ctx, gradient)`, because each variable in
    between would count.

    Args:
        gradient: [..., B, T, h] in a layer's backward.
    """
    storage = torch._C._storage_Use_Count(gradient.untyped_storage()._cdata)  # type: ignore[attr-defined]
    tensor = getattr(
        gradient, USE_COUNT, lambda: UNKNOWN_USE_COUNT
    )()  # without this attribute no buffer is reused
    return tensor, sys.getrefcount(gradient), storage


def tag_reusable(gradient: Tensor) -> Tensor:
    """Set an attribute on this buffer [..., B, T, h] and return the buffer. The attribute says that
    streambp allocated the buffer for a gradient. Only buffers with the attribute may be reused for
    another layer's gradient (`may_overwrite`)."""
    gradient._streambp_buffer = True  # type: ignore[attr-defined]
    return gradient


def may_overwrite(gradient: Tensor, counts: ReferenceCounts, like: Tensor) -> bool:
    """True if the memory of `gradient` [...] may be reused for a tensor with the shape and dtype of
    `like`. This requires that streambp has allocated the memory, and that no other code holds the
    gradient.

    Args:
        gradient: the incoming gradient.
        counts: `reference_counts(gradient)`, compared with `counts_when_alone`.
        like: a tensor [...] with the needed shape and dtype.
    """
    return (
        getattr(gradient, "_streambp_buffer", False)
        and counts[0] != UNKNOWN_USE_COUNT
        and counts == counts_when_alone()
        and gradient.shape == like.shape
        and gradient.dtype == like.dtype
        and gradient.is_contiguous()
        and gradient.untyped_storage().nbytes() == gradient.numel() * gradient.element_size()
    )


@functools.cache
def counts_when_alone() -> ReferenceCounts:
    """Return the `reference_counts` of a gradient that no code except autograd's engine holds. The
    counts depend on the versions of torch and Python, and are measured once in a process.
    `may_overwrite` compares a gradient's counts with these."""
    counts: list[ReferenceCounts] = []

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            counts.append(reference_counts(gradient))
            return tag_reusable(torch.empty_like(gradient))

    with torch.enable_grad():
        x = torch.zeros(2, requires_grad=True, device="cpu")
        torch.autograd.grad(Probe.apply(Probe.apply(x)), [x], torch.zeros_like(x))
    return counts[1]
