"""The script behind docs/transformers-testers.md notices rows that show nothing."""

from __future__ import annotations

import unittest

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MambaConfig, MambaForCausalLM

from scripts import tester_table
from tests.conftest import SHARES_PREFIXES
from tests.seeds import seeded
from tests.versions import needs_mambas_states

SIZES = {
    "vocab_size": 53,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


class Tester:
    """As transformers' have it. mask: of what is no padding, 0 or 1 everywhere."""

    config, length, mask = LlamaConfig(**SIZES), 7, 1

    def prepare_config_and_inputs_for_common(self):
        ids = torch.randint(3, 53, (2, self.length), generator=seeded(0))
        return self.config, {"input_ids": ids, "attention_mask": torch.full_like(ids, self.mask)}


def row_of(case, model_class):
    """Forked as the script does it; in this process where torch, built for CUDA, refuses backward
    in a fork."""
    if torch.version.cuda is None:
        return tester_table.in_a_process(case, model_class, "tiny")
    try:
        return tester_table.row(case, model_class, "tiny")
    finally:
        torch.set_default_dtype(torch.float32)


class Case(unittest.TestCase):
    model_tester = Tester()

    def _prepare_for_class(self, inputs, model_class, return_labels=False):
        return (
            {**inputs, "labels": torch.zeros_like(inputs["input_ids"])} if return_labels else inputs
        )


class Padded(Case):
    """Like the testers of Mamba, whose random masks of zeros below 1 leave no token."""

    model_tester = Tester()
    model_tester.config, model_tester.mask = (
        MambaConfig(**SIZES, state_size=4, use_mambapy=False),
        0,
    )


class Short(Case):
    """Like CLVP's, whose texts are as long as a chunk."""

    model_tester = Tester()
    model_tester.length = 3


@pytest.mark.parametrize(
    ("case", "model_class"),
    [
        (Case, LlamaForCausalLM),
        pytest.param(Padded, MambaForCausalLM, marks=needs_mambas_states),
        (Short, LlamaForCausalLM),
    ],
)
def test_rows_show_something(case, model_class):
    row = row_of(case, model_class)
    assert (row.outcome, row.layers, row.head) == ("streams", "2 streams", "blockwise"), row
    assert 0.0 < row.error <= tester_table.MAX_FLOAT64_ERROR


@pytest.mark.parametrize(
    ("case", "model_class", "without", "why"),
    [
        pytest.param(
            Padded,
            MambaForCausalLM,
            ("give_every_row_a_token", lambda batch: None),
            "the gradients of its layers are zero",
            marks=needs_mambas_states,
        ),
        pytest.param(
            Short,
            LlamaForCausalLM,
            ("chunk_size_for", lambda batch, usual: usual),
            "all its layers ran in one chunk",
            marks=pytest.mark.skipif(
                SHARES_PREFIXES,
                reason="trials of sharing, whose rows are longer, run in several chunks",
            ),
        ),
    ],
)
def test_rows_that_show_nothing_say_so(case, model_class, without, why, monkeypatch):
    """The mutants: without what makes inputs show something."""
    real = tester_table.load

    def load(name):
        module = real(name)
        if hasattr(module, without[0]):
            setattr(module, *without)
        return module

    monkeypatch.setattr(tester_table, "load", load)
    row = row_of(case, model_class)
    assert (row.outcome, row.why) == ("shows nothing", why)
    assert row.outcome in tester_table.SECTIONS
