"""Contrastive training of encoders: pooled states, several forwards before a backward, GradCache.

covers: sharded/bidirectional.py, model/unpatched.py
"""

from __future__ import annotations

import copy

import pytest
import torch

import streambp
from streambp.sharded import layer as halves
from tests.oracle import MAX_FLOAT64_ERROR, worst_error
from tests.seeds import seed_torch
from tests.sharded.test_bidirectional import CHUNK, MODEL_BUILDERS, batch_of

pytestmark = pytest.mark.usefixtures("float64_everywhere")
POOLING = {"bert": "cls", "modernbert": "mean", "embedding_gemma": "mean", "llama": "last"}


def embed(model, batch, pooling):
    """Vectors [B, h] of length one."""
    states = model(**batch).last_hidden_state  # [B, T, h]
    mask = batch["attention_mask"]
    if pooling == "cls":
        vectors = states[:, 0]
    elif pooling == "mean":
        vectors = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    else:
        vectors = states[torch.arange(len(mask)), mask.sum(1) - 1]
    return torch.nn.functional.normalize(vectors, dim=-1)


def contrast(vectors):
    """MultipleNegativesRankingLoss of queries and documents."""
    scores = 20 * vectors[0] @ vectors[1].T
    return torch.nn.functional.cross_entropy(scores, torch.arange(len(scores)))


def plain_step(model, batches, pooling):
    loss = contrast([embed(model, batch, pooling) for batch in batches])
    loss.backward()
    return loss.detach()


def cached_step(model, batches, pooling):
    """GradCache: embeddings without a graph, their gradients, then embeddings with a graph."""
    vectors = []
    for batch in batches:
        with torch.no_grad():
            vectors.append(embed(model, batch, pooling))
    vectors = [v.requires_grad_() for v in vectors]
    loss = contrast(vectors)
    loss.backward()
    for batch, vector in zip(batches, vectors, strict=True):
        (embed(model, batch, pooling) * vector.grad).sum().backward()
    return loss.detach()


STEPS = {"plain": plain_step, "cached": cached_step}


def trained(model, kind, pooling, batches):
    """Losses, weights and gradients of three steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(STEPS[kind](model, batches, pooling))
        optimizer.step()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return torch.stack(losses), dict(model.named_parameters()), gradients


def check(name, kind):
    seed_torch(1)
    stock = MODEL_BUILDERS[name]().train()
    ours = streambp.patch(copy.deepcopy(stock), streambp.StreamConfig(chunk_size=CHUNK))
    batches = [batch_of("right"), batch_of("right")]
    expected = trained(stock, kind, POOLING[name], batches)
    run = trained(ours, kind, POOLING[name], batches)
    torch.testing.assert_close(run[0], expected[0], rtol=1e-10, atol=1e-10)
    assert worst_error(run[1], expected[1]) <= MAX_FLOAT64_ERROR
    assert worst_error(run[2], expected[2]) <= MAX_FLOAT64_ERROR
    assert {layer.path for layer in streambp.describe(ours).layers} == {"streams"}


@pytest.mark.fast(3)
@pytest.mark.parametrize("kind", list(STEPS))
@pytest.mark.parametrize("name", list(POOLING))
def test_exact(name, kind):
    check(name, kind)


def test_the_mutant_whose_first_half_is_not_differentiated_is_noticed(monkeypatch):
    monkeypatch.setattr(halves, "_differentiate_before", lambda call, work, gradients: None)
    with pytest.raises((AssertionError, streambp.StreamBPError)):
        check("llama", "cached")
