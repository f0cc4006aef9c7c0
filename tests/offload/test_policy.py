"""saves="auto" decides when a step begins, from what the model and its device are then. [Note:
saves that fit]

covers: device.py, layer/products.py, layer/saved_tensors.py, offload/policy.py, planner/auto.py,
planner/skeleton.py
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import streambp
from streambp.layer import saved_tensors
from streambp.layer.saved_tensors import SavedForBackward
from streambp.offload import costs, free_memory, policy
from streambp.planner import auto
from tests.families import LENGTH, build, make_batch
from tests.offload.runs import assert_same, step
from tests.offload.test_limits import Device, FixedNeed, MemoryNeed, stepped
from tests.seeds import seed_torch

CPU_DEVICE, META_DEVICE = torch.device("cpu"), torch.device("meta")
GIB = 2**30


@pytest.fixture
def card(monkeypatch):
    """A device that says what it has free: the CPU stands in for it. Readings are collected."""

    class Card:
        free, readings = 80.0 * GIB, 0

        def __call__(self, device):
            self.readings += 1
            return self.free

    fake = Card()
    monkeypatch.setattr(free_memory, "free_memory", fake)
    return fake


def policy_of(model):
    return model._streambp.saves_policy


def tiny(**settings):
    return build("qwen3", dtype=torch.bfloat16, num_hidden_layers=3, **settings)


def patched(model, **settings):
    return streambp.patch(model, streambp.StreamConfig(**{"unpatched_runs": False, **settings}))


def answers(model, lengths=(2048, 16384, 65536)):
    """What is decided at some lengths."""
    chooser = policy_of(model)
    chooser.begin_forward(CPU_DEVICE)
    chooser.end_forward()
    decisions = []
    for length in lengths:
        size = chooser.size(1, length, CPU_DEVICE)
        free = {CPU_DEVICE: chooser.free(CPU_DEVICE)}
        headrooms = chooser._headrooms(free, length, size)
        decisions.append(
            (
                size,
                chooser._fill(headrooms, range(3), length, length, size == length),
            )
        )
    return decisions


def on_the_card(model):
    return patched(copy.deepcopy(model))


def on_a_cpu_first(model, card, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(free_memory, "free_memory", lambda device: None)
        model = patched(copy.deepcopy(model))
        step(model)
        assert policy_of(model).figures.need.method.name == "at most"
    model.zero_grad(set_to_none=True)
    # The CPU stands in for another device as well.
    policy_of(model).states = auto.ModelStates(model, policy_of(model).states.config)
    return model


def on_meta_first(model, card, monkeypatch):
    states = model.state_dict()
    with torch.device("meta"):
        empty = type(model)(copy.deepcopy(model.config)).to(torch.bfloat16)
    empty = patched(empty).to_empty(device=CPU_DEVICE).train()
    empty.load_state_dict(states)
    return empty


@pytest.mark.fast(2)
@pytest.mark.parametrize("flow", [on_a_cpu_first, on_meta_first])
def test_where_a_model_was_patched_does_not_matter(flow, card, monkeypatch):
    model = tiny()
    card.free = 1e7
    expected = answers(on_the_card(model))
    decisions = answers(flow(model, card, monkeypatch))
    assert len({size for size, _ in expected}) > 1
    assert [size for size, _ in decisions] == [size for size, _ in expected]
    for (_, ours), (_, theirs) in zip(decisions, expected, strict=True):
        named_sizes = [
            {index: {(c.name, c.bytes) for c in candidates} for index, candidates in plan.items()}
            for plan in (ours, theirs)
        ]
        assert named_sizes[0] == named_sizes[1]


@pytest.mark.full
def test_a_law_that_is_taken_in_patch_is_seen(card, monkeypatch):
    real = auto.ModelStates.__call__
    first = {}
    monkeypatch.setattr(
        auto.ModelStates,
        "__call__",
        lambda self, device: first.setdefault("known", real(self, device)),
    )
    with pytest.raises(AssertionError):
        test_where_a_model_was_patched_does_not_matter(on_a_cpu_first, card, monkeypatch)


def frozen(model):
    for parameter in model.model.layers[0].parameters():
        parameter.requires_grad_(False)


def adapted(model):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))


MODEL_CHANGES = {
    "frozen": frozen,
    "cast": lambda model: model.to(torch.float32),
    "adapters": adapted,
}


@pytest.mark.fast("frozen")
@pytest.mark.parametrize("change", MODEL_CHANGES)
def test_what_changes_after_patch_is_counted_anew(change, card, monkeypatch):
    counted = []
    real = auto.survey
    monkeypatch.setattr(
        auto, "survey", lambda *args, **kwargs: counted.append(1) or real(*args, **kwargs)
    )
    model = patched(tiny())
    needs = []
    for _ in range(2):
        for _ in range(3):
            step(model)
        needs.append(policy_of(model).figures.need(2 * LENGTH, LENGTH))
        MODEL_CHANGES[change](model) if len(needs) == 1 else None
    assert len(counted) == 2  # once for each state
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    need_before, need_after = needs
    assert (need_after > need_before) == (change == "cast")
    new_law = auto._law(model, streambp.StreamConfig(), None)
    assert need_after == new_law(2 * LENGTH, LENGTH)
    assert trained < 1.1 * need_after


@pytest.mark.full
def test_a_count_leaves_nothing_behind(card):
    """Neither random numbers, nor a program's hooks, nor what acts in the thread."""
    model, hook_calls = tiny(attention_dropout=0.3), []
    hook = model.model.layers[0].mlp.register_forward_hook(
        lambda module, args, out: hook_calls.append(out.is_meta)
    )
    patched(model)
    seed_torch(5)
    random_state = torch.default_generator.get_state()
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        torch.no_grad(),
        torch.autograd.graph.save_on_cpu(),
    ):
        policy_of(model).begin_forward(CPU_DEVICE)
    assert isinstance(policy_of(model).figures.need, auto.StepNeed)
    assert torch.equal(random_state, torch.default_generator.get_state())
    assert not hook_calls
    hook.remove()


@pytest.mark.full
def test_gradients_that_are_there_are_not_needed_once_more(card):
    """A second micro-batch of an accumulation, or a step whose gradients were zeroed, has room for
    as much as a first."""
    model = patched(tiny())
    chooser = policy_of(model)
    chooser.begin_forward(CPU_DEVICE)
    chooser.end_forward()
    first, size = needed_last(chooser), sum(p.nbytes for p in model.parameters())
    step(model)
    for keeps in (True, False):
        model.zero_grad(set_to_none=not keeps)
        chooser.begin_forward(CPU_DEVICE)
        chooser.end_forward()
        assert chooser.present == float(keeps)
        assert (
            first - size < needed_last(chooser) < first - size / 3
            if keeps
            else needed_last(chooser) == first
        )
    for parameter in model.model.layers[0].parameters():
        parameter.grad = torch.zeros_like(parameter)
    chooser.begin_forward(CPU_DEVICE)
    assert 0.1 < chooser.present < 0.9
    needed_bytes, chooser.present, present = needed_last(chooser), 1.0, chooser.present
    assert (first - needed_bytes) / (first - needed_last(chooser)) == pytest.approx(present)


def needed_last(chooser):
    """What a step needs while its first layer's backward runs, when most gradients are there."""
    return dict(chooser.figures.need.bytes_by_layer(64, 32, chooser.present))[0.0]


@pytest.mark.fast(3)
@pytest.mark.parametrize("settings", [{}, {"chunk_size": 5}, {"unpatched_runs": True}], ids=str)
def test_the_driver_is_asked_twice_at_most(card, settings):
    model = patched(tiny(), **settings)
    for _ in range(3):
        step(model)
    for _ in range(2):
        card.readings = 0
        step(model)
        assert 1 <= card.readings <= 2


@pytest.mark.full
def test_readings_for_each_layer_are_seen(card, monkeypatch):
    monkeypatch.setattr(
        free_memory.FreeMemory, "__call__", lambda self, device: free_memory.free_memory(device)
    )
    with pytest.raises(AssertionError):
        test_the_driver_is_asked_twice_at_most(card, {"chunk_size": 5})


class TooSmall(MemoryNeed):
    """A law that misses a part of what a step takes."""

    work = 0.0

    def chunk_bytes(self, chunk):
        return self.work


def falls_short(share, limit_factor=math.inf, steps=6):
    """Steps under a law that is so much too small: in which saves were let go of, and what was
    saved.

    limit_factor: how much more than it tells a device has before it fails.
    """
    batch = make_batch("plain", length=160)
    plain = streambp.patch(
        build("qwen3", num_hidden_layers=4), streambp.StreamConfig(chunk_size=20, saves=())
    )
    full_device = Device()
    expected = stepped(plain, full_device, **batch)
    model = patched(build("qwen3", num_hidden_layers=4), chunk_size=20)
    chooser, need = policy_of(model), TooSmall()
    need.bytes, need.work = share * full_device.peak, 0.3 * full_device.peak
    chooser.states = FixedNeed(need)
    limit = 1.1 * full_device.peak
    device = Device()
    chooser.free = lambda _: limit - device.live
    drop_reasons, saved = [], []
    for number in range(steps):
        device = Device(limit=limit * limit_factor)
        assert_same(stepped(model, device, **batch), expected)
        latest = chooser.latest
        if latest is not None and number:
            drop_reasons.append(latest.drop_reason)
            saved.append(sum(latest.bytes.values()))
    return drop_reasons, saved


@pytest.mark.full
@pytest.mark.parametrize("share", [0.7, 0.55])
def test_from_the_third_step_on_nothing_is_thrown_away(share):
    drop_reasons, saved = falls_short(share)
    assert drop_reasons[0]  # the first that saves something
    assert not any(drop_reasons[1:])
    assert all(size > 0 for size in saved)


@pytest.mark.full
def test_after_an_error_half_is_saved_until_it_fits():
    drop_reasons, saved = falls_short(0.55, limit_factor=1.1)
    assert drop_reasons[0]
    assert not any(drop_reasons[2:])
    assert saved[2] <= saved[0] / 2


@pytest.mark.full
def test_a_policy_that_does_not_learn_is_seen(monkeypatch):
    monkeypatch.setattr(costs.Shortage, "learn", lambda self, previous: None)
    with pytest.raises(AssertionError):
        test_from_the_third_step_on_nothing_is_thrown_away(0.7)


def test_a_margin_goes_when_it_is_no_longer_needed():
    def next_shortage(previous, shortfall):
        shortage = costs.Shortage(
            (1, 1), headroom=100.0, planned=60.0, planned_by_layer={}, shortfall=shortfall
        )
        shortage.learn(previous)
        return shortage

    latest = next_shortage(None, 10.0)
    assert latest.margin == 100 - 60 + 10  # so that ten less than 60 are planned
    steps = [(latest := next_shortage(latest, -1000.0)).margin for _ in range(50)]
    assert steps == sorted(steps, reverse=True)
    assert steps[-1] < 1
    # nothing was free to spare
    assert next_shortage(dataclasses.replace(latest, margin=5.0), 0.0).margin == 5.0


def test_another_length_or_device_has_a_margin_of_its_own():
    chooser = policy.SavesPolicy(
        1, lambda device: 100.0, lambda device: (costs.StepFigures(MemoryNeed()), 0.0), True, True
    )
    chooser.figures = costs.StepFigures(MemoryNeed())
    key, free = (CPU_DEVICE, 64, 8), {CPU_DEVICE: 100.0, META_DEVICE: 100.0}
    chooser.margins[key] = costs.Shortage(key, 0.0, 0.0, {}, margin=30.0)
    assert chooser._headrooms(free, 64, 8) == {
        CPU_DEVICE: [[math.inf, 70.0]],
        META_DEVICE: [[math.inf, 100.0]],
    }
    assert chooser._headrooms(free, 32, 8)[CPU_DEVICE] == [[math.inf, 100.0]]


def test_an_allocator_that_does_not_tell(monkeypatch):
    """A pluggable one raises when it is asked for its fraction or its statistics."""

    def refuse(*_):
        raise RuntimeError("CUDAPluggableAllocator does not yet support getMemoryFraction.")

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", refuse)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", refuse)
    gpu = torch.device("cuda", 0)
    assert free_memory.free_memory(gpu) is None
    free = free_memory.FreeMemory()
    assert free(gpu) is None
    assert free.retries(gpu) == 0


@pytest.mark.parametrize(("total", "reserved"), [(80, 0.05 * 80), (8, 1.0)])
def test_what_is_left_to_others(total, reserved, monkeypatch):
    monkeypatch.setattr(free_memory, "memory_limit", lambda device: total * GIB)
    monkeypatch.setattr(free_memory, "allocator_bytes", lambda device, kind: 0)
    assert free_memory.free_memory(torch.device("cuda", 0)) == pytest.approx(
        (total - reserved) * GIB
    )


@pytest.mark.full
def test_float32_weights_under_autocast_are_bounded(card):
    """The peak of a step whose products are bfloat16 is below the law's, which is counted without
    data."""
    model = patched(build("qwen3", num_hidden_layers=3), chunk_size=64)
    batch = make_batch("plain", length=512)
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16), Device() as device:
            loss = model(**batch, use_cache=False).loss
            loss.backward()
    chooser = policy_of(model)
    assert isinstance(chooser.figures.need, auto.StepNeed)
    assert chooser.figures.need.factor == 2.0
    saved = sum(chooser.latest.bytes.values())
    assert saved > 0
    assert device.peak - saved <= chooser.figures.need(1024, 128) <= 4 * device.peak


@contextlib.contextmanager
def planned_and_kept(chooser):
    """Collects, of each layer that it chooses for, the bytes by name that were planned, and those
    that are kept as the layer's forward ends."""
    sizes_by_layer = {}
    real = SavedForBackward.seal

    def seal(self, size):
        if self.layer_state.saves_policy is not chooser:
            return real(self, size)
        sizes = {}
        for (key, _), tensor in self.store.tensors.items():
            part, _, name = key.partition(".")
            if part in ("attn_out", "lse", "product"):
                name = name.partition("#")[0] if part == "product" else "attn_out"
                sizes[name] = sizes.get(name, 0) + tensor.nbytes
        if "kv" in self.saves:
            sizes["kv"] = sum(kv.k.nbytes + kv.v.nbytes for kv in self.carried.prefix.kv_storages)
        plan = chooser._forward.batch.plan.get(self.layer_state.index, [])
        sizes_by_layer[self.layer_state.index] = {c.name: c.bytes for c in plan}, sizes
        return real(self, size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SavedForBackward, "seal", seal)
        yield sizes_by_layer


def lora(model, **settings):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM", **settings)
    return peft.get_peft_model(model, config, autocast_adapter_dtype=True)


def lora_afterwards(model):
    model = patched(model, chunk_size=5)
    lora(model)
    return model


@contextlib.contextmanager
def one_rank():
    """The only rank of a group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


SET_UPS = {
    "full": lambda: patched(tiny(), chunk_size=5),
    "float32 under autocast": lambda: patched(build("qwen3", num_hidden_layers=3), chunk_size=5),
    "adapters": lambda: patched(lora(tiny()), chunk_size=5),
    "adapters added after patch": lambda: lora_afterwards(tiny()),
    "first layers frozen": lambda: patched(without_gradients(tiny()), chunk_size=5),
    "bucket views": lambda: DistributedDataParallel(
        patched(tiny(), chunk_size=5), gradient_as_bucket_view=True
    ),
}


def without_gradients(model):
    for module in (model.model.embed_tokens, *model.model.layers[:1]):
        module.requires_grad_(False)
    return model


def settled(name, headroom):
    """Planned and kept, by layer, in four micro-batches: without gradients, with them, after an
    evaluation and `set_to_none=False`, after `set_to_none=True`."""
    with one_rank() if name == "bucket views" else contextlib.nullcontext():
        model = SET_UPS[name]()
        chooser = policy_of(getattr(model, "module", model))
        autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled="autocast" in name)
        micro_batches = []
        for present in (0.0, 1.0, 1.0, 0.0):
            chooser.free = lambda device: (
                headroom + chooser.figures.need(2 * LENGTH, 10, chooser.present)
            )
            with planned_and_kept(chooser) as sizes_by_layer, autocast:
                loss = model(**make_batch("plain"), use_cache=False).loss
            micro_batches.append(sizes_by_layer)
            assert chooser.present == present
            loss.backward()
            if len(micro_batches) == 2:
                with torch.no_grad():
                    model.eval()(**make_batch("plain"), use_cache=False)
                model.train()
                model.zero_grad(set_to_none=False)
            if len(micro_batches) == 3:
                model.zero_grad(set_to_none=True)
        return micro_batches


@pytest.mark.fast("bucket views-some fits")
@pytest.mark.parametrize("headroom", [1e9, 6e4], ids=["all fits", "some fits"])
@pytest.mark.parametrize("name", SET_UPS)
def test_what_was_planned_is_kept(name, headroom, card):
    """Name by name and byte by byte, from the first step on."""
    for number, sizes_by_layer in enumerate(settled(name, headroom)):
        planned = {index: plan for index, (plan, _) in sizes_by_layer.items()}
        assert planned == {index: sizes for index, (_, sizes) in sizes_by_layer.items()}, number
        assert sum(sum(plan.values()) for plan in planned.values()) <= headroom
        assert any(planned.values())
        if headroom == 1e9 and "adapters" in name:
            assert "self_attn.v_proj" in planned[1]
            assert not any("lora_" in saved or "base_layer" in saved for saved in planned[1])


@pytest.mark.full
@pytest.mark.parametrize("mutant", ["a name less", "wider hidden states"])
def test_other_names_and_bytes_are_seen(mutant, card, monkeypatch):
    if mutant == "a name less":
        find_products = SavedForBackward.find_products

        def find_fewer_products(self):
            find_products(self)
            self.products.names = self.products.names[:-1]

        monkeypatch.setattr(SavedForBackward, "find_products", find_fewer_products)
    else:
        monkeypatch.setattr(saved_tensors, "linear_autocast_dtype", lambda weight: torch.float64)
    with pytest.raises(AssertionError):
        test_what_was_planned_is_kept("adapters", 1e9, card)
