"""What others put inside a layer may look at absolute positions: then the layer runs whole. [Note:
foreign insides]

covers: admission/third_party.py, admission/long_trial.py, admission/probe.py, admission/rehearsal.py
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import queue

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import streambp
from streambp.admission import long_trial, probe, rehearsal, third_party
from tests import zoo
from tests.families import build, make_batch
from tests.oracle import gradients, worst_error
from tests.tiers import thinned
from tests.versions import HYBRID_PATHS

LENGTH = 150
# trials of sharing run layers as well
CONFIG = streambp.StreamConfig(chunk_size=32, rows="as_given")
CONFIG_AS_GIVEN = streambp.StreamConfig(chunk_size=7, documents="as_given", rows="as_given")
FLOAT64_ORACLE = pytest.mark.usefixtures("float64_oracle")
STEERING_VECTOR = torch.linspace(-1, 1, 32, dtype=torch.float64)
ORIGINAL_CAT = torch.cat(
    (torch.ones(40), (torch.arange(400) % 3 > 0).float())
).double()  # of all positions, the first alike


def adds_in_place(module, args, out):
    out[:, 100:120] += STEERING_VECTOR


def adds(module, args, out):
    steered = torch.zeros_like(out)
    steered[:, 100:120] = STEERING_VECTOR
    return out + steered


def adds_if_long(module, args, out):
    if out.shape[1] > 110:
        out = out.clone()
        out[:, 110] += STEERING_VECTOR
        return out
    return None


def masks(module, args, out):
    return out * ORIGINAL_CAT[: out.shape[1], None]


def shifted(x):
    """Each token also gets the one 16 before it."""
    return x + 0.5 * F.pad(x, (0, 0, 16, 0))[:, : x.shape[1]]


def shifts_input(module, args):
    return (shifted(args[0]),)


class Shifting(torch.nn.Module):
    def __init__(self, mlp):
        super().__init__()
        self.mlp = mlp

    def forward(self, x):
        return self.mlp(shifted(x))


def by_hook(hook):
    return lambda layer: layer.mlp.register_forward_hook(hook)


def by_instance_forward(layer):
    real_forward = layer.mlp.forward
    layer.mlp.forward = lambda x: real_forward(shifted(x))


def by_own_forward(layer):
    real_forward = layer.forward
    layer.forward = lambda x, **kwargs: real_forward(shifted(x), **kwargs)


FOREIGN_MODULES = {
    "in place": by_hook(adds_in_place),
    "given back": by_hook(adds),
    "if it is long": by_hook(adds_if_long),
    "a mask of all positions": by_hook(masks),
    "a pre-hook": lambda layer: layer.mlp.register_forward_pre_hook(shifts_input),
    "a module": lambda layer: setattr(layer, "mlp", Shifting(layer.mlp)),
    "an inner forward": by_instance_forward,
    "the layer's own forward": by_own_forward,
}


def changed_model(way, model=None):
    model = model or build("qwen3", torch.float64)
    way(model.model.layers[1])
    return model


def paths(model):
    return [layer.path for layer in streambp.describe(model).layers]


@pytest.mark.fast(12)
@FLOAT64_ORACLE
# Frozen layers are tried by their outputs alone: one hook and one forward show it.
@pytest.mark.parametrize(
    ("way", "frozen"),
    thinned(
        itertools.product(FOREIGN_MODULES, [False, True]),
        lambda way, frozen: not frozen or way in ("in place", "the layer's own forward"),
    ),
)
def test_absolute_positions_run_whole(way, frozen):
    """12 random tokens show nothing of it."""
    batch = make_batch("left-padded", length=LENGTH)
    models = [changed_model(FOREIGN_MODULES[way]) for _ in range(2)]
    for model in models:
        model.model.layers.requires_grad_(not frozen)
    expected = gradients(models[0], **batch)[1]
    ours = streambp.patch(models[1], CONFIG)
    for _ in range(2):
        assert worst_error(gradients(ours, **batch)[1], expected) <= 1e-10
    assert paths(ours) == ["streams", "checkpoints"]
    assert f"over {LENGTH} tokens at once" in streambp.describe(ours).layers[1].reason
    assert "test_foreign_insides" in streambp.describe(ours).layers[1].reason
    with torch.no_grad():
        assert (
            abs(ours(**batch, use_cache=False).loss - models[0](**batch, use_cache=False).loss)
            <= 1e-12
        )


@FLOAT64_ORACLE
def test_mutant_without_a_long_trial(monkeypatch):
    monkeypatch.setattr(probe, "why_not_at_length", lambda call: None)
    with pytest.raises(AssertionError):
        test_absolute_positions_run_whole("given back", False)


@pytest.fixture
def trials(monkeypatch):
    """Lengths of the trials at a call's own length."""
    lengths = []
    real = long_trial.why_not_at_length
    monkeypatch.setattr(
        probe, "why_not_at_length", lambda call: lengths.append(call.plan.length) or real(call)
    )
    return lengths


@FLOAT64_ORACLE
def test_a_longer_call_is_tried_again(trials):
    """Positions from 100 on are out of sight until then; shorter calls need no trial."""
    stock, ours = (
        changed_model(FOREIGN_MODULES["given back"]),
        streambp.patch(changed_model(FOREIGN_MODULES["given back"]), CONFIG),
    )
    for length, expected_paths in (
        (70, "streams"),
        (90, "streams"),
        (60, "streams"),
        (LENGTH, "checkpoints"),
    ):
        batch = make_batch("plain", length=length)
        assert worst_error(gradients(ours, **batch)[1], gradients(stock, **batch)[1]) <= 1e-10
        assert paths(ours) == ["streams", expected_paths]
    assert trials == [70, 90, LENGTH]


class Gated(torch.nn.Module):
    """Token by token, as an adapter of a user's own."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.gate = torch.nn.Parameter(torch.rand(32, dtype=next(inner.parameters()).dtype))

    def forward(self, x):
        return self.inner(x * self.gate) * torch.sigmoid(x)


@pytest.mark.fast(6)
@FLOAT64_ORACLE
@pytest.mark.parametrize(
    ("family", "mode"),
    thinned(
        itertools.product(
            ["qwen3", "gptj", "lfm2", "qwen3_moe"], ["plain", "left-padded", "packed"]
        ),
        lambda family, mode: (
            family == "qwen3" or mode == ("packed" if family == "lfm2" else "left-padded")
        ),
    ),
)
def test_token_by_token_streams(family, mode, trials):
    stock = build(family, torch.float64) if family == "qwen3" else zoo.build(family)
    layers = getattr(stock, "model", None) or stock.transformer
    layers = getattr(layers, "layers", None) or layers.h
    child_name = next(
        name for name, module in layers[0].named_children() if name in ("mlp", "feed_forward")
    )
    setattr(layers[0], child_name, Gated(getattr(layers[0], child_name)))
    layers[1].register_forward_pre_hook(lambda module, args: None)
    getattr(layers[1], child_name).register_forward_hook(lambda module, args, out: out)
    ours = streambp.patch(copy.deepcopy(stock), CONFIG_AS_GIVEN)
    batch = make_batch(mode)
    for _ in range(2):
        assert worst_error(gradients(ours, **batch)[1], gradients(stock, **batch)[1]) <= 1e-10
    assert set(paths(ours)) == (HYBRID_PATHS if family == "lfm2" else {"streams"})
    assert trials == [23] * list(paths(ours)).count("streams")


@pytest.mark.fast(2)
@pytest.mark.parametrize(
    ("family", "dtype"),
    thinned(
        itertools.product(["qwen3", "qwen3_moe"], [torch.float32, torch.bfloat16]),
        lambda family, dtype: (family == "qwen3") == (dtype == torch.bfloat16),
    ),
)
def test_rounding_is_no_difference(family, dtype):
    model = build(family, dtype) if family == "qwen3" else zoo.build(family, dtype)
    for layer in model.model.layers:
        layer.mlp = Gated(layer.mlp)
    streambp.patch(model, CONFIG)(
        **make_batch("plain", length=1000), use_cache=False
    ).loss.backward()
    assert set(paths(model)) == {"streams"}


@pytest.mark.fast(3)
@FLOAT64_ORACLE
@pytest.mark.parametrize("kind", ["collects", "collects if it is told to", "logs"])
def test_who_only_looks_on_needs_no_trial(kind, trials):
    """Numbers out of sight it sees once for each chunk; tensors make the layer run whole."""
    records, is_on = queue.SimpleQueue(), [True]

    def collect(module, args, out):
        if is_on:
            records.put(out.detach())

    def logs(module, args, out):
        for x in args:
            records.put(float(x.detach().norm()))

    hook = {"collects": lambda m, args, out: records.put(out.detach()), "logs": logs}.get(
        kind, collect
    )
    stock, ours = build("qwen3", torch.float64), build("qwen3", torch.float64)
    ours.model.layers[1].mlp.register_forward_hook(hook)
    streambp.patch(ours, CONFIG)
    batch = make_batch("plain", length=LENGTH)
    assert worst_error(gradients(ours, **batch)[1], gradients(stock, **batch)[1]) <= 1e-10
    assert trials == []
    assert not records.empty()
    assert paths(ours) == ["streams", "streams" if kind == "logs" else "checkpoints"]


def test_memory_that_does_not_suffice(monkeypatch):
    """Fewer tokens are tried then, and `describe` says how many."""
    real = long_trial._chunks_agree
    chunk_counts = []

    def scarce(call, chunks):
        chunk_counts.append(chunks)
        if chunks > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(call, chunks)

    monkeypatch.setattr(long_trial, "_chunks_agree", scarce)
    ours = streambp.patch(
        changed_model(lambda layer: setattr(layer, "mlp", Gated(layer.mlp))), CONFIG
    )
    ours(**make_batch("plain", length=LENGTH), use_cache=False).loss.backward()
    assert chunk_counts == [5, 2]
    reason = streambp.describe(ours).layers[1].reason
    assert reason == f"{__name__}.forward tried on 64 tokens at once, no more did fit"


@pytest.mark.parametrize(
    ("hook", "may"), [(adds_if_long, True), (adds_in_place, False), (masks, False), (print, False)]
)
def test_what_a_hooks_source_tells(hook, may):
    """Those without a branch do on few tokens what they do on many, and are watched."""
    assert third_party._may_change(hook) is may


@pytest.mark.parametrize(
    "family", ["qwen3", "gemma3", "qwen3_moe", "lfm2", "jamba", "gptj", "bamba"]
)
def test_nothing_of_transformers_is_foreign(family):
    model = build(family) if family in ("qwen3", "gemma3") else zoo.build(family)
    assert third_party.foreign_parts(model, None) == []


def edits(module, grad_input, grad_output):
    grad = grad_input[0].clone()
    grad[:, 100:120] *= 3
    return (grad,)


def edits_if_long(module, grad_output):
    if grad_output[0].shape[1] > 110:
        grad = grad_output[0].clone()
        grad[:, 110] *= 3
        return (grad,)
    return None


def counts(module, grad_input, grad_output):
    module.token_count = grad_output[0].shape[1]


def with_backward_hook(hook):
    model = build("qwen3", torch.float64)
    for layer in model.model.layers:
        full = hook is not edits_if_long
        (
            layer.mlp.register_full_backward_hook
            if full
            else layer.mlp.register_full_backward_pre_hook
        )(hook)
    return model


def check_backward_hook(hook, changes_gradients):
    stock, batch = with_backward_hook(hook), make_batch("plain", LENGTH)
    model = streambp.patch(copy.deepcopy(stock), CONFIG)
    for _ in range(2):
        _, expected = gradients(stock, **batch)
        _, grads = gradients(model, **batch)
        assert worst_error(grads, expected) <= 1e-10
    assert ("changes gradients inside it" in str(streambp.describe(model))) is changes_gradients


@FLOAT64_ORACLE
@pytest.mark.parametrize("hook", [edits, edits_if_long])
def test_hooks_that_change_gradients_make_the_layer_run_whole(hook):
    """No run of a few tokens tells by which places they go."""
    check_backward_hook(hook, changes_gradients=True)


@FLOAT64_ORACLE
def test_backward_hooks_that_look_on_stream():
    check_backward_hook(counts, changes_gradients=False)


@FLOAT64_ORACLE
def test_mutant_backward_hooks_are_not_watched(monkeypatch):
    monkeypatch.setattr(probe, "BACKWARD_HOOKS", ())
    with pytest.raises(AssertionError):
        check_backward_hook(edits, changes_gradients=True)


def doubles(module, args, out):
    return out * 2


def in_a_checkpoint(model):
    batch = make_batch("plain")
    loss = checkpoint(lambda: model(**batch, use_cache=False).loss, use_reentrant=False)
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@FLOAT64_ORACLE
def test_a_checkpoint_around_the_model_sees_no_trial(monkeypatch):
    """A trial's graph saves tensors that the checkpoint's recomputation does not meet again."""
    stock = changed_model(by_hook(doubles))
    expected = gradients(stock, **make_batch("plain"))[1]
    ours = streambp.patch(changed_model(by_hook(doubles)), CONFIG_AS_GIVEN)
    assert worst_error(in_a_checkpoint(ours), expected) <= 1e-10
    assert set(paths(ours)) == {"streams"}
    mutant = streambp.patch(changed_model(by_hook(doubles)), CONFIG_AS_GIVEN)
    saves = torch.autograd.graph.saved_tensors_hooks
    monkeypatch.setattr(
        rehearsal.torch.autograd.graph,
        "saved_tensors_hooks",
        lambda pack, unpack: (
            contextlib.nullcontext() if pack is torch.Tensor.detach else saves(pack, unpack)
        ),
    )
    with pytest.raises((AssertionError, RuntimeError)):
        in_a_checkpoint(mutant)
