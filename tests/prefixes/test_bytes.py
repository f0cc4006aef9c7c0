"""Bytes that layers keep of a padded batch, in real steps on a CPU whose storages are tracked:
those of its tokens.

covers: prefixes/calls.py, layer/saved_tensors.py
"""

from __future__ import annotations

import pytest
import torch

import streambp
from streambp.planner.count import LiveBytes
from streambp.prefixes import calls
from tests import families
from tests.seeds import seeded

LENGTHS = {  # of rows of up to 512 tokens
    "37 %": (512, 310, 205, 150, 120, 100, 75, 45),
    "60 %": (512, 480, 420, 340, 260, 200, 150, 100),
}
LAYERS = (2, 5)


def batch_of(lengths):
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]  # [B, T]
    ids = torch.randint(3, families.VOCABULARY, mask.shape, generator=seeded(0)).masked_fill(
        ~mask, 0
    )
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, -100)}


def peak(rows, layers, batch):
    """Bytes of a step's forward and backward."""
    model = families.build("llama", num_hidden_layers=layers)
    streambp.patch(model, streambp.StreamConfig(chunk_size=512, saves=(), rows=rows))
    with LiveBytes() as count:
        model(**batch, use_cache=False).loss.backward()
    return count.peak


def of_a_layer(rows, batch):
    """By how much one more layer raises the peak: its input."""
    small_peak, large_peak = (peak(rows, layers, batch) for layers in LAYERS)
    return (large_peak - small_peak) / (LAYERS[1] - LAYERS[0])


def check(name):
    batch = batch_of(LENGTHS[name])
    tokens, h = int(batch["attention_mask"].sum()), families.SIZES["hidden_size"]
    as_given, packed = (of_a_layer(rows, batch) for rows in ("as_given", "packed"))
    share = tokens / batch["input_ids"].numel()
    print(
        f"{name}: a layer keeps {packed:,.0f} B of {as_given:,.0f} B, {packed / as_given:.4f}; "
        f"share of tokens {share:.4f}"
    )
    assert as_given == pytest.approx(batch["input_ids"].numel() * h * 4, rel=0.01)
    assert packed / as_given == pytest.approx(share, rel=0.01)


@pytest.mark.fast("37 %")
@pytest.mark.parametrize("name", LENGTHS)
def test_layers_keep_the_inputs_of_tokens_alone(name):
    check(name)


@pytest.mark.full
def test_rows_that_are_computed_are_found(monkeypatch):
    monkeypatch.setattr(calls, "find_tree", lambda *_, **__: "a mutant: rows are computed")
    with pytest.raises(AssertionError):
        check("37 %")
