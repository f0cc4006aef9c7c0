"""Parameters in which a module keeps a value of its first batch, or a record of each call: hidden
from named_modules, of two dimensions, replaced.

covers: admission/snapshot.py, fingerprint/memory.py
"""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
from torch import nn

import streambp
from streambp.admission import snapshot
from streambp.admission.snapshot import Snapshot, StateRestorer
from streambp.errors import BackwardError, StreamBPError
from streambp.fingerprint import memory
from streambp.fingerprint.holders import Holder
from tests.admission.test_kept_values import LENGTH, evaluate
from tests.admission.test_kept_values import check as check_record
from tests.admission.test_trials_leave_nothing import (
    CONFIG,
    SITUATIONS,
    Scaled,
    around_mlp,
    make_model,
    results,
    size_of,
)
from tests.families import make_batch
from tests.oracle import MAX_FLOAT64_ERROR, worst_error

pytestmark = pytest.mark.usefixtures("float64_everywhere")


def frozen(*shape):
    return nn.Parameter(torch.zeros(shape), requires_grad=False)


class Hidden(Scaled):
    """Of a module in a list, which no named_modules finds."""

    shape: tuple[int, ...] = ()

    def start(self):
        self.hidden = [nn.Module()]
        self.hidden[0].scale = frozen(*self.shape)

    def parameter(self):
        return self.hidden[0].scale

    def scale_of(self, x):
        if not self.parameter().any():
            self.parameter().data.copy_(size_of(x).expand(self.shape))
        return self.parameter()


class HiddenByCopy(Hidden):
    """Its version counter moves."""

    def scale_of(self, x):
        if not self.parameter().any():
            with torch.no_grad():
                self.parameter().copy_(size_of(x))
        return self.parameter()


class HiddenMatrix(Hidden):
    shape = (1, 32)


class HiddenDeep(Hidden):
    """Of a module in a hidden module."""

    def start(self):
        self.hidden = [nn.Sequential(nn.Module())]
        self.hidden[0][0].scale = frozen()

    def parameter(self):
        return self.hidden[0][0].scale


class HiddenByClosure(Hidden):
    def start(self):
        module = nn.Module()
        module.scale = frozen()
        self.parameter = lambda: module.scale


class Listed(Hidden):
    """Of no module."""

    def start(self):
        self.hidden = [frozen()]

    def parameter(self):
        return self.hidden[0]


class ByClosure(Hidden):
    def start(self):
        parameter = frozen()
        self.parameter = lambda: parameter


class Matrix(Hidden):
    """Of the module itself."""

    shape = (1, 32)

    def start(self):
        self.scale = frozen(*self.shape)

    def parameter(self):
        return self.scale


class Trained(Matrix):
    """A trained weight that its first batch gives."""

    def start(self):
        self.scale = nn.Parameter(torch.zeros(self.shape))


class HiddenReplaced(Hidden):
    def scale_of(self, x):
        if not self.parameter().any():
            self.hidden[0].scale = nn.Parameter(size_of(x), requires_grad=False)
        return self.parameter()


class ListedReplaced(Listed):
    def scale_of(self, x):
        if not self.parameter().any():
            self.hidden[0] = nn.Parameter(size_of(x), requires_grad=False)
        return self.parameter()


class Replaced(Matrix):
    shape = ()

    def scale_of(self, x):
        if not self.scale.any():
            self.scale = nn.Parameter(size_of(x), requires_grad=False)
        return self.scale


FIRST = {kind.__name__: kind for kind in (
    Hidden, HiddenByCopy, HiddenMatrix, HiddenDeep, HiddenByClosure, Listed, ByClosure, Matrix, Trained, HiddenReplaced,
    ListedReplaced, Replaced,
)}  # fmt: skip


def check(way, situation):
    """Exact from the first step on."""
    change, calls = functools.partial(around_mlp, kind=FIRST[way]), SITUATIONS[situation]
    expected = results(make_model(change), calls)
    ours = streambp.patch(make_model(change), CONFIG)
    assert worst_error(results(ours, calls), expected) <= MAX_FLOAT64_ERROR
    return {layer.path for layer in streambp.describe(ours).layers}


@pytest.mark.fast("Trained-first call")
@pytest.mark.parametrize(
    ("way", "situation"), [(way, situation) for way in FIRST for situation in SITUATIONS]
)
def test_a_value_of_the_first_batch(way, situation):
    check(way, situation)


def few_are_copied(monkeypatch):
    """Make matrices of parameters large, so that they are copied before a write."""
    monkeypatch.setattr(snapshot, "MAX_COPIED_MATRIX", 4)


@pytest.mark.full
@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("way", ["HiddenMatrix", "Matrix", "Trained"])
def test_a_value_in_a_large_parameter(way, situation, monkeypatch):
    few_are_copied(monkeypatch)
    check_streaming(way, situation)


def check_streaming(way, situation):
    """Exact, and streamed once the value is there."""
    assert check(way, situation) == {"streams"}


def replaced_in_a_module(layer):
    def hook(module, args, output):
        module.record = nn.Parameter(output.detach().amax(), requires_grad=False)

    layer.mlp.register_forward_hook(hook)
    return lambda: layer.mlp.record.detach()


def replaced_and_trained(layer):
    def hook(module, args, output):
        module.record = nn.Parameter(output.detach().amax((0, 1)))

    layer.mlp.register_forward_hook(hook)
    return lambda: layer.mlp.record.detach()


def replaced_from_the_start(layer):
    layer.mlp.record = nn.Parameter(torch.zeros(()), requires_grad=False)
    return replaced_in_a_module(layer)


def of_all_tokens(layer):
    def hook(module, args, output):
        module.record = nn.Parameter(output.detach().clone(), requires_grad=False)

    layer.mlp.register_forward_hook(hook)
    return lambda: layer.mlp.record.detach()


def replaced_in_a_list(layer):
    records = [frozen()]

    def hook(module, args, output):
        records[0] = nn.Parameter(output.detach().amax(), requires_grad=False)

    layer.mlp.register_forward_hook(hook)
    return lambda: records[0].detach()


def replaced_in_a_hidden_module(layer):
    hidden = [nn.Module()]

    def hook(module, args, output):
        hidden[0].record = nn.Parameter(output.detach().amax(), requires_grad=False)

    layer.mlp.register_forward_hook(hook)
    return lambda: hidden[0].record.detach()


def written_in_a_module(layer):
    layer.mlp.record = frozen()

    def hook(module, args, output):
        module.record.data.copy_(output.detach().amax())

    layer.mlp.register_forward_hook(hook)
    return lambda: layer.mlp.record.detach()


def written_in_a_list(layer):
    records = [frozen()]

    def hook(module, args, output):
        records[0].data.copy_(output.detach().amax())

    layer.mlp.register_forward_hook(hook)
    return lambda: records[0].detach()


def written_in_a_hidden_module(layer):
    hidden = [nn.Module()]
    hidden[0].record = frozen()

    def hook(module, args, output):
        hidden[0].record.data.copy_(output.detach().amax())

    layer.mlp.register_forward_hook(hook)
    return lambda: hidden[0].record.detach()


def train(model, seed=0):
    """Return the gradients of a step; a record has none."""
    model.train()
    model.zero_grad()
    model(**make_batch("plain", LENGTH, seed=seed), use_cache=False).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def train_two(model, seed=0):
    """Return the gradients of two batches, whose backward comes after both forwards."""
    model.train()
    model.zero_grad()
    batches = [make_batch("plain", LENGTH, seed=2 * seed + number) for number in (0, 1)]
    sum(model(**batch, use_cache=False).loss for batch in batches).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


STEPS = {
    "two at once": (train_two, train_two),
    "train": (train, train),
    "evaluate": (evaluate, evaluate),
    "both": (train, evaluate, train),
}
RECORDS = {way.__name__: way for way in (
    replaced_in_a_module, replaced_and_trained, replaced_from_the_start, of_all_tokens, replaced_in_a_list,
    replaced_in_a_hidden_module, written_in_a_module, written_in_a_list, written_in_a_hidden_module,
)}  # fmt: skip


@pytest.mark.fast("replaced_in_a_module-train-before")
@pytest.mark.parametrize(
    ("way", "steps", "when"),
    [(way, steps, when) for way in RECORDS for steps in STEPS for when in ("before", "later")],
)
def test_a_record(way, steps, when):
    if way == "replaced_and_trained" and steps != "evaluate":
        # A recomputation would differentiate another parameter than forward has read.
        expectation = pytest.raises(
            BackwardError, match=r"mlp\.record is another tensor in backward"
        )
    else:
        expectation = contextlib.nullcontext()
    with expectation:
        check_record(RECORDS[way], STEPS[steps], when)


def no_values(monkeypatch):
    monkeypatch.setattr(Snapshot, "_copy_parameter", lambda *_: None)


def vectors_alone(monkeypatch):
    """Neither copy matrices nor watch them."""
    real = Snapshot._copy_parameter
    monkeypatch.setattr(
        Snapshot,
        "_copy_parameter",
        lambda self, name, x: real(self, name, x) if x.dim() < 2 else None,
    )


def not_put_back(monkeypatch):
    few_are_copied(monkeypatch)
    monkeypatch.setattr(StateRestorer, "_put_back", lambda _: None)


def not_told(monkeypatch):
    """Put large parameters back, and name none that the first call sets."""
    few_are_copied(monkeypatch)
    monkeypatch.setattr(StateRestorer, "_changes", lambda self: self._snapshot.changes())


def random_zeros_alone(monkeypatch):
    """Run no layer with its own zeros."""
    monkeypatch.setattr(StateRestorer, "has_foreign_code", False)


def unseen_parameters(monkeypatch):
    monkeypatch.setattr(memory.ReachableValues, "_visit_parameter", lambda *_: None)


def records_of_recomputation(monkeypatch):
    """Let a record of backward's recomputation stay."""
    monkeypatch.setattr(memory, "parameters_of", lambda module: Holder(module, dict, None, None))


def neither(monkeypatch):
    """Put back no value of a parameter, and see none."""
    no_values(monkeypatch)
    unseen_parameters(monkeypatch)


MUTANTS = {
    "neither": (neither, lambda: check("Hidden", "first call")),
    "neither in a closure": (neither, lambda: check("HiddenByClosure", "evaluation first")),
    "neither in a matrix": (neither, lambda: check("Matrix", "new kind")),
    "no values": (no_values, lambda: check("Trained", "first call")),
    "vectors alone": (vectors_alone, lambda: check("Trained", "first call")),
    "not put back": (not_put_back, lambda: check("Trained", "first call")),
    "not told": (not_told, lambda: check_streaming("Trained", "first call")),
    "random zeros": (random_zeros_alone, lambda: check("Trained", "first call")),
    "unseen": (unseen_parameters, lambda: test_a_record("replaced_in_a_module", "train", "before")),
    "unseen, hidden": (
        unseen_parameters,
        lambda: test_a_record("replaced_in_a_hidden_module", "evaluate", "before"),
    ),
    "recomputed": (
        records_of_recomputation,
        lambda: test_a_record("replaced_in_a_hidden_module", "two at once", "before"),
    ),
}


@pytest.mark.fast("neither", "no values", "unseen")
@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant(mutant, monkeypatch):
    MUTANTS[mutant][0](monkeypatch)
    with pytest.raises((AssertionError, StreamBPError)):
        MUTANTS[mutant][1]()
