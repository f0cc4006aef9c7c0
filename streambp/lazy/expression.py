"""Functions of rows of logits, recorded instead of computed.

A `Node` is a function of rows. Inputs are [n, V] logits of some tokens and other tensors of the
program; the result is [n, W]. No node mixes tokens, so any subset of the tokens can be computed at
a time. An operation on tokens (a slice, a view, a mask) changes the positions of the logits and the
other tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from streambp.errors import StreamBPError
from streambp.head.blocks import Projection


@dataclasses.dataclass(frozen=True, eq=False)
class LogitsReading:
    """Input of recorded functions: the logits of one forward at some of its positions. A recorded
    function is a computation from logits that runs later, block by block.

    Attributes:
        head: computes the logits (`streambp.lazy.head.LazyHead`).
        handle: [1], the tensor that represents the logits in the autograd graph.
        positions: [*tokens] integers, indices of hidden states of `head`.
        projection: the map from the output projection's matrix products to logits: scale, softcap
            and temperature.
        unique: True if all positions differ.
        anchor: [1], further input of results in the autograd graph. Through it backward runs the
            node that an engine (DDP, ZeRO-3) has inserted behind the logits, although no gradient
            of logits reaches that node. None: no engine has inserted a node.
        hooks: hooks of engines that scale gradients; backward calls them before the gradient of the
            logits is computed.
    """

    head: Any
    handle: Tensor
    positions: Tensor
    projection: Projection
    unique: bool = True
    anchor: Tensor | None = None
    hooks: tuple[Callable[[Tensor], Tensor | None], ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class TensorOperand:
    """Input of recorded functions: a tensor [*tokens, k] of the program, such as labels or
    advantages. A recorded function is a computation from logits that runs later, block by block.

    Attributes:
        tensor: the tensor.
        version: the tensor's version counter when the function was recorded; later in-place changes
            raise.
    """

    tensor: Tensor
    version: int

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> TensorOperand:
        """Return the input of a recorded function that refers to a tensor [*tokens, k]. The
        tensor's version counter is recorded to detect later in-place changes."""
        return cls(tensor, 0 if tensor.is_inference() else tensor._version)

    def check(self) -> None:
        """Raise `StreamBPError` if the tensor was changed in place after its use was recorded."""
        if not self.tensor.is_inference() and self.tensor._version != self.version:
            raise StreamBPError(
                f"A tensor {list(self.tensor.shape)} that the loss is computed with was changed in "
                "place since it was used on the logits, which are computed later, block by block. "
                "Change a copy of it, or use StreamConfig(lazy_logits=False)."
            )


@dataclasses.dataclass(frozen=True, eq=False)
class RecordedCall:
    """Recorded call function(*args, **kwargs) of an operation on logits, which runs later, block by
    block. The arguments may contain other recorded calls, and inputs (`LogitsReading`,
    `TensorOperand`).

    Attributes:
        function: torch's function.
        args: positional arguments.
        kwargs: keyword arguments.
        graded: True if a gradient flows through the call.
        name: the operation, for the report of `streambp.describe`.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    graded: bool
    name: str


Node = LogitsReading | TensorOperand | RecordedCall  # a function of rows
Values = dict[Node, Any]  # values for n tokens


def children(node: Node) -> list[Node]:
    """Return the recorded calls and inputs among the arguments of a recorded call `node`, including
    nested lists and dicts, for walks over a recorded function. The list is empty if `node` is an
    input."""
    arguments = tree_leaves((node.args, node.kwargs)) if isinstance(node, RecordedCall) else []
    return [leaf for leaf in arguments if isinstance(leaf, Node)]


def leaves(node: Node) -> list[Node]:
    """Return the distinct inputs of a recorded function (a computation from logits that runs
    later): logits (`LogitsReading`) and other tensors (`TensorOperand`)."""
    inputs: dict[Node, None] = {}
    visited: set[Node] = set()
    open_ends = [node]
    while open_ends:
        node = open_ends.pop()
        if node in visited:
            continue
        visited.add(node)
        if isinstance(node, RecordedCall):
            open_ends += children(node)
        else:
            inputs[node] = None
    return list(inputs)


def readings(node: Node) -> list[LogitsReading]:
    """Return the distinct logits (`LogitsReading`) among the inputs of a recorded function, a
    computation from logits that runs later."""
    return [leaf for leaf in leaves(node) if isinstance(leaf, LogitsReading)]


def operation_names(node: Node) -> Iterator[str]:
    """Yield the names of the operations on logits in a recorded function, first to last, such as
    "log_softmax" and "gather", for the report of `streambp.describe`. A recorded function is a
    computation from logits that runs later."""
    for child in children(node):
        yield from operation_names(child)
    if isinstance(node, RecordedCall):
        yield node.name


def inputs_of(node: Node) -> list[Tensor]:
    """Return the tensors [1] that represent a recorded function's logits in the autograd graph. A
    recorded function is a computation from logits that runs later.
    `LazyResult`, the autograd Function that computes the recorded function, has these tensors as
    inputs. Backward therefore runs the nodes of the tensors after the node of `LazyResult`."""
    handles = [
        tensor
        for reading in readings(node)
        for tensor in (reading.handle, reading.anchor)
        if tensor is not None
    ]
    return list({id(tensor): tensor for tensor in handles}.values())


def rebuild(
    node: Node, change: Callable[[Node], Node], changed_nodes: dict[Node, Node] | None = None
) -> Node:
    """Return the recorded function with each of its inputs replaced by `change(input)`, for example
    by the same logits with an engine's hook.

    Args:
        node: the recorded function, a computation from logits that runs later.
        change: function from an input (`LogitsReading` or `TensorOperand`) to its replacement.
        changed_nodes: changed nodes so far, by original node, so that a node used twice is changed
            once.
    """
    changed_nodes = {} if changed_nodes is None else changed_nodes
    if node not in changed_nodes and isinstance(node, RecordedCall):
        args, kwargs = tree_map_only(
            Node, lambda child: rebuild(child, change, changed_nodes), (node.args, node.kwargs)
        )
        changed_nodes[node] = dataclasses.replace(node, args=args, kwargs=kwargs)
    elif node not in changed_nodes:
        changed_nodes[node] = change(node)
    return changed_nodes[node]


def map_tokens(node: Node, change: Callable[[Tensor], Tensor], unique: bool = True) -> Node:
    """Return the same recorded function for other tokens: the result [*tokens, W] becomes [*other
    tokens, W].

    Args:
        node: the recorded function, a computation from logits that runs later.
        change: function [*tokens, k] -> [*other tokens, k], for any k, such as an index.
        unique: True if `change` repeats no token.

    Raises:
        StreamBPError: a tensor of the program was changed in place since its use.
    """

    def change_leaf(leaf: Node) -> Node:
        if isinstance(leaf, LogitsReading):
            positions = change(leaf.positions[..., None])[..., 0]
            return dataclasses.replace(leaf, positions=positions, unique=leaf.unique and unique)
        assert isinstance(leaf, TensorOperand)
        leaf.check()
        return TensorOperand.from_tensor(change(leaf.tensor))

    return rebuild(node, change_leaf)


def evaluate(node: Node, values: Values) -> Any:
    """Compute a recorded function for a block of tokens, in forward or backward, and return its
    result.

    Args:
        node: the recorded function, a computation from logits.
        values: dict from each of the function's inputs to its value for the tokens. The results of
            the function's recorded calls are added to the dict.
    """
    if node not in values:
        assert isinstance(node, RecordedCall)
        args, kwargs = tree_map_only(
            Node, lambda child: evaluate(child, values), (node.args, node.kwargs)
        )
        with torch.set_grad_enabled(torch.is_grad_enabled() and node.graded):
            values[node] = node.function(*args, **kwargs)
    return values[node]
