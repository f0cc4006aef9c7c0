"""Keys and values in tiles against one buffer: what is read, what is added up, what is on the
device.

covers: attention/kv.py, attention/spans.py, chunks.py, layer/saved_tensors.py
"""

from __future__ import annotations

import pytest
import torch

from streambp.attention.kv import WORKING_TILES, KVBuffer, KVTiles, PrefixMemory
from streambp.attention.prefix import KVBytesPerToken, Prefix
from streambp.attention.spans import QueryRun, Spans, Tiling
from streambp.chunks import ChunkPlan
from streambp.layer.saved_tensors import DeviceTensors
from tests.seeds import seeded

LENGTH, CHUNK, SHAPE = 23, 5, (2, 3, 4)  # B, H_kv, D
LAYOUTS = {
    "causal": Spans.causal(2, LENGTH),
    "window": Spans.causal(2, LENGTH, 7),
    "packed": Spans(
        LENGTH,
        (
            (QueryRun(0, 9, 0), QueryRun(9, LENGTH, 9)),
            (QueryRun(0, 14, 0), QueryRun(14, LENGTH, 14)),
        ),
    ),
}


class SwappingStore(DeviceTensors):
    """Gives other tensors back than were put in, and makes those unusable."""

    def save(self, name, chunk, tensor):
        super().save(name, chunk, tensor.clone())

    def peek(self, name, chunk):
        return super().peek(name, chunk).clone()

    def borrow(self, name, chunk):
        tensor = super().borrow(name, chunk).clone()
        super().peek(name, chunk).fill_(torch.nan)
        return tensor


@pytest.mark.parametrize("resident", [0, 2])
@pytest.mark.parametrize("k_block", [3, 4, 16384])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_tiles_hold_what_one_buffer_holds(layout, k_block, resident):
    generator = seeded(0)
    rows, heads, size = SHAPE
    keys_and_values = torch.randn(2, rows, heads, LENGTH, size, generator=generator)  # K and V
    plan, store, scratch = ChunkPlan(LENGTH, CHUNK), SwappingStore(), SwappingStore()
    buffer = KVBuffer(
        torch.empty(rows, LENGTH, heads, size), torch.empty(rows, LENGTH, heads, size)
    )
    tiles = KVTiles(0, plan, store, scratch, resident, False, size)

    def blocks(chunk):
        return sorted(
            layout.blocks(chunk.start, chunk.stop, Tiling(k_block=k_block)),
            key=lambda block: block.k0,
        )

    def compare_visits(gradients, chunk):
        visits = zip(
            buffer.visit(blocks(chunk), gradients),
            tiles.visit(blocks(chunk), gradients),
            strict=True,
        )
        for (block, *expected), (other_block, *tile_parts) in visits:
            assert other_block == block
            assert all(torch.equal(a, b) for a, b in zip(expected, tile_parts, strict=True))
            assert len(tiles._on_device) <= resident + 2 + -(-k_block // CHUNK) or k_block > LENGTH
            if gradients:
                parts = [torch.randn(expected[0].shape, generator=generator) for _ in "kv"]
                buffer.add(block, *parts)
                tiles.add(block, *parts)

    for chunk in plan:
        for kv_storage in (buffer, tiles):
            kv_storage.write(chunk, *keys_and_values[:, :, :, chunk.start : chunk.stop])
        compare_visits(False, chunk)
    for chunk in plan.backward:
        compare_visits(False, chunk)  # a recomputation attends before its backward
        compare_visits(True, chunk)
        for tile_gradient, expected in zip(
            tiles.take_gradients(chunk), buffer.take_gradients(chunk), strict=True
        ):
            assert torch.equal(tile_gradient, expected)
    assert all(index < resident for index in tiles._on_device)


def test_prefixes_share_their_room_in_order():
    plan = ChunkPlan(100, 10)

    def resident(headroom, sizes):
        prefix = Prefix(Spans.causal(1, 100), 100, "auto")
        prefix.memory = PrefixMemory(plan, headroom, DeviceTensors)
        prefix.sizes_seen = [KVBytesPerToken(size, 0, size, 1) for size in sizes]
        return prefix.resident_tiles(backward=False)

    assert resident(None, [8, 8]) == [None, None]
    assert resident(800, [8]) == [None]
    assert resident(799, [8]) == [9 - WORKING_TILES]
    assert resident(1200, [8, 8]) == [None, 5 - WORKING_TILES]
    assert resident(1, [8, 8]) == [0, 0]
