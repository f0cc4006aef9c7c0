"""Blocks cover exactly what spans say, and spans say what transformers' masks say; both by brute
force.

covers: attention/interface.py, attention/mask_scan.py, attention/masks.py, attention/spans.py,
chunks.py
"""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from transformers import LlamaConfig
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from streambp.attention.interface import route_attention
from streambp.attention.mask_scan import move_ends
from streambp.attention.masks import DenseMask, LazyMask, resolve
from streambp.attention.spans import BLOCK_LENGTH_MULTIPLE, BlockKind, QueryRun, Spans, Tiling
from streambp.chunks import Barrier, ChunkPlan
from streambp.errors import UnsupportedMaskError
from tests.seeds import seed_of

CPU = torch.device("cpu")

LENGTH = 26


def random_row(draw):
    """The runs of one row: plain, padded on either side or both, packed, or nothing but padding."""
    kind = draw.choice(["plain", "padded", "packed", "empty"])
    if kind == "empty":
        return ()
    if kind == "packed":
        ends = sorted(
            {0, LENGTH, *(draw.randrange(1, LENGTH) for _ in range(draw.randrange(1, 6)))}
        )
        return tuple(QueryRun(a, b, a) for a, b in itertools.pairwise(ends))
    first, last = (
        (draw.randrange(0, 9), draw.randrange(15, LENGTH + 1)) if kind == "padded" else (0, LENGTH)
    )
    return (
        QueryRun(first, last, first),
        *([QueryRun(last, LENGTH, first, last)] if last < LENGTH else []),
    )


def allowed_pairs(spans):
    """[B, T, T] of 0 and 1, straight from the definition of a span."""
    counts = torch.zeros(len(spans.rows), spans.length, spans.length, dtype=torch.long)
    for row, runs in enumerate(spans.rows):
        for run in runs:
            for q in range(run.q0, run.q1):
                low = run.k0 if spans.window is None else max(run.k0, q - spans.window + 1)
                counts[row, q, low : q + 1 if run.k1 is None else run.k1] = 1
    return counts


def counted_pairs(block):
    """[q, k] of a block: how often each of its pairs counts."""
    query, key = torch.arange(block.q0, block.q1)[:, None], torch.arange(block.k0, block.k1)
    causal = key <= query
    window = key > query - block.window if block.window is not None else torch.ones_like(causal)
    if block.kind is BlockKind.VARLEN:
        counts = torch.zeros(block.q1 - block.q0, block.k1 - block.k0, dtype=torch.bool)
        for i in range(len(block.cu_q) - 1):
            region = (
                slice(block.cu_q[i], block.cu_q[i + 1]),
                slice(block.cu_k[i], block.cu_k[i + 1]),
            )
            q_len, k_len = region[0].stop - region[0].start, region[1].stop - region[1].start
            offset = k_len - q_len  # bottom-right aligned
            distance = torch.arange(q_len)[:, None] + offset - torch.arange(k_len)
            counts[region] = (distance >= 0) & (distance < (block.window or LENGTH))
        return counts.long()
    if block.kind is BlockKind.WINDOW:
        assert block.q1 == block.k1
    if block.kind is BlockKind.CAUSAL:
        assert block.k0 <= block.q0
        assert block.q1 == block.k1
    rule = {
        BlockKind.FULL: torch.ones_like(causal),
        BlockKind.CAUSAL: causal,
        BlockKind.BAND: window,
        BlockKind.WINDOW: causal & window,
    }
    return rule[block.kind].long()


TILINGS = [
    Tiling(),
    Tiling(q_block=3, k_block=4),
    Tiling(k_block=5),
    Tiling(native_window=True),
    Tiling(k_block=6, native_varlen=True),
    Tiling(native_window=True, native_varlen=True),
    Tiling(bottom_right=True),
    Tiling(k_block=5, bottom_right=True, native_varlen=True),
    Tiling(
        min_tokens=4,
        tail=Tiling(k_block=5, bottom_right=True),
        masked=Tiling(q_block=3),
        native_varlen=True,
    ),
    Tiling(min_tokens=2, k_block=BLOCK_LENGTH_MULTIPLE, tail=Tiling(), native_window=True),
]


def test_few_lengths_for_every_length():
    tiling = Tiling(min_tokens=256, k_block=4 * BLOCK_LENGTH_MULTIPLE)
    lengths, remainders = set(), set()
    for length in (1, 255, 256, 257, 8191, 8192, 8193, 20_000, 65_536, 65_537, 123_457, 1_000_003):
        sizes = [k1 - k0 for k0, k1 in tiling.keys(7, 7 + length)]
        assert sum(sizes) == length
        lengths |= {size for size in sizes if tiling.takes(size)}
        remainders |= {size for size in sizes if not tiling.takes(size)}
    assert lengths <= {
        256,
        512,
        1024,
        2048,
        4096,
        BLOCK_LENGTH_MULTIPLE,
        2 * BLOCK_LENGTH_MULTIPLE,
        3 * BLOCK_LENGTH_MULTIPLE,
        4 * BLOCK_LENGTH_MULTIPLE,
    }
    assert max(remainders) < 256


@pytest.mark.fast(5)
@pytest.mark.parametrize("tiling", TILINGS, ids=range(len(TILINGS)))
@pytest.mark.parametrize("window", [None, 1, 4, 11, 40])
def test_blocks_cover_each_pair_once(window, tiling):
    draw = random.Random(f"{seed_of(0)}{window}{tiling}")
    for _ in range(25):
        rows = [random_row(draw) for _ in range(draw.randrange(1, 4))]
        spans = Spans(LENGTH, (rows[0], *rows), window)
        size = draw.randrange(1, LENGTH + 1)
        counts = torch.zeros(len(spans.rows), LENGTH, LENGTH, dtype=torch.long)
        for start in range(0, LENGTH, size):
            for block in spans.blocks(start, min(start + size, LENGTH), tiling):
                assert start <= block.q0 < block.q1 <= start + size
                if block.kind is BlockKind.CAUSAL and not any(
                    t.bottom_right for t in (tiling, tiling.tail or tiling)
                ):
                    assert block.k0 == block.q0, (
                        "a kernel that aligns at the first key needs squares"
                    )
                counts[block.b0 : block.b1, block.q0 : block.q1, block.k0 : block.k1] += (
                    counted_pairs(block)
                )
        assert torch.equal(counts, allowed_pairs(spans))


def describe_mask(window=None, position_ids=None, padding=None, is_causal=True):
    """The LazyMask that a model gets from transformers."""
    config = LlamaConfig(attn_implementation="sdpa", sliding_window=window, is_causal=is_causal)
    make = create_causal_mask if window is None else create_sliding_window_causal_mask
    rows = 2 if padding is None else padding.shape[0]
    arguments = {
        "config": config,
        "inputs_embeds": torch.zeros(rows, LENGTH, 4),
        "attention_mask": padding,
        "past_key_values": None,
        "position_ids": position_ids,
    }
    with route_attention([config]):
        lazy = make(**arguments)
    return lazy, make(**arguments)


def padding_mask(*ranges):
    mask = torch.zeros(len(ranges), LENGTH, dtype=torch.long)
    for row, (first, last) in enumerate(ranges):
        mask[row, first:last] = 1
    return mask


PACKED = torch.cat([torch.arange(9), torch.arange(3), torch.arange(14)]).expand(2, -1)
BATCHES = {
    "plain": {},
    "left and right padding": {"padding": padding_mask((4, LENGTH), (0, 20), (3, 11))},
    "a row of padding": {"padding": padding_mask((0, 0), (0, LENGTH))},
    "packed": {"position_ids": PACKED},
    "window": {"window": 5},
    "window and padding": {"window": 5, "padding": padding_mask((4, LENGTH), (0, 12))},
    "window and packing": {"window": 5, "position_ids": PACKED},
}


@pytest.mark.parametrize("name", BATCHES)
def test_spans_are_transformers_masks(name):
    lazy, expected = describe_mask(**BATCHES[name])
    assert isinstance(lazy, LazyMask)
    rows = 2 if "padding" not in BATCHES[name] else BATCHES[name]["padding"].shape[0]
    spans = resolve(lazy, rows, LENGTH, BATCHES[name].get("position_ids"), None, CPU)
    assert isinstance(spans, Spans)
    if expected is None:
        expected = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    assert torch.equal(
        allowed_pairs(spans).bool(), expected.reshape(-1, LENGTH, LENGTH).expand(rows, -1, -1)
    )


def test_padding_with_a_hole_is_read_tile_by_tile():
    padding = padding_mask((4, LENGTH), (0, 20))
    padding[:, 9:11] = 0
    lazy, expected = describe_mask(padding=padding)
    dense = resolve(lazy, 2, LENGTH, None, None, CPU)
    assert isinstance(dense, DenseMask)
    assert torch.equal(dense.tile(5, 17, 2, 21, CPU), expected[:, :, 5:17, 2:21])


def test_bidirectional_mask_is_refused():
    lazy, _ = describe_mask(is_causal=False, padding=padding_mask((0, 20), (0, LENGTH)))
    dense = resolve(lazy, 2, LENGTH, None, None, CPU)
    assert dense.barriers == (Barrier(1, LENGTH - 1),)
    with pytest.raises(UnsupportedMaskError, match="comes after"):
        move_ends(ChunkPlan(LENGTH, 5), dense.barriers)
    assert len(move_ends(ChunkPlan(LENGTH, LENGTH), dense.barriers)) == 1


@pytest.mark.parametrize("value", [True, 0.0])
def test_one_pair_above_the_diagonal_moves_chunk_ends(value):
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
    if value is not True:
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    assert not resolve(mask, 2, LENGTH, None, None, CPU).barriers
    mask[0, 0, 7, 19] = value
    dense = resolve(mask, 2, LENGTH, None, None, CPU)
    assert dense.barriers
    assert dense.barriers == (Barrier(8, 19),)
    assert move_ends(ChunkPlan(LENGTH, 8), dense.barriers).ends == (7, 20, LENGTH)
    assert move_ends(ChunkPlan(LENGTH, 20), dense.barriers) == ChunkPlan(LENGTH, 20)
    assert max(block.k1 for block in dense.blocks(0, 20, Tiling())) == 20


@pytest.mark.parametrize("lowest", [torch.finfo(torch.float32).min, -torch.inf])
def test_added_mask_with_an_empty_row_is_refused_where_others_read_its_key(lowest):
    mask = torch.full((1, 2, LENGTH, LENGTH), lowest).triu(1)
    mask[0, :, 3] = lowest
    with pytest.raises(UnsupportedMaskError, match="without any key"):
        resolve(mask, 1, LENGTH, None, None, CPU)
    mask[0, :, :, 3] = lowest
    assert not resolve(mask, 1, LENGTH, None, None, CPU).barriers
    mask[0, 1, 3, 3] = 0.0
    with pytest.raises(UnsupportedMaskError, match="other queries or heads read"):
        resolve(mask, 1, LENGTH, None, None, CPU)


def test_cu_seq_lens():
    lazy, _ = describe_mask(padding=torch.ones(1, LENGTH))
    ends = torch.tensor([0, 9, 12, LENGTH], dtype=torch.int32)
    spans = resolve(lazy, 1, LENGTH, None, ends, CPU)
    assert spans.rows == ((QueryRun(0, 9, 0), QueryRun(9, 12, 9), QueryRun(12, LENGTH, 12)),)
    with pytest.raises(UnsupportedMaskError, match="must rise from 0"):
        resolve(describe_mask()[0], 1, LENGTH, None, ends + 1, CPU)


@pytest.mark.parametrize(("rows", "names_it"), [(1, True), (2, False)])
def test_cu_seq_lens_that_end_before_the_sequence_name_the_remedy(rows, names_it):
    """As rows that are padded to a multiple; what the message says is accepted."""
    ends = torch.tensor([0, 9, LENGTH - 3], dtype=torch.int32)
    with pytest.raises(UnsupportedMaskError, match="must rise from 0") as error:
        resolve(describe_mask()[0], rows, LENGTH, None, ends, CPU)
    assert (f"append {LENGTH}, " in str(error.value)) == names_it
    longer = torch.cat([ends, ends.new_tensor([LENGTH])])
    spans = resolve(describe_mask()[0], 1, LENGTH, None, longer, CPU)
    assert spans.rows == (
        (QueryRun(0, 9, 0), QueryRun(9, LENGTH - 3, 9), QueryRun(LENGTH - 3, LENGTH, LENGTH - 3)),
    )


def test_cu_seq_lens_that_contradict_position_ids():
    lazy, _ = describe_mask(position_ids=PACKED[:1].expand(2, -1))
    with pytest.raises(UnsupportedMaskError, match="Pass only one of the two"):
        resolve(lazy, 1, LENGTH, PACKED[:1], torch.tensor([0, 10, LENGTH]), CPU)
