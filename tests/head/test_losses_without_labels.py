"""A plain loop whose model returns None, 0 or NaN for a batch without labels, against the unpatched
model.

covers: model/causal_lm.py, model/empty_batches.py
"""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F

import streambp
from streambp.model import causal_lm
from streambp.model.empty_batches import EmptyBatchWarning
from tests.families import make_batch
from tests.head.test_empty_batches import (
    EMPTY,
    MODELS,
    SETTINGS,
    check_like_unpatched,
)


def none_without_labels(logits, labels, vocab_size, **_):
    """Return the mean over labelled tokens; None if there is none."""
    return None if bool((labels == -100).all()) else mean(logits, labels)


def zero_without_labels(logits, labels, vocab_size, **_):
    """Return the mean over labelled tokens; a zero that has no graph if there is none."""
    return torch.zeros(()) if bool((labels == -100).all()) else mean(logits, labels)


def zero_of_the_graph(logits, labels, vocab_size, **_):
    """Return the mean over labelled tokens; a zero that is made of the logits if there is none."""
    return logits.sum() * 0.0 if bool((labels == -100).all()) else mean(logits, labels)


def clamped(logits, labels, vocab_size, **_):
    """Return the sum over labelled tokens over their number, at least 1."""
    return mean(logits, labels, "sum") / (labels != -100).sum().clamp(min=1)


def mean(logits, labels, reduction="mean"):
    flat = logits[:, :-1].flatten(0, 1)
    return F.cross_entropy(flat, labels[:, 1:].flatten(), reduction=reduction)


LOSSES = {
    "the model's own": None,
    "none": none_without_labels,
    "zero": zero_without_labels,
    "zero of the graph": zero_of_the_graph,
    "clamped": clamped,
    "mean": lambda logits, labels, vocab_size, **_: mean(logits, labels),
}


def loop(model, batches):
    """Return what the steps of a loop leave: the gradients after each, what its loss was, and the
    warnings that name an empty batch."""
    steps, names = [], []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in batches:
            model.zero_grad()
            loss = model(**batch, use_cache=False).loss
            names.append(None if loss is None else loss.requires_grad)
            if loss is not None and loss.requires_grad:
                loss.backward()
            parameters = model.named_parameters()
            steps.append({name: p.grad.clone() for name, p in parameters if p.grad is not None})
    return steps, names, [w for w in caught if EMPTY in str(w.message)]


def batches():
    """Return a batch with labels, one whose labels are all -100, one without `labels`, and again
    the first."""
    batch = make_batch("plain")
    empty = {**batch, "labels": torch.full_like(batch["labels"], -100)}
    return [batch, empty, {"input_ids": batch["input_ids"]}, batch, empty]


def check(loss, path, setup):
    stock = MODELS[setup]()
    if LOSSES[loss] is not None:
        getattr(stock, "base_model", stock).loss_function = LOSSES[loss]
        base = stock.get_base_model() if hasattr(stock, "get_base_model") else stock
        base.loss_function = LOSSES[loss]
    ours = streambp.patch(copy.deepcopy(stock), streambp.StreamConfig(**SETTINGS[path]))
    expected, kinds, _ = loop(stock, batches())
    steps, our_kinds, warned = loop(ours, batches())
    assert our_kinds == kinds
    for gradients, step in zip(steps, expected, strict=True):
        assert gradients.keys() == step.keys()
        if step:
            check_like_unpatched(gradients, step, by_entry=True)
    assert len(warned) == 1


@pytest.mark.fast("full-one pass-none", "tied-lazy-zero", "lora-default-zero of the graph")
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("path", ["one pass", "lazy", "packed", "default"])
@pytest.mark.parametrize("setup", ["full", "tied", "lora", "head saved"])
def test_a_loop_whose_loss_is_none_or_zero(setup, path, loss, float64_oracle):
    check(loss, path, setup)


def detached(monkeypatch):
    """Give the loss of an empty batch no graph."""
    real = causal_lm._without_nan

    def without_nan(output, labelled):
        output = real(output, labelled)
        output.loss = output.loss.detach()
        return output

    monkeypatch.setattr(causal_lm, "_without_nan", without_nan)


def says_nothing(monkeypatch):
    monkeypatch.setattr(EmptyBatchWarning, "warn", lambda self: None)


@pytest.mark.parametrize("spoil", [detached, says_nothing])
def test_mutant(spoil, monkeypatch, float64_oracle):
    spoil(monkeypatch)
    with pytest.raises(AssertionError):
        check("the model's own", "one pass", "full")
