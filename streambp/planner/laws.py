"""What a step asks of a device at any length: sums of a few features of T and C with counted coefficients.

Features of T positions a row in N chunks of C (T, and no chunks, where the sequence is not cut):

    1, T, C, N, T N, T C, T^2,    other ranks' keys as `profile.keys_held` has them,    and
    E    blocks of keys that chunks attend to beyond one, over all chunks
    C E  queries times such blocks

Each quantity has the features that it can have. Products: every token's, those that chunks but the last repeat, and scores
that plain products compute. Attention: pairs, whose number is T^2 or, with windows, T and T C. Bytes that are moved: of
tokens, those that chunks but the last repeat, of the weights' sums for each chunk, of the prefix's gradients for each
chunk, and of queries' gradients for each block of keys. A sequence in one chunk does a little less (2 % of the bytes of an
8B model).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from streambp.planner.work import Work

Point = tuple[int, int]  # T, C
LOOKED_AT = 2048  # chunks; of more, the blocks are those of the average chunk


class Law(NamedTuple):
    """A number for each of 1, T, C, N, keys, T N, T C, T^2, E and C E: a quantity's coefficient, or a step's `Features`."""

    one: float = 0.0
    tokens: float = 0.0
    chunk: float = 0.0
    chunks: float = 0.0
    keys: float = 0.0
    tokens_chunks: float = 0.0
    tokens_chunk: float = 0.0
    square: float = 0.0
    blocks: float = 0.0
    queries_blocks: float = 0.0

    def at(self, step: Features, total: float = 0.0) -> float:
        """`total` and the quantity in a step with these features."""
        for coefficient, feature in zip(self, step, strict=True):
            total += coefficient * feature
        return total


Features = Law
LAYERS = ("forward", "backward")  # the kinds of phases that run in chunks
# The features of each quantity of `Work`, those that tell most apart first.
IN_CHUNKS: Mapping[str, tuple[str, ...]] = {
    "products": ("tokens", "chunk", "square", "chunks"),
    "forward": ("square", "tokens", "tokens_chunk", "one"),
    "backward": ("square", "tokens", "tokens_chunk", "one"),
    "moved": ("tokens", "chunk", "tokens_chunks", "chunks", "queries_blocks"),
    "dispatches": ("chunks", "one", "blocks"),
    "out": ("tokens", "chunk", "tokens_chunks"),
    "back": ("tokens", "chunk", "tokens_chunks"),
}
AT_ONCE: Mapping[str, tuple[str, ...]] = {
    "products": ("tokens",), "forward": ("square", "tokens"), "backward": ("square", "tokens"), "moved": ("tokens", "one"),
    "dispatches": ("one", "tokens"), "out": (), "back": (),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Part:
    """The work of all phases of a kind: "embedding", "forward" and "backward" of all layers, "head" and so on.

    laws: for each field of `Work`. k_block: keys in a block.
    """

    name: str
    laws: tuple[Law, ...]
    k_block: int

    def at(self, step: Features) -> Work:
        """Of a step with these features."""
        return Work(*(max(0.0, law.at(step)) for law in self.laws))


def features(tokens: float, chunk: float, keys: float = 0.0, k_block: int = 0) -> Features:
    """Of T = tokens in chunks of C = chunk; 0: the sequence is not cut.

    Args:
        keys: other ranks'. k_block: keys in a block; 0: blocks are not asked for.
    """
    chunks = math.ceil(tokens / chunk) if chunk else 0
    blocks = 0.0
    for index in range(min(chunks, LOOKED_AT) if k_block else 0):
        start, stop = index * chunk, min(tokens, (index + 1) * chunk)
        blocks += math.ceil(start / k_block) if stop - start >= k_block else math.ceil(stop / k_block) - 1
    if chunks > LOOKED_AT and k_block:
        blocks = (chunks - 1) * (chunks * chunk / k_block / 2)
    products = (tokens * chunks, tokens * chunk, tokens * tokens)
    return Features(1, tokens, chunk, chunks, keys, *products, blocks, chunk * blocks)


def fit_bytes(points: Sequence[Point], values: Sequence[Sequence[float]]) -> list[Law]:
    """The plane through each column of values [points, n]: constant, per T, per C and per chunk; without a slope in C where
    all points share C = 0, and without one in the number of chunks where there are but three points."""
    columns = min(4, len(points)) if any(c for _, c in points) else 2
    rows = torch.tensor([features(*point)[:columns] for point in points], dtype=torch.float64)
    found = torch.linalg.lstsq(rows, torch.tensor(values, dtype=torch.float64)).solution.mT.tolist()
    return [Law(*(round(value, 6) + 0.0 for value in line)) for line in found]


def fit_work(name: str, points: Sequence[Point], found: Sequence[Work], k_block: int, own: int | None = None) -> Part:
    """The laws through the work that was counted at several points; of as many features as there are points.

    Args:
        own: so many of the points count for copies to the host; None: all.
    """
    used = dict(IN_CHUNKS if any(c for _, c in points) else AT_ONCE)
    if name not in LAYERS:
        both = ("tokens", "one")  # the head has blocks of its own
        used |= {"products": ("tokens",), "moved": both, "dispatches": both}
    steps = [features(*point, k_block=k_block) for point in points]
    laws = []
    for field, values in zip(Work._fields, zip(*found, strict=True), strict=True):
        number = own if own is not None and field in ("out", "back") else len(points)
        chosen = list(used[field][:number])
        law = Law()
        if chosen and any(values):
            table = torch.tensor([[getattr(step, one) for one in chosen] for step in steps], dtype=torch.float64)
            while number < len(points) and torch.linalg.matrix_rank(table[:number, : len(chosen)]) < len(chosen):
                chosen.pop()  # points with as many chunks do not tell it from the others
            rows = table[:number, : len(chosen)]
            scale = rows.abs().amax(0).clamp_min(1e-9)
            wanted = torch.tensor(values[:number], dtype=torch.float64)[:, None]
            solution = torch.linalg.lstsq(rows / scale, wanted, driver="gelsd", rcond=1e-9).solution.flatten() / scale
            law = Law(**{one: float(f"{value:.12g}") for one, value in zip(chosen, solution.tolist(), strict=True)})
        laws.append(law)
    return Part(name, tuple(laws), k_block)
