"""Rows of several documents in encoders, and in decoders made bidirectional.

transformers separates an encoder's documents by a 4-D mask, or under FlashAttention by cu_seq_lens_q
and by positions that a layer passes to its attention. FlashAttention does not run on a CPU: there
the unpatched model attends by sdpa, with the mask that says the same.

covers: attention/masks.py, attention/kinds.py
"""

from __future__ import annotations

import copy
import itertools
import warnings

import pytest
import torch
from transformers.models.t5 import modeling_t5

import streambp
from streambp.attention import kinds, masks
from streambp.known_names import IMPLEMENTATION
from tests.oracle import MAX_FLOAT64_ERROR, worst_error
from tests.seeds import seed_torch
from tests.sharded import test_biased_encoders
from tests.sharded.test_bidirectional import CHUNK, LENGTH, MODEL_BUILDERS, MODERNBERT_SIZES

pytestmark = pytest.mark.usefixtures("float64_everywhere")

DOCUMENTS = ((9, 6, 7), (5, 17), (LENGTH,))  # lengths, of each row
WINDOW = MODERNBERT_SIZES["local_attention"] // 2
ONE_ROW = DOCUMENTS[:1]
ENDS = torch.tensor([0, *itertools.accumulate(DOCUMENTS[0])], dtype=torch.int32)
VARLEN = {
    "cu_seq_lens_q": ENDS, "cu_seq_lens_k": ENDS, "max_length_q": 9, "max_length_k": 9,
}  # fmt: skip


def positions(rows=DOCUMENTS):
    return torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in rows])


def blocks(rows=DOCUMENTS):
    """[B, 1, T, T]: True within documents."""
    number = [torch.arange(len(n)).repeat_interleave(torch.tensor(n)) for n in rows]
    number = torch.stack(number)
    return (number[:, None, :, None] == number[:, None, None, :]).clone()


def added(mask):
    return torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float64).min)


def within_window(mask):
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    return mask & (distance.abs() <= WINDOW)


def masks_of(name, mask):
    """What the model takes as attention_mask. ModernBERT uses a plain one in all layers."""
    if name.startswith("modernbert"):
        return {"full_attention": mask, "sliding_attention": within_window(mask)}
    return mask


def packed_batch(rows=DOCUMENTS, **arguments):
    ids = torch.randint(3, 60, (len(rows), LENGTH))
    return {"input_ids": ids, "position_ids": positions(rows), **arguments}


def gradients(model, batch):
    model.zero_grad(set_to_none=True)
    labels = batch["input_ids"].clone()
    labels[:, ::3] = -100
    if hasattr(model, "classifier"):
        loss = model(**batch, labels=torch.tensor([0, 1, 0])[: len(labels)]).loss
    elif "MaskedLM" in type(model).__name__:
        loss = model(**batch, labels=labels).loss
    else:
        states = model(**batch).last_hidden_state
        loss = (states * torch.linspace(-1.0, 2.0, states.numel()).view_as(states).sin()).sum()
    loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), grads


def check(stock, batch, expected_batch=None, model=None):
    """Two patched steps against the unpatched model, which gets `expected_batch` if it is given;
    the patched model is `model`, or a copy of `stock`."""
    loss, expected = gradients(stock, expected_batch or batch)
    ours = streambp.patch(model or copy.deepcopy(stock), streambp.StreamConfig(chunk_size=CHUNK))
    for _ in range(2):
        ours_loss, grads = gradients(ours, batch)
        assert abs(ours_loss - loss) <= 1e-12 * abs(loss)
        assert worst_error(grads, expected) <= MAX_FLOAT64_ERROR
    described = streambp.describe(ours)
    assert {layer.path for layer in described.layers} == {"streams"}
    assert described.last_step.chunks > 1
    return str(described)


def model_of(name, implementation):
    seed_torch()
    stock = MODEL_BUILDERS[name]().train()
    stock.set_attn_implementation(implementation)
    return stock


@pytest.mark.fast("modernbert-sdpa-dict", "llama-eager-added")
@pytest.mark.parametrize("form", ["bool", "added", "dict"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", list(MODEL_BUILDERS))
def test_masks_of_documents(name, implementation, form):
    stock = model_of(name, implementation)
    mask = blocks()
    if form == "dict":
        mask = masks_of(name, mask)
    if form == "added" or implementation == "eager":
        mask = {k: added(v) for k, v in mask.items()} if isinstance(mask, dict) else added(mask)
    check(stock, packed_batch(attention_mask=mask))


def test_a_bool_mask_in_eager_attention_is_refused():
    """Unpatched, it is added to the scores as 0 and 1, and separates nothing."""
    stock = model_of("bert", "eager")
    ours = streambp.patch(stock, streambp.StreamConfig(chunk_size=CHUNK))
    with pytest.raises(streambp.StreamBPError, match="it adds the mask to the scores, True as 1"):
        gradients(ours, packed_batch(attention_mask=blocks()))


@pytest.mark.skipif(
    not hasattr(modeling_t5, "eager_attention_forward"),
    reason="T5 of this transformers attends without the interface, and its layers run unchunked",
)
@pytest.mark.parametrize("name", ["t5", "umt5"])
def test_masks_of_documents_with_biases_by_distance(name):
    seed_torch(1)
    batch = packed_batch(attention_mask=added(blocks()))
    del batch["position_ids"]
    check(test_biased_encoders.model_of(name), batch)


@pytest.mark.parametrize("name", ["modernbert", "bert", "llama"])
def test_positions_mark_no_documents_in_masks_of_encoders(name):
    """Not unpatched either: attention goes across documents, and so does ours."""
    described = check(model_of(name, "sdpa"), packed_batch())
    assert "apart" not in described
    described = check(model_of(name, "sdpa"), packed_batch(ONE_ROW, **VARLEN))
    assert "apart" not in described


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_positions_mark_documents_in_masks_of_a_decoder_made_bidirectional(implementation):
    """EmbeddingGemma's windows to both sides end where a document does."""
    stock = model_of("embedding_gemma", implementation)
    described = check(stock, packed_batch(use_cache=False))
    assert "position_ids restart: attention kept the 6 documents" in described


def test_documents_that_a_cache_hides_unpatched_are_warned_of():
    """The unpatched model makes a cache by its config, and then looks for no documents."""
    ours = streambp.patch(
        model_of("embedding_gemma", "sdpa"), streambp.StreamConfig(chunk_size=CHUNK)
    )
    batch = packed_batch()
    with pytest.warns(UserWarning, match="position_ids restart"):
        _, grads = gradients(ours, batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, expected = gradients(ours, {**batch, "use_cache": False})
    assert worst_error(grads, expected) <= MAX_FLOAT64_ERROR


def test_the_mutant_that_does_not_look_for_documents_is_noticed(monkeypatch):
    monkeypatch.setattr(masks, "_note_documents", lambda *_: None)
    with pytest.raises(pytest.fail.Exception):
        test_documents_that_a_cache_hides_unpatched_are_warned_of()


def test_the_mutant_that_warns_of_all_restarts_is_noticed(monkeypatch):
    """Where the mask separates nothing, the unpatched model computes the same."""
    monkeypatch.setattr(
        masks, "_note_documents", lambda mask, *_: setattr(mask, "document_source",
            ("position_ids", 3)),
    )  # fmt: skip
    with pytest.raises(AssertionError):
        test_positions_mark_no_documents_in_masks_of_encoders("bert")


def under_flash(stock):
    """A copy whose configs name FlashAttention, which the layers' tests need not run."""
    model = copy.deepcopy(stock)
    for module in model.modules():
        if hasattr(module, "config"):
            setattr(module.config, IMPLEMENTATION, "flash_attention_2")
    return model


@pytest.mark.fast("modernbert-lengths", "llama-positions")
@pytest.mark.parametrize("marks", ["lengths", "positions"])
@pytest.mark.parametrize("name", ["modernbert", "bert", "llama", "embedding_gemma"])
def test_documents_that_flash_attention_separates(name, marks, monkeypatch):
    stock = model_of(name, "sdpa")
    batch = packed_batch(ONE_ROW)
    expected_batch = {**batch, "attention_mask": masks_of(name, blocks(ONE_ROW))}
    if name == "embedding_gemma":  # its masks separate them, too
        batch["use_cache"] = False
        expected_batch = batch
    elif name == "modernbert" and marks == "positions":
        expected_batch = batch  # its layers pass no positions to their attention
    if marks == "lengths":
        batch = {**batch, **VARLEN}
    described = check(stock, batch, expected_batch, under_flash(stock))
    separates = expected_batch is not batch or name == "embedding_gemma"
    source = "cu_seq_lens_q are given" if marks == "lengths" else "position_ids restart"
    assert (f"{source}: attention kept the 3 documents" in described) == separates


def test_ends_that_flash_attention_cannot_read_are_refused():
    ours = streambp.patch(
        under_flash(model_of("bert", "sdpa")), streambp.StreamConfig(chunk_size=CHUNK)
    )
    with pytest.raises(streambp.StreamBPError, match="must rise from 0 to the length"):
        gradients(ours, packed_batch(**VARLEN))


@pytest.mark.parametrize("name", ["modernbert", "llama"])
def test_the_mutant_that_reads_across_documents_is_noticed(name, monkeypatch):
    monkeypatch.setattr(kinds, "find_flash_documents", lambda *_: None)
    with pytest.raises(AssertionError):
        test_documents_that_flash_attention_separates(name, "lengths", monkeypatch)


def all_keys(self, q0, q1, k0, k1, device):
    return torch.ones(1, 1, q1 - q0, k1 - k0, dtype=torch.bool)


def test_the_mutant_that_reads_all_keys_of_a_row_is_noticed(monkeypatch):
    monkeypatch.setattr(masks.DenseMask, "tile", all_keys)
    with pytest.raises((AssertionError, streambp.StreamBPError)):
        test_masks_of_documents("modernbert", "sdpa", "dict")
