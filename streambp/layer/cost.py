"""What saving the tensors of a chunk, a layer or a whole forward would take, and what it would spare."""

from __future__ import annotations

import dataclasses
from typing import Protocol


@dataclasses.dataclass(frozen=True)
class Product:
    """A Linear's output: bytes, and the FLOPs that computing it takes."""

    bytes: int
    flops: float

    def __add__(self, other: Product) -> Product:
        return Product(self.bytes + other.bytes, self.flops + other.flops)


@dataclasses.dataclass(frozen=True)
class Cost:
    """Bytes of the layer inputs, of attention outputs with their logsumexps, of keys and values; FLOPs of a forward's
    attention; products by name. overwritten: names of what cannot be saved, because a layer writes to it."""

    x: int = 0
    attn_out: int = 0
    kv: int = 0
    attention_flops: float = 0.0
    products: dict[str, Product] = dataclasses.field(default_factory=dict)
    overwritten: frozenset[str] = frozenset()

    def __add__(self, other: Cost) -> Cost:
        products = dict(self.products)
        for name, product in other.products.items():
            products[name] = products[name] + product if name in products else product
        return Cost(
            self.x + other.x,
            self.attn_out + other.attn_out,
            self.kv + other.kv,
            self.attention_flops + other.attention_flops,
            products,
            self.overwritten | other.overwritten,
        )


class Watch(Protocol):
    """Measures one layer's forward."""

    def start(self) -> None:
        """To be called before the first chunk."""
        ...

    def chunk_done(self, cost: Cost) -> None:
        """To be called after each chunk, when the store has what is saved of it. cost: of this chunk."""
        ...

    def graph_done(self, size: int) -> None:
        """To be called when backward has recomputed a chunk, with the bytes that its graph saves."""
        ...
