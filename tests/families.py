"""Tiny models of the dense decoder-only families, and the batches they are tried on."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.device import DEVICE
from tests.seeds import seed_torch, seeded

Device = torch.device | str
VOCABULARY = 53
LENGTH = 23
WINDOW = 6
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 8}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": WINDOW}),
    "phi3": (Phi3ForCausalLM, Phi3Config, {}),
    "olmo2": (Olmo2ForCausalLM, Olmo2Config, {}),
    "gemma3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        {
            "head_dim": 8,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
            "final_logit_softcapping": 5.0,
        },
    ),
}
MODES = ("plain", "left-padded", "right-padded", "packed")


def build(
    family: str,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    device: Device = DEVICE,
    **overrides: object,
) -> PreTrainedModel:
    """A model in train mode with sdpa and random weights, norms and biases among them, which are
    those of any device."""
    model_class, config_class, extra = FAMILIES[family]
    seed_torch(seed)
    config = config_class(**{**SIZES, **extra, **overrides}, attn_implementation="sdpa")
    model = model_class(config).to(dtype).train()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return placed(model, device)


def placed(model: PreTrainedModel, device: Device) -> PreTrainedModel:
    """On a device, with weights tied as before: `to` may make new parameters, one by one."""
    if torch.device(device).type != "cpu":
        model.to(device)  # type: ignore[arg-type]
        model.tie_weights()
    return model


def make_batch(
    mode: str, length: int = LENGTH, seed: int = 1, rows: int = 2, device: Device = DEVICE
) -> dict[str, Tensor]:
    """Random tokens with labels; padding and prompts are not labelled, documents of a packed row
    restart at 0."""
    generator = seeded(seed)
    ids = torch.randint(3, VOCABULARY, (rows, length), generator=generator)
    labels = ids.clone()
    batch = {"input_ids": ids, "labels": labels}
    if mode == "packed":
        boundaries = [[0, 5, 6, 14, length], [0, 9, length]]
        positions = [
            torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(c)]) for c in boundaries
        ]
        batch["position_ids"] = torch.stack([positions[row % 2] for row in range(rows)])
        labels[batch["position_ids"] == 0] = -100
    if mode in ("left-padded", "right-padded"):
        mask = torch.ones_like(ids)
        for row in range(rows):
            pads = (7, 2, 0)[row % 3]
            columns = slice(0, pads) if mode == "left-padded" else slice(length - pads, length)
            mask[row, columns] = 0
            if mode == "left-padded":
                labels[
                    row, pads
                ] = -100  # predicted by padding, which reads nothing: tests/model/test_padding.py
        ids[mask == 0] = 0
        labels[mask == 0] = -100
        batch["attention_mask"] = mask
    return {name: x.to(device) for name, x in batch.items()}


def mix_neighbours(monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel) -> None:
    """Each position of the layers' MLP also gets its left neighbour, so that they cannot be cut."""
    mlp = type(model.model.layers[0].mlp)  # type: ignore[union-attr, index]
    real = mlp.forward
    monkeypatch.setattr(mlp, "forward", lambda self, x: real(self, x + 0.5 * torch.roll(x, 1, 1)))
