"""What attention may ask of CUDA's kernels, on meta tensors: no device is needed to see a rule broken.

covers: attention/kernels.py, attention/spans.py
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from streambp.attention.spans import Run, Spans
from tests.attention.meta_runs import HEADS, KV_HEADS, SIZE, run

CHUNK = 8192
LENGTHS = (8193, 16_384, 20_001, 24_577, 30_000, 33_333, 40_959, 49_153, 57_344, 65_537)


def documents(*ends):
    return tuple(Run(a, b, a) for a, b in itertools.pairwise(ends))


def padded(length, first, last):
    return (Run(first, last, first), *([Run(last, length, first, last)] if last < length else []))


LAYOUTS = {
    "plain": Spans.causal(1, 20_000),
    "one token over": Spans.causal(1, 2 * CHUNK + 1),
    "two rows": Spans.causal(2, 20_000),
    "left-padded": Spans(20_000, (padded(20_000, 5, 20_000), padded(20_000, 9000, 20_000))),
    "one unpadded token in a chunk": Spans(20_000, (padded(20_000, CHUNK - 1, 20_000),)),
    "right-padded": Spans(20_000, (padded(20_000, 0, 19_999), padded(20_000, 3, CHUNK + 1))),
    "right-padded row": Spans(20_000, (padded(20_000, 0, 17_001),)),
    "packed": Spans(20_000, (documents(0, 5, 6, 9001, 9002, 20_000), documents(0, 20_000))),
    "window": Spans.causal(1, 20_000, window=1000),
    "small window": Spans.causal(1, 20_000, window=7),
    "window, right-padded": Spans(20_000, (padded(20_000, 0, 15_000),), 1000),
}


@pytest.mark.parametrize("tiles", [None, 1], ids=["one buffer", "tiles"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_graph_sees_one_layout_and_no_small_block(name, tiles, monkeypatch):
    recorder, counted = run(monkeypatch, LAYOUTS[name], CHUNK, rows=len(LAYOUTS[name].rows), tiles=tiles, saved=False)
    assert all(len(layouts) == 1 for layouts in recorder.graphs.values())
    for operator, queries, keys, _ in recorder.calls:
        if operator.startswith("cudnn"):
            assert min(queries, keys) >= 256
            assert queries % 128 == keys % 128 == 0
    assert counted.syncs == 0
    if "window" not in name:
        assert recorder.graphs


def keys_of(monkeypatch, lengths, rows=1):
    forwards, backwards = set(), {}
    for length in lengths:
        recorder, _ = run(monkeypatch, Spans.causal(rows, length), CHUNK, rows=rows)
        forwards |= recorder.forwards
        for key, layouts in recorder.graphs.items():
            backwards.setdefault(key, set()).update(layouts)
    return forwards, backwards


def test_other_lengths_find_the_same_graphs(monkeypatch):
    """Of one row: chunks of 8,192 queries, and pieces of the last one."""
    first, _ = keys_of(monkeypatch, LENGTHS[:5])
    forwards, backwards = keys_of(monkeypatch, LENGTHS)
    assert all(len(layouts) == 1 for layouts in backwards.values())
    sizes = {(key[0][2], key[1][2]) for key in (*forwards, *backwards)}
    assert len(sizes) <= len(forwards) <= 70, "strides depend on T"
    again, _ = keys_of(monkeypatch, (37_111, 41_234, 64_999))
    assert len(again - forwards) <= 12
    assert first < forwards


def test_whole_chunks_of_any_length_build_no_new_graph(monkeypatch):
    forwards, backwards = keys_of(monkeypatch, (65_536,))
    assert (len(forwards), len(backwards)) == (8, 5)  # a square; prefixes of 1 to 7 chunks, and of 1 to 4
    for length in range(2 * CHUNK, 16 * CHUNK, 3 * CHUNK):
        more, more_backwards = keys_of(monkeypatch, (length,))
        assert more <= forwards | {key for key in more if key[1][2] == 65_536}
        assert more_backwards.keys() <= backwards.keys()


def test_no_upload_for_a_chunk_whose_layout_was_seen(monkeypatch):
    layout = dataclasses.replace(LAYOUTS["packed"])
    _, first = run(monkeypatch, layout, CHUNK, rows=2)
    _, second = run(monkeypatch, layout, CHUNK, rows=2)
    assert 0 < first.uploads <= 3 * 2  # chunks, rows
    assert second.uploads == second.syncs == 0


@pytest.mark.parametrize("saved", [True, False], ids=["attn_out saved", "recomputed"])
def test_elementwise_bytes(saved, monkeypatch):
    """Of one Qwen3-8B layer at 65,536 tokens: docs/cuda.md has the table."""
    _, counted = run(monkeypatch, Spans.causal(1, 65_536), CHUNK, saved=saved)
    elements = 65_536 * HEADS * SIZE  # of o
    chunks = elements / 8
    kv_elements = 2 * 65_536 * KV_HEADS * SIZE
    expected = {
        "merge in Triton": (1 if saved else 2) * 7 * 6 * chunks,  # two blocks: read both, write one
        "add_": (4 * 6 + 3 * 2 * 10) * chunks + 36 / 8 * 10 * kv_elements,  # dq of 5 to 8 blocks; dK and dV of 36 squares
        "_to_copy": 3 * (6 + 6) * chunks + 6 * kv_elements,
        "copy_": 4 * kv_elements,  # into the buffer
        "zeros_like": 4 * kv_elements,
    }
    for name, size in expected.items():
        assert counted.by_name[name] <= 1.02 * size, name
    assert counted.total <= 1.02 * sum(expected.values())
    assert counted.calls <= (750 if saved else 880)
    share = 36 * counted.total / (15 * 4e12)
    print(f"36 layers' attention: {100 * share:.2f} % of a step of 15 s at 4 TB/s")
