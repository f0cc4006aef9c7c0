"""The reason that `describe` gives for the longest chunk: of documents and of shared prefixes, and
mutants of all.

covers: layer/call.py, model/describe.py
"""

from __future__ import annotations

import functools

import pytest
import torch

import streambp
from streambp.layer import call
from streambp.prefixes import calls
from streambp.prefixes.tree import find_tree
from tests import zoo
from tests.model.test_describe import test_why_a_chunk_is_longer_than_asked_for as check_reason
from tests.packed import packed_batch
from tests.prefixes import batches
from tests.versions import needs_states

REASONS = (
    call.REASON_LONG_CHUNK_MASK,
    call.REASON_LONG_CHUNK_DOCUMENTS,
    call.REASON_LONG_CHUNK_FORKS,
    call.REASON_LONG_CHUNK_STATES.format(2),
)


def documents():
    """Return a batch in which each end of 2 tokens is one token before a document's end."""
    return packed_batch([[0, 2, 4, 6, 8, 23], [0, 3, 5, 7, 9, 23]], ids=False, ends=False), 2


def shared_prefix():
    """Return rows that branch behind 20 tokens; chunks of 5 would leave one token of the other 11."""
    return batches.make_batch("plain", prompt=21, completion=10), 5


CASES = {
    "documents": (documents, call.REASON_LONG_CHUNK_DOCUMENTS),
    "shared prefix": (shared_prefix, call.REASON_LONG_CHUNK_FORKS),
}


def check(case):
    make, reason = CASES[case]
    batch, size = make()
    config = streambp.StreamConfig(
        chunk_size=size, rows="packed" if case == "shared prefix" else "as_given"
    )
    model = streambp.patch(zoo.build("lfm2", torch.float32), config)
    with pytest.MonkeyPatch.context() as changes:
        # few tokens are not worth a packed row, or another chunk
        changes.setattr(calls, "find_tree", functools.partial(find_tree, min_prefix=8))
        changes.setattr(calls, "CHUNK_OVERHEAD_TOKENS", 0)
        model(**batch, use_cache=False).loss.backward()
    report = str(streambp.describe(model))
    assert f"tokens: {reason}" in report, report
    assert [text for text in REASONS if text in report] == [reason]


@needs_states
@pytest.mark.parametrize("case", CASES)
def test_why_a_chunk_is_longer_than_asked_for(case):
    check(case)


def one_reason(reason):
    """Return a mutant: one reason for whatever makes a chunk longer."""

    def spoil(monkeypatch):
        real = call.LayerCall._set_plan
        monkeypatch.setattr(
            call.LayerCall, "_set_plan", lambda self, plan, why: real(self, plan, reason)
        )

    return spoil


def no_reason(monkeypatch):
    monkeypatch.setattr(
        call.LayerCall, "_set_plan", lambda self, plan, why: setattr(self, "plan", plan)
    )


STATES = ("lfm2", "plain", call.REASON_LONG_CHUNK_STATES.format(2))
MASK = ("qwen3", "prefix", call.REASON_LONG_CHUNK_MASK)
MUTANTS = {
    "documents as masks": (one_reason(call.REASON_LONG_CHUNK_MASK), lambda: check("documents")),
    "forks as masks": (one_reason(call.REASON_LONG_CHUNK_MASK), lambda: check("shared prefix")),
    "states as masks": (one_reason(call.REASON_LONG_CHUNK_MASK), lambda: check_reason(*STATES)),
    "masks as states": (
        one_reason(call.REASON_LONG_CHUNK_STATES.format(2)),
        lambda: check_reason(*MASK),
    ),
    "no reason": (no_reason, lambda: check_reason(*MASK)),
}


@needs_states
@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant(mutant, monkeypatch):
    spoil, run = MUTANTS[mutant]
    spoil(monkeypatch)
    with pytest.raises(AssertionError):
        run()
