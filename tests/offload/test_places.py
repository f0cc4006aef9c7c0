"""What a layer saves, and where, is one choice for the host's room and the device's.

covers: offload/placement.py, offload/policy.py, offload/manager.py, offload/link.py
"""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

import streambp
from streambp.offload import manager_of, policy
from streambp.offload.costs import Candidate
from streambp.offload.engines import DeviceMemory
from streambp.offload.manager import OffloadManager
from streambp.offload.placement import INPUT_NAME, Headroom, choose_placement
from tests.families import LENGTH, build, make_batch
from tests.offload.runs import assert_same, layer_bytes, model_with, prefix_bytes, step
from tests.offload.test_auto import Injected, auto
from tests.oracle import MAX_FLOAT64_ERROR, gradients, worst_error
from tests.seeds import seed_of

FORWARD_SECONDS = 16  # of a layer's forward, by the injected clock
PEAK = 10 * prefix_bytes()
NAMES = ("attn_out", "kv", "gate", "up")


def made_up(draw, layers):
    inputs = {index: draw.randint(1, 4) for index in range(layers)}
    candidates = {
        index: [
            Candidate(index, name, draw.randint(1, 8), draw.choice((1.0, 2.0, 3.0)))
            for name in NAMES[: draw.randint(1, 4)]
        ]
        for index in range(layers)
    }
    headroom = Headroom(
        draw.randint(0, 30),
        draw.randint(0, 12),
        draw.randint(0, 16),
        ("attn_out",) if draw.random() < 0.3 else (),
    )
    return inputs, candidates, headroom


def check_rooms(placement, inputs, candidates, headroom):
    """Neither room is exceeded but by inputs, which have to be somewhere."""
    host = device = 0
    forced = 0
    for index, size in inputs.items():
        sizes = {INPUT_NAME: size} | {
            candidate.name: candidate.bytes for candidate in placement.saved[index]
        }
        assert len(sizes) == 1 + len(placement.saved[index])
        assert placement.staying[index] <= sizes.keys()
        leaving = {
            name: size for name, size in sizes.items() if name not in placement.staying[index]
        }
        assert not set(leaving) & set(headroom.never_leave)
        assert sum(leaving.values()) <= max(headroom.link, size)
        host += sum(leaving.values())
        device += sum(sizes.values()) - sum(leaving.values())
        forced += size
    assert host <= headroom.host
    assert placement.on_device == device
    assert device <= max(headroom.device, forced)
    assert sum(placement.leaving.values()) == host


def best_of_all(inputs, candidates, headroom):
    """The most that any choice spares in which inputs leave first: by trying each."""
    all_candidates = [candidate for index in inputs for candidate in candidates[index]]
    on_device = 0
    host = headroom.host
    forced = {}
    for index, size in inputs.items():
        forced[index] = size if size <= host else 0
        on_device += size - forced[index]
        host -= forced[index]
    best = 0.0
    for where in itertools.product(("no", "host", "device"), repeat=len(all_candidates)):
        leaving = dict(forced)
        staying, spared = on_device, 0.0
        allowed = True
        for candidate, destination in zip(all_candidates, where, strict=True):
            spared += candidate.bytes * candidate.flops_per_byte * (destination != "no")
            staying += candidate.bytes * (destination == "device")
            if destination == "host":
                leaving[candidate.index] += candidate.bytes
                allowed &= candidate.name not in headroom.never_leave
        for index, size in leaving.items():
            allowed &= size <= max(headroom.link, forced[index])
        fits = staying <= headroom.device or (staying == on_device)
        if allowed and fits and sum(leaving.values()) <= headroom.host:
            best = max(best, spared)
    return best


def test_no_room_is_exceeded_and_little_is_lost():
    draw = random.Random(seed_of(0))
    reached, possible = 0.0, 0.0
    for _ in range(40):
        inputs, candidates, headroom = made_up(draw, 2)
        placement = choose_placement(inputs, candidates, headroom)
        check_rooms(placement, inputs, candidates, headroom)
        best = best_of_all(inputs, candidates, headroom)
        assert placement.spared <= best
        reached += placement.spared
        possible += best
    assert reached >= 0.9 * possible  # of tensors as large as the rooms


@pytest.mark.parametrize("link", [50, 120, 230, 300, 450])
@pytest.mark.parametrize("device", [0, 500, 2000, 4000, 8000])
def test_alike_layers_use_both_rooms(link, device):
    """Of Qwen3-8B at 64k, in hundredths of a GiB a layer: the seconds of what is not saved are those of the bytes
    that have no room."""
    sizes = {"attn_out": 51, "kv": 25, "q": 50, "o": 50, "gate": 150, "up": 150}
    flops_per_byte = {"attn_out": 20.0, "kv": 3.4}
    inputs = dict.fromkeys(range(36), 50)
    candidates = {
        index: [
            Candidate(index, name, size, flops_per_byte.get(name, 1.0))
            for name, size in sizes.items()
        ]
        for index in inputs
    }
    headroom = Headroom(math.inf, link, device)
    placement = choose_placement(inputs, candidates, headroom)
    check_rooms(placement, inputs, candidates, headroom)
    remaining_bytes = 36 * (link - 50) + device  # what a fraction of each tensor would fill
    limit = 0.0
    for name in sizes:
        part = min(remaining_bytes, 36 * sizes[name])
        limit += part * flops_per_byte.get(name, 1.0)
        remaining_bytes -= part
    assert placement.spared >= 0.92 * limit
    print(f"link {link} device {device}: {placement.spared / max(limit, 1e-9):.3f}")


def test_many_tensors_of_a_layer():
    """As the experts of a mixture have: not every set of them is tried."""
    draw = random.Random(seed_of(1))
    candidates = [Candidate(0, f"expert {i}", draw.randint(1, 8), 1.0) for i in range(200)]
    headroom = Headroom(400, 300, 200)
    placement = choose_placement({0: 4}, {0: candidates}, headroom)
    check_rooms(placement, {0: 4}, {0: candidates}, headroom)
    assert placement.spared >= 0.97 * min(
        sum(candidate.bytes for candidate in candidates), 300 - 4 + 200
    )


def test_attention_that_is_faster_than_its_copies_stays():
    candidates = [Candidate(0, "attn_out", 4, 9.0), Candidate(0, "gate", 4, 1.0)]
    placement = choose_placement({0: 2}, {0: candidates}, Headroom(100, 100, 4, ("attn_out",)))
    assert placement.staying[0] == {"attn_out"}
    assert placement.leaving == {INPUT_NAME: 2, "gate": 4}


def with_both_rooms(free, model=None, part=0.5):
    """A model whose second step has both: a link that takes about such a part of a layer, and a
    device with so many bytes free."""
    link = part * layer_bytes() / FORWARD_SECONDS
    return auto(Injected(link=link, memory=DeviceMemory(10, PEAK, PEAK + free)), model)


def two_rooms(model):
    """Whether tensors of one layer went both ways in a step, whose loss and gradients it
    returns."""
    manager = manager_of(model)
    stores = []
    opened = OffloadManager.open

    def open_of(self, index, device):
        store = opened(self, index, device)
        stores.append(store)
        return store

    model.zero_grad(set_to_none=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OffloadManager, "open", open_of)
        loss = model(**make_batch("plain"), use_cache=False).loss
    assert len(stores) == 3
    assert manager.workspace + manager.resident_bytes <= manager.gpu_memory
    is_split = [0 < store.resident_bytes < store.bytes for store in stores]
    resident_bytes = manager.resident_bytes
    loss.backward()
    return (
        any(is_split),
        resident_bytes,
        (loss.detach(), {n: p.grad for n, p in model.named_parameters()}),
    )


@pytest.mark.parametrize("layers", [1, 2])
def test_what_was_chosen_stays_and_leaves_and_changes_no_bit(layers):
    model = with_both_rooms(int(layers * layer_bytes()))
    step(model)  # measures
    is_split, resident_bytes, result = two_rooms(model)
    assert is_split
    choice = model._streambp.saves_policy.latest
    assert resident_bytes == choice.on_device
    assert choice.on_device > 0
    assert choice.leaving > 0
    assert_same(result, step(model_with(streambp.describe(model).saves)))
    assert_same(result, step(model_with()))


def test_against_the_unpatched_model_in_float64(float64_oracle):
    batch = make_batch("plain", length=LENGTH)
    reference = build("qwen3", torch.float64, num_hidden_layers=3)
    expected = gradients(reference, **batch)
    model = with_both_rooms(layer_bytes(), build("qwen3", torch.float64, num_hidden_layers=3))
    for _ in range(2):
        actual = gradients(model, **batch)
    assert model._streambp.saves_policy.latest.on_device
    assert float(actual[0]) == pytest.approx(float(expected[0]), rel=1e-12)
    assert actual[1].keys() == expected[1].keys()
    assert worst_error(actual[1], expected[1]) <= MAX_FLOAT64_ERROR


def test_a_device_without_room_for_saves_keeps_none():
    model = with_both_rooms(0)
    step(model)
    _, resident_bytes, result = two_rooms(model)
    assert resident_bytes == 0
    assert_same(result, step(model_with()))


def without_the_device(patch):
    patch.setattr(policy.LinkBudget, "room_on_device", lambda self, tokens: 0.0)


def without_the_names(patch):
    patch.setattr(
        OffloadManager,
        "staying",
        property(lambda self: None, lambda self, value: None),
        raising=False,
    )


@pytest.mark.parametrize("mutant", [without_the_device, without_the_names])
def test_mutant_turns_a_test_red(mutant, monkeypatch):
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        test_what_was_chosen_stays_and_leaves_and_changes_no_bit(1)
