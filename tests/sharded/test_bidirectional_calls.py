"""Layers whose attention reads ahead, as training programs call them: rows without tokens, other
modes, several forwards in a step.

covers: sharded/bidirectional.py, sharded/call.py, attention/kinds.py, attention/masks.py
"""

from __future__ import annotations

import copy

import pytest
import torch

import streambp
from streambp.attention import kinds, masks
from tests.oracle import MAX_FLOAT64_ERROR, worst_error
from tests.seeds import seed_torch
from tests.sharded.test_bidirectional import CHUNK, LENGTH, MODEL_BUILDERS, in_halves, padding

__all__ = ["in_halves"]  # a fixture

NAMES = ["bert", "modernbert", "llama", "embedding_gemma"]
WINDOWS = {"modernbert": {1, 2}, "embedding_gemma": {0, 1}}  # layers with a sliding window


pytestmark = pytest.mark.usefixtures("float64_everywhere")


def make_model(name, implementation="sdpa"):
    model = MODEL_BUILDERS[name]().train()
    model.set_attn_implementation(implementation)
    return model


def ids(rows, length=LENGTH):
    return torch.randint(3, 60, (rows, length))


def gradients(model, step):
    model.zero_grad(set_to_none=True)
    loss = step(model)
    if loss.requires_grad:
        loss.backward()
    parameter_gradients = {
        n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
    }
    return loss.detach(), parameter_gradients


def check(stock, step, steps=2, **settings):
    """Compare steps of the patched model with the unpatched one, and return its description."""
    loss, expected = gradients(stock, step)
    config = streambp.StreamConfig(**{"chunk_size": CHUNK, **settings})
    ours = streambp.patch(copy.deepcopy(stock), config)
    for _ in range(steps):
        ours_loss, our_gradients = gradients(ours, step)
        assert abs(ours_loss - loss) <= 1e-11 * abs(loss)
        assert worst_error(our_gradients, expected) <= MAX_FLOAT64_ERROR
    return streambp.describe(ours)


def weighted(output):
    """A sum over all outputs with weights that follow from their positions."""
    states = output.last_hidden_state
    weights = torch.arange(states.numel(), dtype=states.dtype).sin().reshape(states.shape)
    return (states * weights).sum()


def without_tokens(kind):
    """A mask whose third row is padding alone."""
    mask = padding(kind)
    mask[2] = 0
    return mask


@pytest.mark.fast("modernbert-between-eager")
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["right", "between"])
@pytest.mark.parametrize("name", NAMES)
def test_a_row_of_padding(name, kind, implementation, in_halves):
    """Eager attention takes the mean over all keys there, also in layers with a window and beside a
    row with padding between its tokens."""
    seed_torch()
    x, mask = ids(3), without_tokens(kind)
    stock = make_model(name, implementation)
    implementation = stock.config._attn_implementation  # older ModernBERTs keep sdpa

    def step(model):
        states = model(input_ids=x, attention_mask=mask, use_cache=False).last_hidden_state
        row_mask = mask.clone()
        row_mask[2] = 1  # the row's outputs are read
        return (states * row_mask[..., None]).square().sum()

    described = check(stock, step)
    paths = {layer.path for layer in described.layers}
    assert paths == {"streams" if implementation == "sdpa" else "checkpoints"}
    assert bool(in_halves) == (implementation == "sdpa")


def test_the_mutant_that_looks_for_no_row_of_padding_is_noticed(monkeypatch, in_halves):
    monkeypatch.setattr(masks.LazyMask, "has_empty_row", False)
    with pytest.raises((AssertionError, streambp.StreamBPError)):
        test_a_row_of_padding("bert", "between", "eager", in_halves)


def windows_without_tokens():
    """Padding that is longer than the windows (8 tokens), on the right of the second row."""
    mask = torch.ones(3, LENGTH, dtype=torch.long)
    mask[1, LENGTH - 13 :] = 0
    return mask


@pytest.mark.fast("modernbert-eager")
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["modernbert", "embedding_gemma"])
def test_windows_of_padding(name, implementation, in_halves):
    """Eager attention takes the mean over all keys there, and a mean without the mask reads it."""
    seed_torch()
    x, mask = ids(3), windows_without_tokens()
    stock = make_model(name, implementation)
    implementation = stock.config._attn_implementation  # older ModernBERTs keep sdpa

    def step(model):
        return weighted(model(input_ids=x, attention_mask=mask, use_cache=False))

    paths = [layer.path for layer in check(stock, step).layers]
    if implementation == "sdpa":
        assert set(paths) == {"streams"}
    else:
        windows = {layer for layer, path in enumerate(paths) if path == "checkpoints"}
        assert windows == WINDOWS[name]
    assert in_halves


def test_the_mutant_that_looks_for_no_window_of_padding_is_noticed(monkeypatch, in_halves):
    monkeypatch.setattr(masks.LazyMask, "has_empty_window", False)
    with pytest.raises((AssertionError, streambp.StreamBPError)):
        test_windows_of_padding("embedding_gemma", "eager", in_halves)


@pytest.mark.parametrize("name", NAMES)
def test_fields_of_the_output(name):
    """BERT makes a cache where it is a decoder."""
    seed_torch()
    x = ids(2)
    stock = make_model(name)
    ours = streambp.patch(copy.deepcopy(stock), streambp.StreamConfig(chunk_size=CHUNK))
    assert list(ours(input_ids=x).keys()) == list(stock(input_ids=x).keys())


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_a_3d_mask_is_refused(name):
    """The unpatched model raises, too; each position of [T, T] would count as one of [T]."""
    x = ids(3)
    model = streambp.patch(make_model(name), streambp.StreamConfig(chunk_size=CHUNK))
    mask = torch.ones(3, LENGTH, LENGTH, dtype=torch.long).tril()
    with pytest.raises(streambp.errors.UnsupportedMaskError, match="Pass it 2-D"):
        model(input_ids=x, attention_mask=mask, use_cache=False)


@pytest.mark.fast("modernbert")
@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_around_the_first_call(name, in_halves):
    """The checkpoint's hooks would store the tensors of the halves' trial."""
    seed_torch(1)
    x, mask = ids(3), padding("right")

    def step(model):
        def call(start):
            states = model(input_ids=x, attention_mask=mask, use_cache=False).last_hidden_state
            return (states * mask[..., None]).square().sum() + start

        start = torch.zeros((), requires_grad=True)
        return torch.utils.checkpoint.checkpoint(call, start, use_reentrant=False)

    check(make_model(name), step)
    assert in_halves


@pytest.mark.fast("modernbert")
@pytest.mark.parametrize("name", NAMES)
def test_inference_mode_first(name, in_halves):
    """No test of the halves is run under inference mode, and the next call tests them."""
    seed_torch(1)
    x, mask = ids(3), padding("right")

    def step(model):
        model.eval()
        with torch.inference_mode():
            first = float(weighted(model(input_ids=x, attention_mask=mask, use_cache=False)))
        model.train()
        return weighted(model(input_ids=x, attention_mask=mask, use_cache=False)) + first

    check(make_model(name), step)
    assert len(in_halves) == 4 * MODEL_BUILDERS[name]().config.num_hidden_layers


def mean_of(output, mask):
    states = output.last_hidden_state
    token_mask = mask[..., None].to(states.dtype)
    return torch.nn.functional.normalize((states * token_mask).sum(1) / token_mask.sum(1), dim=-1)


def ranking_loss(first, second):
    """Sentence-transformers' MultipleNegativesRankingLoss."""
    return torch.nn.functional.cross_entropy(20 * first @ second.T, torch.arange(len(first)))


def pairs():
    """Queries with padding, and shorter documents."""
    documents = ids(3, 15)
    return (ids(3), padding("right")), (documents, torch.ones_like(documents))


def embed(model, tokens, mask):
    return mean_of(model(input_ids=tokens, attention_mask=mask, use_cache=False), mask)


@pytest.mark.fast("bert", "embedding_gemma")
@pytest.mark.parametrize("name", NAMES)
def test_two_forwards_before_a_backward(name, in_halves):
    """The lengths of the two differ, and their weights are the same."""
    seed_torch(2)
    queries, documents = pairs()
    check(make_model(name), lambda m: ranking_loss(embed(m, *queries), embed(m, *documents)))
    assert set(in_halves) == {LENGTH, 15}


@pytest.mark.fast("llama")
@pytest.mark.parametrize("name", NAMES)
def test_a_cached_ranking_loss(name):
    """Embeddings without a graph, the loss over all of them, and each row again with a graph."""
    seed_torch(3)
    batches = pairs()

    def step(model):
        with torch.no_grad():
            embeddings = [embed(model, *part) for part in batches]
        leaves = [x.requires_grad_() for x in embeddings]
        loss = ranking_loss(*leaves)
        loss.backward()
        for (tokens, mask), leaf in zip(batches, leaves, strict=True):
            for row in range(3):
                part = slice(row, row + 1)
                recomputed = embed(model, tokens[part], mask[part])
                (recomputed * leaf.grad[part]).sum().backward()
        return loss.detach()

    check(make_model(name), step)


@pytest.mark.fast("modernbert")
@pytest.mark.parametrize("name", NAMES)
def test_evaluation_between_and_accumulated_steps(name):
    seed_torch(4)
    x, y, mask = ids(3), ids(2, 29), padding("right")

    def step(model):
        weighted(model(input_ids=y, use_cache=False)).backward()
        model.eval()
        with torch.no_grad():
            value = float(weighted(model(input_ids=x, attention_mask=mask, use_cache=False)))
        model.train()
        return weighted(model(input_ids=x, attention_mask=mask, use_cache=False)) + value

    check(make_model(name), step, saves=("attn_out",), offload="cpu")


@pytest.mark.fast("bert")
@pytest.mark.parametrize("name", NAMES)
def test_frozen_lower_layers(name):
    seed_torch(5)
    stock = make_model(name)
    for parameter_name, parameter in stock.named_parameters():
        is_low = any(part in parameter_name for part in ("embed", "layer.0.", "layers.0."))
        parameter.requires_grad_(not is_low)
    queries, documents = pairs()
    check(stock, lambda m: ranking_loss(embed(m, *queries), embed(m, *documents)))


def row_mask(kind, added):
    """[B, 1, 1, T], as programs make it by hand: one row of keys for all queries."""
    mask = without_tokens("right") if kind == "empty row" else padding("right")
    mask = mask.bool()[:, None, None]
    if not added:
        return mask
    lowest = torch.finfo(torch.get_default_dtype()).min
    return torch.zeros_like(mask, dtype=torch.get_default_dtype()).masked_fill(~mask, lowest)


@pytest.mark.fast(2)
@pytest.mark.parametrize(
    ("kind", "added", "path"),
    [
        ("tokens", True, "streams"),
        ("tokens", False, "streams"),
        ("empty row", False, "streams"),
        ("empty row", True, "checkpoints"),  # the mean over all keys
    ],
)
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_a_mask_with_one_row_of_keys(name, kind, added, path, in_halves):
    seed_torch(20)
    x, mask = ids(3), row_mask(kind, added)

    def step(model):
        return weighted(model(input_ids=x, attention_mask=mask, use_cache=False))

    described = check(make_model(name), step)
    assert {layer.path for layer in described.layers} == {path}
    assert bool(in_halves) == (path == "streams")


def test_the_mutant_that_takes_an_empty_query_for_zeros_is_noticed(monkeypatch, in_halves):
    monkeypatch.setattr(kinds, "_why_empty_queries", lambda mask: None)
    with pytest.raises((AssertionError, streambp.StreamBPError)):
        test_a_mask_with_one_row_of_keys("bert", "empty row", True, "checkpoints", in_halves)
