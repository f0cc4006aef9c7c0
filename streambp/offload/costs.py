"""What layers may save, what that takes and spares, and the record of what a micro-batch chose.

What each layer's tensors take, the planner sees on tensors without data, where it can count; a layer's own forward and
backward correct it. `offload/policy.py` chooses.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from streambp.offload.engines import Engine

GRAPH = "everything"  # among what is saved: the call's graph. [Note: kept graphs]
KV_WORTH = 3.4  # seconds spared a byte, of outputs of Linears: norms, rotation and half of the refill come on top
BACK, TRIED = 0.1, 0.01  # of what was left free for nothing comes back with each good step; less after a failure
ATTENTION_PACE = 1.12  # seconds of a FLOP of attention, of a product's: an H200's rates (`rates.py`)


@dataclasses.dataclass(frozen=True)
class Product:
    """A Linear's output: bytes, and the FLOPs that computing it takes."""

    bytes: float
    flops: float


@dataclasses.dataclass(frozen=True)
class Cost:
    """Bytes of the layer inputs, of attention outputs with their logsumexps, of keys and values; FLOPs of a forward's
    attention; products by name. overwritten: names of what cannot be saved, because a layer writes to it."""

    x: float = 0
    attn_out: float = 0
    kv: float = 0
    attention_flops: float = 0.0
    products: dict[str, Product] = dataclasses.field(default_factory=dict)
    overwritten: frozenset[str] = frozenset()

    def __add__(self, other: Cost) -> Cost:
        products = dict(self.products)
        for name, new in other.products.items():
            old = products.get(name)
            products[name] = new if old is None else Product(old.bytes + new.bytes, old.flops + new.flops)
        return Cost(
            self.x + other.x,
            self.attn_out + other.attn_out,
            self.kv + other.kv,
            self.attention_flops + other.attention_flops,
            products,
            self.overwritten | other.overwritten,
        )


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Something that a layer may save: bytes, and the FLOPs of products a byte that backward is spared."""

    index: int
    name: str
    bytes: float
    worth: float


class LayerCost(NamedTuple):
    """A layer's cost, of a call of so many tokens over all rows, and as many in a row. graph: bytes, if all is kept; 0: not
    known. situations: of the layer's backward, of which it is known what is not read."""

    device: torch.device
    cost: Cost
    graph: float
    tokens: int
    length: int
    situations: int

    def scaled_to(self, tokens: int) -> Cost:
        """Of a call of so many tokens, in rows as long."""
        cost = self.cost
        if tokens == self.tokens:
            return cost
        scale = tokens / self.tokens
        products = {name: Product(scale * p.bytes, scale * p.flops) for name, p in cost.products.items()}
        x, attn_out, kv, flops = (scale * size for size in (cost.x, cost.attn_out, cost.kv, cost.attention_flops))
        return Cost(x, attn_out, kv, flops, products, cost.overwritten)

    def candidates(self, index: int, tokens: int, length: int, whole: bool = False) -> Iterator[Candidate]:
        """What layer `index` may save of a call of `tokens` tokens in rows of `length`. whole: in one chunk, whose backward
        computes no keys and values ahead. Worth has three digits: layers of one kind are worth the same."""
        cost = self.scaled_to(tokens)
        worth = {name: product.flops / product.bytes for name, product in cost.products.items() if product.bytes}
        sizes: dict[str, float] = {name: cost.products[name].bytes for name in worth}
        if cost.kv and worth and not whole:
            sizes["kv"], worth["kv"] = cost.kv, KV_WORTH * sum(worth.values()) / len(worth)
        if cost.attn_out:
            pace = ATTENTION_PACE * (length / self.length)
            sizes["attn_out"], worth["attn_out"] = cost.attn_out, pace * cost.attention_flops / cost.attn_out
        for name, size in sizes.items():
            yield Candidate(index, name, size, float(f"{worth[name]:.2e}"))


@dataclasses.dataclass
class LayerSeen:
    """What a layer's forward would have saved, chunk by chunk.

    Args:
        tokens: of all rows. length: of a row. chunks: how many there are. unread: of the layer, filled by its backward:
            situations in which some products (`recompute`) need not be computed again.
        engine: whose clock times the chunks; None: nothing is timed.
    """

    device: torch.device
    tokens: int
    length: int
    chunks: int
    unread: dict[Any, Any]
    engine: Engine | None = None
    costs: list[Cost] = dataclasses.field(default_factory=list)
    graph: float = 0.0  # bytes that the graphs of all chunks save
    marks: list[Any] = dataclasses.field(default_factory=list)

    def mark(self, cost: Cost | None = None) -> None:
        """Forward begins, or that of a chunk is over, which costs so much: mark the time in the compute queue."""
        if self.engine is not None:
            self.marks.append(self.engine.clock())
        if cost is not None:
            self.costs.append(cost)

    def learnt(self) -> LayerCost | None:
        """Without the products that no backward reads; None before a backward has run."""
        if len(self.costs) < self.chunks or not self.unread:
            return None
        unread = frozenset.intersection(*(found.recompute for found in self.unread.values()))
        total = sum(self.costs, Cost())
        products = {name: product for name, product in total.products.items() if name not in unread}
        cost = dataclasses.replace(total, products=products)
        graph = self.graph + cost.kv if self.graph else 0.0  # not seen where another forward came before backward
        return LayerCost(self.device, cost, graph, self.tokens, self.length, len(self.unread))

    def times(self) -> list[float]:
        """Seconds of each chunk; [] if nothing is timed."""
        pairs = zip(self.marks, self.marks[1:], strict=False)
        return [] if self.engine is None else [self.engine.seconds(before, after) for before, after in pairs]


def attention_rate(layers: Iterable[LayerSeen]) -> float:
    """FLOP/s of attention, from the slope of the chunks' times: they differ in nothing but how much they attend to.

    Returns:
        Infinity if longer spans take no longer.
    """
    above = below = 0.0
    for layer in layers:
        chunks = zip(layer.costs, layer.times(), strict=True)
        # FLOPs of attention and seconds, per byte of hidden states: chunks may differ in length.
        paces = [(cost.attention_flops / (cost.x or 1), seconds / (cost.x or 1)) for cost, seconds in chunks]
        whole = paces[:-1] or [(0.0, 0.0)]  # the last chunk may be shorter
        mean_work, mean_time = (sum(values) / len(whole) for values in zip(*whole, strict=True))
        above += sum((w - mean_work) ** 2 for w, _ in whole)
        below += sum((w - mean_work) * (t - mean_time) for w, t in whole)
    return above / below if below > 0 else float("inf")


@dataclasses.dataclass(frozen=True)
class Measured:
    """One forward over `tokens` tokens, `length` a row: seconds of its layers' compute, bytes/s to the host, attention
    FLOP/s, and bytes that the host has for it."""

    tokens: int
    length: int
    seconds: float
    link: float
    attention: float
    host: float


@dataclasses.dataclass
class Chosen:
    """What a micro-batch saves: by name the bytes, and the number of layers.

    tokens: of all rows; length: of a row; chunk: of a chunk. room: bytes that a step without saves leaves free, on the
    device or of what may leave it. measured: what saves on the host were chosen by, where the layers' inputs take so many
    bytes, and why something is left out, or not saved by all layers; None: saves stay on the device. least: bytes that were
    free whenever the device was asked. let_go: why nothing is saved any more; None: it is.
    """

    tokens: int
    length: int
    chunk: int
    room: float
    plan: dataclasses.InitVar[dict[int, list[Candidate]]]
    measured: Measured | None = None
    inputs: float = 0.0
    left_out: dict[str, str] = dataclasses.field(default_factory=dict)
    least: float = math.inf
    let_go: str | None = None
    spared: float = 0.0  # FLOPs of products, or others that take as long
    bytes: dict[str, float] = dataclasses.field(default_factory=dict)
    layers: dict[str, int] = dataclasses.field(default_factory=dict)

    def __post_init__(self, plan: dict[int, list[Candidate]]) -> None:
        """From the plan of each layer; what is worth most comes first."""
        for one in sorted((one for found in plan.values() for one in found), key=lambda one: -one.worth):
            self.bytes[one.name] = self.bytes.get(one.name, 0.0) + one.bytes
            self.layers[one.name] = self.layers.get(one.name, 0) + 1
            self.spared += one.bytes * one.worth


@dataclasses.dataclass
class AsUnpatched:
    """A micro-batch of so many tokens over all rows that ran as unpatched: bytes, predicted, that it kept, and those that a
    step without saves leaves free."""

    tokens: int
    bytes: float
    room: float


Choice = Chosen | AsUnpatched


class Need:
    """What a step without saves takes."""

    def by_layer(self, tokens: int, chunk: int, present: float) -> tuple[tuple[float, float], ...]:
        """(index, bytes): what is needed while layers up to that one wait for their backward.

        Args:
            tokens: over all rows. chunk: tokens of a chunk. present: the part of the gradients that are there already.
        """
        raise NotImplementedError

    def at_work(self, chunk: int) -> float:
        """Bytes that computing a chunk of so many tokens takes."""
        raise NotImplementedError

    def __call__(self, tokens: int, chunk: int, present: float = 0.0) -> float:
        """Bytes at most."""
        return max(map(operator.itemgetter(1), self.by_layer(tokens, chunk, present)))


@dataclasses.dataclass
class Figures:
    """What is known of a model's steps in one of its states.

    need: None: nothing. costs: of layers, by index; their own steps correct it. seconds: of a step without saves, by tokens
    and those of a chunk; None where no step was counted. products, link: FLOP/s, and bytes/s to the host. why: nothing is
    counted, or known at all.
    """

    need: Need | None = None
    costs: dict[int, LayerCost] = dataclasses.field(default_factory=dict)
    seconds: Callable[[int, int], float] | None = None
    products: float = math.inf
    link: float = 0.0
    why: str = ""

    def spared(self, plan: Mapping[int, list[Candidate]]) -> float:
        """Seconds that backward is spared by what each layer saves."""
        return sum(one.bytes * one.worth for found in plan.values() for one in found) / self.products


@dataclasses.dataclass
class Shortage:
    """What one micro-batch lacked of the memory that it had planned with, and what those like it leave free for that.

    room, planned: bytes for saves, and of those that were planned; wished: the latter by layer. missing: the most
    that was at any time, less than 0: that much stayed free. gone: its saves were let go of. failed: the device ran out.
    margin: bytes that the next one like it leaves free besides; back: the part of them that a good one gives back.
    """

    key: tuple[int, int]
    room: float
    planned: float
    wished: Mapping[int, float]
    missing: float = -math.inf
    gone: bool = False
    failed: bool = False
    margin: float = 0.0
    back: float = BACK

    def learn(self, before: Shortage | None) -> None:
        """Set what the next one like it is to leave free; `before`: what the one before it lacked."""
        if before is not None:
            self.margin, self.back = before.margin, before.back
        if self.missing > 0:
            self.margin = self.margin + self.room - self.planned + self.missing
            self.back = TRIED if self.failed else self.back
        else:
            self.margin = self.margin - self.back * min(self.margin, -self.missing)
