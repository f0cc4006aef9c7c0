"""position_ids that do not grow by one: documents in streamed calls, where a plain unpatched call
attends across.

covers: model/state.py, model/wrappers.py
"""

from __future__ import annotations

import copy
import warnings

import pytest
import torch

import streambp
from streambp.errors import ConfigError
from streambp.model import state
from tests.families import build, make_batch
from tests.oracle import gradients, worst_error
from tests.packed import packed_batch

ACROSS_DOCUMENTS_MESSAGE = "The unpatched model would attend across them"
POSITIONS = {
    "restart": lambda length: torch.cat([torch.arange(9), torch.arange(length - 9)]),
    "skip": lambda length: torch.cat([torch.arange(9), torch.arange(length - 9) + 1000]),
    "stride": lambda length: 2 * torch.arange(length),
}


pytestmark = pytest.mark.usefixtures("float64_everywhere")


def batch_with(kind):
    batch = make_batch("plain")
    position_ids = POSITIONS[kind](batch["input_ids"].shape[1])[None]
    return {**batch, "position_ids": position_ids.to(batch["input_ids"].device)}


def step(model, **batch):
    """One step as a plain loop makes it: nothing is said of a cache. What was warned of, and the
    gradients."""
    model.zero_grad(set_to_none=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(**batch).loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return [str(w.message) for w in caught if "documents" in str(w.message)], grads


def model_and_ours(family="qwen3", **settings):
    stock = build(family, torch.float64)
    return stock, streambp.patch(
        copy.deepcopy(stock), streambp.StreamConfig(chunk_size=5, **settings)
    )


@pytest.mark.parametrize("kind", POSITIONS)
def test_a_call_that_the_unpatched_model_attends_across(kind):
    (stock, ours), batch = model_and_ours(), batch_with(kind)
    messages, grads = step(ours, **batch)
    assert len(messages) == 1
    assert ACROSS_DOCUMENTS_MESSAGE in messages[0]
    assert worst_error(grads, step(stock, **batch)[1]) >= 1e-3
    assert worst_error(grads, gradients(stock, **batch)[1]) <= 1e-10
    assert step(ours, **batch)[0] == [], "once"
    number = {"restart": 4, "skip": 4, "stride": 46}[kind]
    note = (
        f"position_ids restart: attention kept the {number} documents of the last call's rows apart"
    )
    assert note in str(streambp.describe(ours))
    step(ours, **make_batch("plain"))
    assert "documents" not in str(streambp.describe(ours))


@pytest.mark.parametrize("kind", POSITIONS)
def test_a_mask_of_ones_rules_packing_out(kind):
    """As the warning says."""
    (stock, ours), batch = model_and_ours(), batch_with(kind)
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    messages, grads = step(ours, **batch)
    assert messages == []
    assert worst_error(grads, step(stock, **batch)[1]) <= 1e-10


@pytest.mark.parametrize("settings", [{"use_cache": False}, {"config": False}], ids=str)
def test_nothing_is_said_where_the_unpatched_model_does_the_same(settings):
    (stock, ours), batch = model_and_ours(), batch_with("restart")
    if "config" in settings:
        stock.config.use_cache = ours.config.use_cache = False
        settings = {}
    messages, grads = step(ours, **batch, **settings)
    assert messages == []
    assert worst_error(grads, step(stock, **batch, **settings)[1]) <= 1e-10


def test_ends_of_documents_count_with_any_attention():
    """cu_seq_lens_q is for FlashAttention's kernels unpatched; streamed layers attend by it
    whatever the implementation."""
    stock, ours = model_and_ours()
    batch = packed_batch([[0, 9, 23]], ids=False)
    document_grads = gradients(
        stock, **{name: batch[name] for name in ("input_ids", "labels", "position_ids")}
    )[1]
    ends = {name: value for name, value in batch.items() if name != "position_ids"}
    loss, _ = gradients(stock, **ends)
    found_loss, _ = gradients(ours, **ends)
    assert abs(found_loss - loss) >= 1e-6
    assert (
        "cu_seq_lens_q are given: attention kept the 2 documents of the last call's rows apart"
        in str(streambp.describe(ours))
    )
    assert worst_error(gradients(ours, **batch)[1], document_grads) <= 1e-10


def test_documents_are_named():
    with pytest.raises(ConfigError, match="documents is 'from_masks'; it must be one of"):
        streambp.StreamConfig(documents="from_masks")


def test_a_model_that_never_asked_for_a_cache_would_be_silent(monkeypatch):
    """The mutant: what the call asked for is forgotten."""
    monkeypatch.setattr(state, "wants_cache", lambda config, kwargs: False)
    _, ours = model_and_ours()
    assert step(ours, **batch_with("skip"))[0] == []
