"""Offloaded tensors: the same gradients to the bit, defined behaviour when things go wrong, and no races."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch

import streambp
from streambp.offload import arena, engines, manager, transfers
from streambp.offload.arena import host_limit, padded
from streambp.offload.trace import TraceEngine
from tests import zoo
from tests.families import LENGTH, build, make_batch

SAVES = ((), ("attn_out",), ("kv",), ("attn_out", "kv"))


def model_with(saves=(), model=None, **settings):
    model = build("qwen3", num_hidden_layers=3) if model is None else model
    return streambp.patch(model, streambp.StreamConfig(chunk_size=5, saves=saves, **settings))


def offloaded(saves=("attn_out", "kv"), model=None, **settings):
    return model_with(saves, model, offload="cpu", **settings)


def manager_of(model):
    return model._streambp.state.offloader


def step(model, mode="plain", **batch):
    model.zero_grad(set_to_none=True)
    loss = model(**{**make_batch(mode), **batch}, use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(found, expected):
    assert torch.equal(found[0], expected[0])
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert torch.equal(found[1][name], gradient), name


@pytest.mark.parametrize("saves", SAVES, ids=lambda s: "+".join(s) or "none")
@pytest.mark.parametrize("mode", ["plain", "left-padded", "packed"])
def test_gradients_are_bitwise_the_same(mode, saves):
    expected = step(model_with(saves), mode)
    model = offloaded(saves)
    for _ in range(2):  # the second step finds a stack that was used
        assert_same(step(model, mode), expected)
    stats = manager_of(model).stats()
    assert stats["bytes_out"] > 0
    assert stats["bytes_back"] > 0
    assert "to the host" in str(streambp.describe(model))


@pytest.mark.parametrize("name", ["jamba", "gemma3n_text", "qwen3_moe", "deepseek_v3"])
def test_families(name):
    expected = step(model_with(("kv",), zoo.build(name, torch.float32)))
    assert_same(step(offloaded(("kv",), zoo.build(name, torch.float32))), expected)


def forward(model, seed):
    return model(**make_batch("plain", seed=seed), use_cache=False).loss


def gradients_of(model):
    return {name: p.grad.clone() for name, p in model.named_parameters()}


SCHEDULES = {  # forwards F and backwards B of micro-batches; E is an evaluation
    "accumulation": "F0 B0 F1 B1 F2 B2",
    "1F1B": "F0 F1 B0 F2 B1 B2",
    "interleaved": "F0 F1 F2 B1 B0 B2",
    "last first": "F0 F1 F2 B2 B1 B0",
    "evaluation in between": "F0 E F1 B0 E B1 F2 B2",
}


def run(model, schedule):
    model.zero_grad(set_to_none=True)
    losses = {}
    for item in schedule.split():
        if item == "E":
            with torch.no_grad():
                forward(model, 9)
        elif item[0] == "F":
            losses[item[1]] = forward(model, int(item[1]))
        else:
            losses.pop(item[1]).backward()
    return gradients_of(model)


@pytest.mark.parametrize("saves", SAVES, ids=lambda s: "+".join(s) or "none")
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_schedules(schedule, saves):
    expected, found = run(model_with(saves), schedule), run(offloaded(saves), schedule)
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


def expected_host_bytes(model, rows=2, length=LENGTH, chunk_size=5):
    """The formula, for every layer and chunk: x [B, C, h], o [B, H, C, D], lse [B, H, C], K and V [B, H_kv, C, D]."""
    config = model.config
    total = 0
    for start in range(0, length, chunk_size):
        tokens = rows * (min(start + chunk_size, length) - start)
        heads, kv = config.num_attention_heads, config.num_key_value_heads
        sizes = [config.hidden_size, heads * config.head_dim, heads, kv * config.head_dim, kv * config.head_dim]
        total += sum(padded(4 * tokens * size) for size in sizes)
    return total * config.num_hidden_layers


def test_host_bytes_are_the_formulas_to_the_byte():
    model = offloaded()
    expected = expected_host_bytes(model)
    loss = forward(model, 1)
    assert manager_of(model)._current().stack.used == expected
    assert manager_of(model).transfers.bytes[engines.OUT] <= expected
    loss.backward()
    forward(model, 1).backward()
    assert manager_of(model).host_bytes <= 1.2 * expected


def test_fifty_steps_do_not_grow():
    model = offloaded()
    sizes = []
    for seed in range(50):
        forward(model, seed).backward()
        gc.collect()
        sizes.append((manager_of(model).host_bytes, len(manager_of(model).transfers)))
    assert len(set(sizes[1:])) == 1
    assert len(manager_of(model).transfers) <= transfers.GROUPS_IN_FLIGHT * 5  # x, attn_out, lse, k, v


def test_longer_sequences_in_the_next_step():
    for lengths in ((11, 40, 23), (40, 11, 64)):
        ours, theirs = offloaded(), model_with(("attn_out", "kv"))
        for length in lengths:
            batch = make_batch("plain", length=length)
            assert_same(step(ours, **batch), step(theirs, **batch))


def test_two_models_keep_apart():
    first, second = offloaded(), offloaded(model=build("llama", num_hidden_layers=3))
    expected = step(model_with(("attn_out", "kv")))
    loss = forward(second, 1)
    assert_same(step(first), expected)
    loss.backward()
    assert manager_of(first) is not manager_of(second)


def test_copies_and_pickles_start_empty():
    model = offloaded()
    expected = step(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert manager_of(other) is not manager_of(model)
        assert manager_of(other).host_bytes == 0
        sites = [w.site for w in other._streambp.wrappers if hasattr(w, "site")]
        assert all(site.offloader is manager_of(other) for site in sites)
        assert_same(step(other), expected)


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_exception_in_a_step(when, monkeypatch):
    model = offloaded()
    expected = step(model)
    before = manager_of(model).host_bytes
    mlp = type(model.model.layers[1].mlp)
    real, calls = mlp.forward, []

    def breaks(self, x):
        calls.append(x)
        if self is model.model.layers[1].mlp and len(calls) > (3 if when == "forward" else 18):
            raise ValueError("injected")
        return real(self, x)

    with monkeypatch.context() as patch:
        patch.setattr(mlp, "forward", breaks)
        with pytest.raises(ValueError, match="injected"):
            step(model)
    gc.collect()
    assert_same(step(model), expected)
    assert manager_of(model).host_bytes <= 2 * before


def test_backward_twice_is_an_error():
    model = offloaded()
    loss = forward(model, 1)
    loss.backward(retain_graph=True)
    with pytest.raises(streambp.StreamBPError, match="second time"):
        loss.backward()
    assert_same(step(model), step(model_with(("attn_out", "kv"))))


def test_second_load_is_an_error():
    offloader = manager.OffloadManager(None, "keep", 1)
    store = offloader.open(0, torch.device("cpu"))
    store.put("x", 0, torch.randn(3))
    store.seal([("x", 0)], 1)
    store.take("x", 0)
    with pytest.raises(streambp.StreamBPError, match="second time"):
        store.take("x", 0)


@pytest.mark.parametrize("on_host_full", ["keep", "recompute"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.8])
def test_host_budget_too_small(share, on_host_full):
    expected = step(model_with(("attn_out", "kv")))
    model = offloaded()
    budget = int(share * expected_host_bytes(model)) + 1
    model = offloaded(host_memory=budget, on_host_full=on_host_full)
    for _ in range(2):
        assert_same(step(model), expected)
    assert manager_of(model).host_bytes <= budget
    assert "did not fit" in str(streambp.describe(model))


def test_host_budget_too_small_raises_and_the_model_stays_usable():
    model = offloaded(host_memory=3000, on_host_full="raise")
    with pytest.raises(streambp.StreamBPError, match="Raise host_memory"):
        step(model)
    assert_same(step(offloaded(model=model)), step(model_with(("attn_out", "kv"))))


def layer_bytes():
    return expected_host_bytes(build("qwen3", num_hidden_layers=1))


def prefix_bytes(tokens=2 * LENGTH):
    """K, V and the accumulators of their gradients of one layer, all in float32."""
    config = build("qwen3", num_hidden_layers=1).config
    return 4 * 4 * tokens * config.num_key_value_heads * config.head_dim


@pytest.mark.parametrize("layers", [0.5, 1, 2.2, 4])
def test_last_layers_stay_while_the_device_has_room(layers):
    expected = step(model_with(("attn_out", "kv")))
    model = offloaded(gpu_memory=prefix_bytes() + int(layers * layer_bytes()))
    for _ in range(2):
        loss = forward(model, 1)
        kept = [layer().kept for layer in manager_of(model)._current().layers]
        stay = min(int(layers), 2)  # the first layer's size is not known before it has run
        assert [bool(k) for k in kept] == [index >= 3 - stay for index in range(3)]
        assert manager_of(model).kept <= layers * layer_bytes()
        loss.backward()
        assert manager_of(model).kept == 0
        assert_same(step(model), expected)
    assert "on the device" in str(streambp.describe(model))


@pytest.mark.parametrize("share", [0.01, 0.95])
@pytest.mark.parametrize("saves", SAVES, ids=lambda s: "+".join(s) or "none")
@pytest.mark.parametrize("mode", ["plain", "left-padded", "packed"])
def test_streamed_prefixes_change_no_bit(mode, saves, share):
    """share: of the prefix, that the device has room for; nothing of it stays, or some of its tiles."""
    length = 64
    expected = step(model_with(saves), **make_batch(mode, length=length))
    model = offloaded(saves, gpu_memory=int(share * prefix_bytes(2 * length)))
    for _ in range(2):
        assert_same(step(model, **make_batch(mode, length=length)), expected)
    plain = offloaded(saves)
    step(plain, **make_batch(mode, length=length))
    assert manager_of(model).stats()["bytes_back"] > manager_of(plain).stats()["bytes_back"]


def test_a_second_micro_batch_finds_the_device_full():
    model = offloaded(gpu_memory=prefix_bytes() + 2 * layer_bytes())
    first, second = forward(model, 1), forward(model, 2)
    assert manager_of(model).kept <= 2 * layer_bytes()
    moved = manager_of(model).transfers.bytes[engines.OUT]
    del first, second
    gc.collect()
    assert manager_of(model).kept == 0
    forward(model, 1)
    assert manager_of(model).transfers.bytes[engines.OUT] - moved < moved / 2


def test_inputs_that_stay_must_not_change():
    model = offloaded(gpu_memory="1GiB")
    changed = []
    hook = model.model.layers[2].register_forward_pre_hook(lambda module, args: changed.append(args[0]))
    loss = forward(model, 1)
    hook.remove()
    with torch.no_grad():
        changed[0].add_(1.0)
    with pytest.raises(streambp.StreamBPError, match="changed in place"):
        loss.backward()


def test_host_limit_reads_what_the_machine_has(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 200 kB\nMemAvailable:      100 kB\n")
    assert host_limit(None, meminfo, tmp_path) == int(0.9 * 102400)
    (tmp_path / "memory.max").write_text("50000\n")
    (tmp_path / "memory.current").write_text("10000\n")
    assert host_limit(30000, meminfo, tmp_path) == 30000
    with pytest.raises(streambp.StreamBPError, match="only"):
        host_limit(60000, meminfo, tmp_path)
    (tmp_path / "memory.max").write_text("max\n")
    assert host_limit(60000, meminfo, tmp_path) == 60000


@pytest.mark.parametrize(
    ("field", "value"), [("offload", "disk"), ("on_host_full", "ignore"), ("host_memory", "many"), ("gpu_memory", -1)]
)
def test_settings(field, value):
    with pytest.raises(streambp.StreamBPError, match=field):
        streambp.StreamConfig(**{field: value})


def test_sizes_are_parsed():
    sizes = {"96GiB": 96 * 2**30, "1.5 TB": 1.5e12, "512MiB": 2**29, "1000": 1000, 77: 77}
    for text, size in sizes.items():
        assert streambp.StreamConfig(host_memory=text).host_memory == size


def test_close_gives_the_memory_back():
    model = offloaded()
    expected = step(model)
    manager_of(model).close()
    assert manager_of(model).host_bytes == 0
    assert_same(step(model), expected)


def poisoned(self, size):
    return torch.full((size,), 0xFF, dtype=torch.uint8)  # NaN in every float dtype


def test_nothing_is_read_that_was_not_written(monkeypatch):
    monkeypatch.setattr(engines.SynchronousEngine, "host_buffer", poisoned)
    assert_same(step(offloaded()), step(model_with(("attn_out", "kv"))))


def traced(schedule, saves=("attn_out", "kv"), collect=False):
    """Twice the schedule, with a step between that breaks off in backward, while tensors are on their way back."""
    model = offloaded(saves)
    engine = TraceEngine(collect)
    manager_of(model)._given_engine = engine
    run(model, schedule)
    break_off(model)
    return run(model, schedule), engine


def break_off(model):
    """A backward that raises once it has recomputed two chunks of the second layer."""
    loss = forward(model, 5)
    mlp = model.model.layers[1].mlp
    real, calls = type(mlp).forward, []

    def breaks(x):
        calls.append(x.shape)
        if len(calls) == 3:
            raise ValueError("injected")
        return real(mlp, x)

    mlp.forward = breaks
    with pytest.raises(ValueError, match="injected"):
        loss.backward()
    del mlp.forward, loss
    gc.collect()


@pytest.mark.parametrize("saves", SAVES, ids=lambda s: "+".join(s) or "none")
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_no_races(schedule, saves):
    found, engine = traced(schedule, saves)
    assert engine.checked > 100
    assert all(gradient.isfinite().all() for gradient in found.values())


def without(waits):
    """The checker's `wait` with some of the manager's waits left out, told apart by their queue and their event's."""

    def wait(self, waiting, event, real=TraceEngine.wait):
        if event is not None and (waiting, event.get("from")) in waits:
            return
        real(self, waiting, {k: v for k, v in (event or {}).items() if k != "from"})

    return wait


def record(self, queue, real=TraceEngine.record):
    return {**real(self, queue), "from": queue}


WAITS = {  # the wait that is left out, and a race that must be found then
    "offload before compute": ([(engines.OUT, engines.COMPUTE)], "out reads device"),
    "reload into memory that compute still uses": ([(engines.BACK, engines.COMPUTE)], "back writes device"),
    "compute before the reload": ([(engines.COMPUTE, engines.BACK)], "compute reads device"),
    "source let go before its offload": ([(engines.COMPUTE, engines.OUT)], "writes device"),
    # Others cover these two as well: only what was let go is loaded, and compute waits for what came back before a
    # stack is used again. They fail without both.
    "host memory written before it was read": (
        [(engines.OUT, engines.BACK), (engines.COMPUTE, engines.BACK)],
        "out writes host",
    ),
    "reload before its offload": ([(engines.BACK, engines.OUT), (engines.COMPUTE, engines.OUT)], "back reads host"),
}


@pytest.mark.parametrize("name", WAITS)
def test_a_missing_wait_is_a_race(name, monkeypatch):
    waits, race = WAITS[name]
    monkeypatch.setattr(TraceEngine, "record", record)
    monkeypatch.setattr(TraceEngine, "wait", without([]))
    assert not traced(SCHEDULES["1F1B"], collect=True)[1].races
    monkeypatch.setattr(TraceEngine, "wait", without(waits))
    assert any(race in found for found in traced(SCHEDULES["1F1B"], collect=True)[1].races)


def test_arena_hands_out_aligned_ranges_that_do_not_overlap():
    pool = arena.Arena(1000, lambda size: torch.zeros(size, dtype=torch.uint8))
    stack = pool.take()
    assert stack.push(10) is None
    assert pool.grow(stack, 128)
    first, second = stack.push(10), stack.push(64)
    first.fill_(1)
    assert second.sum() == 0
    assert (second.data_ptr() - first.data_ptr()) % arena.ALIGNMENT == 0
    assert stack.push(1) is None
    assert not pool.grow(stack, 1000)
    pool.give_back(stack)
    assert pool.take() is stack
    assert stack.used == 0
