"""Documents whose ends (`cu_seq_lens_q`) stop before the sequence: the remedy of the message is
exact, and mutants of the messages.

covers: attention/masks.py, admission/entry.py
"""

from __future__ import annotations

import copy

import pytest
import torch

import streambp
from streambp.admission import entry
from streambp.attention import masks
from streambp.errors import UnsupportedMaskError
from tests.attention.test_spans import (
    test_cu_seq_lens_that_end_before_the_sequence_name_the_remedy as check_attention,
)
from tests.families import build
from tests.oracle import MAX_FLOAT64_ERROR, gradients, worst_error
from tests.packed import packed_batch
from tests.recurrent.test_documents import padding_behind
from tests.recurrent.test_documents import (
    test_what_chunks_cannot_be_told_runs_whole as check_states,
)
from tests.versions import needs_states

LENGTH, PADDING = 23, 3


def padded():
    """Return a row of two documents and padding behind them, with `cu_seq_lens_q` of the documents
    alone; and the same row as position_ids mark it, padding as a document."""
    batch = packed_batch([[0, 9, LENGTH - PADDING, LENGTH]], ids=False)
    batch["labels"][:, -PADDING:] = -100
    ends = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
    by_positions = {name: value for name, value in batch.items() if name not in ends}
    by_ends = {name: value for name, value in batch.items() if name != "position_ids"}
    for name in ends[:2]:
        by_ends[name] = by_ends[name][:-1]
    return by_ends, by_positions


def appended(batch, message):
    """Return the batch with the end that the message asks for."""
    end = message.partition("append ")[2].partition(",")[0]
    assert end == str(LENGTH), message
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        batch[name] = torch.cat([batch[name], batch[name].new_tensor([int(end)])])
    return batch


def check(family):
    stock = build(family, torch.float64)
    by_ends, by_positions = padded()
    expected = gradients(copy.deepcopy(stock), **by_positions)[1]
    ours = streambp.patch(stock, streambp.StreamConfig(chunk_size=5))
    with pytest.raises(UnsupportedMaskError, match=r"must rise from 0 .* labels to -100") as error:
        gradients(ours, **by_ends)
    remedied = gradients(ours, **appended(by_ends, str(error.value)))[1]
    assert worst_error(remedied, expected) <= MAX_FLOAT64_ERROR


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_the_remedy_is_exact(family, float64_oracle):
    check(family)


def general_remedy(monkeypatch):
    """Make attention's message say what it says of other ends."""
    monkeypatch.setattr(
        masks, "_remedy_of_ends", lambda *_: "Flatten the batch into one row, or leave it out."
    )


def wrong_remedy(monkeypatch, real=masks._remedy_of_ends):
    monkeypatch.setattr(
        masks, "_remedy_of_ends", lambda ends, rows, length: real(ends, rows, length + 1)
    )


def no_remedy(monkeypatch, real=entry._why_not_between_documents):
    """Make layers with states say no remedy."""

    def shortened(*arguments):
        reason = real(*arguments)
        return None if reason is None else reason.partition(" (append")[0]

    monkeypatch.setattr(entry, "_why_not_between_documents", shortened)


MUTANTS = {
    "general": (general_remedy, lambda _: check("qwen3")),
    "general in a mask": (general_remedy, lambda _: check_attention(1, names_it=True)),
    "wrong": (wrong_remedy, lambda _: check("qwen3")),
    "none for states": (
        no_remedy,
        lambda monkeypatch: check_states("lfm2", padding_behind, monkeypatch),
    ),
}


@needs_states
@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant(mutant, monkeypatch, float64_oracle):
    spoil, run = MUTANTS[mutant]
    spoil(monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        run(monkeypatch)
