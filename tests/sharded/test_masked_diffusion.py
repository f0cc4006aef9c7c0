"""Language models of masked diffusion (LLaDA, block diffusion): random tokens are masked, each
layer looks both ways, and a token's loss is divided by the probability of its mask.

covers: sharded/bidirectional.py, attention/mask_scan.py, lazy/dispatch.py
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import streambp
from streambp.attention import mask_scan, masks
from streambp.sharded import layer as halves
from tests.oracle import MAX_FLOAT64_ERROR, worst_error
from tests.seeds import seed_torch

VOCABULARY = 61
MASK_TOKEN = 60
LENGTH = 22  # 3 chunks of 7, and one token
CHUNK = 7
BLOCK = 4

pytestmark = pytest.mark.usefixtures("float64_everywhere")


def build():
    seed_torch()
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        is_causal=False,
    )
    model = LlamaForCausalLM(config).train()
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    return model


def padding():
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, 15:] = 0
    return mask


def blocks():
    """A token reads its block of four tokens and the blocks before, [B, 1, T, T]."""
    block = torch.arange(LENGTH) // BLOCK
    return (block[:, None] >= block).expand(2, 1, -1, -1)


def noised_and_clean():
    """Row with the noised tokens, then the clean ones: a noised token reads its own block and the
    clean blocks before, a clean one reads clean blocks up to its own, [B, 1, T, T]."""
    half = LENGTH // 2
    block = torch.arange(half) // BLOCK
    earlier = block[:, None] > block
    own_block = block[:, None] == block
    top = torch.cat((own_block, earlier), 1)
    bottom = torch.cat((torch.zeros_like(own_block), earlier | own_block), 1)
    return torch.cat((top, bottom)).expand(2, 1, -1, -1)


MASKS = {
    "all tokens": lambda: None,
    "padding": padding,
    "blocks": blocks,
    "noised and clean": noised_and_clean,
}


def diffusion_loss(model, ids, attention_mask, seed):
    """The loss of LLaDA's training program."""
    seed_torch(seed)
    probability = torch.rand(ids.shape[0], 1).clamp(min=0.2).expand(ids.shape)
    masked = torch.rand(ids.shape) < probability
    noised = torch.where(masked, MASK_TOKEN, ids)
    logits = model(input_ids=noised, attention_mask=attention_mask).logits
    losses = F.cross_entropy(logits[masked], ids[masked], reduction="none")
    return (losses / probability[masked]).sum() / ids.numel()


def train(model, mask):
    """The loss of two batches, and the sum of their gradients by name."""
    seed_torch(5)
    ids = torch.randint(0, MASK_TOKEN, (2, LENGTH))
    total = 0.0
    for seed in (1, 2):
        loss = diffusion_loss(model, ids, mask(), seed)
        loss.backward()
        total += loss.item()
    return total, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def check(name, lazy_logits):
    expected_loss, expected = train(build(), MASKS[name])
    config = streambp.StreamConfig(chunk_size=CHUNK, saves=(), lazy_logits=lazy_logits)
    model = streambp.patch(build(), config)
    our_loss, ours = train(model, MASKS[name])
    assert abs(our_loss - expected_loss) <= 1e-12 * abs(expected_loss)
    assert worst_error(ours, expected) <= MAX_FLOAT64_ERROR
    described = streambp.describe(model)
    assert {layer.path for layer in described.layers} == {"streams"}
    start = "no logits: computed blockwise" if lazy_logits else "as its caller computes it"
    assert described.head.startswith(start)


@pytest.mark.parametrize("lazy_logits", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_losses_and_gradients_are_the_unpatched_models(name, lazy_logits):
    check(name, lazy_logits)


MUTANTS = {
    "keys behind the query are not read": (
        masks,
        "find_reach",
        lambda tile, length, device: tuple((0, min(length, q0 + 3)) for q0 in range(0, length, 3)),
        lambda: check("noised and clean", False),
    ),
    "a first half that is not differentiated": (
        halves,
        "_differentiate_before",
        lambda call, work, gradients: None,
        lambda: check("all tokens", True),
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants(mutant, monkeypatch):
    module, name, replacement, run = MUTANTS[mutant]
    for scanned in (mask_scan, masks):
        monkeypatch.setattr(scanned, "SCAN_TILE_SIZE", 3)
    monkeypatch.setattr(module, name, replacement)
    with pytest.raises(AssertionError):
        run()
