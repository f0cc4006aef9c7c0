"""A step without a labelled token in each loss path, TRL's losses and PPO's values among them, with
counts of 0 and upstream gradients of 0, infinity and NaN, against the unpatched model.

covers: head/log_probs.py, head/one_pass.py, model/fused_head.py, integrations/trl/values.py,
  losses/ppo.py
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import warnings

import pytest
import torch

from tests.families import make_batch
from tests.head.test_empty_batches import EMPTY, check_like_unpatched
from tests.oracle import lift_float32_casts

pytest.importorskip("trl", reason="TRL is not installed")
pytest.importorskip("peft", reason="peft is not installed")

from streambp.integrations.trl import values
from tests.distributed.engines import model_for
from tests.integrations.test_trl import FullLogits
from tests.loss_mutants import MUTANTS
from tests.loss_paths import SETTINGS, SETUPS, loss_of, prepare

COUNTS = (None, 0, torch.tensor(0), torch.tensor(7))
UPSTREAMS = (1.0, 0.0, math.inf, math.nan)
LABELS = {"none": slice(None), "one row without": slice(1, None)}


@pytest.fixture(autouse=True)
def exact_stock_head(monkeypatch):
    lift_float32_casts(monkeypatch)
    monkeypatch.setattr("trl.trainer.utils._ChunkedLogProbFunction", FullLogits)


def gradients(model, path, batch, count, upstream, patched):
    """Return the loss and the gradients of one step."""
    model.zero_grad()
    loss = loss_of(model, path, batch, count, patched)
    (loss * upstream).backward()
    parameters = model.named_parameters()
    return loss.detach(), {name: p.grad.clone() for name, p in parameters if p.grad is not None}


def models(path, setup):
    """Return the unpatched model and the patched one, with the same weights."""
    prepared = []
    for patched in (False, True):
        model = model_for(SETUPS[setup]).double()
        prepare(model, path, patched)
        prepared.append(model)
    return prepared


def check(path, setup, labels=LABELS):
    stock, ours = models(path, setup)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for kind, count, upstream in itertools.product(labels, COUNTS, UPSTREAMS):
            batch = make_batch("plain")
            batch["labels"][LABELS[kind]] = -100
            expected_loss, expected = gradients(stock, path, batch, count, upstream, False)
            loss, our_gradients = gradients(ours, path, batch, count, upstream, True)
            check_like_unpatched(our_gradients, expected, by_entry=True)
            if expected_loss.isfinite() or kind != "none":
                torch.testing.assert_close(
                    loss, expected_loss, rtol=1e-10, atol=1e-10, equal_nan=True
                )
            elif path not in ("own loss", "ppo"):
                assert loss == 0.0  # NaN unpatched
    return [w for w in caught if EMPTY in str(w.message)]


@pytest.mark.fast("full-two passes", "head saved-sft", "tied-ppo")
@pytest.mark.parametrize("path", SETTINGS)
@pytest.mark.parametrize("setup", SETUPS)
def test_finite_gradients_are_those_of_the_unpatched_model(setup, path):
    messages = check(path, setup)
    assert len(messages) == (path != "own loss")  # a program's own, which sees no labels


# each way in which a path could make NaN of a step without labels
CASES = [("scales zeros", "one pass"), ("factor of values", "ppo"), ("objective by product", "ppo")]
CASES += [("head of no label", path) for path in SETTINGS]


@pytest.mark.fast("factor of values-ppo", "head of no label-sft")
@pytest.mark.parametrize(("mutant", "path"), CASES)
def test_mutant_turns_that_red(mutant, path, monkeypatch):
    MUTANTS[mutant](monkeypatch)
    with pytest.raises(AssertionError):
        check(path, "full", ("none",))


def check_fields():
    """Engines look for tensors with gradients among the declared fields of a forward's output."""
    model = model_for({}).double()
    prepare(model, "ppo", patched=True)
    output = model(**make_batch("plain"), fused_lm_head=True, values=True)
    assert "state_values" in [field.name for field in dataclasses.fields(output)]
    assert output.state_values.requires_grad


def test_engines_see_the_values():
    check_fields()


def test_mutant_values_that_engines_do_not_see(monkeypatch):
    def undeclared(kind):
        def make(state_values, **fields):
            output = kind(**fields)
            output["state_values"] = state_values
            return output

        return make

    monkeypatch.setattr(values, "_with_values", undeclared)
    with pytest.raises(AssertionError):
        check_fields()
