"""Linear products that a recomputation can leave out, because nobody reads them.

The refill of K and V computes the queries for nothing, and the recomputation of a chunk computes the layer's last Linear
for nothing: its backward wants its input and weight, not its output. On a Qwen3-8B layer these are 2.3 % and 6.5 % of a
step's Linear FLOPs. Which products are unread follows from the layer's own data flow, so it is traced, not listed: on a
chunk of a few tokens, every Linear's output is given its name as a label, every operation hands the labels of its inputs
to its outputs, and then

    refill     may leave out what never labels a K or V
    recompute  may leave out what never labels a tensor that autograd saves

A product that is left out is filled with NaN, so that a wrong trace could not go unnoticed.

[Note: narrow queries] In a refill the layer still norms and rotates the queries that nobody reads: more bytes than all else
that a refill moves. So there a left-out Linear may return as few features as one head has: a layer that takes its number of
heads from the product's size then works on one head. Whether it does, and finds the same keys and values, is tried on the
few tokens of the trace; if not, left-out products have their full size.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Labels = frozenset[str]


@dataclasses.dataclass(frozen=True)
class UnreadProducts:
    """Names, relative to the layer, of the Linears whose output is not needed in a refill or a recomputation.

    width: features that those left out of a refill may return; None: all. [Note: narrow queries]
    """

    refill: Labels = frozenset()
    recompute: Labels = frozenset()
    width: int | None = None


@dataclasses.dataclass(frozen=True)
class UnreadInHalves:
    """The same for a layer that is cut at its attention: Linears whose products are not needed for queries alone, for what
    the layer returns, or to differentiate either half. [Note: halves]"""

    for_queries: Labels = frozenset()
    for_output: Labels = frozenset()
    to_differentiate_before: Labels = frozenset()
    to_differentiate_after: Labels = frozenset()


def plain_linears(layer: nn.Module) -> dict[str, nn.Linear]:
    """The layer's Linears that compute x @ W^T + b and nothing else.

    None if anything watches the inside of the layer: a forward hook must see true values in recomputations too.
    """
    inner = [module for module in layer.modules() if module is not layer]
    if any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks for m in inner):
        return {}
    return {
        name: module
        for name, module in layer.named_modules()
        if type(module) is nn.Linear and "forward" not in module.__dict__ and type(module.weight) in PLAIN
    }


PLAIN = (Tensor, nn.Parameter)


class DataFlow(TorchDispatchMode):
    """Labels storages by the Linears that their contents depend on."""

    def __init__(self) -> None:
        super().__init__()
        self._labels: dict[int, Labels] = {}
        self._alive: list[Any] = []  # a freed storage's address would be used again

    def of(self, tensor: Tensor) -> Labels:
        return self._labels.get(tensor.untyped_storage()._cdata, frozenset())

    def add(self, tensor: Tensor, labels: Labels) -> None:
        storage = tensor.untyped_storage()
        self._alive.append(storage)
        self._labels[storage._cdata] = self._labels.get(storage._cdata, frozenset()) | labels

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        labels = frozenset().union(*(self.of(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)))
        if labels:
            written = [
                value
                for value, argument in zip(args, func._schema.arguments, strict=False)
                if argument.alias_info is not None and argument.alias_info.is_write
            ]
            for x in tree_leaves((result, written)):
                if isinstance(x, Tensor):
                    self.add(x, labels)
        return result


@dataclasses.dataclass(frozen=True)
class Trace:
    """Which Linears a run called, whose products its results depend on, and whose products autograd saved."""

    called: Labels
    reached: Labels
    read: Labels


def trace(linears: dict[str, nn.Linear], run: Callable[[], Iterable[Tensor]]) -> Trace:
    """Run a few tokens through the layer and see what depends on which product.

    Args:
        linears: as `plain_linears` gives them.
        run: computes the layer, or a part of it, with a graph; returns the results.
    """
    flow = DataFlow()
    read: set[str] = set()
    called: set[str] = set()

    def pack(tensor: Tensor) -> None:
        # Returning the tensor would tie a node to its own output in a cycle that keeps the layer's input alive.
        read.update(flow.of(tensor))

    def label(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            called.add(name)
            flow.add(output, frozenset({name}))

        return hook

    handles = [module.register_forward_hook(label(name)) for name, module in linears.items()]
    try:
        with flow, torch.autograd.graph.saved_tensors_hooks(pack, lambda nothing: nothing):
            results = run()
    finally:
        for handle in handles:
            handle.remove()
    reached = frozenset().union(*(flow.of(x) for x in results))
    return Trace(frozenset(called), reached, frozenset(read))


def trace_unread(linears: dict[str, nn.Linear], run: Callable[[], list[tuple[Tensor, Tensor]]]) -> UnreadProducts:
    """What a refill and a recomputation can leave out; `run` computes the layer and returns K, V of each attention call."""
    found = trace(linears, lambda: [x for pair in run() for x in pair])
    return UnreadProducts(found.called - found.reached, found.called - found.read)


def matching(names: Iterable[str], patterns: Iterable[str]) -> list[str]:
    """The names, in order, that a glob matches; an adapter's base layer goes by the name of the module it stands in."""
    return [name for name in names if any(fnmatch.fnmatch(name.removesuffix(".base_layer"), glob) for glob in patterns)]


@contextlib.contextmanager
def left_out(linears: dict[str, nn.Linear], names: Labels, width: int | None = None) -> Iterator[None]:
    """Within, these Linears return NaN and know their backward; width: of so many features, without a backward."""
    chosen = [linears[name] for name in names if name in linears]
    for module in chosen:
        module.forward = _unread_forward(module, width)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        for module in chosen:
            module.__dict__.pop("forward", None)


@contextlib.contextmanager
def captured(linears: dict[str, nn.Linear], names: list[str], sink: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Within, the output of each of these Linears is also given to `sink`, with its name."""
    chosen = {name: linears[name] for name in names if name in linears}

    def capture(name: str, module: nn.Linear) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            out = type(module).forward(module, x)
            sink(name, out)
            return out

        return forward

    for name, module in chosen.items():
        module.forward = capture(name, module)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        for module in chosen.values():
            module.__dict__.pop("forward", None)


@contextlib.contextmanager
def known(linears: dict[str, nn.Linear], names: list[str], source: Callable[[str], Tensor | None]) -> Iterator[None]:
    """Within, these Linears return what `source` has for their name, and know their backward; None: they compute."""
    chosen = {name: linears[name] for name in names if name in linears}
    for name, module in chosen.items():
        module.forward = _known_forward(module, functools.partial(source, name))  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        for module in chosen.values():
            module.__dict__.pop("forward", None)


def _unread_forward(module: nn.Linear, width: int | None) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        weight: Any = module.weight
        if width is not None:
            x, *_ = _autocast(x, weight, None)
            return x.new_full((*x.shape[:-1], min(width, module.out_features)), torch.nan)
        out: Tensor = KnownLinear.apply(*_autocast(x, weight, module.bias), None)
        return out

    return forward


def _known_forward(module: nn.Linear, source: Callable[[], Tensor | None]) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        value = source()
        if value is None:
            return type(module).forward(module, x)
        weight: Any = module.weight
        out: Tensor = KnownLinear.apply(*_autocast(x, weight, module.bias), value)
        return out

    return forward


def _autocast(x: Tensor, weight: Any, bias: Any) -> tuple[Tensor, Any, Any]:
    """What F.linear works with."""
    device = x.device.type
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return x, weight, bias
    dtype = torch.get_autocast_dtype(device)
    return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


class KnownLinear(torch.autograd.Function):
    """x [..., in] @ W^T + b that need not be computed: `value` [..., out], or NaN where nobody reads it; a Linear's
    gradients backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, value: Tensor | None) -> Tensor:
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        return x.new_full((*x.shape[:-1], weight.shape[0]), torch.nan) if value is None else value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        flat = grad.flatten(0, -2)
        return (
            None if weight is None else grad @ weight,
            None if x is None else flat.mT @ x.flatten(0, -2),
            flat.sum(0) if ctx.needs_input_grad[2] else None,
            None,
        )
