"""Weights that train, on the host: their gradients arrive there with the bits of weights on the
device.

covers: offload/gradients.py, offload/weights.py, integrations/in_backward.py
"""

from __future__ import annotations

import weakref

import pytest
import torch
from torch.optim import SGD, AdamW

from streambp.errors import BackwardError, ConfigError, HostMemoryError
from streambp.integrations.in_backward import optimizer_in_backward
from streambp.offload.gradients import GradientArrival
from streambp.offload.ranges import view_of
from streambp.offload.weights import HostWeights
from tests import zoo
from tests.families import build, make_batch
from tests.offload.test_weights import mutant
from tests.offload.weights_runs import FAMILIES, assert_same, invert, patched, step, weights_of
from tests.oracle import gradients, worst_error
from tests.tiers import thinned

pytestmark = pytest.mark.filterwarnings("ignore:Move the model to an accelerator")


def full(family="qwen3", dtype=torch.float32, weights="cpu", **settings):
    """A family's model that trains as a whole, patched."""
    model = build(family, num_hidden_layers=4) if family == "qwen3" else zoo.build(family)
    return patched(model.to(dtype).train(), weights, **settings)


def model_pair(family="qwen3", dtype=torch.float32, **settings):
    model = full(family, dtype, **settings)
    invert(model)
    return model, full(family, dtype, "device", **settings)


def of_layers(model):
    return [
        p
        for layer_state in weights_of(model).ranges.layer_states.values()
        for p in layer_state.layer.parameters()
    ]


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_families_give_the_same_bits(family, dtype):
    model, resident = model_pair(family, dtype)
    for _ in range(2):
        assert_same(step(model), step(resident))
    weights = weights_of(model)
    assert weights.device_bytes == 2 * max(
        layer.memory.numel() for layer in weights.ranges.layers.values()
    )
    assert all(layer.trains for layer in weights.ranges.layers.values())


def test_against_the_unpatched_model(float64_oracle):
    batch = make_batch("plain")
    loss, expected = gradients(build("qwen3").double().train(), **batch)
    model = patched(build("qwen3").double().train())
    invert(model)
    streamed_loss, ours = gradients(model, **batch)
    assert abs(float(streamed_loss - loss)) < 1e-12
    assert ours.keys() == expected.keys()
    assert worst_error(ours, expected) < 1e-11


def test_gradients_lie_in_their_layers_buffers():
    """Where autograd leaves them without a copy; a second micro-batch takes one buffer more, for
    all layers in turn."""
    model, resident = model_pair()
    assert_same(step(model, 1), step(resident, 1))
    weights = weights_of(model)
    spans = [
        (b.memory.data_ptr(), b.memory.data_ptr() + b.memory.numel()) for b in weights._buffers
    ]
    assert len(spans) == len(weights.ranges.layers)
    assert all(
        any(start <= p.grad.data_ptr() < stop for start, stop in spans) for p in of_layers(model)
    )
    assert (
        weights.ranges.gradient_bytes
        == sum(b.memory.numel() for b in weights._buffers)
        == weights.ranges.bytes
    )
    assert_same(step(model, 3), step(resident, 3))
    assert weights.ranges.gradient_bytes == weights.ranges.bytes + max(
        b.memory.numel() for b in weights._buffers
    )


def test_gradients_that_somebody_keeps_are_not_written_over():
    model, resident = model_pair()
    gradient_lists = []
    for tested_model in (model, resident):
        tested_model.zero_grad(set_to_none=True)
        tested_model(**make_batch("plain", seed=1), use_cache=False).loss.backward()
        gradient_lists.append([p.grad for p in tested_model.parameters()])
        tested_model.zero_grad(set_to_none=True)
        tested_model(**make_batch("plain", seed=2), use_cache=False).loss.backward()
    assert all(map(torch.equal, *gradient_lists))
    for tested_model in (model, resident):
        tested_model.zero_grad(set_to_none=False)
    results = [step_without_zeroing(tested_model) for tested_model in (model, resident)]
    assert_same(*results)


def step_without_zeroing(model):
    loss = model(**make_batch("plain", seed=5), use_cache=False).loss
    loss.backward()
    return [loss.detach()], {name: p.grad.clone() for name, p in model.named_parameters()}


def trained(model, steps=4, scaled=False):
    """Losses and weights of AdamW on two micro-batches a step, clipped; under float16 autocast with
    a scaler."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, enabled=scaled)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    losses = []
    for seed in range(steps):
        for micro_batch in range(2):
            with torch.autocast("cpu", torch.float16, enabled=scaled):
                loss = model(
                    **make_batch("plain", seed=10 * seed + micro_batch), use_cache=False
                ).loss
            scaler.scale(loss).backward()
            losses.append(loss.detach())
        scaler.unscale_(optimizer)
        # which overflows at first
        losses.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3).nan_to_num())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.full
@pytest.mark.parametrize("scaled", [False, True])
def test_accumulation_clipping_and_a_scaler(scaled):
    assert_same(trained(full(), scaled=scaled), trained(full(weights="device"), scaled=scaled))


def in_backward(model, make, steps=3):
    handle, losses = optimizer_in_backward(model, make), []
    for seed in range(steps):
        loss = model(**make_batch("plain", seed=seed), use_cache=False).loss
        loss.backward()
        losses.append(loss.detach())
        assert all(p.grad is None for p in model.parameters())
    handle.remove()
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}


def after_backward(model, make, steps=3):
    optimizer, losses = make(list(model.parameters())), []
    for seed in range(steps):
        loss = model(**make_batch("plain", seed=seed), use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}


OPTIMIZERS = {
    "AdamW": lambda parameters: AdamW(parameters, lr=1e-2),
    "fused AdamW": lambda parameters: AdamW(parameters, lr=1e-2, fused=True),
    "SGD": lambda parameters: SGD(parameters, lr=1e-1, momentum=0.9),
}


@pytest.mark.full
@pytest.mark.parametrize("name", thinned(list(OPTIMIZERS), lambda name: name == "fused AdamW"))
def test_an_optimizer_in_backward_is_one_after_it(name):
    model, make = full(), OPTIMIZERS[name]
    expected = after_backward(full(weights="device"), make)
    assert_same(in_backward(model, make), expected)
    weights = weights_of(model)
    assert weights.ranges.gradient_bytes <= 2 * max(
        layer.memory.numel() for layer in weights.ranges.layers.values()
    )
    resident = full(weights="device")
    assert_same(in_backward(resident, make), expected)


def test_eight_bit_states_in_backward():
    """Of bitsandbytes, which computes on a CPU, too."""
    library = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")

    def make(parameters):
        return library.optim.AdamW8bit(parameters, lr=1e-2, min_8bit_size=256)

    assert_same(in_backward(full(), make), after_backward(full(weights="device"), make))


@pytest.mark.full
def test_an_optimizer_in_backward_keeps_its_state():
    def run(resumed):
        model = full()
        handle = optimizer_in_backward(model, OPTIMIZERS["AdamW"])
        for seed in range(4):
            if seed == 2 and resumed:
                state = handle.state_dict()
                handle.remove()
                handle = optimizer_in_backward(model, OPTIMIZERS["AdamW"])
                handle.load_state_dict(state)
            model(**make_batch("plain", seed=seed), use_cache=False).loss.backward()
        return [torch.zeros(1)], {name: p.detach().clone() for name, p in model.named_parameters()}

    assert_same(run(True), run(False))


def test_clipping_by_global_norm_is_refused():
    model = full()
    with pytest.raises(ConfigError, match="global norm"):
        optimizer_in_backward(model, OPTIMIZERS["SGD"], max_grad_norm=1.0)
    handle = optimizer_in_backward(model, OPTIMIZERS["SGD"])
    with pytest.raises(ConfigError, match="already"):
        optimizer_in_backward(model, OPTIMIZERS["SGD"])
    handle.remove()
    optimizer_in_backward(model, OPTIMIZERS["SGD"], max_grad_norm=None).remove()


def test_host_memory_counts_gradients():
    model = full(host_memory=200_000)
    with torch.no_grad():
        model(**make_batch("plain"), use_cache=False)
    size = weights_of(model).ranges.bytes
    model = full(host_memory=size + size // 2)
    with pytest.raises(HostMemoryError, match="The gradients of a layer want"):
        step(model, 1)
    model = full(host_memory=2 * size)
    step(model, 1)


@pytest.mark.full
def test_some_layers_train_and_others_are_frozen():
    results = []
    for weights in ("cpu", "device"):
        model = build("qwen3", num_hidden_layers=4)
        model.model.layers[:2].requires_grad_(False)
        patched(model.train(), weights)
        if weights == "cpu":
            invert(model)
        results.append([step(model), step(model)])
    for ours, theirs in zip(*results, strict=True):
        assert_same(ours, theirs)


@pytest.mark.full
def test_an_error_in_backward_leaves_the_model_usable():
    model, resident = model_pair()
    expected = step(resident)
    assert_same(step(model), expected)
    parameter = weights_of(model).ranges.layer_states[1].layer.mlp.up_proj.weight

    def fail(gradient):
        raise RuntimeError("no")

    handle = parameter.register_hook(fail)
    with pytest.raises(RuntimeError, match="no"):
        step(model)
    handle.remove()
    for _ in range(2):
        assert_same(step(model), expected)


# -- mutants


def test_mutant_a_buffer_that_is_used_again_too_early(monkeypatch):
    mutant(
        monkeypatch,
        HostWeights,
        "send_gradients",
        "all(storage() is None for storage in candidate.gradient_storages)",
        "True",
    )
    with pytest.raises(AssertionError):
        test_gradients_that_somebody_keeps_are_not_written_over()


@pytest.mark.full
def test_mutant_a_buffer_that_is_never_free(monkeypatch):
    mutant(
        monkeypatch,
        HostWeights,
        "send_gradients",
        "all(storage() is None for storage in candidate.gradient_storages)",
        "not candidate.gradient_storages",
    )
    with pytest.raises(AssertionError):
        test_gradients_lie_in_their_layers_buffers()


@pytest.mark.full
def test_mutant_a_step_that_is_taken_for_a_layers(monkeypatch):
    """Slots that outlive a forward hold weights from before the optimizer's step."""
    mutant(monkeypatch, type(weights_of(full())), "begin", "slot.index = -1", "pass")
    mutant(monkeypatch, type(weights_of(full())), "_start", "slot.index = -1", "pass")
    with pytest.raises((AssertionError, BackwardError)):
        test_an_optimizer_in_backward_is_one_after_it("fused AdamW")


def test_what_sees_a_storage_sees_it_go():
    gradient = view_of(torch.empty(64, dtype=torch.uint8), 0, torch.empty(4))
    storage_ref = weakref.ref(gradient.untyped_storage())
    alias = gradient[1:]
    del gradient
    assert storage_ref() is not None
    del alias
    assert storage_ref() is None


def test_weights_go_into_their_layer_as_they_are():
    weight = torch.nn.Parameter(torch.randn(3))
    (layer_input,) = GradientArrival.apply([], weight)
    assert layer_input.data_ptr() == weight.data_ptr()
    layer_input.sum().backward()
    assert torch.equal(weight.grad, torch.ones(3))
