"""Packed rows in layers with states: where documents start is told to the kernels, in chunks.

covers: admission/probe.py, admission/trials.py, recurrent/documents.py
"""

from __future__ import annotations

import copy
import inspect

import pytest
import torch

import streambp
from streambp.admission import probe, trials
from streambp.recurrent import documents
from tests import zoo
from tests.families import make_batch
from tests.layer import reference_kernels
from tests.oracle import gradients, worst_error
from tests.packed import packed_batch
from tests.recurrent.test_states import patched
from tests.versions import needs_falcons_documents, needs_states

pytestmark = needs_states

# Mixers alone where transformers' sdpa attends across documents.
CONFIG_CHANGES = {"granitemoehybrid": {"layer_types": ["mamba", "mamba"]}}
RULES = ("qwen3_next", "qwen3_5_text", "olmo_hybrid")
SCANS = ("bamba", "nemotron_h", "falcon_h1", "granitemoehybrid")
CONVOLUTIONS = ("lfm2", "lfm2_moe")
FAMILIES_WITHOUT_DOCUMENTS = ("kimi_linear", "bailing_hybrid")  # their wrapper drops cu_seq_lens_q


@pytest.fixture(autouse=True)
def float64_everywhere(float64_oracle):
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def build(name, monkeypatch, kernels=None, **changes):
    model = zoo.build(name, **CONFIG_CHANGES.get(name, {}), **changes)
    reference_kernels.install(monkeypatch, model, **(kernels or {}))
    return model


CUTS = ([0, 5, 6, 15, 21, 23], [0, 9, 23])


def packed(ids=True, ends=True, rows=None):
    """Documents of one token (5), that start with a chunk of 5 (5, 15), within chunks (6, 9, 21),
    over several (9)."""
    rows = (1 if ends else 2) if rows is None else rows
    return packed_batch(list(CUTS[:rows]), ids, ends)


def paths(model):
    return {layer.path for layer in streambp.describe(model).layers}


def check_packed(stock, batch, chunk_sizes):
    expected_loss, expected = gradients(copy.deepcopy(stock), **batch)
    for chunk_size in chunk_sizes:
        ours = patched(stock, chunk_size=chunk_size)
        loss, our_gradients = gradients(ours, **batch)
        assert paths(ours) == {"streams"}, str(streambp.describe(ours))
        assert abs(loss - expected_loss) <= 1e-12 * abs(expected_loss)
        assert worst_error(our_gradients, expected) <= 1e-12


CASES = [("qwen3_next", {}), ("bamba", {"ends": False}), ("lfm2", {"ends": False})]
OTHER_CASES = [
    *((name, case) for name in RULES for case in ({}, {"ids": False}, {"ends": False})),
    *(
        (name, case)
        for name in (*SCANS, *CONVOLUTIONS)
        for case in ({"ends": False}, {"rows": 1}, {"ids": False})
    ),
    *(
        (name, case)
        for name in FAMILIES_WITHOUT_DOCUMENTS
        for case in ({"rows": 1}, {"ends": False})
    ),
]


@pytest.mark.parametrize(
    ("name", "case", "chunk_sizes"),
    [
        *((name, case, (5,)) for name, case in CASES),
        *(
            pytest.param(name, case, (2, 3, 5, 6, 7, 16, 22), marks=pytest.mark.full)
            for name, case in OTHER_CASES
        ),
    ],
    ids=str,
)
def test_packed_rows_stream(name, case, chunk_sizes, monkeypatch):
    check_packed(build(name, monkeypatch), packed(**case), chunk_sizes)


@pytest.mark.parametrize("name", ["qwen3_next", "bamba", "lfm2"])
def test_what_the_kernels_are_told_counts(name, monkeypatch):
    """The documents of attention are told by position_ids: what differs is the layer with
    states."""
    model, batch = build(name, monkeypatch), packed()
    _, separate = gradients(model, **batch)
    del batch["seq_idx"], batch["cu_seq_lens_q"]
    _, mixed = gradients(model, **batch)
    assert worst_error(mixed, separate) >= 1e-5


@pytest.mark.parametrize("name", ["qwen3_next", "bamba"])
def test_without_a_graph(name, monkeypatch):
    stock, batch = build(name, monkeypatch).eval(), packed()
    ours = patched(copy.deepcopy(stock), chunk_size=5)
    with torch.no_grad():
        expected, our_loss = (model(**batch, use_cache=False).loss for model in (stock, ours))
    assert paths(ours) == {"streams"}
    assert abs(our_loss - expected) <= 1e-12


def test_two_calls_before_their_backward(monkeypatch):
    """A backward goes by its own call's documents, whatever the layer was called with since."""
    stock, batches = build("bamba", monkeypatch), (packed(ends=False), make_batch("plain"))
    ours = patched(copy.deepcopy(stock), chunk_size=5)
    expected, our_gradients = (
        torch.autograd.grad(
            sum(model(**batch, use_cache=False).loss for batch in batches), model.parameters()
        )
        for model in (stock, ours)
    )
    assert paths(ours) == {"streams"}
    assert worst_error(dict(enumerate(our_gradients)), dict(enumerate(expected))) <= 1e-12


def test_describe_names_what_tells(monkeypatch):
    ours, batch = patched(build("bamba", monkeypatch), chunk_size=5), packed()
    gradients(ours, **batch)
    assert "documents of packed rows as seq_idx and cu_seq_lens_q tell its kernels" in str(
        streambp.describe(ours)
    )
    gradients(ours, **make_batch("plain"))
    assert "documents" not in str(streambp.describe(ours))


def test_offloading_changes_no_bit(monkeypatch):
    stock, batch = build("falcon_h1", monkeypatch).float(), packed(ends=False)
    expected = gradients(patched(copy.deepcopy(stock), chunk_size=5), **batch)[1]
    our_gradients = gradients(patched(stock, chunk_size=5, offload="cpu", gpu_memory=1), **batch)[1]
    assert all(torch.equal(our_gradients[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("name", "trained"),
    [
        ("qwen3_next", "in_proj_ba"),
        pytest.param("falcon_h1", "out_proj", marks=needs_falcons_documents),
    ],
)
def test_the_trace_of_unread_products_sees_one_document(name, trained, monkeypatch):
    """It runs two chunks of two tokens, and here the second would start a document: nobody would
    read its start states."""
    stock, batch = (
        build(name, monkeypatch),
        packed_batch([[0, 2, 4, 5, 6, 14, 23]], True, name == "qwen3_next"),
    )
    for parameter_name, parameter in stock.named_parameters():
        parameter.requires_grad_(trained in parameter_name)
    recorded = []
    real = trials.Trial.recompute
    monkeypatch.setattr(
        trials.Trial,
        "recompute",
        lambda self: recorded.append(self.call.arguments.documents) or real(self),
    )
    check_packed(stock, batch, [5])
    all_documents = [of for of in recorded if of is not None]
    assert all_documents
    assert all(of.ids.unique().numel() == 1 and len(of.ends) in (0, 2) for of in all_documents)


def ends_too_soon(batch):
    batch["cu_seq_lens_q"][-1] -= 2
    del batch["position_ids"]  # attention would find that they disagree
    return "cu_seq_lens_q does not rise from 0 to the sequence's 23 tokens"


def padding_behind(batch):
    """The last document is none."""
    batch["cu_seq_lens_q"] = batch["cu_seq_lens_q"][:-1]
    del batch["position_ids"]
    return "cu_seq_lens_q does not rise from 0 to the sequence's 23 tokens (append 23, "


def without_a_change(_):
    return "its selective scan takes no notice"


@pytest.mark.parametrize(
    ("name", "change"),
    [("lfm2", ends_too_soon), ("lfm2", padding_behind), ("jamba", without_a_change)],
)
def test_what_chunks_cannot_be_told_runs_whole(name, change, monkeypatch):
    stock = build(
        name,
        monkeypatch,
        **({"num_hidden_layers": 1, "layer_types": ["conv"]} if name == "lfm2" else {}),
    )
    batch = packed()
    reason = change(batch)
    expected = gradients(copy.deepcopy(stock), **batch)[1]
    ours = patched(stock, chunk_size=5)
    assert worst_error(gradients(ours, **batch)[1], expected) <= 1e-12
    assert reason in str(streambp.describe(ours))
    gradients(ours, **make_batch("plain"))
    assert paths(ours) == {"streams"}


def state_for_every_document(*args, initial_states=None, seq_idx=None, **kwargs):
    """As if the start state were that of whatever document comes first."""
    seq_idx = None if seq_idx is None else seq_idx - seq_idx[:, :1]
    kwargs |= {"initial_states": initial_states, "seq_idx": seq_idx}
    return reference_kernels.mamba_chunk_scan_combined(*args, **kwargs)


def state_without_gradient(*args, initial_states=None, seq_idx=None, **kwargs):
    initial_states = None if initial_states is None else initial_states.detach()
    kwargs |= {"initial_states": initial_states, "seq_idx": seq_idx}
    return reference_kernels.mamba_chunk_scan_combined(*args, **kwargs)


def check_found_out(kernel, monkeypatch):
    kernel.__name__ = "mamba_chunk_scan_combined"
    kernel.__signature__ = inspect.signature(reference_kernels.mamba_chunk_scan_combined)
    stock = build("granitemoehybrid", monkeypatch, {"mamba2_chunk_scan": kernel})
    batch = packed(ends=False)
    expected = gradients(copy.deepcopy(stock), **batch)[1]
    ours = patched(stock, chunk_size=5)
    assert worst_error(gradients(ours, **batch)[1], expected) <= 1e-12
    assert paths(ours) == {"checkpoints"}


@pytest.mark.parametrize("kernel", [state_for_every_document, state_without_gradient])
def test_a_kernel_that_does_something_else_is_found_out(kernel, monkeypatch):
    """At its first call: the probe's tokens are several documents where the call's are."""
    check_found_out(kernel, monkeypatch)


def test_a_probe_of_one_document_would_not_find_it(monkeypatch):
    monkeypatch.setattr(
        probe, "split_documents", lambda arguments, length: documents.join_documents(arguments)
    )
    with pytest.raises(AssertionError):
        check_found_out(state_for_every_document, monkeypatch)
