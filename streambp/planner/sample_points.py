"""Choose the lengths and chunk sizes at which steps are counted, so that fitted functions hold for
all lengths."""

from __future__ import annotations

from streambp.attention.kernels import K_BLOCK, MATH
from streambp.planner.laws import Point

SAMPLE_CHUNKS = (4096, 8192)  # chunk sizes for streamed steps, whose lines hold for any length
# chunk sizes for attention by plain matrix products, whose tiles are small and many
TILED_SAMPLE_CHUNKS = (1024, 2048)
# Points (T, C) in groups, for models with T5's bias. The attention tiles of the first group are
# larger than the tensors of T C elements. The tiles of the second group are smaller. Its chunks
# reach the largest of a plan's chunks, because a fit through smaller ones is 8 % too low there.
# On a CPU, attention to the encoder's output builds scores of T C pairs, so a single group is
# enough.
BIASED_POINTS: tuple[tuple[Point, ...], ...] = (
    ((5120, 1024), (6144, 1024), (6144, 512)),
    ((12288, 3072), (15360, 3072), (24576, 8192), (32768, 8192)),
)
CPU_BIASED_POINTS: tuple[tuple[Point, ...], ...] = (
    ((4096, 1024), (4096, 2048), (6144, 1024), (6144, 2048)),
)
UNCHUNKED_BIASED_POINTS: tuple[tuple[Point, ...], ...] = (
    ((512, 0), (640, 0)),
    ((8192, 0), (16384, 0), (24576, 0)),
)


def biased_points_for(
    at: Point | None, chunked: bool, on_gpu: bool
) -> tuple[tuple[Point, ...], ...]:
    """Return the points (T, C), row length and chunk size, at which steps run on tensors without
    data to count their bytes, for models whose attention adds T5's bias. The bytes of such a model
    grow with T^2, or with T C if the sequence is chunked.

    The points are in at most two groups: short rows, and long rows. A function is fitted through
    each group, and the larger value is the prediction. A single line through short rows would be
    too low for long rows, because bytes are convex in T.

    Args:
        at: (T, C) for which the prediction is made, so that points near it are chosen; None: points
            for predictions at any length.
        chunked: True for steps that are computed chunk by chunk.
        on_gpu: True for kernels and memory of a GPU, False for those of a CPU.
    """
    groups = UNCHUNKED_BIASED_POINTS
    if chunked:
        groups = BIASED_POINTS if on_gpu else CPU_BIASED_POINTS
    if at is None:
        return groups
    length, chunk = at
    if not chunked:
        return (((length, 0), (length + chunk, 0), (length + 2 * chunk, 0)),)
    if length > groups[-1][-1][0]:
        return groups
    small = max(1, chunk // 2)
    longer = length + chunk
    return (((length, chunk), (length, small), (longer, chunk), (longer, small)),)


def points_for(
    at: Point | None,
    chunked: bool,
    fused: bool,
    states: bool,
    tiles: bool,
) -> tuple[Point, ...]:
    """Return the points (T, C), row length and chunk size, at which steps run on tensors without
    data. The memory and FLOPs of the steps are counted, and functions of T and C are fitted through
    the counts. C is 0 for steps that are not chunked.

    Rows are longer than the attention kernels' block of keys, unless the row in `at` is shorter.
    Counts are fast for few chunks, so each row has only a first, some inner and a last chunk. Rows
    have more chunks if K and V come from the host, or if plain matrix products compute attention.

    Layers with recurrent states save a state for each chunk. A third chunk size separates the
    effect of the number of chunks from the effect of the chunk size. The rows have more chunks,
    too: in rows of few chunks, states of several layers would be copied to the host at the same
    time, unlike in long rows.

    Args:
        at: (T, C) for which the prediction is made, so that points near it are chosen; None: points
            for predictions at any length.
        chunked: True for steps that are computed chunk by chunk.
        fused: True if a fused kernel computes attention; False for plain matrix products.
        states: True for layers with recurrent states.
        tiles: True if K and V come from the host in tiles, one for each chunk.
    """
    small, large = SAMPLE_CHUNKS if fused else TILED_SAMPLE_CHUNKS
    if fused:
        k_block = K_BLOCK
    else:
        k_block = MATH.tiling.k_block or 0
    if at is not None and (fused or at[1] < large):
        small = max(1, at[1] // 2)
        large = at[1]
    few_chunks = fused and not tiles and (at is None or at[0] >= large + k_block)
    if (
        few_chunks
        and states
        and chunked
        and large % 4 == 0
        and (at is None or at[0] >= 6 * large >= large + k_block)
    ):
        length = 6 * large
        return (
            (length, large),
            (length, large * 3 // 2),
            (length, large * 3 // 4),
            (length + large, large),
        )
    few_chunks = few_chunks and not states
    if fused and at is None and not few_chunks:
        small = large // 4
    short = few_chunks and at is None
    length = max((3 if few_chunks else 4) * large, large + k_block)
    if at is not None:
        length = min(at[0], length)
    if not chunked:
        return (length, 0), (length + large, 0)
    points = (length, large), (3 * small if short else length, small), (length + large, large)
    if states:
        return (*points, (length, 2 * small if 2 * small < large else max(1, small // 2)))
    return points


def points_of_more_chunks(points: tuple[Point, ...], at: Point | None) -> tuple[Point, ...]:
    """Return points (T, C), row length and chunk size, like `points` but with an additional chunk
    in each row. Return () if the rows of `points` have four chunks already, or if `at` is shorter
    than the new rows.

    Steps that move attention outputs to the host need more device memory in rows of four chunks or
    more: the copies of an additional layer. A function of T and C is therefore fitted through
    `points`, and a second through the result. The larger value is the predicted memory.

    Args:
        points: (T, C) of steps in chunks, from `points_for`.
        at: (T, C) for which the prediction is made; None: any length.
    """
    (length, large), (small_length, small), (longer, _) = points[:3]
    if length >= 4 * large or (at is not None and at[0] < longer + large):
        return ()
    if small_length < 4 * small:
        small_length += small
    return (longer, large), (small_length, small), (longer + large, large)
