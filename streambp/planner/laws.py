"""Costs of a step at any length: linear functions of a few features, with counted coefficients.

Features of a step with T positions a row in N chunks of C (C = N = 0 for an unchunked sequence):

    1, T, C, N, T N, T C, T^2,    other ranks' keys (see `profile.held_keys`),    and
    E    blocks of keys that a chunk attends to, minus one, summed over the chunks
    C E  the same, times the queries of a chunk

Each cost uses the features on which it can depend:

    matrix products    T;  C, as all chunks but the last are recomputed;  T^2, for plain attention
    attention          T^2, or T and T C with windows: the number of query-key pairs
    moved bytes        T;  C, as all chunks but the last are recomputed;  N, for sums of weight
                       gradients;  T N, for gradients of the prefix;  C E, for gradients of queries

Steps of several chunks determine the coefficients. A step in one chunk costs a little less (2 % of
the bytes of an 8B model).
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import torch

from streambp.planner.work import Work

Point = tuple[int, int]  # T, C
# maximal number of chunks whose blocks are counted one by one; for more, the average is used
MAX_COUNTED_CHUNKS = 2048


class Law(NamedTuple):
    """Coefficients of a linear function of a step's features, which predicts the step's bytes or
    FLOPs. The fields are, in order, the coefficients of 1, T, C, N, K, T N, T C, T^2, E and C E.

    T is the tokens of a row, C the tokens of a chunk, N the number of chunks. K is the amount of
    other ranks' keys (`profile.held_keys`). E is the number of key blocks that a chunk attends to,
    minus one, summed over the chunks. A step's `Features` have the same fields.
    """

    constant: float = 0.0
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
        """Return the function's value for a step (bytes or FLOPs, for example): `total` plus the
        sum of coefficient times feature. `step` has the features of the step, such as its tokens
        and chunks."""
        # no Python loop, because a plan evaluates laws many thousands of times
        return sum(map(operator.mul, self, step), total)


Features = Law
CHUNKED_PHASES = ("forward", "backward")  # kinds of phases that run in chunks
ENCODER_PHASES = ("embedding", "embedding backward")  # kinds of phases in which an encoder runs
# The features of each quantity of `Work`, the most distinctive first.
CHUNKED_FEATURES: Mapping[str, tuple[str, ...]] = {
    "products": ("tokens", "chunk", "square", "chunks"),
    "forward": ("square", "tokens", "tokens_chunk", "constant"),
    "backward": ("square", "tokens", "tokens_chunk", "constant"),
    "traffic": ("tokens", "chunk", "tokens_chunks", "chunks", "queries_blocks"),
    "dispatches": ("chunks", "constant", "blocks"),
    "to_host": ("tokens", "chunk", "tokens_chunks"),
    "from_host": ("tokens", "chunk", "tokens_chunks"),
}
UNCHUNKED_FEATURES: Mapping[str, tuple[str, ...]] = {
    "products": ("tokens",), "forward": ("square", "tokens"), "backward": ("square", "tokens"),
    "traffic": ("tokens", "constant"), "dispatches": ("constant", "tokens"),
    "to_host": (), "from_host": (),
}  # fmt: skip
# Whether an encoder-decoder's encoder has one length, or the decoder's length; "" without encoder.
Encoder = Literal["", "same", "fixed"]
# Features of products and attention beside an encoder. Each chunk computes the keys and values of
# the encoder's output.
CHUNKED_ENCODER_FEATURES: Mapping[str, tuple[str, ...]] = {
    "same": ("tokens", "tokens_chunks", "chunk", "chunks"),
    "fixed": ("tokens", "chunks", "chunk"),
}
EQUAL_LENGTH_ATTENTION = ("square", "tokens")
# Features of bytes in the device's memory, one for each point.
BYTES_FEATURES: Mapping[bool, tuple[str, ...]] = {
    True: ("constant", "tokens", "chunk", "chunks"),  # in chunks
    False: ("constant", "tokens"),
}
# Features of bytes for models with T5's bias. Unpatched, they build a bias of all pairs of
# positions. Chunks build zeros for all pairs of a chunk and the encoder's output.
BIASED_BYTES_FEATURES: Mapping[bool, tuple[str, ...]] = {
    True: ("constant", "tokens", "chunk", "tokens_chunk"),
    False: ("constant", "tokens", "square"),
}
# Features of T5's kind, which attends by plain products or adds a bias of all pairs.
BIASED_UNCHUNKED = dict.fromkeys(Work._fields, ("square", "tokens", "constant"))
BIASED_CHUNKED = {
    **dict.fromkeys(
        Work._fields, ("tokens", "square", "tokens_chunks", "chunks", "tokens_chunk", "chunk")
    ),
    "dispatches": ("square", "tokens", "chunks", "tokens_chunks", "constant"),
    "to_host": ("tokens", "chunk", "tokens_chunks"),
    "from_host": ("tokens", "chunk", "tokens_chunks"),
}
ENCODER_FEATURES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "same": {
        "products": ("tokens", "constant"),
        "forward": EQUAL_LENGTH_ATTENTION,
        "backward": EQUAL_LENGTH_ATTENTION,
    },
    "fixed": {"products": ("constant",), "forward": ("constant",), "backward": ("constant",)},
}


@dataclasses.dataclass(frozen=True)
class PhaseLaws:
    """FLOPs, bytes and dispatches of all phases of one kind, as functions of a row's tokens T and a
    chunk's tokens C. Kinds are "embedding", "forward" and "backward" of all layers, "head" and so
    on.

    Attributes:
        name: the kind.
        laws: a function of T and C for each field of `Work` (FLOPs, bytes, dispatches), in the
            order of the fields.
        k_block: number of keys in an attention block, the part of the keys that one kernel call
            reads.
        floors: functions in the order of `laws`, which bound the predictions from below; empty: no
            bound but 0. A step that streams keys and values from the host does all work of a step
            that has them on the device. The functions in `laws` are fitted through rows of many
            chunks, and are too low for rows of few chunks.
    """

    name: str
    laws: tuple[Law, ...]
    k_block: int
    floors: tuple[Law, ...] = ()

    def at(self, step: Features) -> Work:
        """Return the FLOPs, bytes and dispatches of these phases in a step with the given features
        (T, C, number of chunks and so on)."""
        work = Work(*(max(0.0, law.at(step)) for law in self.laws))
        if not self.floors:
            return work
        return Work(*map(max, work, (floor.at(step) for floor in self.floors)))


def features(tokens: float, chunk: float, keys: float = 0.0, k_block: int = 0) -> Features:
    """Return the features of a step (1, T, C, number of chunks and so on), in which its costs are
    linear.

    Args:
        tokens: T, tokens of a row.
        chunk: C, tokens of a chunk; 0: the sequence is not chunked.
        keys: amount of other ranks' keys, as `profile.held_keys` returns.
        k_block: number of keys in an attention block; 0: the features that count blocks are 0.
    """
    if chunk:
        chunks = math.ceil(tokens / chunk)
    else:
        chunks = 0
    blocks = 0.0
    for index in range(min(chunks, MAX_COUNTED_CHUNKS) if k_block else 0):
        start = index * chunk
        stop = min(tokens, (index + 1) * chunk)
        blocks += (
            math.ceil(start / k_block) if stop - start >= k_block else math.ceil(stop / k_block) - 1
        )
    if chunks > MAX_COUNTED_CHUNKS and k_block:
        blocks = (chunks - 1) * (chunks * chunk / k_block / 2)
    products = (tokens * chunks, tokens * chunk, tokens * tokens)
    return Features(1, tokens, chunk, chunks, keys, *products, blocks, chunk * blocks)


def fit_bytes(
    points: Sequence[Point], values: Sequence[Sequence[float]], adds_biases: bool = False
) -> list[Law]:
    """Return bytes as linear functions of T, C and the number of chunks, fitted through counted
    steps. T is the tokens of a row, and C the tokens of a chunk.

    A function has a constant, and coefficients of T, C and the number of chunks. The last two are 0
    if all points have C = 0. The last one is 0 for only three points. The last
    coefficient is that of T C for models with T5's bias, and that of T^2 if all points have C = 0.

    Args:
        points: (T, C) of each counted step.
        values: [points, n], counted bytes of n phases at each point.
        adds_biases: True for models whose attention adds T5's bias.

    Returns:
        The n functions.
    """
    names_by_kind = BIASED_BYTES_FEATURES if adds_biases else BYTES_FEATURES
    names = names_by_kind[any(c for _, c in points)][: len(points)]
    steps = [features(*point) for point in points]
    rows = torch.tensor(
        [[getattr(step, name) for name in names] for step in steps], dtype=torch.float64
    )
    coefficients = torch.linalg.lstsq(
        rows, torch.tensor(values, dtype=torch.float64)
    ).solution.mT.tolist()
    laws = []
    for line in coefficients:
        rounded = [round(value, 6) + 0.0 for value in line]
        laws.append(Law(**dict(zip(names, rounded, strict=True))))
    return laws


def _features_of_work(
    name: str, is_chunked: bool, encoder: Encoder, adds_biases: bool
) -> Mapping[str, tuple[str, ...]]:
    """Return the names of the features on which each field of `Work` depends, by the field's name,
    for one kind of phase.

    Args:
        name: the kind of phase, such as "forward" of all layers.
        is_chunked: True for steps that are computed chunk by chunk.
        encoder: length of the rows of the model's encoder: "fixed", "same" as the decoder's, or ""
            without encoder.
        adds_biases: True for models whose attention adds T5's bias.
    """
    if adds_biases and name in CHUNKED_PHASES + ENCODER_PHASES:
        if encoder == "fixed" and name in ENCODER_PHASES:
            # an encoder that streams has fewer chunks if these are larger
            return dict.fromkeys(Work._fields, ("constant", "tokens", "chunk"))
        return BIASED_CHUNKED if is_chunked else BIASED_UNCHUNKED
    feature_names = dict(CHUNKED_FEATURES if is_chunked else UNCHUNKED_FEATURES)
    if encoder and name in CHUNKED_PHASES:
        products = CHUNKED_ENCODER_FEATURES[encoder] if is_chunked else ("tokens", "constant")
        feature_names["products"] = products
    elif encoder and name in ENCODER_PHASES:
        feature_names |= {
            **ENCODER_FEATURES[encoder],
            "traffic": ("tokens", "constant"),
            "dispatches": ("constant",),
        }
    elif name not in CHUNKED_PHASES:
        head_features = ("tokens", "constant")  # the head has its own blocks
        feature_names |= {
            "products": ("tokens",),
            "traffic": head_features,
            "dispatches": head_features,
        }
    return feature_names


def fit_work(
    name: str,
    points: Sequence[Point],
    costs: Sequence[Work],
    k_block: int,
    count_of_own: int | None = None,
    encoder: Encoder = "",
    adds_biases: bool = False,
) -> PhaseLaws:
    """Return the costs of one kind of phase as linear functions of the features (T, C, number of
    chunks and so on), fitted through counted steps. T is the tokens of a row, and C the tokens of a
    chunk. The number of coefficients is at most the number of points.

    Args:
        name: the kind of phase, such as "forward" of all layers.
        points: (T, C) of each counted step.
        costs: the counted costs at each point.
        k_block: number of keys in an attention block, the part of the keys that one kernel call
            reads.
        count_of_own: number of points, from the first on, that were counted for exactly this way to
            run the step. Bytes copied to and from the host are fitted through these alone, because
            later points may have other copies. None: all points.
        encoder: length of the rows of the model's encoder: "fixed", "same" as the decoder's, or ""
            without encoder.
        adds_biases: True for models whose attention adds T5's bias.
    """
    feature_names = _features_of_work(name, any(c for _, c in points), encoder, adds_biases)
    steps = [features(*point, k_block=k_block) for point in points]
    laws = []
    for field, values in zip(Work._fields, zip(*costs, strict=True), strict=True):
        if count_of_own is not None and field in ("to_host", "from_host"):
            number = count_of_own
        else:
            number = len(points)
        names = list(feature_names[field][:number])
        law = Law()
        if names and any(values):
            table = torch.tensor(
                [[getattr(step, feature) for feature in names] for step in steps],
                dtype=torch.float64,
            )
            while number < len(points) and torch.linalg.matrix_rank(
                table[:number, : len(names)]
            ) < len(names):
                names.pop()  # points with equal numbers of chunks do not determine this feature
            rows = table[:number, : len(names)]
            scale = rows.abs().amax(0).clamp_min(1e-9)
            targets = torch.tensor(values[:number], dtype=torch.float64)[:, None]
            solution = (
                torch.linalg.lstsq(
                    rows / scale, targets, driver="gelsd", rcond=1e-9
                ).solution.flatten()
                / scale
            )
            law = Law(
                **{
                    feature: float(f"{value:.12g}")
                    for feature, value in zip(names, solution.tolist(), strict=True)
                }
            )
        laws.append(law)
    return PhaseLaws(name, tuple(laws), k_block)
