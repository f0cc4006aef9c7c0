"""Packed rows told by position_ids alone, in layers with states: each document is computed as if it were alone.

[Note: segments]
"""

from __future__ import annotations

import copy
import itertools

import pytest
import torch

import streambp
from tests import zoo
from tests.layer.test_states import KINDS, OTHERS, patched
from tests.oracle import worst_error
from tests.packed import packed_batch
from tests.versions import needs_states

pytestmark = needs_states

# Documents of one token (5), that start with a chunk of 5 (5, 15), within chunks (6, 21), over several (6); other ones in
# every second row.
CUTS = ([0, 5, 6, 15, 21, 26], [0, 9, 10, 26])
STATES = tuple(name for name in (*KINDS, *OTHERS) if name != "xlstm")


@pytest.fixture(autouse=True)
def float64_everywhere(float64_oracle):
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def packed(rows=1, length=26):
    cuts = [[*(cut for cut in row if cut < length), length] for row in CUTS[:rows]]
    return packed_batch(cuts, ids=False, ends=False), cuts


def summed_loss(model, batch):
    """The sum over labelled tokens, from logits: some families' losses know no other mean than their own."""
    logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
    labels = batch["labels"][:, 1:].flatten()
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels, reduction="sum", ignore_index=-100)


def differentiated(model, losses):
    model.zero_grad(set_to_none=True)
    total = sum(losses)
    total.backward()
    return total.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def one_by_one(stock, batch, cuts):
    """Loss and gradients of the unpatched model, each document a row of its own."""
    documents = [
        {name: value[row : row + 1, a:b] for name, value in batch.items()}
        for row, ends in enumerate(cuts)
        for a, b in itertools.pairwise(ends)
    ]
    return differentiated(stock, [summed_loss(stock, document) for document in documents])


def check_one_by_one(name, chunk_sizes, rows=1, length=26, changes=None, **settings):
    fresh = zoo.build(name, **(changes or {}))
    batch, cuts = packed(rows, length)
    expected_loss, expected = one_by_one(copy.deepcopy(fresh), batch, cuts)
    for chunk_size in chunk_sizes:
        ours = patched(fresh, chunk_size=chunk_size, **settings)
        loss, found = differentiated(ours, [summed_loss(ours, batch)])
        assert {layer.path for layer in streambp.describe(ours).layers} == {"streams"}, str(streambp.describe(ours))
        assert abs(loss - expected_loss) <= 1e-12 * abs(expected_loss)
        assert worst_error(found, expected) <= 1e-12, chunk_size


@pytest.mark.parametrize("name", STATES)
def test_documents_are_alone(name):
    check_one_by_one(name, (5, 7))


@pytest.mark.parametrize("name", ["qwen3_next", "bamba"])
def test_documents_of_several_rows_are_alone(name):
    check_one_by_one(name, (5,), rows=2)
