"""What a step asks of a device at any length: sums of a few features of T and C with counted coefficients.

Features of T positions a row in N chunks of C (T, and no chunks, where the sequence is not cut):

    1, T, C, N, T N, T C, T^2    and
    E    blocks of keys that chunks attend to beyond one, over all chunks
    C E  queries times such blocks

Each quantity has the features that it can have. Products: every token's, those that chunks but the last repeat, and scores
that plain products compute. Attention: pairs, whose number is T^2 or, with windows, T and T C. Bytes: of tokens, those that
chunks but the last repeat, of the weights' sums for each chunk, of the prefix's gradients for each chunk, and of queries'
gradients for each block of keys. A sequence in one chunk does a little less (2 % of the bytes of an 8B model).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from streambp.planner.work import Work

LOOKED_AT = 2048  # chunks; of more, the blocks are those of the average chunk
ONE, TOKENS, CHUNK, CHUNKS, TOKENS_CHUNKS, TOKENS_CHUNK, SQUARE, BLOCKS, QUERY_BLOCKS = range(9)


class UsedBytes(NamedTuple):
    """The features of each quantity of `Work`, those that tell most apart first."""

    products: tuple[int, ...]
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    moved: tuple[int, ...]
    dispatches: tuple[int, ...]
    out: tuple[int, ...]
    back: tuple[int, ...]


LAYERS = ("forward", "backward")  # the kinds of phases that run in chunks
IN_CHUNKS = UsedBytes(
    products=(TOKENS, CHUNK, SQUARE, CHUNKS),
    forward=(SQUARE, TOKENS, TOKENS_CHUNK, ONE),
    backward=(SQUARE, TOKENS, TOKENS_CHUNK, ONE),
    moved=(TOKENS, CHUNK, TOKENS_CHUNKS, CHUNKS, QUERY_BLOCKS),
    dispatches=(CHUNKS, ONE, BLOCKS),
    out=(TOKENS, CHUNK, TOKENS_CHUNKS),
    back=(TOKENS, CHUNK, TOKENS_CHUNKS),
)
AT_ONCE = UsedBytes(
    products=(TOKENS,), forward=(SQUARE, TOKENS), backward=(SQUARE, TOKENS), moved=(TOKENS, ONE), dispatches=(ONE, TOKENS),
    out=(), back=(),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Part:
    """The work of all phases of a kind: "embedding", "forward" and "backward" of all layers, "head" and so on.

    laws: for each field of `Work`, the coefficients of the nine features. k_block: keys in a block.
    """

    name: str
    laws: tuple[tuple[float, ...], ...]
    k_block: int

    def at(self, given: Sequence[float]) -> Work:
        """Of a step with these features."""
        return Work(*(max(0.0, _sum(law, given)) for law in self.laws))


def features(tokens: float, chunk: float, k_block: int) -> tuple[float, ...]:
    """The nine features of T = tokens in chunks of C = chunk; 0: the sequence is not cut."""
    chunks = math.ceil(tokens / chunk) if chunk else 0
    blocks = 0.0
    for index in range(min(chunks, LOOKED_AT)):
        start, stop = index * chunk, min(tokens, (index + 1) * chunk)
        blocks += math.ceil(start / k_block) if stop - start >= k_block else math.ceil(stop / k_block) - 1
    if chunks > LOOKED_AT:
        blocks = (chunks - 1) * (chunks * chunk / k_block / 2)
    return (1, tokens, chunk, chunks, tokens * chunks, tokens * chunk, tokens * tokens, blocks, chunk * blocks)


def _sum(law: Sequence[float], given: Sequence[float]) -> float:
    total = 0.0
    for coefficient, feature in zip(law, given, strict=True):
        total += coefficient * feature
    return total


def fit_part(
    name: str, points: Sequence[tuple[int, int]], found: Sequence[Work], k_block: int, own: int | None = None
) -> Part:
    """The laws through the work that was counted at several points (T, C); of as many features as there are points.

    Args:
        own: so many of the points count for copies to the host; None: all.
    """
    used = IN_CHUNKS if any(c for _, c in points) else AT_ONCE
    if name not in LAYERS:
        used = used._replace(products=(TOKENS,), moved=(TOKENS, ONE), dispatches=(TOKENS, ONE))  # the head's own blocks
    table = torch.tensor([features(*point, k_block) for point in points], dtype=torch.float64)  # [points, 9]
    laws = []
    for field, columns, values in zip(Work._fields, used, zip(*found, strict=True), strict=True):
        number = own if own is not None and field in ("out", "back") else len(points)
        chosen = list(columns[:number])
        law = [0.0] * table.shape[1]
        if chosen and any(values):
            while number < len(points) and torch.linalg.matrix_rank(table[:number, chosen]) < len(chosen):
                chosen.pop()  # points with as many chunks do not tell it from the others
            rows = table[:number, chosen]
            scale = rows.abs().amax(0).clamp_min(1e-9)
            wanted = torch.tensor(values[:number], dtype=torch.float64)[:, None]
            solution = torch.linalg.lstsq(rows / scale, wanted, driver="gelsd", rcond=1e-9).solution.flatten() / scale
            for column, value in zip(chosen, solution.tolist(), strict=True):
                law[column] = float(f"{value:.12g}")
        laws.append(tuple(law))
    return Part(name, tuple(laws), k_block)
