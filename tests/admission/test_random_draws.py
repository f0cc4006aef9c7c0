"""Layers that draw random numbers for a row or for a weight run whole: with the same seed they
compute what the unpatched model computes. Layers that draw a number for each token stream.

covers: admission/random_draws.py, admission/probe.py
"""

from __future__ import annotations

import copy
import os

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import (
    Dinov2Config,
    Dinov2Model,
    GPTJConfig,
    GPTJForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

import streambp
from streambp.admission import probe, random_draws
from tests.families import SIZES, VOCABULARY, build
from tests.oracle import gradients, lift_float32_casts, worst_error
from tests.seeds import seed_torch

LENGTH = 23
CHUNK_SIZE = 5


class StochasticDepth(nn.Module):
    """Leaves out a module's output for some rows."""

    def __init__(self, inner, draw):
        super().__init__()
        self.inner, self.draw = inner, draw

    def forward(self, hidden_states):
        output = self.inner(hidden_states)
        if self.training:
            output = output * self.draw(output)
        return output


def adapted(kind, **settings):
    peft = pytest.importorskip("peft", reason="adapters")
    config = getattr(peft, kind)(
        target_modules=["q_proj", "v_proj", "o_proj", "up_proj"], **settings
    )
    model = peft.get_peft_model(build("qwen3"), config)
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.1)
    return model


def with_mlp(draw, family="qwen3"):
    model = build(family)
    for layer in model.model.layers:
        layer.mlp = StochasticDepth(layer.mlp, draw)
    return model


DRAWS_FOR_ROWS = {
    "a number for each row": lambda: with_mlp(lambda x: torch.rand(x.shape[0], 1, 1) > 0.5),
    "a number for the batch": lambda: with_mlp(lambda x: torch.rand(()) > 0.5),
    "dropout of a row": lambda: with_mlp(lambda x: F.dropout(x.new_ones(len(x), 1, 1), 0.5)),
    "a number for each channel": lambda: with_mlp(lambda x: torch.rand(x.shape[-1]) > 0.5),
    "module_dropout of LoKr": lambda: adapted("LoKrConfig", r=4, module_dropout=0.5),
    "rank_dropout of LoKr": lambda: adapted("LoKrConfig", r=4, rank_dropout=0.5),
    "module_dropout of LoHa": lambda: adapted("LoHaConfig", r=4, module_dropout=0.5),
    "rank_dropout of LoHa": lambda: adapted("LoHaConfig", r=4, rank_dropout=0.5),
}
DRAWS_FOR_TOKENS = {
    "nothing": lambda: build("qwen3"),
    "dropout": lambda: with_mlp(lambda x: F.dropout(torch.ones_like(x), 0.5)),
    "a number for each token": lambda: with_mlp(lambda x: torch.rand(*x.shape[:2], 1) > 0.5),
    "noise": lambda: with_mlp(torch.randn_like),
    "attention dropout": lambda: build("qwen3", attention_dropout=0.3),
    "lora_dropout": lambda: adapted("LoraConfig", r=4, lora_dropout=0.3),
    "a number without effect (LoKr)": lambda: adapted("LoKrConfig", r=4),
    "a number without effect (LoHa)": lambda: adapted("LoHaConfig", r=4),
    "attention by itself, with dropout": lambda: GPTJForCausalLM(
        GPTJConfig(
            n_embd=32, n_layer=2, n_head=4, rotary_dim=8, vocab_size=VOCABULARY, attn_pdrop=0.3
        )
    ),
    "noise of a router": lambda: MixtralForCausalLM(
        MixtralConfig(**SIZES, num_local_experts=4, router_jitter_noise=0.1)
    ),
}


def train_step(model, ids, seed):
    seed_torch(seed)
    return gradients(model, input_ids=ids, labels=ids)


def patched(model):
    config = streambp.StreamConfig(chunk_size=CHUNK_SIZE, unpatched_runs=False)
    return streambp.patch(model, config)


def assert_exact_whole(draws, first_mode):
    model = DRAWS_FOR_ROWS[draws]().double().train()
    ours = patched(copy.deepcopy(model))
    ids = torch.randint(0, VOCABULARY, (2, LENGTH))
    if first_mode == "evaluation":
        ours.eval()
        ours(input_ids=ids, labels=ids)
        ours.train()
    losses = set()
    for seed in range(6):
        loss, ours_gradients = train_step(ours, ids, seed)
        expected_loss, expected_gradients = train_step(model, ids, seed)
        torch.testing.assert_close(loss, expected_loss, rtol=1e-10, atol=0)
        assert worst_error(ours_gradients, expected_gradients) < 1e-10
        losses.add(round(loss.item(), 9))
    assert len(losses) > 1  # the layers do draw
    assert random_draws.REASON_DRAWS_FOR_ROWS in str(streambp.describe(ours))


@pytest.mark.parametrize("first_mode", ["train", "evaluation"])
@pytest.mark.parametrize("draws", DRAWS_FOR_ROWS)
def test_a_layer_that_draws_for_rows_runs_whole(draws, first_mode, monkeypatch):
    lift_float32_casts(monkeypatch)
    assert_exact_whole(draws, first_mode)


@pytest.mark.parametrize("draws", DRAWS_FOR_ROWS)
def test_without_the_count_a_test_is_red(draws, monkeypatch):
    lift_float32_casts(monkeypatch)
    monkeypatch.setattr(probe, "_draws_for_rows", lambda *_: False)
    with pytest.raises(AssertionError):
        assert_exact_whole(draws, "train")


@pytest.mark.parametrize("draws", DRAWS_FOR_TOKENS)
def test_a_layer_that_draws_for_tokens_streams(draws):
    ours = patched(DRAWS_FOR_TOKENS[draws]().train())
    ids = torch.randint(0, VOCABULARY, (2, LENGTH))
    train_step(ours, ids, 0)
    text = str(streambp.describe(ours))
    assert "checkpoints" not in text, text
    assert "streams" in text


@pytest.mark.parametrize("rate", ["module_dropout", "rank_dropout"])
@pytest.mark.parametrize("kind", ["LoKrConfig", "LoHaConfig"])
def test_a_new_adapter_of_zeros(kind, rate):
    peft = pytest.importorskip("peft", reason="adapters")
    config = getattr(peft, kind)(r=4, target_modules=["q_proj", "up_proj"], **{rate: 0.5})
    ours = patched(peft.get_peft_model(build("qwen3"), config).train())
    ids = torch.randint(0, VOCABULARY, (2, LENGTH))
    ours(input_ids=ids, labels=ids).loss.backward()
    assert random_draws.REASON_DRAWS_FOR_ROWS in str(streambp.describe(ours))


class Unordered(nn.Module):
    """Rounds otherwise in each run, as sums of atomic additions on a GPU do."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, hidden_states):
        output = self.inner(hidden_states)
        # Entropy of the system: torch's and Python's generators start anew in each run of a trial.
        bits = torch.frombuffer(bytearray(os.urandom(output.numel())), dtype=torch.uint8)
        return output * (1 + 1e-7 * (bits.view(output.shape) % 7))


@pytest.mark.parametrize(("rate", "streams"), [(0.0, True), (0.5, False)])
def test_kernels_that_round_otherwise_in_each_run(rate, streams):
    model = adapted("LoKrConfig", r=4, module_dropout=rate)
    for layer in model.base_model.model.model.layers:
        layer.mlp = Unordered(layer.mlp)
    ours = patched(model.train())
    ids = torch.randint(0, VOCABULARY, (2, LENGTH))
    ours(input_ids=ids, labels=ids).loss.backward()
    reason = random_draws.REASON_DRAWS_FOR_ROWS
    assert (reason not in str(streambp.describe(ours))) == streams


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_few_tokens(length):
    model = DRAWS_FOR_ROWS["a number for each row"]().train()
    ours = streambp.patch(
        copy.deepcopy(model), streambp.StreamConfig(chunk_size=1, unpatched_runs=False)
    )
    ids = torch.randint(0, VOCABULARY, (2, length))
    for seed in range(6):
        losses = []
        for subject in (model, ours):
            seed_torch(seed)
            losses.append(subject(input_ids=ids).logits.square().mean().item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_inference_mode_in_training_mode():
    model = DRAWS_FOR_ROWS["a number for each row"]().train()
    ours = patched(copy.deepcopy(model))
    ids = torch.randint(0, VOCABULARY, (2, LENGTH))
    with torch.inference_mode():
        for seed in range(6):
            losses = []
            for subject in (model, ours):
                seed_torch(seed)
                losses.append(subject(input_ids=ids, labels=ids).loss.item())
            assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_stochastic_depth_of_a_vision_tower(rate):
    config = Dinov2Config(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, image_size=32, patch_size=4,
        drop_path_rate=rate, mlp_ratio=2,
    )  # fmt: skip
    seed_torch(0)
    model = Dinov2Model(config).double().train()
    ours = streambp.patch(
        copy.deepcopy(model),
        streambp.StreamConfig(chunk_size=CHUNK_SIZE, towers=True, unpatched_runs=False),
    )
    pixels = torch.randn(3, 3, 32, 32, dtype=torch.float64)
    for seed in range(6):
        results = []
        for subject in (model, ours):
            subject.zero_grad(set_to_none=True)
            seed_torch(seed)
            output = subject(pixel_values=pixels).last_hidden_state
            output.square().mean().backward()
            results.append(
                [output.detach()] + [p.grad for p in subject.parameters() if p.grad is not None]
            )
        for result, expected in zip(*results, strict=True):
            torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-12)
    # Older layers of DINOv2 take no mask, and run whole in any case.
    paths = {layer.path for layer in streambp.describe(ours).layers}
    assert rate == 0 or "streams" not in paths
