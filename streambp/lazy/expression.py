"""What a program computes of each row of logits, remembered instead of computed.

A `Node` is a function of rows: it turns [n, V] logits of some tokens, and what the program gives beside them, into [n, W].
Nothing in it mixes tokens, so that it may be computed for a few tokens at a time, whichever these are: an operation on the
tokens (a slice, a view, a mask) is one on the positions that the logits are read at, and on what stands beside them.
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
class Reading:
    """The logits of a forward at some of its positions.

    head: what computes them (`streambp.lazy.head.Hub`). handle: [1], its place in the graph.
    positions: [*tokens] integers; unique: no two are the same.
    anchor: stands in the graph where an engine wants something run before these logits' gradient.
    hooks: of engines, which scale what is left of the gradient. They stand before the handle in the graph.
    """

    head: Any
    handle: Tensor
    positions: Tensor
    projection: Projection
    unique: bool = True
    anchor: Tensor | None = None
    hooks: tuple[Callable[[Tensor], Tensor | None], ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Operand:
    """A tensor of the program's, [*tokens, k]: k values for each token. version: what it must not be written to after."""

    tensor: Tensor
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> Operand:
        """A node for a tensor [*tokens, k] as it is now."""
        return cls(tensor, 0 if tensor.is_inference() else tensor._version)

    def check(self) -> None:
        """Raise StreamBPError if the tensor was changed in place since the node was made."""
        if not self.tensor.is_inference() and self.tensor._version != self.version:
            raise StreamBPError(
                f"A tensor {list(self.tensor.shape)} that the loss is computed with was changed in place since it was used "
                "on the logits, which are computed later, block by block. Change a copy of it, or use "
                "StreamConfig(lazy_logits=False)."
            )


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """function(*args, **kwargs), with nodes among them. graded: a gradient passes through."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    graded: bool
    name: str


Node = Reading | Operand | Call  # a function of rows
Values = dict[Node, Any]  # of n tokens


def children(node: Node) -> list[Node]:
    """The nodes among a call's arguments, inside of lists and dicts too; none for a leaf."""
    given = tree_leaves((node.args, node.kwargs)) if isinstance(node, Call) else []
    return [leaf for leaf in given if isinstance(leaf, Node)]


def leaves(node: Node) -> list[Node]:
    """The readings, and what stands beside them, once each."""
    found: dict[Node, None] = {}
    seen: set[Node] = set()
    open_ends = [node]
    while open_ends:
        node = open_ends.pop()
        if node in seen:
            continue
        seen.add(node)
        if isinstance(node, Call):
            open_ends += children(node)
        else:
            found[node] = None
    return list(found)


def readings(node: Node) -> list[Reading]:
    """Those of the leaves that are logits, once each."""
    return [leaf for leaf in leaves(node) if isinstance(leaf, Reading)]


def names(node: Node) -> Iterator[str]:
    """The operations, first to last."""
    for child in children(node):
        yield from names(child)
    if isinstance(node, Call):
        yield node.name


def inputs_of(node: Node) -> list[Tensor]:
    """Through what a gradient of it goes: the handles [1] of its heads, and what engines want run."""
    found = [tensor for reading in readings(node) for tensor in (reading.handle, reading.anchor) if tensor is not None]
    return list({id(tensor): tensor for tensor in found}.values())


def rebuilt(node: Node, change: Callable[[Node], Node], done: dict[Node, Node] | None = None) -> Node:
    """The same function with each of its leaves changed. done: what became of nodes so far."""
    done = {} if done is None else done
    if node not in done and isinstance(node, Call):
        args, kwargs = tree_map_only(Node, lambda child: rebuilt(child, change, done), (node.args, node.kwargs))
        done[node] = dataclasses.replace(node, args=args, kwargs=kwargs)
    elif node not in done:
        done[node] = change(node)
    return done[node]


def over_tokens(node: Node, change: Callable[[Tensor], Tensor], unique: bool = True) -> Node:
    """The same function of other tokens: [*tokens, W] -> [*other tokens, W].

    Args:
        change: [*tokens, k] -> [*other tokens, k], for any k.
        unique: it gives no token twice.

    Raises:
        StreamBPError: a tensor beside the logits was changed in place since it was used.
    """

    def changed(leaf: Node) -> Node:
        if isinstance(leaf, Reading):
            positions = change(leaf.positions[..., None])[..., 0]
            return dataclasses.replace(leaf, positions=positions, unique=leaf.unique and unique)
        assert isinstance(leaf, Operand)
        leaf.check()
        return Operand.of(change(leaf.tensor))

    return rebuilt(node, changed)


def evaluate(node: Node, values: Values) -> Any:
    """The function, of what `values` holds for its leaves; intermediate results are added to them."""
    if node not in values:
        assert isinstance(node, Call)
        args, kwargs = tree_map_only(Node, lambda child: evaluate(child, values), (node.args, node.kwargs))
        with torch.set_grad_enabled(torch.is_grad_enabled() and node.graded):
            values[node] = node.function(*args, **kwargs)
    return values[node]
