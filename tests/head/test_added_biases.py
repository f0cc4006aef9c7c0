"""Models that add a bias to their logits (BART, Marian): the loss is exact, without logits.

covers: lazy/lazy_hidden.py, head/blocks.py, head/log_probs.py, head/recipe.py
"""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import streambp
from streambp.head import blocks
from streambp.head.one_pass import PendingGradients
from streambp.head.recipe import HeadRequest, LogitsExpression
from streambp.lazy import lazy_hidden
from streambp.lazy.lazy_hidden import LazyHidden
from tests.model.test_encoder_decoders import CHUNK, LENGTH, MODEL_BUILDERS, batch_of
from tests.oracle import MAX_FLOAT64_ERROR, assert_as_precise, relative_l2, worst_error
from tests.seeds import seed_torch, seeded

VOCABULARY = 64
BIAS = "final_logits_bias"


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(blocks, "TOKENS_PER_BLOCK", 5)
    monkeypatch.setattr(blocks, "LOGITS_PER_BLOCK", 5 * VOCABULARY)


def model_of(name, kind):
    """A model whose bias is a buffer of zeros, a buffer of other values, or trained."""
    model = MODEL_BUILDERS[name]().train()
    if kind == "zeros":
        return model
    values = torch.randn(1, VOCABULARY)
    if kind == "trained":
        del model._buffers[BIAS]
        values = nn.Parameter(values)
    setattr(model, BIAS, values)
    return model


def of_labels(model, batch):
    return model(**batch).loss


def of_logits(model, batch):
    """Label smoothing, as Seq2SeqTrainer computes it from the logits of a call without labels."""
    batch = dict(batch)
    labels = batch.pop("labels")
    read = labels.clamp(min=0).roll(1, 1)
    logits = model(**batch, decoder_input_ids=read).logits
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.2)


LOSSES = {"labels": of_labels, "label smoothing": of_logits}


def gradients(model, batch, loss_of):
    model.zero_grad(set_to_none=True)
    loss = loss_of(model, batch)
    loss.backward()
    parameter_gradients = {
        n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
    }
    return loss.detach(), parameter_gradients


def patched(stock, loss):
    config = streambp.StreamConfig(chunk_size=CHUNK, lazy_logits=loss == "label smoothing")
    return streambp.patch(copy.deepcopy(stock), config)


def check(name, kind, loss, steps=2):
    stock = model_of(name, kind)
    batch = batch_of(name, 19)
    expected_loss, expected = gradients(stock, batch, LOSSES[loss])
    assert (BIAS in expected) == (kind == "trained")
    ours = patched(stock, loss)
    for _ in range(steps):
        found_loss, our_gradients = gradients(ours, batch, LOSSES[loss])
        assert abs(found_loss - expected_loss) <= 1e-12 * abs(expected_loss)
        assert worst_error(our_gradients, expected) <= MAX_FLOAT64_ERROR
    return ours


@pytest.mark.usefixtures("float64_everywhere", "small_blocks")
@pytest.mark.parametrize(
    ("name", "kind", "loss"),
    [
        pytest.param(name, kind, loss, marks=pytest.mark.full if number % 3 else ())
        for number, (kind, loss, name) in enumerate(
            itertools.product(("zeros", "values", "trained"), LOSSES, ("bart", "marian"))
        )
    ],
)
def test_exact_and_without_logits(name, kind, loss):
    seed_torch()
    head = streambp.describe(check(name, kind, loss)).head
    assert "builds" not in head, head


class Shapes(TorchDispatchMode):
    """Shapes of all results of torch's operators."""

    def __init__(self):
        super().__init__()
        self.shapes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.shapes |= {tuple(x.shape) for x in tree_leaves(result) if isinstance(x, torch.Tensor)}
        return result


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("loss", list(LOSSES))
def test_no_logits_of_all_tokens_exist(loss):
    seed_torch(1)
    stock = model_of("bart", "trained")
    batch = batch_of("bart", 19)
    rows = {}
    for name, model in (("unpatched", stock), ("streamed", patched(stock, loss))):
        gradients(model, batch, LOSSES[loss])  # a first call runs layers on trial
        with Shapes() as shapes:
            gradients(model, batch, LOSSES[loss])
        of_logits = [shape for shape in shapes.shapes if shape[-1:] == (VOCABULARY,)]
        rows[name] = max(torch.Size(shape[:-1]).numel() for shape in of_logits)
    assert rows["unpatched"] == 3 * LENGTH
    assert rows["streamed"] <= stock.config.d_model  # the transposed gradient of the weight


def test_generation_is_untouched():
    seed_torch(2)
    stock = model_of("marian", "values").eval()
    ours = patched(stock, "labels")
    ids = torch.randint(3, 60, (2, 9))
    kwargs = {"max_new_tokens": 6, "num_beams": 2, "do_sample": False}
    assert torch.equal(ours.generate(ids, **kwargs), stock.generate(ids, **kwargs))


def lazy_logits_of(hidden, weight):
    recipe = LogitsExpression(HeadRequest(PendingGradients()), weight=weight)
    return LazyHidden.make(hidden, recipe)


def head_of(seed, bias_dtype, width=32, rows=96):
    """Hidden states, weight and bias, which half precision has, and labels."""
    generator = seeded(seed)
    random = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    leaves = {
        "hidden": random(rows, width).bfloat16().float(),
        "weight": (random(VOCABULARY, width) / width**0.5).bfloat16().float(),
        "bias": 8.0 * random(VOCABULARY).to(bias_dtype).float(),
    }
    return leaves, torch.randint(0, VOCABULARY, (rows,), generator=generator)


def gradients_of_head(project, leaves, labels, dtypes, autocast):
    typed_leaves = {n: x.to(dtypes[n], copy=True).requires_grad_() for n, x in leaves.items()}
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = project(typed_leaves["hidden"], typed_leaves["weight"]) + typed_leaves["bias"]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        loss = F.cross_entropy(logits, labels)
    loss.backward()
    return {name: leaf.grad for name, leaf in typed_leaves.items()}


def errors(bias_dtype, autocast):
    """Of the gradients of hidden states, weight and bias, ours over many blocks and those of full
    logits, one random head after the other."""
    for seed in itertools.count():
        leaves, labels = head_of(seed, bias_dtype)
        exact = dict.fromkeys(leaves, torch.float64)
        truth = gradients_of_head(F.linear, leaves, labels, exact, False)
        narrow = torch.float32 if autocast else torch.bfloat16
        dtypes = {"hidden": narrow, "weight": narrow, "bias": bias_dtype}
        stock = gradients_of_head(F.linear, leaves, labels, dtypes, autocast)
        ours = gradients_of_head(lazy_logits_of, leaves, labels, dtypes, autocast)
        yield relative_l2(ours, truth), relative_l2(stock, truth)


PRECISIONS = {
    "autocast": (torch.float32, True),
    "bf16": (torch.bfloat16, False),
    "bf16, bias in float32": (torch.float32, False),
}


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("name", list(PRECISIONS))
def test_as_precise_as_full_logits(name):
    assert_as_precise(errors(*PRECISIONS[name]))


def test_a_bias_that_changed_since_forward_is_refused():
    seed_torch(3)
    ours = patched(model_of("bart", "trained"), "label smoothing")
    loss = of_logits(ours, batch_of("bart", 19))
    with torch.no_grad():
        ours.final_logits_bias.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def forgotten(x, addend, real=lazy_hidden._add_rule):
    return x


def without_a_gradient(x, addend, real=lazy_hidden._add_rule):
    return real(x, addend.detach())


MUTANTS = {
    "the bias is forgotten": (forgotten, "values"),
    "the bias gets no gradient": (without_a_gradient, "trained"),
}


@pytest.mark.usefixtures("float64_everywhere")
@pytest.mark.parametrize("mutant", list(MUTANTS))
def test_mutants(mutant, monkeypatch):
    replacement, kind = MUTANTS[mutant]
    seed_torch(4)
    rules = dict(LazyHidden.rules) | dict.fromkeys(("add", "__add__"), replacement)
    monkeypatch.setattr(LazyHidden, "rules", rules)
    with pytest.raises(AssertionError):
        check("bart", kind, "labels", steps=1)


@pytest.mark.usefixtures("small_blocks")
def test_the_mutant_that_rounds_the_bias_is_noticed(monkeypatch):
    monkeypatch.setattr(LogitsExpression, "bias_dtype", lambda self: None)
    with pytest.raises(AssertionError):
        assert_as_precise(errors(*PRECISIONS["autocast"]))
