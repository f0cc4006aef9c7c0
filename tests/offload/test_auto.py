"""offload="auto": what it chooses from what it measures, and that it says so.

covers: offload/costs.py, offload/link.py, offload/engines.py, offload/policy.py
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from types import SimpleNamespace

import pytest
import torch

import streambp
from streambp.model.record import offload_text
from streambp.offload import manager_of
from streambp.offload.costs import (
    Cost,
    ForwardMeasurement,
    LayerCost,
    LinearOutput,
    ObservedCosts,
    StepFigures,
    attention_rate,
)
from streambp.offload.engines import COMPUTE_QUEUE, TO_HOST_QUEUE, DeviceMemory, Engine
from streambp.offload.policy import SavesPolicy
from tests.families import LENGTH, build, make_batch
from tests.offload.runs import assert_same, layer_bytes, model_with, prefix_bytes, step

LAYERS = 36


def qwen3_8b(length):
    """A forward of 36 layers in bf16."""
    tokens = length * LAYERS
    products = {
        "mlp.gate_proj": LinearOutput(tokens * 12288 * 2, 2.0 * tokens * 4096 * 12288),
        "mlp.up_proj": LinearOutput(tokens * 12288 * 2, 2.0 * tokens * 4096 * 12288),
        "self_attn.q_proj": LinearOutput(tokens * 4096 * 2, 2.0 * tokens * 4096 * 4096),
    }
    return Cost(
        tokens * 8192,
        tokens * (8192 + 128),
        tokens * 4096,
        4.0 * 128 * 32 * length / 2 * tokens,
        products,
    )


def h200(length, **changes):
    """Sustained rates of DESIGN.md, and the seconds they give."""
    cost = qwen3_8b(length)
    dense = 2.0 * length * LAYERS * 193e6
    seconds = cost.attention_flops / 606e12 + dense / 600e12
    return ForwardMeasurement(
        length,
        length,
        **{"seconds": seconds, "link": 46e9, "attention": 606e12, "host": math.inf, **changes},
    )


class Choice:
    """What a model of one layer that costs so much saves, on the host and so many bytes of the
    device, in chunks of a quarter of the row. With `is_measured` a step has measured these
    bytes."""

    def __init__(
        self, cost, measured, host=math.inf, device=0.0, is_measured=False, chunk_fraction=0.25
    ):
        measured = dataclasses.replace(measured, host=host)
        self.manager = SimpleNamespace(staying=None)
        link = SimpleNamespace(
            begin=lambda length: measured,
            room_on_device=lambda tokens: device,
            is_measured=is_measured,
            manager=self.manager,
        )
        policy = SavesPolicy(
            1, lambda device: None, lambda device: (StepFigures(), 0.0), False, True, link
        )
        policy.figures.costs[0] = LayerCost(
            torch.device("cpu"), cost, 0.0, measured.tokens, measured.length, 1
        )
        chunk = int(measured.length * chunk_fraction)
        policy._begin_on_host(link, measured.length, measured.length, chunk)
        self.latest = policy.latest
        self.saves, self.measured = tuple(self.latest.layers), measured
        self.bytes = self.latest.leaving
        self.copying = self.bytes / measured.link


@pytest.mark.parametrize(
    ("length", "is_saved"), [(8192, False), (12800, False), (13600, True), (131072, True)]
)
def test_attention_is_saved_from_13k_tokens_on(length, is_saved):
    choice = Choice(qwen3_8b(length), h200(length, seconds=1e9), math.inf)
    assert ("attn_out" in choice.saves) == is_saved
    assert ("attending again is faster" in offload_text(choice.latest)) != is_saved


def test_saves_come_in_order_until_the_link_is_full():
    cost = qwen3_8b(65536)
    sizes = {"x": cost.x, "attn_out": cost.attn_out, "kv": cost.kv}
    sizes |= {name: product.bytes for name, product in cost.products.items()}
    order = ["attn_out", "kv", "mlp.gate_proj", "mlp.up_proj", "self_attn.q_proj"]
    for count in range(len(order) + 1):
        link_bytes = sum(sizes[name] for name in ["x", *order[:count]])
        choice = Choice(cost, h200(65536, seconds=(link_bytes + 1) / 46e9), math.inf)
        assert choice.saves[:count] == tuple(order[:count])
        assert choice.bytes <= link_bytes
        assert all(sizes[name] <= sizes[order[count]] for name in choice.saves[count:])
        assert choice.copying <= choice.measured.seconds


def test_nothing_is_saved_that_the_host_has_no_room_for():
    cost = qwen3_8b(65536)
    choice = Choice(cost, h200(65536, seconds=1e9), cost.x + cost.attn_out + 1)
    assert choice.saves == ("attn_out",)
    assert choice.latest.left_out["kv"] == "the host has no room"


def test_copies_have_room_that_a_step_has_measured():
    """In one chunk the copies of two layers are under way; with little room fewer tensors leave."""
    cost = qwen3_8b(65536)
    copied = {}
    for chunk_fraction in (0.25, 1.0):
        plenty = Choice(cost, h200(65536, seconds=1e9), device=0.0, chunk_fraction=chunk_fraction)
        little = Choice(
            cost, h200(65536, seconds=1e9), math.inf, 3.0 * cost.x, True, chunk_fraction
        )
        assert plenty.bytes > 5 * cost.x
        copied[chunk_fraction] = little.bytes - cost.x
        room = copied[chunk_fraction] * 2 * chunk_fraction + little.latest.on_device
        assert 0 < room <= 3.0 * cost.x
    assert copied[1.0] < copied[0.25]
    assert "kv" not in Choice(cost, h200(65536, seconds=1e9), chunk_fraction=1.0).saves


def test_a_link_that_inputs_fill_carries_nothing_else():
    choice = Choice(qwen3_8b(65536), h200(65536, link=1e9), math.inf)
    assert choice.saves == ()
    assert choice.bytes == qwen3_8b(65536).x
    assert "layer inputs alone" in offload_text(choice.latest)


def observed_layer(work, times, x=()):
    """What a layer was seen to do whose chunks attend for so many FLOPs and take so many
    seconds."""
    engine = SimpleNamespace(clock=None, seconds=lambda start, stop: stop - start)
    costs = [
        Cost(x=size, attention_flops=flops)
        for flops, size in itertools.zip_longest(work, x, fillvalue=0)
    ]
    marks = list(itertools.accumulate(times, initial=0.0))
    return ObservedCosts(torch.device("cpu"), 0, 0, len(work), {}, engine, costs, marks=marks)


def test_attention_rate_is_the_slope_of_the_chunks_times():
    work = [1e12, 3e12, 5e12, 7e12, 1e12]  # the last chunk is a short one
    layers = [[0.5 + w / 4e14 for w in work], [0.25 + w / 4e14 for w in work]]
    assert attention_rate([observed_layer(work, times) for times in layers]) == pytest.approx(4e14)
    assert attention_rate([observed_layer([1e12], [0.5])]) == math.inf
    assert attention_rate([observed_layer(work, [0.5] * len(work))]) == math.inf


def test_attention_rate_of_chunks_of_different_lengths():
    """20 us a token, and attention at 4e14 FLOP/s: more tokens take longer whatever they attend
    to."""
    tokens, work = (8192, 1000, 8000, 3000, 10), (2e12, 1e12, 9e12, 6e12, 1e9)
    times = [20e-6 * size + flops / 4e14 for size, flops in zip(tokens, work, strict=True)]
    assert attention_rate(
        [observed_layer(work, times, [2 * size for size in tokens])]
    ) == pytest.approx(4e14)


class Injected(Engine):
    """Copies at a given rate, and a clock that goes on by the attention done so far."""

    def __init__(self, link=1e12, step=1.0, memory=None):
        super().__init__(torch.device("cpu"))
        self.link, self.step, self.device_memory = link, step, memory
        self.sent_bytes, self.time = 0, 0.0

    def copy(self, queue, target, source):
        super().copy(queue, target, source)
        self.sent_bytes += source.nbytes if queue == TO_HOST_QUEUE else 0

    def queue_seconds(self):
        return {**super().queue_seconds(), TO_HOST_QUEUE: self.sent_bytes / self.link}

    def clock(self, queue=COMPUTE_QUEUE):
        self.time += self.step
        self.step *= 1.1  # later chunks attend to more
        return self.time

    def memory(self):
        return self.device_memory


def auto(engine, model=None, offload="auto", **settings):
    model = model_with(settings.pop("saves", "auto"), model, offload=offload, **settings)
    manager_of(model)._given_engine = engine
    return model


def measured(model):
    return model._streambp.saves_policy.link.measured


def test_the_first_step_measures_and_the_second_saves():
    model = auto(Injected())
    assert "the first step measures" in str(streambp.describe(model))
    assert_same(step(model), step(model_with()))
    result = step(model)
    saves = streambp.describe(model).saves
    assert {"attn_out", "kv", "mlp.gate_proj", "mlp.up_proj", "self_attn.q_proj"} <= set(saves)
    assert "mlp.down_proj" not in saves  # its product is never computed again
    assert_same(result, step(model_with(saves)))
    printed = str(streambp.describe(model))
    for part in ("auto chose kv, ", "GB/s to the host", "behind the compute", "FLOPs in backward"):
        assert part in printed
    assert "auto chose" not in str(streambp.describe(model_with()))


@pytest.mark.full
def test_a_slow_link_carries_inputs_alone():
    model = auto(Injected(link=10.0))
    for _ in range(2):
        assert_same(step(model), step(model_with()))
    assert streambp.describe(model).saves == ()
    assert "the link has no room" in str(streambp.describe(model))


@pytest.mark.full
def test_each_length_is_measured_once():
    model = auto(Injected())
    for length in (LENGTH, LENGTH, 3 * LENGTH, 3 * LENGTH, LENGTH):
        batch = make_batch("plain", length=length)
        result = step(model, **batch)
        assert_same(result, step(model_with(streambp.describe(model).saves), **batch))
    assert len(measured(model)) == 2


@pytest.mark.full
def test_layers_stay_on_what_the_device_had_free():
    for free in (0, 10 * layer_bytes()):
        model = auto(Injected(link=10.0, memory=DeviceMemory(10, 1000, 1000 + free)))
        expected = step(model)
        assert manager_of(model).resident_bytes == 0
        loss = model(**make_batch("plain"), use_cache=False).loss
        assert (manager_of(model).resident_bytes > 0) == (free > 0)
        assert manager_of(model).gpu_memory <= prefix_bytes() + 0.9 * free
        loss.backward()
        assert_same(step(model), expected)


@pytest.mark.full
@pytest.mark.parametrize("saves", [("kv",), ()])
def test_given_saves_are_kept_to(saves):
    model = auto(Injected(), saves=saves, offload="auto")
    for _ in range(2):
        assert_same(step(model), step(model_with(saves)))
    assert streambp.describe(model).saves == saves


@pytest.mark.full
def test_saves_auto_with_offload_cpu():
    model = auto(Injected(), saves="auto", offload="cpu")
    step(model)
    step(model)
    assert "attn_out" in streambp.describe(model).saves
    assert manager_of(model).gpu_memory is None


@pytest.mark.full
def test_copies_measure_for_themselves():
    model = auto(Injected())
    step(model)
    step(model)
    model_copy = copy.deepcopy(model)
    assert measured(model_copy) == {}
    assert_same(step(model_copy), step(model_with()))


def test_saves_auto_in_a_list():
    assert streambp.StreamConfig(saves=["auto"], offload="cpu") == streambp.StreamConfig(
        saves="auto", offload="cpu"
    )
    assert streambp.StreamConfig(saves=["auto"], offload="cpu").named_saves == ()


def test_forwards_without_a_backward_decide_nothing():
    model = auto(Injected(), model=build("qwen3", num_hidden_layers=3))
    for _ in range(3):
        assert model(**make_batch("plain"), use_cache=False).loss.requires_grad
    assert measured(model) == {}
