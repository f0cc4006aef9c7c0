"""Which Linears' products a layer's results and its backward depend on: a trace of a few tokens.

Every Linear's output is given its name as a label, every operation hands the labels of its inputs to its outputs, and then

    refill     may leave out what never labels a K or V
    recompute  may leave out what never labels a tensor that autograd saves
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from streambp.device import has_data
from streambp.layer.products import Labels


class DataFlow(TorchDispatchMode):
    """Labels storages by the Linears that their contents depend on.

    called, reached, read: Linears that a run called, those whose products its results depend on, and those whose products
        autograd saved.
    """

    def __init__(self) -> None:
        super().__init__()
        self.called: Labels = frozenset()
        self.reached: Labels = frozenset()
        self.read: Labels = frozenset()
        self._labels: dict[int, Labels] = {}
        self._alive: list[Any] = []  # a freed storage's address would be used again

    def of(self, tensor: Tensor) -> Labels:
        """The labels of the storage of a tensor [...]."""
        if tensor.layout != torch.strided:  # it has no storage (sparse adapters' weights), and carries no label
            return frozenset()
        return self._labels.get(tensor.untyped_storage()._cdata, frozenset())

    def add(self, tensor: Tensor, labels: Labels) -> None:
        """Give the storage of a tensor [...] these labels too, and keep it alive; a sparse tensor takes none."""
        if tensor.layout != torch.strided:
            return
        storage = tensor.untyped_storage()
        self._alive.append(storage)
        self._labels[storage._cdata] = self._labels.get(storage._cdata, frozenset()) | labels

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        labels = frozenset().union(*map(self.of, _tensors((*args, *(kwargs or {}).values()))))
        if labels:
            written = [
                value
                for value, argument in zip(args, func._schema.arguments, strict=False)
                if argument.alias_info is not None and argument.alias_info.is_write
            ]
            for x in _tensors((result, *written)):
                self.add(x, labels)
        return result


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Those among an operator's arguments or results, and in lists and tuples of them: deeper there are none."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from (part for part in value if isinstance(part, Tensor))


def trace(linears: dict[str, nn.Linear], run: Callable[[], Iterable[Tensor]]) -> DataFlow:
    """Run a few tokens through the layer and see what depends on which product.

    Args:
        linears: as `plain_linears` gives them.
        run: computes the layer, or a part of it, with a graph; returns the results, tensors of any shape.
    """
    flow = DataFlow()

    def pack(tensor: Tensor) -> Tensor | None:
        flow.read |= flow.of(tensor)
        # The tensor itself would tie a node to its own output, and keep the layer's input alive.
        return tensor.data if has_data(tensor) else None

    def label(name: str, module: nn.Module, args: Any, output: Tensor) -> None:
        flow.called |= {name}
        flow.add(output, frozenset({name}))

    handles = [module.register_forward_hook(functools.partial(label, name)) for name, module in linears.items()]
    try:
        with flow, torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
            results = run()
    finally:
        for handle in handles:
            handle.remove()
    flow.reached = frozenset().union(*(flow.of(x) for x in results))
    return flow
