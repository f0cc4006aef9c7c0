"""Trace of a few tokens that finds the Linear outputs that a layer's results and its backward
depend on.

Every Linear's output gets the Linear's name as a label, and every operation copies the labels of
its inputs to its outputs. Then

    refill     may skip a Linear that never labels a K or V
    recompute  may skip a Linear that never labels a tensor that autograd saves
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from streambp.device import has_data
from streambp.layer.products import LinearNames


class DataFlow(TorchDispatchMode):
    """Torch dispatch mode that labels each tensor's storage with names of Linears: the ones on
    whose outputs the tensor depends. The labels show the outputs that a recomputation can skip.

    Attributes:
        called: names of the Linears that ran.
        reached: names of the Linears whose outputs influence the results of the traced run.
        read: names of the Linears whose outputs influence a tensor that autograd saved.
    """

    def __init__(self) -> None:
        super().__init__()
        self.called: LinearNames = frozenset()
        self.reached: LinearNames = frozenset()
        self.read: LinearNames = frozenset()
        self._labels: dict[int, LinearNames] = {}
        self._alive: list[Any] = []  # the allocator would reuse a freed storage's address

    def labels_of(self, tensor: Tensor) -> LinearNames:
        """Return the labels of a tensor [...]: the names of the Linears on whose outputs the tensor
        depends. A sparse tensor has none."""
        if tensor.layout != torch.strided:  # sparse adapters' weights have no storage and no label
            return frozenset()
        return self._labels.get(tensor.untyped_storage()._cdata, frozenset())

    def add(self, tensor: Tensor, labels: LinearNames) -> None:
        """Add names of Linears to a tensor's labels. A Linear's output is labelled with the
        Linear's name, and an operator's result with all labels of the operator's inputs. Sparse
        tensors get no labels.

        Labels are stored by the address of the tensor's storage. This object therefore keeps the
        storage alive, so that no new tensor gets the same address.

        Args:
            tensor: the tensor [...].
            labels: names of Linears.
        """
        if tensor.layout != torch.strided:
            return
        storage = tensor.untyped_storage()
        self._alive.append(storage)
        self._labels[storage._cdata] = self._labels.get(storage._cdata, frozenset()) | labels

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        labels = frozenset().union(
            *map(self.labels_of, _tensors((*args, *(kwargs or {}).values())))
        )
        if labels:
            overwritten = [
                value
                for value, argument in zip(args, func._schema.arguments, strict=False)
                if argument.alias_info is not None and argument.alias_info.is_write
            ]
            for x in _tensors((result, *overwritten)):
                self.add(x, labels)
        return result


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among an operator's arguments or results, and the tensors in lists and
    tuples among these values. `DataFlow` reads or sets the tensors' labels."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from (part for part in value if isinstance(part, Tensor))


def trace(linears: dict[str, nn.Linear], run: Callable[[], Iterable[Tensor]]) -> DataFlow:
    """Call `run` and return a `DataFlow` with the names of the Linears whose outputs influence the
    results (`reached`) or a tensor that autograd saves (`read`). A recomputation of the results can
    skip Linears that are not in `reached`; a recomputation for backward those not in `read`.

    Args:
        linears: the layer's Linears by name, as returned by `plain_linears`.
        run: computes the layer or a part of it on a few tokens, with an autograd graph; returns the
            results [...].
    """
    flow = DataFlow()

    def pack(tensor: Tensor) -> Tensor | None:
        flow.read |= flow.labels_of(tensor)
        # The tensor itself would make a cycle of node and output, and keep the layer's input alive.
        return tensor.data if has_data(tensor) else None

    def label(name: str, module: nn.Module, args: Any, output: Tensor) -> None:
        flow.called |= {name}
        flow.add(output, frozenset({name}))

    handles = [
        module.register_forward_hook(functools.partial(label, name))
        for name, module in linears.items()
    ]
    try:
        with flow, torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
            results = run()
    finally:
        for handle in handles:
            handle.remove()
    flow.reached = frozenset().union(*(flow.labels_of(x) for x in results))
    return flow
