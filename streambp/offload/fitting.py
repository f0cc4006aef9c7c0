"""What layers may save on the device, what that takes and spares, and the record of what a micro-batch chose.

What each layer's tensors take, the planner sees on tensors without data, where it can count; a layer's own forward and
backward correct it. `offload/policy.py` chooses. [Note: saves that fit]
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from streambp.layer.cost import Cost
from streambp.layer.products import UnreadProducts, never_read

BACK, TRIED = 0.1, 0.01  # of what was left free for nothing comes back with each good step; less after a failure
KV_WORTH = 3.4  # seconds spared a byte, of outputs of Linears: norms, rotation and half of the refill come on top
ATTENTION_PACE = 1.12  # seconds of a FLOP of attention, of a product's: an H200's rates (`rates.py`)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Something that a layer may save: bytes, and the FLOPs a byte that backward is spared."""

    index: int
    name: str
    bytes: float
    worth: float


@dataclasses.dataclass
class LayerSeen:
    """What a layer's forward would have saved, chunk by chunk. [Note: saves that fit]

    tokens: of all rows. chunks: how many there are. unread: of the layer, filled by its backward: situations in which some
    products need not be computed again.
    """

    device: torch.device
    tokens: int
    length: int
    chunks: int
    unread: dict[Any, UnreadProducts]
    cost: Cost = dataclasses.field(default_factory=Cost)
    done: int = 0
    graph: float = 0.0  # bytes that the graphs of all chunks save

    def start(self) -> None:
        """Nothing: no time is measured."""

    def chunk_done(self, cost: Cost) -> None:
        """Add up what a chunk costs."""
        self.cost, self.done = self.cost + cost, self.done + 1

    def graph_done(self, size: int) -> None:
        """Add up what the chunks' graphs save."""
        self.graph += size

    def learnt(self) -> LayerCost | None:
        """Without the products that backward leaves out anyway; None before a backward has run."""
        if self.done < self.chunks or not self.unread:
            return None
        unread = never_read(self.unread.values())
        products = {name: product for name, product in self.cost.products.items() if name not in unread}
        cost = dataclasses.replace(self.cost, products=products)
        graph = self.graph + self.cost.kv if self.graph else 0.0  # not seen where another forward came before backward
        return LayerCost(self.device, cost, graph, self.tokens, self.length, len(self.unread))


@dataclasses.dataclass(frozen=True)
class LayerCost:
    """A layer's cost, of a call of so many tokens over all rows, and as many in a row. graph: bytes, if all is kept; 0: not
    known."""

    device: torch.device
    cost: Cost
    graph: float
    tokens: int
    length: int
    situations: int  # of the layer's backward, of which it is known what is not read

    def inputs(self, tokens: int) -> float:
        """Bytes of the layer's inputs in a call of so many tokens."""
        return self.cost.x * tokens / self.tokens

    def candidates(self, index: int, tokens: int, length: int) -> Iterator[Candidate]:
        """What layer `index` may save of a call of `tokens` tokens in rows of `length`."""
        cost, scale = self.cost, tokens / self.tokens
        products = {name: product.flops / product.bytes for name, product in cost.products.items() if product.bytes}
        if cost.attn_out:
            worth = ATTENTION_PACE * cost.attention_flops / cost.attn_out * (length / self.length)
            yield Candidate(index, "attn_out", cost.attn_out * scale, _rounded(worth))
        if cost.kv and products:
            usual = sum(products.values()) / len(products)
            yield Candidate(index, "kv", cost.kv * scale, _rounded(KV_WORTH * usual))
        for name, worth in products.items():
            yield Candidate(index, name, cost.products[name].bytes * scale, _rounded(worth))


def _rounded(worth: float) -> float:
    """To three digits: layers of one kind are worth the same."""
    return float(f"{worth:.2e}")


@dataclasses.dataclass
class Chosen:
    """What a micro-batch saves: by name the bytes, and the number of layers.

    tokens: of all rows; chunk: of a chunk. room: bytes that a step without saves leaves free. least: bytes that were free
    whenever the device was asked. let_go: why nothing is saved any more; None: it is.
    """

    tokens: int
    chunk: int
    room: float
    bytes: dict[str, float]
    layers: dict[str, int]
    least: float = math.inf
    let_go: str | None = None

    @classmethod
    def of(cls, tokens: int, chunk: int, room: float, plan: dict[int, list[Candidate]]) -> Chosen:
        """From the plan of each layer; what is worth most comes first."""
        chosen = sorted((c for candidates in plan.values() for c in candidates), key=lambda c: -c.worth)
        sizes: dict[str, float] = {}
        layers: dict[str, int] = {}
        for candidate in chosen:
            sizes[candidate.name] = sizes.get(candidate.name, 0.0) + candidate.bytes
            layers[candidate.name] = layers.get(candidate.name, 0) + 1
        return cls(tokens, chunk, room, sizes, layers)


@dataclasses.dataclass
class AsUnpatched:
    """A micro-batch of so many tokens over all rows that ran as unpatched: bytes, predicted, that it kept, and those that a
    step without saves leaves free."""

    tokens: int
    bytes: float
    room: float


class Margin(NamedTuple):
    """Bytes that a micro-batch leaves free besides, because one like it lacked them. back: the part that a good one gives
    back."""

    bytes: float = 0.0
    back: float = BACK


@dataclasses.dataclass
class Shortage:
    """What one micro-batch lacked of the memory that it had planned with.

    room, planned: bytes for saves, and of those that were planned; wished: the latter by layer. by: the most that was
    missing at any time, less than 0: that much stayed free. gone: its saves were let go of. failed: the device ran out.
    """

    key: tuple[int, int]
    room: float
    planned: float
    wished: Mapping[int, float]
    by: float = -math.inf
    gone: bool = False
    failed: bool = False

    def margin(self, before: Margin) -> Margin:
        """What the next one like it is to leave free besides; `before`: this one."""
        if self.by > 0:
            back = TRIED if self.failed else before.back
            return Margin(before.bytes + self.room - self.planned + self.by, back)
        return before._replace(bytes=before.bytes - before.back * min(before.bytes, -self.by))
