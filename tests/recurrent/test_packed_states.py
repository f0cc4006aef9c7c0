"""Packed rows told by position_ids alone, in layers with states: each document is computed as if it
were alone.

[Note: segments]

covers: admission/probe.py, layer/packing.py, model/wrappers.py, recurrent/documents.py,
recurrent/segments.py
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import warnings

import pytest
import torch

import streambp
from streambp.admission import probe
from streambp.errors import UnsupportedModelError
from streambp.layer import packing
from streambp.model import wrappers
from streambp.recurrent import documents, segments
from tests import zoo
from tests.families import make_batch
from tests.layer import reference_kernels
from tests.oracle import gradients, worst_error
from tests.packed import packed_batch
from tests.recurrent.test_states import KINDS, OTHER_FAMILIES, patched
from tests.tiers import thinned
from tests.versions import LFM2_PASSES_ON, needs_states

pytestmark = needs_states

# Documents of one token (5), that start with a chunk of 5 (5, 15), within chunks (6, 21), over
# several (6); other ones in every second row.
CUTS = ([0, 5, 6, 15, 21, 26], [0, 9, 10, 26])
TESTED_KINDS = tuple(name for name in KINDS if name != "xlstm")
# the fast tier has them in several rows, others in one
ROW_WISE_FAMILIES = ("qwen3_next", "jamba", "recurrent_gemma", "zaya")
FAMILIES_TESTED_ELSEWHERE = (
    *OTHER_FAMILIES,
    *(name for name in ("inkling_text", "inkling2_text", "qwen4_exp_text") if name in zoo.NAMES),
)
UNCHUNKED_FAMILIES = ("qwen4_exp_text",)  # one of its layers is not cut


@pytest.fixture(autouse=True)
def float64_everywhere(float64_oracle):
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def packed(rows=1, length=26):
    ends_by_row = [[*(end for end in row if end < length), length] for row in CUTS[:rows]]
    return packed_batch(ends_by_row, ids=False, ends=False), ends_by_row


def summed_loss(model, batch):
    """The sum over labelled tokens, from logits: some families' losses know no other mean than
    their own."""
    logits = model(
        input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False
    ).logits
    labels = batch["labels"][:, 1:].flatten()
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels, reduction="sum", ignore_index=-100
    )


def differentiated(model, losses):
    model.zero_grad(set_to_none=True)
    total = sum(losses)
    total.backward()
    return total.detach(), {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


def one_by_one(stock, batch, ends_by_row):
    """Loss and gradients of the unpatched model, each document a row of its own."""
    documents = [
        {name: value[row : row + 1, a:b] for name, value in batch.items()}
        for row, ends in enumerate(ends_by_row)
        for a, b in itertools.pairwise(ends)
    ]
    return differentiated(stock, [summed_loss(stock, document) for document in documents])


def check_one_by_one(
    name, chunk_sizes, rows=1, length=26, changes=None, ends_by_row=None, **settings
):
    base = zoo.build(name, **(changes or {}))
    batch, ends_by_row = (
        packed(rows, length)
        if ends_by_row is None
        else (packed_batch(ends_by_row, ids=False, ends=False), ends_by_row)
    )
    expected_loss, expected = one_by_one(copy.deepcopy(base), batch, ends_by_row)
    for chunk_size in chunk_sizes:
        ours = patched(base, chunk_size=chunk_size, **settings)
        loss, our_gradients = differentiated(ours, [summed_loss(ours, batch)])
        unchunked = {"checkpoints"} if name in UNCHUNKED_FAMILIES else set()
        assert {layer.path for layer in streambp.describe(ours).layers} == {
            "streams"
        } | unchunked, str(streambp.describe(ours))
        assert abs(loss - expected_loss) <= 1e-12 * abs(expected_loss)
        assert worst_error(our_gradients, expected) <= 1e-12, chunk_size


@pytest.mark.fast("lfm2")
@pytest.mark.parametrize(
    "name",
    thinned(
        [*TESTED_KINDS, *FAMILIES_TESTED_ELSEWHERE],
        lambda name: name in TESTED_KINDS and name not in ROW_WISE_FAMILIES,
    ),
)
def test_documents_are_alone(name):
    check_one_by_one(name, (5, 7))


@pytest.mark.fast("recurrent_gemma", "qwen3_next")
@pytest.mark.parametrize(
    "name",
    thinned(
        [*ROW_WISE_FAMILIES, "bamba", "lfm2", "minimax"], lambda name: name in ROW_WISE_FAMILIES
    ),
)
def test_documents_of_several_rows_are_alone(name):
    """Each row has its own: those that start together are called together."""
    check_one_by_one(name, (5, 9), rows=2)


@pytest.mark.parametrize(
    ("name", "ends"), thinned([("bamba", 6), ("jamba", 6), ("jamba", 2)], lambda _, ends: ends == 6)
)
def test_a_trial_cuts_by_its_own_documents(name, ends):
    """And not by the batch's, which would leave a document of the trial with one token in a
    chunk."""
    check_one_by_one(name, (4,), ends_by_row=[[0, ends, 40]])


def test_mutant_a_trial_cuts_by_the_batchs_documents(monkeypatch):
    monkeypatch.setattr(
        packing.Packing, "barriers", property(lambda self: self.rows.barriers if self.rows else ())
    )
    with pytest.raises(AssertionError, match="its forward does not work on chunks"):
        test_a_trial_cuts_by_its_own_documents("jamba", 6)


@pytest.mark.full
@pytest.mark.parametrize(
    ("length", "sizes"),
    [
        (21, (2, 5, 20)),
        (22, (3, 32)),
        *(pytest.param(n, (2, 3, 4, 5, 6, 20, 32), marks=pytest.mark.full) for n in (21, 22, 26)),
    ],
)
def test_lengths_and_chunks(length, sizes):
    """One token more than whole chunks, chunks of two tokens, a chunk that holds all."""
    check_one_by_one("qwen3_next", sizes, length=length)
    check_one_by_one("falcon_h1", (4,), rows=2, length=length)


def test_a_layer_that_runs_whole_has_its_documents(monkeypatch):
    """Such as one whose kernel the trial finds to compute something else in chunks."""
    monkeypatch.setattr(probe, "_unread_state", lambda call, x: "no reason")
    stock = zoo.build("bamba")
    batch, ends_by_row = packed(rows=2)
    expected_loss, expected = one_by_one(copy.deepcopy(stock), batch, ends_by_row)
    ours = patched(stock, chunk_size=5)
    loss, our_gradients = differentiated(ours, [summed_loss(ours, batch)])
    assert "checkpoints" in {layer.path for layer in streambp.describe(ours).layers}
    assert abs(loss - expected_loss) <= 1e-12 * abs(expected_loss)
    assert worst_error(our_gradients, expected) <= 1e-12


def test_without_a_graph():
    stock, (batch, ends_by_row) = zoo.build("bamba").eval(), packed()
    expected, _ = one_by_one(copy.deepcopy(stock), batch, ends_by_row)
    ours = patched(stock, chunk_size=5)
    with torch.no_grad():
        assert abs(summed_loss(ours, batch) - expected) <= 1e-12 * abs(expected)


@pytest.mark.parametrize("name", ["qwen3_next", "jamba", "lfm2", "mamba"])
def test_as_given_goes_on_as_unpatched(name):
    stock, (batch, _) = zoo.build(name), packed(rows=2)
    expected = gradients(copy.deepcopy(stock), **batch)[1]
    ours = patched(stock, chunk_size=5, documents="as_given")
    assert worst_error(gradients(ours, **batch)[1], expected) <= 1e-12
    assert "documents of packed rows" not in str(streambp.describe(ours))


@pytest.mark.parametrize("name", ["qwen3_next", "mamba"])
def test_a_mask_rules_packing_out(name):
    stock, (batch, _) = zoo.build(name), packed()
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    expected = gradients(copy.deepcopy(stock), **batch)[1]
    assert worst_error(gradients(patched(stock, chunk_size=5), **batch)[1], expected) <= 1e-12


def test_describe_and_a_warning():
    ours, (batch, _) = patched(zoo.build("lfm2"), chunk_size=5), packed()
    with pytest.warns(
        UserWarning, match="let its recurrences and convolutions go on from one to the next"
    ):
        gradients(ours, **batch)
    description = str(streambp.describe(ours))
    assert (
        "5 documents of packed rows, told by position_ids: its mixers are called for one after the "
        "other" in description
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        gradients(ours, **batch)
    gradients(ours, **make_batch("plain"))
    assert "documents" not in str(streambp.describe(ours))


def test_states_that_are_an_argument_are_refused():
    ours, (batch, _) = patched(zoo.build("xlstm"), chunk_size=5), packed()
    with pytest.raises(
        UnsupportedModelError, match=r"position_ids mark 5 documents .*documents='as_given'"
    ):
        gradients(ours, **batch)


def shifted(position_ids, rows):
    rows_of_documents = documents.packed_rows(position_ids, rows)
    return documents.PackedRows(
        tuple((0, *(end + 1 for end in row[1:-1]), row[-1]) for row in rows_of_documents.ends)
    )


def going_on(self, chunk):
    """As if every document but a row's first went on from the states that the chunk starts from."""
    return [
        documents.DocumentSegment(rows, start, stop, chunk.start > 0)
        for rows, start, stop, _ in SEGMENTS(self, chunk)
    ]


def ending_first(parts, rows, tokens):
    """As if a chunk ended with its first document."""
    return parts[0][2]


SEGMENTS = documents.PackedRows.segments
MUTANTS = {
    "states not reset": (wrappers, "packed_rows", lambda position_ids, rows: None),
    "ends shifted by one": (wrappers, "packed_rows", shifted),
    "a document goes on from the chunk's states": (documents.PackedRows, "segments", going_on),
    "end states of the first document": (segments, "_end_states", ending_first),
}


@functools.cache
def check_unchanged():
    check_one_by_one("qwen3_next", (7,))


@pytest.mark.fast("end states of the first document")
@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants(mutant, monkeypatch):
    check_unchanged()
    monkeypatch.setattr(*MUTANTS[mutant])
    with pytest.raises(AssertionError):
        check_one_by_one("qwen3_next", (7,))


def test_a_chunk_that_ends_before_a_documents_last_token(monkeypatch):
    """The mutant: nothing keeps chunks from ending there, and the next one takes a kernel for
    decoding."""
    monkeypatch.setattr(documents.PackedRows, "barriers", ())
    with pytest.raises((AssertionError, RuntimeError)):
        check_one_by_one("bamba", (7,))


@pytest.mark.fast(2)
@pytest.mark.parametrize("offload", ["none", "cpu"])
@pytest.mark.parametrize(
    "saves",
    [
        ("*",),
        *(pytest.param(saves, marks=pytest.mark.full) for saves in (("attn_out",), ("kv", "*"))),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1"])
def test_documents_with_saves_and_offloading(name, saves, offload):
    check_one_by_one(name, (5,), rows=2, saves=saves, offload=offload)


DOCUMENT_ARGUMENTS = {
    "qwen3_next": "seq_idx and cu_seq_lens_q",
    "bamba": "seq_idx",
    "lfm2": "seq_idx",
    "falcon_h1": "seq_idx",
}


def built(monkeypatch, name, **kernels):
    stock = zoo.build(name)
    reference_kernels.install(monkeypatch, stock, **kernels)
    return stock


def check_with_kernels(stock, rows, sentence):
    batch, ends_by_row = packed(rows)
    expected_loss, expected = one_by_one(copy.deepcopy(stock), batch, ends_by_row)
    for chunk_size in (5, 7):
        ours = patched(stock, chunk_size=chunk_size)
        loss, our_gradients = differentiated(ours, [summed_loss(ours, batch)])
        assert sentence in str(streambp.describe(ours))
        assert {layer.path for layer in streambp.describe(ours).layers} == {"streams"}
        assert abs(loss - expected_loss) <= 1e-12 * abs(expected_loss)
        assert worst_error(our_gradients, expected) <= 1e-12


@pytest.mark.fast(3)
@pytest.mark.parametrize(
    ("name", "rows"),
    thinned(
        itertools.product(DOCUMENT_ARGUMENTS, [1, 2]),
        lambda name, rows: name == "qwen3_next" or (rows == 2) == (name != "bamba"),
    ),
)
def test_kernels_are_told(name, rows, monkeypatch):
    """A delta rule takes documents of a single row, and the mixer of older LFM2s passes nothing
    on."""
    calls = (rows == 2 and name == "qwen3_next") or (name == "lfm2" and not LFM2_PASSES_ON)
    sentence = (
        "its mixers are called" if calls else f"told to its kernels as {DOCUMENT_ARGUMENTS[name]}"
    )
    check_with_kernels(built(monkeypatch, name), rows, sentence)


@pytest.mark.fast("jamba")
@pytest.mark.parametrize("name", ["kimi_linear", "jamba", "zaya", "recurrent_gemma"])
def test_kernels_that_cannot_be_told(name, monkeypatch):
    """A delta rule whose mixer drops cu_seq_lens_q, a selective scan, a state and a convolution of
    the module's own."""
    check_with_kernels(built(monkeypatch, name), 1, "its mixers are called")


def deaf(*args, seq_idx=None, **kwargs):
    return reference_kernels.mamba_chunk_scan_combined(*args, **kwargs)


def test_a_kernel_that_does_not_do_as_it_is_told_is_called_by_document(monkeypatch):
    deaf.__name__ = "mamba_chunk_scan_combined"
    deaf.__signature__ = inspect.signature(reference_kernels.mamba_chunk_scan_combined)
    check_with_kernels(
        built(monkeypatch, "bamba", mamba2_chunk_scan=deaf), 1, "its mixers are called"
    )


def test_a_trial_of_one_document_would_not_find_it(monkeypatch):
    deaf.__name__ = "mamba_chunk_scan_combined"
    deaf.__signature__ = inspect.signature(reference_kernels.mamba_chunk_scan_combined)
    monkeypatch.setattr(
        probe, "trial_rows", lambda rows, length: documents.PackedRows(((0, length),) * rows)
    )
    monkeypatch.setattr(
        probe, "split_documents", lambda arguments, length: documents.join_documents(arguments)
    )
    with pytest.raises(AssertionError):
        check_with_kernels(
            built(monkeypatch, "bamba", mamba2_chunk_scan=deaf), 1, "told to its kernels"
        )
