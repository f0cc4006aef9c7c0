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
    """Coefficients of a linear function that predicts the bytes or FLOPs of a step from features of
    the step. The class is also used for the features themselves (`Features`), in the same fields.

    Attributes:
        constant: bytes or FLOPs that depend on no feature.
        tokens: coefficient of T, the tokens of a row.
        chunk: coefficient of C, the tokens of a chunk.
        chunks: coefficient of N, the number of chunks.
        keys: coefficient of the amount of other ranks' keys on this rank (`profile.held_keys`).
        tokens_chunks: coefficient of T N.
        tokens_chunk: coefficient of T C.
        square: coefficient of T^2.
        blocks: coefficient of E, the number of key blocks that a chunk attends to, minus one,
            summed over the chunks. A block is a part of the keys that one kernel call reads.
        queries_blocks: coefficient of C E.
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
        """Return the predicted bytes or FLOPs of a step: `total`, plus the sum over all features of
        coefficient times feature.

        Args:
            step: the features of the step, such as T and C.
            total: number to which the sum is added.
        """
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
    """Costs of one part of a training step, as functions of a row's tokens T and a chunk's tokens
    C. Parts (kinds of phases) are "embedding", "forward" of all layers, "backward" of all layers,
    "head" and so on. Costs are FLOPs, bytes and dispatches (operations that torch starts).

    Attributes:
        name: the part's name, such as "forward".
        laws: a function of T and C for each field of `Work` (FLOPs, bytes, dispatches), in the
            order of the fields.
        k_block: number of keys in an attention block, the part of the keys that one kernel call
            reads.
        floors: functions in the order of `laws`, which bound the predictions from below; empty: no
            bound but 0. Only steps that copy keys and values from the host for each chunk have such
            bounds, because `laws` is too low for few chunks. The bound is the cost of the same step
            with keys and values on the device.
    """

    name: str
    laws: tuple[Law, ...]
    k_block: int
    floors: tuple[Law, ...] = ()

    def at(self, step: Features) -> Work:
        """Return the FLOPs, bytes and dispatches (operations that torch starts) of this part of a
        step, such as the forward of all layers.

        Args:
            step: the features of the step: T (a row's tokens), C (a chunk's tokens), the number of
                chunks and so on.
        """
        work = Work(*(max(0.0, law.at(step)) for law in self.laws))
        if not self.floors:
            return work
        return Work(*map(max, work, (floor.at(step) for floor in self.floors)))


def features(tokens: float, chunk: float, keys: float = 0.0, k_block: int = 0) -> Features:
    """Return the features of a step: numbers such as T, C, T^2 and the number of chunks. The bytes
    and FLOPs of a step are predicted as linear functions (`Law`) of its features.

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
    """Return linear functions that predict the bytes of a step's phases from T, the tokens of a
    row, C, the tokens of a chunk, and the number of chunks. The functions are fitted through steps
    that ran on tensors without data, so that their bytes were counted.

    A function has at most four features: 1, T, C and the number of chunks, in this order. The last
    is left out for three points. The features are 1 and T if all points have C = 0 (unchunked
    steps). Models with T5's bias have T C in place of the number of chunks, or T^2 as the third
    feature of unchunked steps.

    Args:
        points: (T, C) of each step.
        values: [points, n], bytes of n phases of each step.
        adds_biases: True for models whose attention adds T5's bias.

    Returns:
        A function for each of the n phases.
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
    """Return a dict from each field of `Work` ("products", "traffic" and so on) to the names of the
    features on which this cost depends, for one part of a step. Features are T (a row's tokens), C
    (a chunk's tokens), T^2 and so on. `fit_work` determines a coefficient for each.

    Args:
        name: the part of the step, such as "forward" of all layers.
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
    """Return functions that predict the FLOPs, bytes and dispatches of a part of a step, such as
    the forward of all layers, for any length. The functions are linear in features such as T (a
    row's tokens), C (a chunk's tokens) and the number of chunks. Each function is fitted through
    steps that ran on tensors without data, so that their costs were counted. A function of n
    coefficients needs n points or more.

    Args:
        name: the part of the step, such as "forward" of all layers.
        points: (T, C) of each step.
        costs: the part's counted FLOPs, bytes and dispatches in each step.
        k_block: number of keys in an attention block, the part of the keys that one kernel call
            reads.
        count_of_own: number of points, from the first on, through which the bytes copied to and
            from the host are fitted. Later points were counted for a similar way to run the step,
            with other copies. None: all points.
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
