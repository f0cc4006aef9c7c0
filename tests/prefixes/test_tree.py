"""The tree of a batch's rows against brute force: which tokens are computed, whose they are, and
what they read.

covers: prefixes/tree.py, attention/spans.py
"""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from streambp.attention.spans import QueryRun, Tiling
from streambp.prefixes import tree as tree_module
from streambp.prefixes.tree import MIN_SHARED_TOKENS, PrefixTree, find_tree
from tests.attention.test_spans import counted_pairs
from tests.seeds import seed_of


def tree_of(rows, width, min_prefix=1, positions=None):
    """The tree of rows, each (padding on the left, its tokens); None where nothing is shared."""
    ids, mask = torch.full((len(rows), width), 9), torch.zeros(len(rows), width, dtype=torch.long)
    for index, (column, tokens) in enumerate(rows):
        ids[index, column : column + len(tokens)] = torch.tensor(tokens, dtype=torch.long)
        mask[index, column : column + len(tokens)] = 1
    tree = find_tree(ids, mask, positions, min_prefix=min_prefix, min_savings=0.0)
    return tree if isinstance(tree, PrefixTree) else None


def packed_positions(row):
    """The packed place of each of a row's tokens."""
    positions = []
    for span in row.packed_spans:
        assert span.row_start == len(positions)
        positions += range(span.start, span.stop)
    return positions


def allowed(spans):
    """The keys that each query reads, straight from the definition of a run."""
    keys = [set() for _ in range(spans.length)]
    for run in spans.rows[0]:
        for q in range(run.q0, run.q1):
            low = run.k0 if spans.window is None else max(run.k0, q - spans.window - run.shift + 1)
            new = set(range(low, q + 1 if run.k1 is None else run.k1))
            assert not new & keys[q]
            keys[q] |= new
    return keys


def check(tree, rows, window):
    """Every token of every row is computed once, and reads what stands before it in its row."""
    keys, used_positions = allowed(tree.spans(window)), set()
    for row, (column, tokens) in zip(tree.rows, rows, strict=True):
        row_positions = packed_positions(row)
        assert len(row_positions) == len(tokens)
        assert row.column == column or not tokens
        used_positions |= set(row_positions)
        for index, q in enumerate(row_positions):
            first = 0 if window is None else max(0, index - window + 1)
            assert keys[q] == set(row_positions[first : index + 1]), (rows, index)
    assert used_positions == set(range(tree.tokens))
    assert tree.tokens_of_rows == sum(len(tokens) for _, tokens in rows)


def check_with_and_without_window(tree, rows):
    for window in (None, 2):
        check(tree, rows, window)
    assert tree.tokens == nodes(rows)


def nodes(rows, by_column=True):
    """How many different tokens there are: by what stands up to them, and by their position."""
    return len(
        {
            (column * by_column, tokens[: i + 1])
            for column, tokens in rows
            for i in range(len(tokens))
        }
    )


def all_rows(width):
    for column in range(width + 1):
        for length in range(width - column + 1):
            for tokens in itertools.product((0, 1), repeat=length):
                yield column, tokens


def check_all(batches, width):
    trees = 0
    for rows in batches:
        tree = tree_of(rows, width)
        if tree is None:
            assert nodes(rows) in (0, width * len(rows))  # padding alone, or nothing to save
            continue
        trees += 1
        assert tree.tokens == nodes(rows)
        for window in (None, 1, 2):
            check(tree, rows, window)
    return trees


def test_all_pairs_of_short_rows_with_any_padding():
    assert check_all(itertools.product(all_rows(3), repeat=2), 3) > 100


def test_all_batches_of_three_short_rows():
    full_rows = [(0, tokens) for tokens in itertools.product((0, 1), repeat=3)]
    ending = [
        (0, tokens) for length in (0, 1, 2) for tokens in itertools.product((0, 1), repeat=length)
    ]
    assert check_all(itertools.product(full_rows, full_rows, [*full_rows, *ending]), 3) > 500


def random_rows(draw, width):
    """Branches of branches, with rows that end inside others and equal ones."""
    rows = []
    for _ in range(draw.randint(2, 8)):
        start = () if not rows or draw.random() < 0.2 else draw.choice(rows)[1]
        start = start[: draw.randrange(len(start) + 1)]
        continuation = tuple(
            draw.randrange(3) for _ in range(draw.randrange(width - len(start) + 1))
        )
        rows.append((draw.choice((0, 0, 2)), start + continuation))
    return rows


@pytest.mark.parametrize("seed", range(40))
def test_random_trees(seed):
    draw = random.Random(seed_of(seed))
    rows = random_rows(draw, 24)
    min_prefix = draw.choice((1, 2, 5))
    tree = tree_of(rows, 26, min_prefix)
    if tree is None:
        return
    assert nodes(rows) <= tree.tokens <= tree.tokens_of_rows
    assert min_prefix > 1 or tree.tokens == nodes(rows)
    for window in (None, 1, 3, 7):
        check(tree, rows, window)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("varlen", [False, True])
def test_blocks_of_trees_count_each_pair_once(seed, varlen):
    """Of any chunk; where kernels take packed documents, all branches of a chunk are one block."""
    draw = random.Random(seed_of(seed))
    rows = [
        (0, (1, 2, 3, 4, 5, *(draw.randrange(9) for _ in range(draw.randrange(1, 9)))))
        for _ in range(5)
    ]
    tree = tree_of(rows, 26, 2)
    tiling = Tiling(q_block=4, k_block=3, native_varlen=varlen, bottom_right=varlen)
    for window in (None, 3, 6):
        keys = allowed(tree.spans(window))
        for start in range(0, tree.length, 7):
            stop = min(start + 7, tree.length)
            counts = torch.zeros(tree.length, tree.length, dtype=torch.long)
            blocks = list(tree.spans(window).blocks(start, stop, tiling))
            for block in blocks:
                counts[block.q0 : block.q1, block.k0 : block.k1] += counted_pairs(block)
            expected = torch.zeros_like(counts)
            for q in range(start, stop):
                expected[q, list(keys[q])] = 1
            assert torch.equal(counts, expected)
            assert sum(bool(block.cu_q) for block in blocks) <= 1


def test_what_makes_a_branch():
    prompt = tuple(range(MIN_SHARED_TOKENS))
    rows = [(0, (*prompt, 100)), (0, (*prompt, 101)), (0, (*prompt[:-1], 102))]
    tree = tree_of(rows, MIN_SHARED_TOKENS + 1, MIN_SHARED_TOKENS)
    assert tree.tokens == 2 * MIN_SHARED_TOKENS + 2  # the third shares one token too few
    assert (
        tree_of(rows[1:], MIN_SHARED_TOKENS + 1, MIN_SHARED_TOKENS).tokens
        == 2 * MIN_SHARED_TOKENS + 1
    )
    # with the usual threshold
    assert isinstance(find_tree(torch.tensor([[1, 2, 3], [1, 2, 4]])), str)
    long = torch.arange(20 * MIN_SHARED_TOKENS).repeat(2, 1)
    long[1, 2 * MIN_SHARED_TOKENS :] += 1
    assert "saves too little" in find_tree(long)  # a 20th of the tokens


def test_rows_with_other_padding_share_by_their_positions_alone():
    rows = [(0, (1, 2, 3)), (2, (1, 2, 4))]
    assert tree_of(rows, 5).tokens == 6
    positions = torch.tensor([[0, 1, 2, 3, 4], [1, 1, 0, 1, 2]])
    tree = tree_of(rows, 5, positions=positions)
    assert tree.tokens == 4
    check(tree, rows, None)
    assert tree.pack(positions).tolist() == [[0, 1, 2, 2]]
    assert tree_of(rows, 5, positions=positions + torch.tensor([[0], [1]])).tokens == 6


def test_the_highest_position_of_padding_is_in_the_packed_row():
    """Rotary embeddings that stretch with the length of a batch look at it."""
    rows = [(0, (1, 2, 3)), (0, (1, 2, 4))]
    tree = tree_of(rows, 6)
    assert (tree.tokens, tree.length, tree.extra_position) == (4, 5, 5)
    assert QueryRun(4, 5, 4) in tree.spans().rows[0]
    assert tree_of(rows, 3).extra_position is None


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"mask": [[1, 0, 1], [1, 1, 1]]}, "leaves out tokens between others"),
        ({"positions": [[0, 1, 0]]}, "do not grow by one"),
        ({"mask": [[0, 1, 1], [0, 1, 1]], "labelled": [[1, 0, 0], [0, 0, 0]]}, "predicts a label"),
    ],
)
def test_what_cannot_share(arguments, why):
    ids = torch.tensor([[5, 6, 7], [5, 6, 8]])
    arguments = {name: torch.tensor(value) for name, value in arguments.items()}
    if "labelled" in arguments:
        arguments["labelled"] = arguments["labelled"].bool()
    assert why in find_tree(ids, **arguments, min_prefix=1)


@pytest.mark.parametrize(
    "mutant", ["a sibling is read", "windows count packed tokens", "rows share what differs"]
)
def test_mutants_are_found(mutant, monkeypatch):
    rows = [(0, (1, 2, 3, 4)), (0, (1, 2, 5, 6)), (0, (1, 2, 5, 7))]
    if mutant == "a sibling is read":
        real = PrefixTree._shared_runs
        monkeypatch.setattr(
            PrefixTree,
            "_shared_runs",
            lambda self: (QueryRun(r.q0, r.q1, r.k0, r.k1 + 1) for r in real(self)),
        )
    elif mutant == "windows count packed tokens":
        real_within = PrefixTree._shared_runs_within
        monkeypatch.setattr(
            PrefixTree,
            "_shared_runs_within",
            lambda self, w: (QueryRun(r.q0, r.q1, r.k0, r.k1) for r in real_within(self, w)),
        )
    else:
        real_common = tree_module._shared_lengths
        monkeypatch.setattr(
            tree_module,
            "_shared_lengths",
            lambda *args: {row: at + 1 for row, at in real_common(*args).items() if at < 4},
        )
    tree = tree_of(rows, 4)
    with pytest.raises(AssertionError):
        check_with_and_without_window(tree, rows)
