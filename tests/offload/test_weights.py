"""Weights on the host: the same bits as with weights on the device, while nobody can read the
host's but the copies.

covers: offload/weights.py, offload/ranges.py, layer/layer_state.py
"""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import textwrap

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import streambp
from streambp.errors import BackwardError, HostMemoryError, StreamBPError, UnsupportedModelError
from streambp.offload import ranges
from streambp.offload import weights as host_weights
from streambp.offload.weights import HostWeights
from tests.families import build, make_batch, mix_neighbours
from tests.offload.weights_runs import (
    FAMILIES,
    adapted_model,
    assert_same,
    invert,
    patched,
    step,
    weights_of,
    with_adapters,
)
from tests.seeds import seed_torch
from tests.tiers import thinned

pytestmark = pytest.mark.filterwarnings("ignore:Move the model to an accelerator")
ALL_SAVES = ("attn_out", "kv", "*")
SETTINGS = {
    "nothing saved": {},
    "all saved": {"saves": ALL_SAVES},
    "auto": {"saves": "auto"},
    "offload": {"saves": ALL_SAVES, "offload": "cpu"},
    "little room": {"offload": "cpu", "gpu_memory": 1},
    "offload auto": {"saves": "auto", "offload": "auto"},
    "chunks of auto": {"chunk_size": "auto"},
}


def model_pair(family="qwen3", dtype=torch.float32, **settings):
    """A model with its weights on the host, inverted, and the same one with its weights on the
    device."""
    model = adapted_model(family, dtype, **settings)
    invert(model)
    return model, adapted_model(family, dtype, "device", **settings)


@pytest.mark.fast(3)
@pytest.mark.parametrize(
    "dtype", thinned([torch.float32, torch.bfloat16], lambda dtype: dtype == torch.bfloat16)
)
@pytest.mark.parametrize(
    "family", thinned(FAMILIES, lambda family: family in ("gpt_oss", "qwen3_next", "falcon_h1"))
)
def test_families_give_the_same_bits(family, dtype):
    model, resident = model_pair(family, dtype)
    for _ in range(2):
        assert_same(step(model), step(resident))
    weights = weights_of(model)
    largest = max(layer.memory.numel() for layer in weights.ranges.layers.values())
    assert weights.device_bytes == 2 * largest


@pytest.mark.fast("offload")
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_settings_give_the_same_bits(settings):
    model, resident = model_pair(**settings)
    for _ in range(3):
        assert_same(step(model, 1), step(resident, 1))


def test_a_layers_weights_come_once_in_each_direction():
    model = adapted_model()
    invert(model)
    weights = weights_of(model)
    step(model, 3)
    loads = {
        index: sum(n for (_, layer), n in weights.loads.items() if layer == index)
        for index in range(4)
    }
    assert loads == {0: 6, 1: 6, 2: 3, 3: 3}  # the last two are still there when backward begins


def test_the_next_layer_is_on_its_way_before_a_layer_is_computed(monkeypatch):
    """From the second micro-batch on, when the order is known."""
    model = adapted_model()
    invert(model)
    step(model, 1)
    weights, entries, real = weights_of(model), [], HostWeights.on_device

    def entered(self, index, direction, *args, **kwargs):
        entries.append((direction[0], index, sum(weights.loads.values())))
        return real(self, index, direction, *args, **kwargs)

    monkeypatch.setattr(HostWeights, "on_device", entered)
    loads_before = sum(weights.loads.values())
    step(model, 1)
    # Of forward's first layer nothing was known; all others' copies began a layer before.
    assert [(d, i, n - loads_before) for d, i, n in entries] == [
        ("f", 0, 0), ("f", 1, 2), ("f", 2, 3), ("f", 3, 4), ("b", 3, 4), ("b", 2, 4), ("b", 1, 5), ("b", 0, 6),
    ]  # fmt: skip


SCHEDULES = ("F0 F1 B1 B0", "F0 E F1 B0 E B1", "F0 F1 E B0 F2 B2 B1")


@pytest.mark.full
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_orders_of_passes(schedule):
    def run(model):
        model.zero_grad(set_to_none=True)
        losses, values = {}, []
        for item in schedule.split():
            if item == "E":
                with torch.no_grad():
                    values.append(model(**make_batch("plain", seed=9), use_cache=False).loss)
            elif item[0] == "F":
                losses[item[1]] = model(
                    **make_batch("plain", seed=int(item[1])), use_cache=False
                ).loss
                values.append(losses[item[1]].detach())
            else:
                losses[item[1]].backward()
        return values, {
            name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
        }

    model, resident = model_pair()
    for _ in range(2):
        assert_same(run(model), run(resident))


@pytest.mark.full
def test_under_autocast_no_copy_of_a_weight_outlives_its_layer():
    model, resident = model_pair()

    def run(model):
        with torch.autocast("cpu", torch.bfloat16):
            return step(model)

    assert_same(run(model), run(resident))


class Casts(TorchDispatchMode):
    """The storages of matrices that were cast to half precision."""

    def __init__(self):
        super().__init__()
        self.storages = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if (
            func is torch.ops.aten._to_copy.default
            and out.dim() == 2
            and out.dtype == torch.bfloat16
        ):
            self.storages.append(StorageWeakRef(out.untyped_storage()))
        return out


def casts_left(model):
    """How many of them there are, and how many autocast keeps, when a forward without gradients is
    over."""
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), Casts() as casts:
        model(**make_batch("plain"), use_cache=False)
        return len(casts.storages), sum(not storage.expired() for storage in casts.storages)


def test_autocasts_cache_keeps_no_layer():
    """Of a model that trains as a whole, in an evaluation; frozen weights are not cached at all."""
    cast_count, live_count = casts_left(patched(build("qwen3", num_hidden_layers=4)))
    assert cast_count > 28
    assert live_count <= 1  # the head's
    cast_count, live_count = casts_left(patched(build("qwen3", num_hidden_layers=4), "device"))
    assert live_count >= 28


@pytest.mark.full
def test_an_error_leaves_the_model_usable(monkeypatch):
    model, resident = model_pair()
    layer = model.get_base_model().model.layers[2]
    expected = step(resident)
    real = type(layer.mlp).forward

    def failing(self, x):
        if self is layer.mlp and failing.calls_left == 0:
            raise RuntimeError("no")
        failing.calls_left -= self is layer.mlp
        return real(self, x)

    step(model)
    monkeypatch.setattr(type(layer.mlp), "forward", failing)
    for calls_left in (0, 2, 5):
        failing.calls_left = calls_left
        with pytest.raises(RuntimeError, match="no"):
            step(model)
    monkeypatch.setattr(type(layer.mlp), "forward", real)
    assert_same(step(model), expected)


@pytest.mark.fast(2)
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_has_weights_of_its_own(how):
    model, expected = adapted_model(), step(adapted_model(weights="device"))
    step(model)
    model_copy = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    invert(model_copy)
    assert_same(step(model_copy), expected)
    assert_same(step(model), expected)
    ours, theirs = ({p.data_ptr() for p in m.parameters()} for m in (model, model_copy))
    assert not ours & theirs


def test_unpatch_leaves_the_same_objects_with_the_same_bits():
    model = with_adapters(build("qwen3"))
    originals = {name: (id(p), p.detach().clone()) for name, p in model.named_parameters()}
    patched(model)
    step(model)
    streambp.unpatch(model)
    assert {name: id(p) for name, p in model.named_parameters()} == {
        name: i for name, (i, _) in originals.items()
    }
    assert all(
        torch.equal(p, originals[name][1])
        for name, p in model.named_parameters()
        if "lora" not in name
    )
    assert not any("_apply" in module.__dict__ for module in model.modules())


def test_files_hold_what_they_held(tmp_path):
    model = adapted_model()
    step(model)
    parameter = model.get_base_model().model.layers[1].mlp.up_proj.base_layer.weight
    for tensor in (parameter, parameter.detach()):
        file = io.BytesIO()
        torch.save(tensor, file)
        assert len(file.getvalue()) < parameter.nbytes + 2000  # not its layer's range
        file.seek(0)
        assert torch.equal(torch.load(file), parameter)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    plain = torch.load(file, weights_only=False)
    assert not any("_apply" in module.__dict__ for module in plain.modules())
    merged = model.merge_and_unload()
    merged.save_pretrained(tmp_path)
    loaded = type(merged).from_pretrained(tmp_path)
    assert all(torch.equal(p, merged.get_parameter(name)) for name, p in loaded.named_parameters())


def test_generate_and_attention_weights():
    model, resident = model_pair()
    model.eval(), resident.eval()
    ids = make_batch("plain")["input_ids"][:, :9]
    actual, expected = (
        m.generate(input_ids=ids, max_new_tokens=5, do_sample=False) for m in (model, resident)
    )
    assert torch.equal(actual, expected)
    with torch.no_grad():
        actual, expected = (m(input_ids=ids, use_cache=True).logits for m in (model, resident))
    assert torch.equal(actual, expected)
    with pytest.raises(
        UnsupportedModelError, match="does not stream: a cache or attention weights were asked for"
    ):
        model(input_ids=ids, use_cache=True)


def test_one_token_streams_as_one_chunk():
    # a token alone runs whole on the device, by peft's code
    model, resident = model_pair(kernels="own")
    batch = {"input_ids": torch.tensor([[5], [7]])}

    def run(model):
        model.zero_grad(set_to_none=True)
        loss = model(**batch, use_cache=False).logits.float().square().mean()
        loss.backward()
        return [loss.detach()], {
            name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
        }

    assert_same(run(model), run(resident))
    layer_states = next(
        m for m in model.modules() if "_streambp" in m.__dict__
    )._streambp.steps.layer_states
    assert all(layer_state.last_call.report.plan is not None for layer_state in layer_states)


@pytest.mark.full
def test_a_layer_that_runs_whole_is_refused_by_name(monkeypatch):
    model = adapted_model()
    mix_neighbours(monkeypatch, model.get_base_model())
    with pytest.raises(
        UnsupportedModelError, match="Qwen3DecoderLayer 0 does not stream: it mixes tokens"
    ):
        step(model)
    with torch.no_grad():
        model(**make_batch("plain"), use_cache=False)


def test_a_group_of_one_rank_pins_one_copy(monkeypatch):
    monkeypatch.setattr(host_weights, "is_initialized", lambda: True)
    monkeypatch.setattr(host_weights, "get_world_size", lambda: 1)
    assert_same(step(adapted_model()), step(adapted_model(weights="device")))


def test_each_group_counts_as_several(monkeypatch):
    monkeypatch.setattr(host_weights, "several_ranks", lambda: host_weights.is_initialized())
    with pytest.raises(UnsupportedModelError, match="a group of several"):
        test_a_group_of_one_rank_pins_one_copy(monkeypatch)


@pytest.mark.full
def test_refusals(monkeypatch):
    with pytest.raises(
        HostMemoryError, match=r"The weights of layer 2 want .* and host_memory is 0.00 GiB"
    ):
        step(adapted_model(host_memory=80_000))
    model = adapted_model()
    loss, trained = (
        model(**make_batch("plain"), use_cache=False).loss,
        [p for p in model.parameters() if p.requires_grad],
    )
    with pytest.raises(BackwardError, match="create_graph=True"):
        torch.autograd.grad(loss, trained, create_graph=True)
    layer = model.get_base_model().model.layers[1].mlp.up_proj.base_layer
    layer.weight = torch.nn.Parameter(layer.weight.detach().to("meta"), requires_grad=False)
    with pytest.raises(
        UnsupportedModelError,
        match=r"mlp.up_proj.base_layer.weight of layer 1 is a Parameter on meta",
    ):
        step(model)
    monkeypatch.setattr(host_weights, "is_initialized", lambda: True)
    monkeypatch.setattr(host_weights, "get_world_size", lambda: 2)
    with pytest.raises(
        UnsupportedModelError, match="a group of several: each rank would pin a copy"
    ):
        step(adapted_model())
    monkeypatch.setattr(host_weights, "get_world_size", lambda: 1)
    step(adapted_model())
    model = adapted_model()
    for parameter in model.parameters():
        parameter.grad_accum = None  # as under ZeRO-1 and -2
    with pytest.raises(UnsupportedModelError, match="DeepSpeed stores the weights of this model"):
        step(model)


@pytest.mark.full
def test_freezing_later_and_training_anew():
    model = patched(build("qwen3", num_hidden_layers=4))
    model.model.layers.requires_grad_(False)
    resident = patched(build("qwen3", num_hidden_layers=4), "device")
    resident.model.layers.requires_grad_(False)
    assert_same(step(model), step(resident))
    for tested_model in (model, resident):
        tested_model.model.layers[1].mlp.requires_grad_(True)
    assert_same(step(model), step(resident))
    assert len(weights_of(model).ranges.layers[1].slices) < len(
        weights_of(model).ranges.layers[2].slices
    )


class Statistics:
    """As bitsandbytes': statistics of a weight [blocks], quantised themselves."""

    def __init__(self, absmax, state2=None):
        self.absmax, self.state2 = absmax, state2


class Quantised(torch.nn.Module):
    """A Linear with an 8-bit weight [in, out] whose statistics hang on the parameter, as
    bitsandbytes has them."""

    def __init__(self, linear):
        super().__init__()
        absmax = linear.weight.detach().abs().amax(1) / 127  # [out]
        peak = absmax.amax() / 255
        self.weight = torch.nn.Parameter(
            (linear.weight.detach() / absmax[:, None]).round().char(), requires_grad=False
        )
        self.weight.quant_state = Statistics((absmax / peak).round().byte(), Statistics(peak))

    def forward(self, x):
        state = self.weight.quant_state
        absmax = state.absmax.float() * state.state2.absmax
        return torch.nn.functional.linear(x, self.weight.float() * absmax[:, None])


@pytest.mark.full
def test_statistics_of_quantised_weights_move_along():
    def run(weights):
        model = build("qwen3", num_hidden_layers=3).requires_grad_(False)
        for layer in model.model.layers:
            layer.mlp.down_proj = Quantised(layer.mlp.down_proj)
        model.model.layers[0].mlp.up_proj.weight.requires_grad_(True)
        patched(model, weights)
        if weights == "cpu":
            invert(model)
        return model, step(model)

    model, result = run("cpu")
    assert_same(result, run("device")[1])
    slices = weights_of(model).ranges.layers[1].slices
    state = model.model.layers[1].mlp.down_proj.weight.quant_state
    assert {id(state.absmax), id(state.state2.absmax)} <= {
        id(weight_slice.tensor) for weight_slice in slices
    }


def test_the_host_holds_little_more_than_the_weights():
    model = patched(build("qwen3", hidden_size=256, intermediate_size=512).requires_grad_(False))
    invert(model)
    host_ranges = weights_of(model).ranges
    layer_bytes = sum(p.nbytes for p in model.model.layers.parameters())
    assert layer_bytes <= host_ranges.bytes <= 1.01 * layer_bytes


def test_weights_that_others_hold_stay_on_the_device():
    def run(weights):
        model = build("qwen3", num_hidden_layers=3)
        layers = model.model.layers
        layers[1].mlp.up_proj.weight = layers[0].mlp.up_proj.weight
        layers.requires_grad_(False)
        patched(model, weights)
        return model, step(model)

    model, result = run("cpu")
    assert_same(result, run("device")[1])
    streamed = [
        id(weight_slice.tensor)
        for layer in weights_of(model).ranges.layers.values()
        for weight_slice in layer.slices
    ]
    assert id(model.model.layers[0].mlp.up_proj.weight) not in streamed


@pytest.mark.fast(2)
@pytest.mark.parametrize("assign", [False, True])
def test_weights_that_are_loaded_later_are_used(assign):
    model, resident = adapted_model(), adapted_model(weights="device")
    step(model)
    state = {name: x.clone() * 1.1 for name, x in resident.state_dict().items()}
    for tested_model in (model, resident):
        tested_model.load_state_dict({name: x.clone() for name, x in state.items()}, assign=assign)
        if assign:
            tested_model.requires_grad_(False)
            for name, parameter in tested_model.named_parameters():
                parameter.requires_grad_("lora_" in name)
    assert_same(step(model), step(resident))


@pytest.mark.full
def test_adapters_come_go_and_are_merged():
    model, resident = adapted_model(), adapted_model(weights="device")
    result_lists = []
    for tested_model in (model, resident):
        results = [step(tested_model)]
        tested_model.merge_adapter()  # writes to `.data`
        with torch.no_grad():
            results.append(
                ([tested_model(**make_batch("plain"), use_cache=False).loss], results[0][1])
            )
        tested_model.unmerge_adapter()
        results.append(step(tested_model))
        with tested_model.disable_adapter(), torch.no_grad():
            results.append(
                ([tested_model(**make_batch("plain"), use_cache=False).loss], results[0][1])
            )
        seed_torch(4)
        tested_model.add_adapter("second", tested_model.peft_config["default"])
        tested_model.set_adapter("second")
        results.append(step(tested_model))
        result_lists.append(results)
    for ours, theirs in zip(*result_lists, strict=True):
        assert_same(ours, theirs)


@pytest.mark.full
def test_a_moved_model_leaves_its_weights_on_the_host(monkeypatch):
    """Asked of a device that has no data; the emulated one has (tests/emulated/test_weights.py)."""
    model = adapted_model()
    step(model)
    shapes = []

    def fn(tensor):
        shapes.append(tuple(tensor.shape))
        return tensor

    layer = model.get_base_model().model.layers[0]
    assert layer.__dict__["_apply"].func is ranges.move_others
    layer._apply(fn)
    assert (0,) in shapes
    model.to(torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    resident = adapted_model(weights="device").to(torch.bfloat16)
    assert_same(step(model), step(resident))


# -- mutants


def mutant(monkeypatch, where, name, old, new):
    source = textwrap.dedent(inspect.getsource(getattr(where, name)))
    assert old in source
    space = dict(vars(inspect.getmodule(where)))
    exec(source.replace(old, new), space)
    monkeypatch.setattr(where, name, space[name])


@pytest.mark.full
def test_mutant_a_slot_that_outlives_a_forward(monkeypatch):
    mutant(monkeypatch, HostWeights, "begin", "slot.index = -1", "pass")
    mutant(monkeypatch, HostWeights, "_start", "slot.index = -1", "pass")
    with pytest.raises(AssertionError):
        test_adapters_come_go_and_are_merged()


def test_mutant_a_model_that_moves_as_ever(monkeypatch):
    mutant(monkeypatch, ranges, "move_others", "id(tensor) not in host_tensors", "True")
    with pytest.raises(AssertionError):
        test_a_moved_model_leaves_its_weights_on_the_host(monkeypatch)


def test_mutant_autocasts_cache(monkeypatch):
    monkeypatch.setattr(torch, "set_autocast_cache_enabled", lambda on: None)
    with pytest.raises(AssertionError):
        test_autocasts_cache_keeps_no_layer()


def test_mutant_a_view_with_its_layers_storage(monkeypatch, tmp_path):
    def view(memory, offset, like):
        return (
            memory[offset : offset + like.nbytes]
            .view(like.dtype)
            .as_strided(like.shape, like.stride())
        )

    monkeypatch.setattr(ranges, "view_of", view)
    with pytest.raises(AssertionError):
        test_files_hold_what_they_held(tmp_path)


def test_mutant_memory_that_is_used_again_under_other_places(monkeypatch):
    mutant(
        monkeypatch,
        ranges.HostRanges,
        "move_layer",
        "memory if stays else None",
        "memory if previous_size >= size else None",
    )
    with pytest.raises((AssertionError, StreamBPError)):
        test_freezing_later_and_training_anew()
