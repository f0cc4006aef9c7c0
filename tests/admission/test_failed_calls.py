"""A call that fails judges no layer: after a good one all layers stream.

covers: admission/entry.py, admission/probe.py, admission/trials.py, layer/layer_state.py
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile

import pytest
import torch

import streambp
from streambp.admission import probe
from streambp.admission.kept_values import REASON_STORED_VALUES
from streambp.layer.layer_state import DOUBTS_BEFORE_DECISION, LayerTests, TrialResult
from tests.families import build, make_batch
from tests.oracle import MAX_FLOAT64_ERROR, gradients, worst_error
from tests.tiers import thinned

CONFIG = streambp.StreamConfig(chunk_size=5, saves=())


def fails_at(layer, number):
    """The MLP's call of that number raises, once; the count is where nothing can put it back."""
    calls = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the model
    real = layer.mlp.forward

    def forward(x):
        calls.write(b".")
        if calls.tell() == number:
            raise ValueError(f"call {number} fails")
        return real(x)

    layer.mlp.forward = forward


def counts_and_fails(layer, number):
    """The same with a count that is put back after a trial."""
    layer.mlp.count, real = 0, layer.mlp.forward

    def forward(x):
        layer.mlp.count += 1
        if layer.mlp.count == number:
            raise ValueError(f"call {number} fails")
        return real(x)

    layer.mlp.forward = forward


def call_fails(model, batch, trains):
    """Run a call that may fail; say whether it did."""
    model.train(trains)
    failed = False
    try:
        with torch.set_grad_enabled(trains):
            loss = model(**batch, use_cache=False).loss
        if trains:
            loss.backward()
    except ValueError:
        failed = True
    model.zero_grad(set_to_none=True)
    model.train()
    return failed


def streams_exactly(model, counts=False):
    """Good calls, after the last of which all layers stream, with the gradients of the model that
    never failed.

    A layer whose module counts its calls runs whole: it would count chunks.
    """
    batch = make_batch("plain")
    expected = gradients(build("llama", torch.float64), **batch)[1]
    for _ in range(2):
        grads = gradients(model, **batch)[1]
    assert worst_error(grads, expected) <= MAX_FLOAT64_ERROR
    first, second = streambp.describe(model).layers
    assert second.path == "streams"
    assert first.path == ("checkpoints" if counts else "streams")
    assert not counts or first.reason.startswith(REASON_STORED_VALUES)


@pytest.mark.fast(4)
@pytest.mark.parametrize(
    ("how", "number", "trains"),
    thinned(
        itertools.product([fails_at, counts_and_fails], range(1, 13), [True, False]),
        lambda how, number, trains: number in (2, 5) and trains,
    ),
)
def test_a_module_that_raises_once(how, number, trains, float64_oracle):
    """In a trial or in a call: what a trial alone has seen ends no call."""
    model = build("llama", torch.float64)
    how(model.model.layers[0], number)
    streambp.patch(model, CONFIG)
    failed = [call_fails(model, make_batch("plain"), trains) for _ in range(3)]
    # a forward, and a recomputation that is put back
    assert sum(failed) <= 2 * (how is counts_and_fails)
    for _ in range(number if how is counts_and_fails else 0):
        failed.append(call_fails(model, make_batch("plain"), trains))
    # a forward, and a recomputation that is put back
    assert sum(failed) <= 2 * (how is counts_and_fails)
    streams_exactly(model, counts=how is counts_and_fails)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("trains", [True, False])
def test_an_empty_batch(family, trains, float64_oracle):
    model = streambp.patch(build(family, torch.float64), CONFIG).train(trains)
    batch = {name: value[:0] for name, value in make_batch("plain").items()}
    with torch.set_grad_enabled(trains):
        for _ in range(DOUBTS_BEFORE_DECISION + 1):
            with contextlib.suppress(RuntimeError):
                model(**batch, use_cache=False)
    model.train()
    expected = gradients(build(family, torch.float64), **make_batch("plain"))[1]
    assert worst_error(gradients(model, **make_batch("plain"))[1], expected) <= MAX_FLOAT64_ERROR
    assert {layer.path for layer in streambp.describe(model).layers} == {"streams"}


def test_embeddings_of_another_dtype(float64_oracle):
    family = "gemma3"
    model = streambp.patch(build(family, torch.float64), CONFIG)
    batch = make_batch("plain")
    wrong = torch.randn(2, batch["input_ids"].shape[1], 32, dtype=torch.float16)
    for _ in range(DOUBTS_BEFORE_DECISION + 1):
        with pytest.raises(Exception, match="dtype"):
            model(inputs_embeds=wrong, labels=batch["labels"], use_cache=False)
    expected = gradients(build(family, torch.float64), **batch)[1]
    assert worst_error(gradients(model, **batch)[1], expected) <= MAX_FLOAT64_ERROR
    assert {layer.path for layer in streambp.describe(model).layers} == {"streams"}


def test_what_never_runs_in_chunks_is_known_after_some_calls(float64_oracle, monkeypatch):
    """A layer that does not work on chunks is tried so many times, and no more."""
    model = build("llama", torch.float64)
    trials, real, length = (
        [],
        model.model.layers[0].mlp.forward,
        make_batch("plain")["input_ids"].shape[1],
    )

    def forward(x):
        if x.shape[1] not in (length, 12):
            raise ValueError(f"{length} tokens are needed")
        return real(x)

    model.model.layers[0].mlp.forward = forward
    streambp.patch(model, CONFIG)
    why_not = probe._why_not
    monkeypatch.setattr(
        probe, "_why_not", lambda call, x: trials.append(call.layer_state.index) or why_not(call, x)
    )
    for _ in range(DOUBTS_BEFORE_DECISION + 2):
        gradients(model, **make_batch("plain"))
    assert trials.count(0) == DOUBTS_BEFORE_DECISION
    first, second = streambp.describe(model).layers
    assert (first.path, second.path) == ("checkpoints", "streams")
    assert "does not work on chunks (ValueError" in first.reason


@pytest.mark.parametrize("mutant", ["at once", "never forgotten", "empty batches are tried"])
def test_mutants_turn_these_red(mutant, monkeypatch, float64_oracle):
    if mutant == "at once":
        monkeypatch.setattr(TrialResult, "add_doubt", TrialResult.set_result)
        tests = [lambda: test_a_module_that_raises_once(fails_at, 2, True, None)]
        tests += [lambda: test_a_module_that_raises_once(fails_at, 5, True, None)]
    elif mutant == "never forgotten":
        monkeypatch.setattr(LayerTests, "forget", lambda *_: None)
        monkeypatch.setattr(probe, "can_run_unpatched", lambda *_: True)
        tests = [lambda: test_embeddings_of_another_dtype(None)]
    else:
        monkeypatch.setattr(torch.Tensor, "numel", lambda x: max(1, x.nelement()))
        monkeypatch.setattr(TrialResult, "add_doubt", TrialResult.set_result)
        monkeypatch.setattr(LayerTests, "forget", lambda *_: None)
        monkeypatch.setattr(probe, "can_run_unpatched", lambda *_: True)
        tests = [lambda: test_an_empty_batch("llama", True, None)]
    red = 0
    for test in tests:
        try:
            test()
        except (AssertionError, pytest.fail.Exception):
            red += 1
    assert red
