"""Padded batches as one packed row where training is random: dropout, and NEFTune's noise.

covers: prefixes/calls.py, prefixes/admission.py, device.py
"""

from __future__ import annotations

import contextlib

import pytest
import torch

from streambp.device import RandomState
from streambp.errors import BackwardError
from streambp.prefixes import calls
from tests import zoo
from tests.prefixes.test_calls import float64_everywhere, tokens_or_reason  # noqa: F401 - a fixture
from tests.prefixes.test_padding import WIDTH, any_saving, build, make, packed  # noqa: F401 - a fixture
from tests.seeds import seed_torch

DROPOUT_CONFIGS = {
    "gpt2": {"attn_pdrop": 0.3, "resid_pdrop": 0.2, "embd_pdrop": 0.1},
    "qwen3": {"attention_dropout": 0.3},
}


def check_dropout(family):
    """With one seed the loss of packed rows is a fixed function; its slope along a direction is the
    gradient's."""
    ours, batch = packed(zoo.build(family, **DROPOUT_CONFIGS[family])), make("both")

    def loss():
        seed_torch(7)
        return ours(**batch, use_cache=False).loss

    loss()  # beside trials
    value = loss()
    value.backward()
    seed_torch(11)
    direction = [torch.randn_like(p) for p in ours.parameters()]
    slope = sum((p.grad * d).sum() for p, d in zip(ours.parameters(), direction, strict=True))
    step, ends = 1e-6, []
    with torch.no_grad():
        for way in (1, -2):
            for p, d in zip(ours.parameters(), direction, strict=True):
                p.add_(d, alpha=way * step)
            ends.append(loss())
    assert isinstance(tokens_or_reason(ours), tuple)
    assert abs((ends[0] - ends[1]) / (2 * step) - slope) <= 1e-6 * abs(slope)
    assert not torch.equal(value, ours.eval()(**batch, use_cache=False).loss)


@pytest.mark.fast("gpt2")
@pytest.mark.parametrize("family", DROPOUT_CONFIGS)
def test_dropout(family):
    """Backward draws what forward drew, for the tokens of the packed row."""
    check_dropout(family)


@pytest.mark.full
def test_noise_that_backward_draws_anew_is_found(monkeypatch):
    monkeypatch.setattr(RandomState, "replay", lambda _: contextlib.nullcontext())
    # what backward compares; the slope alone would show it, too
    with pytest.raises(BackwardError, match="the same input has another output"):
        check_dropout("gpt2")


def test_equal_rows_draw_noise_of_their_own():
    """At other positions they share nothing, though rotary embeddings give them the same logits."""
    batch = {
        name: value[:2].clone() for name, value in make("all alike").items() if name != "labels"
    }
    columns = torch.arange(WIDTH)
    batch["position_ids"] = torch.stack([columns, columns + 1])
    ours = packed(zoo.build("qwen3", attention_dropout=0.5), lazy_logits=True)
    is_token = batch["attention_mask"][0] > 0
    for training in (True, False):
        with torch.no_grad():
            logits = ours.train(training)(**batch, use_cache=False).logits[:, is_token]
        assert tokens_or_reason(ours) == (22, 22)
        assert torch.allclose(logits[0] + 0, logits[1] + 0, rtol=1e-9, atol=1e-9) != training


def test_neftune_computes_rows():
    """Its noise depends on how many tokens a row has, padding among them."""
    ours = packed(build("llama"))
    ours.model.embed_tokens.neftune_noise_alpha = 5.0
    ours(**make("both"))
    assert "NEFTune" in tokens_or_reason(ours)


def check_noise_of_each_row(family):
    """By default rows that begin alike draw noise of their own where they are trained, and share
    where it is off."""
    batch = make("all alike")
    unpadded = {"input_ids": batch["input_ids"]}
    ours = packed(zoo.build(family, **DROPOUT_CONFIGS[family]), rows="auto")
    ours(**batch, use_cache=False)
    assert tokens_or_reason(ours) == (44, 44)  # without the padding
    ours(**unpadded, use_cache=False)
    assert "same noise" in tokens_or_reason(ours)
    for model in (ours.eval(), packed(zoo.build(family, **DROPOUT_CONFIGS[family]))):
        model(**batch, use_cache=False)
        assert tokens_or_reason(model) == (44, 11)
        model(**unpadded, use_cache=False)
        assert tokens_or_reason(model) == (4 * WIDTH, WIDTH)


@pytest.mark.parametrize("family", DROPOUT_CONFIGS)
def test_by_default_rows_share_no_noise(family):
    check_noise_of_each_row(family)


def test_by_default_rows_share_no_jitter():
    """Mixtral's routers scale what they read at random."""
    unpadded = {"input_ids": make("all alike")["input_ids"]}
    ours = packed(zoo.build("mixtral", router_jitter_noise=0.1), rows="auto")
    ours(**unpadded, use_cache=False)
    assert "same noise" in tokens_or_reason(ours)
    ours.eval()(**unpadded, use_cache=False)
    assert tokens_or_reason(ours) == (4 * WIDTH, WIDTH)


def test_shared_noise_is_found(monkeypatch):
    monkeypatch.setattr(calls, "draws_noise", lambda _: False)
    with pytest.raises(AssertionError):
        check_noise_of_each_row("qwen3")
