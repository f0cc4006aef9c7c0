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
    """Logits of one forward, at some of its positions, as an input of a recorded function. A
    recorded function consists of operations on logits that the program has called, and that run
    later, block by block. This object stores what is needed to compute the logits then.

    Attributes:
        head: computes the logits (`streambp.lazy.head.LazyHead`).
        handle: [1], the tensor that represents the logits in the autograd graph.
        positions: [*tokens] integers, the index of each token's hidden state in `head`.
        projection: the map from the output projection's matrix products to logits: scale, softcap
            and temperature.
        unique: True if all positions differ.
        anchor: [1], a second input of results in the autograd graph. Through this tensor backward
            runs the node that an engine (DDP, ZeRO-3) has inserted behind the logits. None: no
            engine has inserted a node.
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
    """Tensor [*tokens, k] of the program (labels or advantages, for example) that is an input of a
    recorded function. A recorded function consists of operations on logits that the program has
    called, and that run later, block by block.

    Attributes:
        tensor: the tensor.
        version: the tensor's version counter when the function was recorded, to detect in-place
            changes before the function runs.
    """

    tensor: Tensor
    version: int

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> TensorOperand:
        """Return an object that stores the tensor [*tokens, k] and its current version counter."""
        return cls(tensor, 0 if tensor.is_inference() else tensor._version)

    def check(self) -> None:
        """Raise `StreamBPError` if the tensor was changed in place since this object was made. The
        operations that read the tensor run only later, and would read the changed values."""
        if not self.tensor.is_inference() and self.tensor._version != self.version:
            raise StreamBPError(
                f"A tensor {list(self.tensor.shape)} that the loss is computed with was changed in "
                "place since it was used on the logits, which are computed later, block by block. "
                "Change a copy of it, or use StreamConfig(lazy_logits=False)."
            )


@dataclasses.dataclass(frozen=True, eq=False)
class RecordedCall:
    """Call function(*args, **kwargs) on logits that was recorded instead of run. The call runs
    later, block by block. Lazy logits and tensors among the arguments are replaced by objects of
    this module: other calls (`RecordedCall`), logits (`LogitsReading`) and tensors
    (`TensorOperand`).

    Attributes:
        function: torch's function.
        args: positional arguments.
        kwargs: keyword arguments.
        graded: True if gradients flow through the call; False: the call runs under no_grad.
        name: the operation's name, for the report of `streambp.describe`.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    graded: bool
    name: str


Node = LogitsReading | TensorOperand | RecordedCall  # a function of rows
Values = dict[Node, Any]  # values for n tokens


def children(node: Node) -> list[Node]:
    """Return the arguments of a recorded call that are recorded calls, logits or tensors, including
    those in nested lists and dicts. Return [] if `node` is not a call but logits (`LogitsReading`)
    or a tensor (`TensorOperand`)."""
    arguments = tree_leaves((node.args, node.kwargs)) if isinstance(node, RecordedCall) else []
    return [leaf for leaf in arguments if isinstance(leaf, Node)]


def leaves(node: Node) -> list[Node]:
    """Return the inputs of a recorded function, each once: logits (`LogitsReading`) and tensors of
    the program (`TensorOperand`). A recorded function is a tree of operations on logits
    (`RecordedCall`) that the program has called, and that run later."""
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
    """Return the logits (`LogitsReading`) among the inputs of a recorded function, each once. A
    recorded function consists of operations on logits that the program has called, and that run
    later."""
    return [leaf for leaf in leaves(node) if isinstance(leaf, LogitsReading)]


def operation_names(node: Node) -> Iterator[str]:
    """Yield the names of the operations in a recorded function, in the order of their execution,
    such as "log_softmax" and then "gather". `streambp.describe` reports the names.

    Args:
        node: the recorded function: operations on logits that run later, block by block.
    """
    for child in children(node):
        yield from operation_names(child)
    if isinstance(node, RecordedCall):
        yield node.name


def inputs_of(node: Node) -> list[Tensor]:
    """Return the tensors [1] that represent a recorded function's logits in the autograd graph. The
    tensors' values are not used.

    The function's results are outputs of `LazyResult`, an autograd Function with these tensors as
    inputs. Backward therefore runs the nodes that made these tensors after the node of
    `LazyResult`.

    Args:
        node: the recorded function: operations on logits that run later, block by block.
    """
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
    """Return a copy of a recorded function in which `change` has replaced each input, for example
    by the same logits with an engine's hook.

    Args:
        node: the recorded function: operations on logits that run later, block by block.
        change: function from an input (`LogitsReading` or `TensorOperand`) to its replacement.
        changed_nodes: replacements so far, by original call or input. An input that is used twice
            is thus replaced once. None: there are none yet.
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
    """Return a recorded function that computes the same operations for other tokens: the result
    [*tokens, W] becomes [*other tokens, W]. Nothing is computed; the positions of the logits and
    the other input tensors are indexed.

    Args:
        node: the recorded function: operations on logits that run later, block by block.
        change: function [*tokens, k] -> [*other tokens, k], for any k, such as an index.
        unique: True if `change` repeats no token.

    Raises:
        StreamBPError: an input tensor was changed in place since the function was recorded.
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
    """Run a recorded function for a block of tokens, and return its result. A recorded function
    consists of operations on logits that the program has called earlier.

    Args:
        node: the recorded function.
        values: the value of each of the function's inputs for the block's tokens, by input. The
            result of each operation is added, so that no operation runs twice.
    """
    if node not in values:
        assert isinstance(node, RecordedCall)
        args, kwargs = tree_map_only(
            Node, lambda child: evaluate(child, values), (node.args, node.kwargs)
        )
        with torch.set_grad_enabled(torch.is_grad_enabled() and node.graded):
            values[node] = node.function(*args, **kwargs)
    return values[node]
