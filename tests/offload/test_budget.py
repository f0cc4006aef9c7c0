"""A budget for the device: the last layers' tensors stay while there is room, prefixes stream when
there is none.

covers: offload/engines.py, offload/manager.py
"""

from __future__ import annotations

import gc
import itertools

import pytest
import torch

import streambp
from streambp.offload import engines, manager, manager_of
from tests import zoo
from tests.families import LENGTH, build, make_batch
from tests.offload.runs import (
    BOTH_SAVES,
    SAVES,
    assert_same,
    forward,
    layer_bytes,
    model_with,
    offloaded,
    prefix_bytes,
    sampled,
    step,
)
from tests.oracle import worst_error
from tests.tiers import thinned


@pytest.mark.fast("0.5")
@pytest.mark.parametrize("layers", thinned([0.5, 1, 2.2, 4], lambda layers: layers in (0.5, 2.2)))
def test_last_layers_stay_while_the_device_has_room(layers):
    expected = step(model_with(("attn_out", "kv")))
    model = offloaded(gpu_memory=prefix_bytes() + int(layers * layer_bytes()))
    for _ in range(2):
        loss = forward(model, 1)
        layer_sizes = [layer().resident_bytes for layer in manager_of(model)._current().stores]
        stay = min(int(layers), 2)  # the first layer's size is not known before it has run
        assert [bool(k) for k in layer_sizes] == [index >= 3 - stay for index in range(3)]
        assert manager_of(model).resident_bytes <= layers * layer_bytes()
        loss.backward()
        assert manager_of(model).resident_bytes == 0
        assert_same(step(model), expected)
    assert "on the device" in str(streambp.describe(model))


@pytest.mark.full
@pytest.mark.parametrize("gpu_memory", [None, 1, "1GiB"])
def test_products_are_moved_or_stay(gpu_memory):
    saves = ("attn_out", "mlp.*", "self_attn.?_proj")
    expected = step(model_with(saves), "left-padded")
    model = offloaded(saves, gpu_memory=gpu_memory)
    for _ in range(2):
        assert_same(step(model, "left-padded"), expected)


@pytest.mark.full
def test_a_second_micro_batch_finds_the_device_full():
    model = offloaded(gpu_memory=prefix_bytes() + 2 * layer_bytes())
    first, second = forward(model, 1), forward(model, 2)
    assert manager_of(model).resident_bytes <= 2 * layer_bytes()
    sent_bytes = manager_of(model).transfers.bytes[engines.TO_HOST_QUEUE]
    del first, second
    gc.collect()
    assert manager_of(model).resident_bytes == 0
    forward(model, 1)
    assert manager_of(model).transfers.bytes[engines.TO_HOST_QUEUE] - sent_bytes < sent_bytes / 2


def test_inputs_that_stay_must_not_change():
    model = offloaded(gpu_memory="1GiB")
    inputs = []
    hook = model.model.layers[2].register_forward_pre_hook(
        lambda module, args: inputs.append(args[0])
    )
    loss = forward(model, 1)
    hook.remove()
    with torch.no_grad():
        inputs[-1].add_(1.0)
    with pytest.raises(streambp.StreamBPError, match="changed in place"):
        loss.backward()


@pytest.mark.parametrize("chunk_size", [LENGTH, LENGTH - 1])
def test_inputs_on_the_host_may_change(chunk_size):
    """Also where a chunk is the caller's whole tensor, and where its source still waits on the
    device."""
    settings = streambp.StreamConfig(chunk_size=chunk_size, saves=(), offload="cpu")
    model = streambp.patch(build("qwen3", num_hidden_layers=3), settings)
    expected = step(model)
    model.zero_grad()
    inputs = []
    hooks = [
        layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
        for layer in model.model.layers
    ]
    loss = model(**make_batch("plain"), use_cache=False).loss
    for hook in hooks:
        hook.remove()
    with torch.no_grad():
        for hidden_states in inputs:
            hidden_states.mul_(3.0)
    loss.backward()
    assert_same((loss.detach(), {name: p.grad for name, p in model.named_parameters()}), expected)


PREFIXES = (("plain", (), 0.01), ("left-padded", BOTH_SAVES, 0.95))


@pytest.mark.full
@pytest.mark.parametrize(
    ("mode", "saves", "share"),
    sampled(
        lambda mode, saves, share: (mode, saves, share) in PREFIXES,
        ["plain", "left-padded", "packed"], SAVES, [0.01, 0.95],
    ),
)  # fmt: skip
def test_streamed_prefixes_change_no_bit(mode, saves, share):
    """share: of the prefix, that the device has room for; nothing of it stays, or some of its
    tiles."""
    length = 64
    expected = step(model_with(saves), **make_batch(mode, length=length))
    model = offloaded(saves, gpu_memory=int(share * prefix_bytes(2 * length)))
    for _ in range(2):
        assert_same(step(model, **make_batch(mode, length=length)), expected)
    plain = offloaded(saves)
    step(plain, **make_batch(mode, length=length))
    assert manager_of(model).stats()["bytes_back"] > manager_of(plain).stats()["bytes_back"]


@pytest.mark.fast("gptj", "mistral")
@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "deepseek_v3", "mistral", "gptj"])
def test_streamed_prefixes_of_other_attentions(name):
    """Softcap, windows, sinks, shared keys and values, values of another size than keys, an
    attention of its own."""
    batch = make_batch("plain", length=40)
    expected = step(model_with(("kv",), zoo.build(name, torch.float32)), **batch)
    assert_same(
        step(offloaded(("kv",), zoo.build(name, torch.float32), gpu_memory=1), **batch), expected
    )


@pytest.mark.full
def test_streamed_prefixes_and_hidden_states_that_are_not_contiguous(float64_oracle):
    """Gemma 3n's keys and values are shared between layers; see test_offload.py for what its
    strides do."""
    batch = make_batch("plain", length=40)
    (_, expected), (_, actual) = (
        step(make(("kv",), zoo.build("gemma3n_text", torch.float64), **settings), **batch)
        for make, settings in ((model_with, {}), (offloaded, {"gpu_memory": 1}))
    )
    assert worst_error(actual, expected) <= 1e-10


@pytest.mark.fast("0.4-recompute")
@pytest.mark.parametrize(
    ("share", "on_host_full"),
    thinned(
        itertools.product([0.0, 0.4], ["keep", "recompute"]),
        lambda share, on_host_full: on_host_full == ("recompute" if share else "keep"),
    ),
)
def test_streamed_prefixes_with_a_host_that_is_too_small(share, on_host_full):
    expected = step(model_with(("attn_out", "kv")))
    host_memory = int(share * 3 * (layer_bytes() + prefix_bytes())) + 1
    model = offloaded(gpu_memory=1, host_memory=host_memory, on_host_full=on_host_full)
    for _ in range(2):
        assert_same(step(model), expected)
    assert manager_of(model).host_bytes <= host_memory


def test_streamed_prefixes_under_autocast_and_frozen_attention():
    def frozen(**settings):
        model = model_with(("kv",), **settings)
        for parameter in [
            *model.model.embed_tokens.parameters(),
            *model.model.layers[0].self_attn.parameters(),
        ]:
            parameter.requires_grad_(False)
        return model

    with torch.autocast("cpu", torch.bfloat16):
        expected, actual = (
            step(frozen(**settings)) for settings in ({}, {"offload": "cpu", "gpu_memory": 1})
        )
    assert_same(actual, expected)


def test_evaluation_streams_its_prefix(monkeypatch):
    expected, model = model_with(), offloaded(gpu_memory=1)
    with torch.no_grad():
        assert torch.equal(forward(model, 1), forward(expected, 1))
    assert manager_of(model).stats()["bytes_back"] > 0
    gc.collect()
    assert not list(manager_of(model)._holdings)


@pytest.mark.parametrize("saves", [(), ("kv",)], ids=["kv computed again", "kv saved"])
def test_host_bytes_of_a_streamed_prefix_are_the_formulas(saves):
    """All tiles but the last: accumulators, and K and V unless they are saved; one layer's, used
    again by the next."""
    model = offloaded(saves, gpu_memory=1, rows="as_given")
    step(model)
    reservations = []
    real = manager.HostTensors.reserve

    def reserve(self, size):
        real(self, size)
        reservations.append((self._holding.stack, size))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manager.HostTensors, "reserve", reserve)
        step(model)
    tokens = 2 * (LENGTH // 5) * 5
    assert len({id(stack) for stack, _ in reservations}) == 1
    assert max(size for _, size in reservations) == prefix_bytes(tokens) // (2 if saves else 1)
    assert reservations[0][0].size == max(size for _, size in reservations)


def test_a_forward_brings_nothing_back_that_only_backward_reads():
    model = offloaded(gpu_memory=1)
    loss = forward(model, 1)
    assert not manager_of(model)._current().arriving
    loss.backward()
