"""Weights on the host on the emulated device, where a kernel that meets a tensor of the host
raises.

covers: offload/weights.py, offload/ranges.py, offload/gradients.py, integrations/in_backward.py
"""

from __future__ import annotations

import inspect
import sys

import pytest
import torch
from transformers import Trainer, TrainingArguments

from streambp.device import allocator_bytes
from streambp.integrations import optimizer_in_backward
from streambp.offload import engines, gradients, weights
from tests.device import limit_memory
from tests.emulated import backend
from tests.families import build, make_batch
from tests.offload.weights_runs import adapted_model, patched, weights_of
from tests.tiers import thinned

pytestmark = pytest.mark.emulated
FAMILIES = ("qwen3", "qwen3_moe", "qwen3_next", "falcon_h1")
# Seconds of each copy to the device or from it, or of each kernel.
SLOW_QUEUES = {"back": (0.05, 0.0, 0.0), "out": (0.0, 0.05, 0.0), "compute": (0.0, 0.0, 0.001)}
WAIT_CASES = {
    line.rpartition("# ")[2]: (module.__file__, number)
    for module in (weights, gradients)
    for number, line in enumerate(inspect.getsource(module).splitlines(), 1)
    if ".wait(" in line
}
NEEDED_WAITS = {"7": "compute", "8": "back", "9": "compute", "10": "out", "11": "out"}
GRADIENT_WAITS = ("9", "10", "11")


class Leaky(engines.AcceleratorEngine):
    """Leaves out the waits of one line of a file."""

    line: tuple[str, int] | None = None
    left_out = 0

    def wait(self, queue, event):
        caller = sys._getframe(1)
        if (caller.f_code.co_filename, caller.f_lineno) == Leaky.line:
            Leaky.left_out += event is not None
        else:
            super().wait(queue, event)


def trained(model, batch, micro_batches=1):
    model.zero_grad(set_to_none=True)
    for _ in range(micro_batches):
        model(**batch, use_cache=False).loss.backward()
    torch.accelerator.synchronize()
    return {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}


def are_equal(actual, expected):
    return actual.keys() == expected.keys() and all(
        torch.equal(actual[key], expected[key]) for key in expected
    )


@pytest.mark.emulated(any=True)
@pytest.mark.parametrize(
    "family", thinned(FAMILIES, lambda family: family in ("qwen3", "qwen3_next"))
)
def test_a_moved_model_leaves_its_weights_on_the_host(family, device):
    batch = {name: x.to(device) for name, x in make_batch("plain", rows=1).items()}
    expected = trained(adapted_model(family, weights="device").to(device), batch)
    model = adapted_model(family).to(device)
    for _ in range(2):
        assert are_equal(trained(model, batch), expected)
    frozen = [
        p
        for layer in weights_of(model).ranges.layer_states.values()
        for p in layer.layer.parameters()
        if not p.requires_grad
    ]
    assert {p.device.type for p in frozen} == {"cpu"}
    assert {p.device for p in model.parameters() if p.requires_grad} == {
        torch.device(device.type, 0)
    }
    assert type(weights_of(model)._engine) is engines.AcceleratorEngine
    assert all(layer.memory.is_pinned() for layer in weights_of(model).ranges.layers.values())


def trainer_of(make, clipping, weights, device, folder):
    """HF's Trainer after two steps of two micro-batches."""
    rows = [
        {name: x[0].cpu() for name, x in make_batch("plain", seed=seed, rows=1).items()}
        for seed in range(4)
    ]
    arguments = TrainingArguments(
        str(folder), max_steps=2, gradient_accumulation_steps=2, per_device_train_batch_size=1, max_grad_norm=clipping,
        learning_rate=1e-2, logging_steps=1, eval_strategy="steps", eval_steps=1, report_to=[], disable_tqdm=True,
        save_strategy="no",
    )  # fmt: skip
    trainer = Trainer(make(weights=weights), arguments, train_dataset=rows, eval_dataset=rows[:2])
    assert trainer.args.device.type == device.type
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    "trains", [pytest.param("adapters", marks=pytest.mark.emulated(any=True)), "all"]
)
def test_trainer_leaves_them_there_and_trains_alike(trains, device, tmp_path):
    """Without clipping where all trains: torch adds up norms of two devices in another order than
    those of one. AdamW's steps on the host are a GPU's but for rounding."""
    how = {"adapters": (adapted_model, 0.3), "all": (full_model, 0.0)}[trains]
    ours, resident = (
        trainer_of(*how, weights, device, tmp_path / weights) for weights in ("cpu", "device")
    )
    assert [
        {k: v for k, v in entry.items() if "loss" in k and "train" not in k}
        for entry in ours.state.log_history
    ] == [
        {k: v for k, v in entry.items() if "loss" in k and "train" not in k}
        for entry in resident.state.log_history
    ]
    for (name, parameter), resident_parameter in zip(
        ours.model.named_parameters(), resident.model.parameters(), strict=True
    ):
        on_host = ".layers." in name and (trains == "all" or not parameter.requires_grad)
        assert parameter.device.type == ("cpu" if on_host else device.type), name
        assert torch.equal(parameter.cpu(), resident_parameter.cpu()), name


def full_model(weights="cpu", **settings):
    """A model that trains as a whole."""
    return patched(build("qwen3", num_hidden_layers=4).train(), weights, **settings)


def made_run(make, device, micro_batches):
    batch = {name: x.to(device) for name, x in make_batch("plain", rows=1).items()}
    expected = trained(make(weights="device").to(device), batch, micro_batches)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "make_engine", Leaky)
        model = make(compare_backward=False).to(device)  # `step_without_wait` compares
        trained(model, batch)
        trained(model, batch)
    return model, batch, expected, weights_of(model)._engine, micro_batches


@pytest.fixture(scope="module")
def run(device):
    """A model with its weights on the host, a batch, the gradients of a step, and the model's
    engine."""
    return made_run(adapted_model, device, 1)


@pytest.fixture(scope="module")
def full_run(device):
    """The same of a model that trains as a whole. Gradients of a second micro-batch are added up
    when they arrive."""
    return made_run(full_model, device, 2)


def step_without_wait(run, wait, slow, times=1):
    """Whether a step gives the gradients of weights on the device, and how many waits it left
    out."""
    model, batch, expected, engine, micro_batches = run
    assert type(engine) is Leaky
    c, (back_delay, out_delay, compute_delay) = (
        backend.extension(),
        (times * seconds for seconds in SLOW_QUEUES[slow]),
    )
    streams = [
        engine._streams[queue].stream_id
        for queue in (engines.FROM_HOST_QUEUE, engines.TO_HOST_QUEUE)
    ]
    Leaky.line, Leaky.left_out = WAIT_CASES.get(wait), 0
    try:
        c.set_delays(0, 0, 0.0, compute_delay)
        for stream, seconds in zip(streams, (back_delay, out_delay), strict=True):
            c.set_delays(0, stream, seconds, 0.0)
        gradients = trained(model, batch, micro_batches)
    finally:
        Leaky.line = None
        for stream in (0, *streams):
            c.set_delays(0, stream, 0.0, 0.0)
    return are_equal(gradients, expected), Leaky.left_out


@pytest.mark.parametrize("slow", ["back", "compute"])
def test_with_all_waits_a_step_is_right(run, slow):
    assert step_without_wait(run, None, slow) == (True, 0)


@pytest.mark.parametrize("slow", SLOW_QUEUES)
def test_with_all_waits_gradients_on_the_host_are_right(full_run, slow):
    assert step_without_wait(full_run, None, slow) == (True, 0)
    model = full_run[0]
    layers = {
        id(p)
        for layer_state in weights_of(model).ranges.layer_states.values()
        for p in layer_state.layer.parameters()
    }
    assert {p.grad.device.type for p in model.parameters() if id(p) in layers} == {"cpu"}
    assert "cpu" not in {p.grad.device.type for p in model.parameters() if id(p) not in layers}
    assert all(buffer.memory.is_pinned() for buffer in weights_of(model)._buffers)


@pytest.mark.parametrize("wait", NEEDED_WAITS)
def test_a_wait_that_is_needed(wait, request):
    chosen_run = request.getfixturevalue("full_run" if wait in GRADIENT_WAITS else "run")
    for times in (1, 5, 25):  # the host can be late as well
        is_same, left_out = step_without_wait(chosen_run, wait, NEEDED_WAITS[wait], times)
        assert left_out > 0
        if not is_same:
            return
    raise AssertionError(f"nothing shows that the wait {wait} was left out")


def test_the_device_holds_two_layers(run, device):
    """Beside what is not the layers': embeddings, head, norms, adapters."""
    model = run[0]
    model.zero_grad(set_to_none=True)
    allocated = allocator_bytes(torch.device(device.type, 0), "allocated")
    on_device = sum(p.nbytes for p in model.parameters() if p.device.type == device.type)
    largest = max(layer.memory.numel() for layer in weights_of(model).ranges.layers.values())
    assert weights_of(model).device_bytes == 2 * largest
    assert allocated >= on_device + 2 * largest


def test_as_many_layers_stay_as_have_room(device):
    """weights="auto": all of them, some, none; and fewer for a longer batch."""
    batch = {name: x.to(device) for name, x in make_batch("plain", rows=1).items()}
    expected = trained(adapted_model(weights="device").to(device), batch)
    model = adapted_model(weights="auto").to(device)
    host_weights, headroom = weights_of(model), []
    frozen = [
        p
        for layer_state in host_weights.ranges.layer_states.values()
        for p in layer_state.layer.parameters()
        if not p.requires_grad
    ]
    assert {p.device.type for p in frozen} == {"cpu"}  # nothing is known of a step yet
    size = max(host_weights.ranges.bytes_of(index) for index in host_weights.ranges.layer_states)
    host_weights.headroom = lambda device, rows, length: headroom[-1]
    headroom.append(4 * size - 1)
    for _ in range(2):
        assert are_equal(trained(model, batch), expected)
    assert host_weights.ranges.staying == {3}
    assert sorted(host_weights.ranges.layers) == [0, 1, 2]
    assert {p.device.type for p in host_weights.ranges.layer_states[3].layer.parameters()} == {
        device.type
    }
    headroom.append(0)
    assert are_equal(trained(model, batch), expected)
    assert host_weights.ranges.staying == {3}  # the batch is no longer than before
    longer = {name: torch.cat([x, x], 1) for name, x in batch.items()}
    assert are_equal(
        trained(model, longer), trained(adapted_model(weights="device").to(device), longer)
    )
    assert not host_weights.ranges.staying
    assert {p.device.type for p in frozen} == {"cpu"}
    assert are_equal(trained(model, batch), expected)


def test_a_limit_decides_what_stays(device):
    """By the device's free memory and the step's law: without a limit all layers stay, with one of
    a GiB none does."""
    batch = {name: x.to(device) for name, x in make_batch("plain", rows=1).items()}
    expected = trained(adapted_model(weights="device").to(device), batch)
    for limit, staying in ((None, {0, 1, 2, 3}), (2**30, set())):
        limit_memory(torch.device(device.type, 0), limit)
        try:
            model = adapted_model(weights="auto").to(device)
            assert are_equal(trained(model, batch), expected)
        finally:
            limit_memory(torch.device(device.type, 0), None)
        assert weights_of(model).ranges.staying == staying


def stepped(model, device, **how):
    """Weights after three steps in backward, on the host, and where the optimizers' states are."""
    handle = optimizer_in_backward(
        model, lambda parameters: torch.optim.AdamW(parameters, lr=1e-2), **how
    )
    for seed in range(3):
        if seed == 2:
            state = handle.state_dict()
            handle.remove()
            handle = optimizer_in_backward(
                model, lambda parameters: torch.optim.AdamW(parameters, lr=1e-2), **how
            )
            handle.load_state_dict(state)
        batch = {name: x.to(device) for name, x in make_batch("plain", seed=seed, rows=1).items()}
        model(**batch, use_cache=False).loss.backward()
        assert all(p.grad is None for p in model.parameters())
    torch.accelerator.synchronize()
    moments = [
        x
        for optimizer in handle.optimizers.values()
        for values in optimizer.state.values()
        for x in values.values()
    ]
    return {name: p.detach().cpu() for name, p in model.named_parameters()}, {
        x.device.type for x in moments if x.dim()
    }


@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_and_head_step_on_the_host(tied, device):
    """They stay on the device, and the optimizer's states of no weight do; the step is the same."""

    def model(weights):
        built = build("qwen3", num_hidden_layers=4, tie_word_embeddings=tied).train()
        assert (built.lm_head.weight is built.model.embed_tokens.weight) == tied
        return patched(built, weights).to(device)

    ours = model("cpu")
    weights_found, where = stepped(ours, device, on_host=True)
    assert where == {"cpu"}
    assert {p.device.type for name, p in ours.named_parameters() if ".layers." not in name} == {
        device.type
    }
    assert are_equal(weights_found, stepped(model("device"), device)[0])
    assert stepped(model("cpu"), device)[1] == {"cpu", device.type}


def test_merging_after_the_model_went_to_the_host(device):
    batch = {name: x.to(device) for name, x in make_batch("plain", rows=1).items()}
    models = [adapted_model().to(device), adapted_model(weights="device").to(device)]
    merged = []
    for model in models:
        trained(model, batch)
        merged.append(model.to("cpu").merge_and_unload())
    pairs = zip(*(merged_model.named_parameters() for merged_model in merged), strict=True)
    assert all(torch.equal(ours, theirs) for (_, ours), (_, theirs) in pairs)
