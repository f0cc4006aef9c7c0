"""Decoders whose attention passes `is_causal=False` together with a mask: the mask decides.

covers: attention/interface.py
"""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import MoonshineConfig, MoonshineForConditionalGeneration

import streambp
from streambp.attention import interface
from tests.oracle import MAX_FLOAT64_ERROR, worst_error
from tests.seeds import seed_torch

LENGTH = 22
CHUNK = 7
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "encoder_num_hidden_layers": 2,
    "decoder_num_hidden_layers": 2, "encoder_num_attention_heads": 4, "decoder_num_attention_heads": 4,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip

pytestmark = pytest.mark.usefixtures("float64_everywhere")


def gradients(model, batch):
    model.zero_grad(set_to_none=True)
    loss = model(**batch).loss
    loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), grads


@pytest.mark.fast("none-sdpa")
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("padding", ["none", "targets"])
def test_exact(padding, implementation):
    seed_torch()
    stock = MoonshineForConditionalGeneration(MoonshineConfig(**SIZES)).train()
    stock.set_attn_implementation(implementation)
    labels = torch.randint(3, 60, (3, LENGTH))
    batch = {"input_values": torch.randn(3, 6000), "labels": labels}
    if padding == "targets":
        batch["decoder_attention_mask"] = torch.ones(3, LENGTH, dtype=torch.long)
        batch["decoder_attention_mask"][1, 15:] = 0
        labels[1, 15:] = -100
    loss, expected = gradients(stock, batch)
    ours = streambp.patch(copy.deepcopy(stock), streambp.StreamConfig(chunk_size=CHUNK))
    for _ in range(2):
        ours_loss, grads = gradients(ours, batch)
        assert abs(ours_loss - loss) <= 1e-12 * abs(loss)
        assert worst_error(grads, expected) <= MAX_FLOAT64_ERROR
    assert [layer.path for layer in streambp.describe(ours).layers] == ["streams"] * 2


def test_a_module_that_is_not_causal_is_still_refused(monkeypatch):
    """Its layers then run whole, or the step ends with an error."""
    monkeypatch.setattr(interface, "_is_causal_without_a_mask", lambda module: False)
    with pytest.raises(streambp.StreamBPError, match="is_causal=False"):
        test_exact("none", "sdpa")


def test_what_passes_false_for_another_reason_is_refused():
    """A module that does not look at its own is_causal passes False on purpose."""

    class Elsewhere(torch.nn.Module):
        is_causal = True

        def forward(self, x):
            return x

    class Looking(Elsewhere):
        def forward(self, x):
            return x if self.is_causal else -x

    assert not interface._is_causal_without_a_mask(Elsewhere())
    assert interface._is_causal_without_a_mask(Looking())
    looking = Looking()
    looking.is_causal = False
    assert not interface._is_causal_without_a_mask(looking)
