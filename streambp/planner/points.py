"""At which lengths and chunk sizes steps are counted, so that lines through them hold anywhere."""

from __future__ import annotations

from streambp.attention.kernels import K_BLOCK, MATH
from streambp.planner.laws import Point

CHUNKS = (4096, 8192)  # chunk sizes at which streamed steps are counted for lines that serve any length
TILED_CHUNKS = (1024, 2048)  # where attention is plain matrix products: their tiles are small, and there are many


def points_for(at: Point | None, chunked: bool, fused: bool, states: bool, tiles: bool) -> tuple[Point, ...]:
    """Where to count: lengths beyond the attention kernels' block, or up to `at` if that is shorter.

    As few chunks as tell the lines apart: a first one, inner ones and a last. Tiles of keys from the host are several in
    flight, and plain products have small tiles: both take more. States are kept for each chunk: a third chunk size tells
    that number from the chunk size, and there are so many chunks that what is on its way to the host is one layer's.
    """
    small, large = CHUNKS if fused else TILED_CHUNKS
    k_block = K_BLOCK if fused else MATH.tiling.k_block or 0
    if at is not None and (fused or at[1] < large):
        small, large = max(1, at[1] // 2), at[1]
    few = fused and not tiles and (at is None or at[0] >= large + k_block)
    if few and states and chunked and large % 4 == 0 and (at is None or at[0] >= 6 * large >= large + k_block):
        length = 6 * large
        return (length, large), (length, large * 3 // 2), (length, large * 3 // 4), (length + large, large)
    few = few and not states
    small = small if few or at is not None or not fused else large // 4
    short = few and at is None
    length = max((3 if few else 4) * large, large + k_block)
    length = length if at is None else min(at[0], length)
    if not chunked:
        return (length, 0), (length + large, 0)
    points = (length, large), (3 * small if short else length, small), (length + large, large)
    return (*points, (length, 2 * small if 2 * small < large else max(1, small // 2))) if states else points
