"""Trees of rows in layers that keep states, in float64 against the unpatched batch: a branch goes
on from its parent.

covers: chunks.py, layer/chunk_states.py, layer/saved_tensors.py, prefixes/tree.py,
    prefixes/admission.py
"""

from __future__ import annotations

import itertools
import re

import pytest
import torch

import streambp
from streambp.chunks import ChunkPlan
from streambp.layer.chunk_states import CrossChunkState
from streambp.layer.saved_tensors import DeviceTensors, SavedForBackward
from streambp.offload.manager import HostTensors
from streambp.prefixes import calls
from streambp.prefixes.tree import CHUNK_OVERHEAD_TOKENS, PrefixTree, find_tree
from tests.oracle import MAX_FLOAT64_ERROR, gradients, worst_error
from tests.prefixes import test_padding as padding
from tests.prefixes.batches import MODES, PROMPT, counted, make_batch
from tests.prefixes.test_calls import (
    SETTINGS,
    TEST_MIN_PREFIX,
    build,
    float64_everywhere,  # noqa: F401 - a fixture
    policy_loss,
    reference,
    rows_instead,
    sharing,
    tokens_or_reason,
)
from tests.versions import needs_states

pytestmark = needs_states
FAMILIES = ("lfm2", "qwen3_5_text", "qwen3_next", "mamba2", "mamba", "falcon_h1", "bamba")
MIN_CHUNK_TOKENS = 2  # tokens of a chunk that starts from a state


def tree_of(batch, fork_distance=MIN_CHUNK_TOKENS):
    return find_tree(
        batch["input_ids"],
        batch.get("attention_mask"),
        min_prefix=TEST_MIN_PREFIX,
        fork_distance=fork_distance,
    )


def check(model, family, mode):
    expected_loss, expected = reference(family, mode)
    loss, our_gradients = gradients(model, **make_batch(mode))
    assert abs(loss - expected_loss) <= 1e-12 * abs(expected_loss)
    assert worst_error(our_gradients, expected) <= MAX_FLOAT64_ERROR
    if mode == "nothing shared":
        assert "saves too little" in tokens_or_reason(model)
    else:
        rows, fewest = counted(make_batch(mode))
        assert tokens_or_reason(model) == (rows, tree_of(make_batch(mode)).tokens)
        assert fewest <= tokens_or_reason(model)[1] <= fewest + 4  # a token again for a branch


def cases():
    """Fast: of five families one mode each at one chunk size, and of one all modes."""
    for f, family in enumerate(FAMILIES):
        for m, mode in enumerate(MODES):
            for s, size in enumerate((3, 7, 1000)):
                fast = s == (f + m) % 3 and (
                    family == "lfm2" or (m == f % 4 and family not in ("qwen3_next", "bamba"))
                )
                yield pytest.param(family, mode, size, marks=() if fast else pytest.mark.full)


@pytest.mark.fast(2)
@pytest.mark.parametrize(("family", "mode", "chunk_size"), cases())
def test_gradients_are_exact(family, mode, chunk_size):
    check(sharing(build(family), chunk_size), family, mode)


@pytest.mark.parametrize(
    ("family", "mode", "setting"),
    [
        pytest.param(
            family,
            mode,
            setting,
            marks=() if (f, m) == (0, s % 2) and s in (2, 3) else pytest.mark.full,
        )
        for f, family in enumerate(("qwen3_5_text", "lfm2", "mamba2", "falcon_h1"))
        for m, mode in enumerate(("deep", "two prompts"))
        for s, setting in enumerate(SETTINGS)
    ],
)
def test_settings(family, mode, setting):
    settings = {"saves": ("attn_out", "kv", "*proj")} if setting == "saves" else SETTINGS[setting]
    check(sharing(build(family), 3, **settings), family, mode)


@pytest.mark.parametrize(
    ("family", "mode"),
    [
        pytest.param(
            family, mode, marks=() if (family, mode) == ("lfm2", "deep") else pytest.mark.full
        )
        for family in ("lfm2", "qwen3_5_text", "mamba2", "falcon_h1")
        for mode in ("plain", "padded", "deep")
    ],
)
def test_a_loss_of_lazy_logits(family, mode):
    batch = make_batch(mode)
    ours = sharing(build(family), lazy_logits=True)
    (expected_loss, expected), (loss, our_gradients) = (
        policy_loss(model, batch) for model in (build(family), ours)
    )
    assert abs(loss - expected_loss) <= 1e-12 * abs(expected_loss)
    assert worst_error(our_gradients, expected) <= MAX_FLOAT64_ERROR
    assert tokens_or_reason(ours)[1] == tree_of(batch).tokens


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=() if f == "mamba" else pytest.mark.full) for f in FAMILIES]
)
def test_a_token_that_no_row_has(family):
    """It stands for padding's position at the end of the packed row, and starts from nothing."""
    batch = make_batch("plain")
    mask = torch.ones_like(batch["input_ids"])
    mask[:, -2:] = 0
    batch = {
        **batch,
        "attention_mask": mask,
        "labels": batch["labels"].masked_fill(mask == 0, -100),
    }
    assert tree_of(batch).forks[-1] == (tree_of(batch).tokens, 0)
    ours = sharing(build(family))
    assert (
        worst_error(gradients(ours, **batch)[1], gradients(build(family), **batch)[1])
        <= MAX_FLOAT64_ERROR
    )
    assert tokens_or_reason(ours)[1] == tree_of(batch).tokens


@pytest.mark.parametrize(
    ("family", "mode", "why"),
    [
        pytest.param("recurrent_gemma", "padded", "gave something else than rows"),
        pytest.param("xlstm", "padded", "gave something else than rows", marks=pytest.mark.full),
    ],
)
def test_recurrences_that_go_on_over_padding(family, mode, why):
    """Unpatched a row's states depend on the padding before it; the trial finds it."""
    assert re.search(why, rows_instead(build(family), make_batch(mode), reference(family, mode)[1]))


@pytest.mark.full
@pytest.mark.parametrize("family", ["recurrent_gemma", "xlstm"])
def test_they_share_without_padding(family):
    check(sharing(build(family)), family, "plain")


@pytest.mark.filterwarnings("ignore:position_ids restart")
def test_documents_that_a_models_positions_mark():
    """Its own positions start anew in each row, and its backbone takes none."""
    batch = make_batch("plain")
    length = batch["input_ids"].shape[1]
    positions = torch.cat([torch.arange(PROMPT - 3), torch.arange(length - PROMPT + 3)])
    ours = sharing(build("mamba"))
    plain = streambp.patch(build("mamba"), streambp.StreamConfig(chunk_size=7))
    arguments = {**batch, "position_ids": positions.repeat(4, 1)}
    assert (
        worst_error(gradients(ours, **arguments)[1], gradients(plain, **arguments)[1])
        <= MAX_FLOAT64_ERROR
    )
    assert "mark documents" in tokens_or_reason(ours)


@pytest.mark.parametrize("offload", ["none", "cpu"])
def test_states_of_branches_are_kept_once_each(offload, monkeypatch):
    """Four rows go on from the same ones; backward reads them in the order that was announced."""
    put_in, announced, read = [], [], []
    ours, batch = sharing(build("falcon_h1"), 1000, saves=(), offload=offload), make_batch("plain")
    gradients(ours, **batch)

    def seal(self, size, real=SavedForBackward.seal):
        order = itertools.chain.from_iterable(self.order())
        announced.append(
            [(name, chunk) for name, chunk in order if name == "x" or name.startswith("state.")]
        )
        real(self, size)

    monkeypatch.setattr(SavedForBackward, "seal", seal)
    store = DeviceTensors if offload == "none" else HostTensors
    for name, accesses in {"save": put_in, "peek": read, "take": read}.items():
        if (store, name) != (HostTensors, "take"):  # which peeks
            monkeypatch.setattr(store, name, noted(getattr(store, name), accesses))
    gradients(ours, **batch)
    assert read == [access for layer in reversed(announced) for access in layer]
    states = [("state.0", 1), ("state.1", 1)]
    assert [access for access in put_in if access[0] != "x"] == states * len(announced)


def noted(real, accesses):
    def call(self, name, chunk, *args):
        accesses.append((name, chunk))
        return real(self, name, chunk, *args)

    return call


def check_rows_of_a_chunk_each(monkeypatch):
    """Each row of a layer with states is a chunk of its own; short ones cost more so than their
    padding."""
    monkeypatch.setattr(calls, "CHUNK_OVERHEAD_TOKENS", CHUNK_OVERHEAD_TOKENS)
    stock, batch = build("lfm2"), padding.make("left")
    assert "the last call's 92 tokens would be 47, in 4 chunks at least" in rows_instead(
        stock, batch
    )
    ours = sharing(build("qwen3"))  # whose chunks hold several rows
    gradients(ours, **batch)
    assert tokens_or_reason(ours) == (47, 47)


def test_short_rows_are_computed_where_each_is_a_chunk(monkeypatch):
    check_rows_of_a_chunk_each(monkeypatch)


def test_a_look_that_counts_no_chunks_is_found(monkeypatch):
    monkeypatch.setattr(calls, "_chunk_overhead", lambda _: 0)
    with pytest.raises(AssertionError):
        check_rows_of_a_chunk_each(monkeypatch)


@pytest.mark.parametrize(("length", "packs"), [(40, False), (400, True)])
def test_chunks_count_beside_the_padding_of_a_batch(length, packs):
    """8 rows, half of whose columns are padding; 7 chunks more are as much work as 448 tokens."""
    ids = torch.arange(8 * length).view(8, length)
    mask = (torch.arange(length) < torch.linspace(1, length, 8).long()[:, None]).long()
    assert isinstance(find_tree(ids, mask), PrefixTree)
    assert (
        isinstance(
            find_tree(
                ids, mask, fork_distance=MIN_CHUNK_TOKENS, chunk_overhead=CHUNK_OVERHEAD_TOKENS
            ),
            PrefixTree,
        )
        == packs
    )


def check_tree():
    check(sharing(build("lfm2"), 3), "lfm2", "deep")


def the_chunk_before(plan):
    return tuple(None if index == 0 else index - 1 for index in range(len(plan)))


def without_sums(self, plan, chunk, grads):
    if plan.predecessors[chunk.index] is not None:
        self.upstream[plan.predecessors[chunk.index]] = grads


MUTANTS = {
    "a branch goes on from the chunk before it": (
        ChunkPlan,
        "predecessors",
        property(the_chunk_before),
    ),
    "gradients of states are not summed": (CrossChunkState, "add_state_gradients", without_sums),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_found(mutant, monkeypatch):
    check_tree()
    monkeypatch.setattr(*MUTANTS[mutant])
    with pytest.raises(AssertionError):
        check_tree()


def test_sums_of_states_are_wide():
    """300 branches; in bfloat16 a sum of so many ones would stop at 256."""
    plan = ChunkPlan(602, 2).split_at_forks(
        tuple((start, 2) for start in range(2, 602, 2)), MIN_CHUNK_TOKENS
    )
    carried = CrossChunkState.__new__(CrossChunkState)
    carried.upstream = {}
    for chunk in plan.backward:
        carried.add_state_gradients(plan, chunk, {"state": torch.ones(2, dtype=torch.bfloat16)})
    assert carried.upstream.keys() == {0}
    assert carried.upstream[0]["state"].tolist() == [300.0, 300.0]


def test_states_stay_until_the_last_branch_has_started():
    plan = ChunkPlan(10, 100).split_at_forks(((0, 0), (4, 2), (6, 2), (8, 6)), MIN_CHUNK_TOKENS)
    assert plan.ends == (2, 4, 6, 8, 10)
    assert plan.predecessors == (None, 0, 0, 0, 2)
    assert plan.successors == {0: (1, 3), 2: (4, 4)}
    carried = CrossChunkState.__new__(CrossChunkState)
    carried.states = {}
    saved_keys = []
    for chunk in plan:
        predecessor = plan.predecessors[chunk.index]
        assert carried.start(plan, chunk) == ({} if predecessor is None else {"state": predecessor})
        if chunk.index in plan.successors:
            carried.states[chunk.index] = {"state": chunk.index}
        saved_keys.append(sorted(carried.states))
    assert saved_keys == [[0], [0], [0, 2], [2], []]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
def test_chunks_end_at_forks_and_are_long_enough(size):
    forks = ((0, 0), (20, 8), (27, 14), (36, 0))
    plan = ChunkPlan(40, size).split_at_forks(forks, MIN_CHUNK_TOKENS)
    assert {8, 14, 20, 27, 36, 40} <= set(plan.ends)
    assert all(
        MIN_CHUNK_TOKENS <= chunk.stop - chunk.start <= max(size, MIN_CHUNK_TOKENS) + 1
        for chunk in plan
    )
