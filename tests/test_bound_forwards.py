"""Libraries bind, wrap, copy and write what stands in a patched model's forward as if it were a
function.

covers: instance_forward.py
"""

from __future__ import annotations

import copy
import functools
import io
import pickle
import types

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

import streambp
from streambp import instance_forward
from tests.families import build, make_batch
from tests.model.test_contract import CONFIG
from tests.oracle import gradients, relative_l2, worst_error

BATCH = make_batch("left-padded")
IDS = BATCH["input_ids"]
FLOAT32, BF16 = 1e-5, 5e-2  # relative L2; rounding to bf16 alone moves these gradients by 1e-2


@pytest.fixture(autouse=True)
def accelerators():
    """Others may have left accelerate's settings, which are a process's own."""
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


def use_model(model, rounds):
    """Loss and gradients of a step; what the model generates, in eval mode, before it."""
    model.eval()
    tokens = model.generate(
        input_ids=IDS[:1, :5], max_new_tokens=4, do_sample=False, use_cache=True, pad_token_id=0
    )
    model.train()
    return tokens, gradients(model, **BATCH)[1], rounds


def assert_same(ours, stock):
    (tokens, grads, bar), (expected_made, expected, _) = ours, stock
    assert torch.equal(tokens, expected_made)
    assert relative_l2(grads, expected) <= bar
    # Where the bar is float32's, a run in bf16 does not pass for one.
    assert bar == FLOAT32 or relative_l2(grads, expected) > FLOAT32


@pytest.mark.fast(3)
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("precision", ["bf16", "no"])
@pytest.mark.parametrize("order", ["patch, prepare", "prepare, patch"])
def test_accelerate_prepares_and_unwraps(order, precision, keep):
    accelerator = Accelerator(mixed_precision=precision, cpu=True)
    runs = []
    for streamed in (False, True):
        model = build("llama", torch.float32)
        for act in order.split(", ") if streamed else ["prepare"]:
            model = (
                accelerator.prepare(model) if act == "prepare" else streambp.patch(model, CONFIG)
            )
        bar = BF16 if precision == "bf16" else FLOAT32
        results = [use_model(model, bar)]
        model = accelerator.unwrap_model(model, keep_fp32_wrapper=keep)
        bar = bar if keep else FLOAT32
        results.append(use_model(model, bar))
        if streamed:
            assert {layer.path for layer in streambp.describe(model).layers} == {"streams"}
            streambp.unpatch(model)
            assert not streambp.model.installed_patch.is_patched(model)
        results.append((*use_model(model, bar)[:2], FLOAT32))
        runs.append(results)
    for stock, ours in zip(*runs, strict=True):
        assert_same(ours, stock)


def by_method(model):
    model.forward = types.MethodType(model.forward, model)
    return model


def by_wraps(model):
    real_forward = model.forward
    model.forward = functools.wraps(real_forward)(
        lambda *args, **kwargs: real_forward(*args, **kwargs)
    )
    return model


def by_wraps_bound(model):
    real_forward = model.forward

    @functools.wraps(real_forward)
    def forward(self, *args, **kwargs):
        return real_forward(self, *args, **kwargs)

    model.forward = types.MethodType(forward, model)
    return model


def by_compile(model):
    model.forward = torch.compile(model.forward, backend="eager")
    return model


KINDS = {
    "types.MethodType": by_method,
    "types.MethodType, deep copy": lambda model: copy.deepcopy(by_method(model)),
    "functools.wraps": by_wraps,
    "functools.wraps, bound": by_wraps_bound,
    "torch.compile of its forward": by_compile,
    "copy.copy": copy.copy,
    "copy.deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
}


@pytest.mark.fast(3)
@pytest.mark.usefixtures("float64_oracle")
@pytest.mark.parametrize("kind", KINDS)
def test_a_forward_that_was_bound_as_a_function(kind):
    torch._dynamo.reset()
    stock = use_model(build("llama", torch.float64), 0)
    ours = KINDS[kind](streambp.patch(build("llama", torch.float64), CONFIG))
    for patched in (True, False):
        tokens, grads, _ = use_model(ours, 0)
        assert torch.equal(tokens, stock[0])
        assert worst_error(grads, stock[1]) <= 1e-10
        assert streambp.model.installed_patch.is_patched(ours) == patched
        if patched:
            assert {layer.path for layer in streambp.describe(ours).layers} == {"streams"}
            streambp.unpatch(ours)


def test_a_copy_of_a_bound_forward_runs_its_own_weights():
    ours = by_method(streambp.patch(build("llama"), CONFIG))
    twin = copy.deepcopy(ours)
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(1.5)
    expected = gradients(streambp.unpatch(copy.deepcopy(twin)), **BATCH)[1]
    assert relative_l2(gradients(twin, **BATCH)[1], expected) <= FLOAT32
    assert relative_l2(gradients(ours, **BATCH)[1], expected) > 1e-2


def test_a_file_of_torch_save_has_the_unpatched_model():
    stock, ours = build("llama"), streambp.patch(build("llama"), CONFIG)
    gradients(ours, **BATCH)
    file = io.BytesIO()
    torch.save(ours, file)
    assert b"streambp" not in file.getvalue()
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert [list(module.__dict__) for module in loaded.modules()] == [
        list(module.__dict__) for module in stock.modules()
    ]
    assert worst_error(gradients(loaded, **BATCH)[1], gradients(stock, **BATCH)[1]) == 0
    assert streambp.describe(ours).layers


def test_nothing_is_left_on_an_unpatched_model():
    stock, ours = build("llama"), streambp.patch(build("llama"), CONFIG)
    assert instance_forward.REDUCE_METHOD in ours.__dict__
    streambp.unpatch(ours)
    assert [list(module.__dict__) for module in ours.modules()] == [
        list(module.__dict__) for module in stock.modules()
    ]


@pytest.mark.parametrize("mutant", ["keeps its module", "knows no bound one"])
def test_mutant(mutant, monkeypatch):
    base = instance_forward.InstanceForward
    if mutant == "keeps its module":
        monkeypatch.setattr(
            base, "__call__", lambda self, *args, **kwargs: self.call(*args, **kwargs)
        )
    else:
        monkeypatch.setattr(base, "is_replacement", lambda self, forward: forward is self)
    with pytest.raises((AssertionError, TypeError, AttributeError)):
        test_a_forward_that_was_bound_as_a_function("types.MethodType")
