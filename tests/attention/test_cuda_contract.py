"""What attention may ask of CUDA's kernels, on meta tensors: no device is needed to see a rule
broken.

covers: attention/kernels.py, attention/kernels_wide.py, attention/spans.py, chunks.py,
planner/auto.py
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from streambp import chunks
from streambp.attention.backend import BlockPurpose
from streambp.attention.spans import QueryRun, Spans
from streambp.chunks import plan_chunks
from streambp.offload.costs import StepFigures
from streambp.offload.policy import SavesPolicy
from streambp.planner import auto
from streambp.planner.laws import Law
from streambp.planner.profile import Method, Phase
from tests.attention.meta_runs import CUDNN_FIRST, HEADS, KV_HEADS, SIZE, run
from tests.attention.platforms import A100, B200, H200, MI300, RTX_4090, backend

CHUNK = 8192
LENGTHS = (8193, 16_384, 20_001, 24_577, 30_000, 33_333, 40_959, 49_153, 57_344, 65_537)


def documents(*ends):
    return tuple(QueryRun(a, b, a) for a, b in itertools.pairwise(ends))


def padded(length, first, last):
    return (
        QueryRun(first, last, first),
        *([QueryRun(last, length, first, last)] if last < length else []),
    )


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


@pytest.mark.fast(3)
@pytest.mark.parametrize("tiles", [None, 1], ids=["one buffer", "tiles"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_graph_sees_one_layout_and_no_small_block(name, tiles, monkeypatch):
    recorder, counted = run(
        monkeypatch, LAYOUTS[name], CHUNK, rows=len(LAYOUTS[name].rows), tiles=tiles, saved=False
    )
    assert all(len(layouts) == 1 for layouts in recorder.graphs.values())
    for operator, queries, keys, _ in recorder.calls:
        if operator.startswith("cudnn"):
            assert min(queries, keys) >= 256
            assert queries % 128 == keys % 128 == 0
    assert counted.syncs == 0
    if "window" not in name:
        assert recorder.graphs


NATIVE, ONE_SIZE = {(128, 128), (192, 128), (256, 256)}, {(128, 128), (192, 192), (256, 256)}


MACHINES = {"H200": H200, "A100": A100, "4090": RTX_4090, "B200": B200, "MI300": MI300}
FEW_CASES = [  # machine, head sizes, tiles, layouts
    ("H200", (192, 128), None, ("two rows", "packed")),
    ("H200", (192, 128), 1, ("one token over",)),
    ("H200", (256, 256), None, ("left-padded",)),
    ("A100", (192, 128), None, ("packed", "window")),
    ("A100", (192, 128), 1, ("one token over",)),
    ("H200", (512, 512), None, ("two rows",)),
    ("MI300", (192, 128), None, ("one token over", "packed")),
]
SIZES = ((192, 128), (256, 256), (512, 512))
ALL_CASES = [
    (machine, sizes, tiles, tuple(LAYOUTS))
    for machine in MACHINES
    for sizes in SIZES
    for tiles in (None, 1)
]


def case_id(case):
    machine, (size, value_size), tiles, layouts = case
    return (
        f"{machine}, "
        f"{size}/{value_size}{', tiles' * (tiles is not None)}{', all' * (len(layouts) == len(LAYOUTS))}"
    )


@pytest.mark.parametrize(
    "case",
    [*FEW_CASES, *(pytest.param(case, marks=pytest.mark.full) for case in ALL_CASES)],
    ids=case_id,
)
def test_every_block_has_head_sizes_that_its_kernel_takes(case, monkeypatch):
    """The rules that no operator checks without data, with one layout for each graph."""
    where, sizes, tiles, layouts = case
    machine = MACHINES[where]
    choice = backend(machine, *sizes)
    for name in layouts:
        layout = LAYOUTS[name]
        rows = len(layout.rows)
        arguments = {"size": sizes[0], "value_size": sizes[1], "backend": choice, "heads": 16}
        recorder, _ = run(
            monkeypatch, layout, CHUNK, rows=rows, tiles=tiles, saved=False, **arguments
        )
        assert all(len(layouts) == 1 for layouts in recorder.graphs.values())
        for operator, queries, keys, _ in recorder.calls:
            if operator.startswith("cudnn"):
                assert min(queries, keys) >= 256
                assert queries % 128 == keys % 128 == 0
        for operator, *pair in recorder.sizes:
            takes = (
                NATIVE
                if operator.startswith("cudnn")
                else {sizes}
                if operator.startswith("efficient")
                else ONE_SIZE
            )
            assert tuple(pair) in takes, operator
        cudnn = any(operator.startswith("cudnn") for operator, *_ in recorder.sizes)
        native = (machine is H200 and sizes != (512, 512)) or (
            machine is B200 and sizes == (192, 128)
        )
        # the end of padding leaves larger blocks
        assert cudnn == (native and name not in ("window", "small window"))
        if machine is MI300 and sizes != (512, 512):
            assert not {operator for operator, *_ in recorder.sizes} - {"flash", "flash backward"}


def keys_of(monkeypatch, lengths, rows=1, **arguments):
    forwards, backwards = set(), {}
    for length in lengths:
        recorder, _ = run(monkeypatch, Spans.causal(rows, length), CHUNK, rows=rows, **arguments)
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
    other_forwards, _ = keys_of(monkeypatch, (37_111, 41_234, 64_999))
    assert len(other_forwards - forwards) <= 12
    assert first < forwards


@pytest.mark.parametrize(
    "sizes", [(128, 128), (192, 128), (256, 256)], ids=lambda sizes: f"{sizes[0]}-{sizes[1]}"
)
def test_whole_chunks_of_any_length_build_no_new_graph(sizes, monkeypatch):
    arguments = {"size": sizes[0], "value_size": sizes[1], "backend": backend(H200, *sizes)}
    forwards, backwards = keys_of(monkeypatch, (65_536,), **arguments)
    # a square; prefixes of 1 to 7 chunks, and of 1 to 4
    assert (len(forwards), len(backwards)) == (8, 5)
    for length in range(2 * CHUNK, 16 * CHUNK, 3 * CHUNK):
        more_forwards, more_backwards = keys_of(monkeypatch, (length,), **arguments)
        assert more_forwards <= forwards | {key for key in more_forwards if key[1][2] == 65_536}
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
        "add_": (4 * 6 + 3 * 2 * 10) * chunks
        + 36 / 8 * 10 * kv_elements,  # dq of 5 to 8 blocks; dK and dV of 36 squares
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


def passes(size):
    """How many pieces of queries read the prefix of a chunk."""
    return len(list(CUDNN_FIRST.tiling(BlockPurpose.FORWARD).queries(0, size)))


ROWS_AND_LENGTHS = [
    *itertools.product((1, 2, 3, 5, 6, 7), (20_000, 40_000, 65_536, 100_001)),
    (3, 600),
    (1, 2048),
]


@pytest.mark.parametrize("rule", ["plain", "planner"])
@pytest.mark.parametrize(("rows", "length"), ROWS_AND_LENGTHS)
def test_auto_chunks_take_one_pass(rows, length, rule, monkeypatch):
    """Three rows had chunks of 2,730 tokens, and one of 40,000 tokens chunks of 5,000: three and
    four pieces of queries."""
    if rule == "plain":
        size = plan_chunks(length, rows, "auto").size
    else:
        law = auto.StepNeed(
            Method(
                "streambp", (), "none", False, True, (Phase("backward 0", Law()),), (), Law(), ()
            )
        )
        figures = StepFigures(law, {}, lambda tokens, chunk: 1 / chunk if chunk <= 8192 else 1.0)
        size = SavesPolicy(1, lambda device: 1.0, lambda device: (figures, 0.0), True, True).chunk(
            0, rows, length, None
        )
    assert size == length or passes(size) == 1
    assert size * rows <= 8192 or size == 1
    assert 2 * size * rows > min(2048, length * rows) * 0.99
    if rule == "planner":
        assert size == min(length, 1 << ((8192 // rows).bit_length() - 1)) or size == length


def test_chunks_that_are_not_rounded_are_seen(monkeypatch):
    monkeypatch.setattr(chunks, "floor_power_of_two", lambda size: size)
    anew = plan_chunks.__wrapped__  # it remembers
    assert passes(anew(65_536, 3, "auto").size) == 3
    assert passes(anew(40_000, 1, "auto").size) >= 3
