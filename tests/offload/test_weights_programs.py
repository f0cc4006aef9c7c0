"""What programs do beside training steps, with weights on the host: the same bits as with weights
on the device.

covers: offload/weights.py, offload/ranges.py
"""

from __future__ import annotations

import os
import warnings
from types import SimpleNamespace

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

import streambp
from streambp.admission import probe
from streambp.offload.ranges import bytes_on_host
from tests.families import build, make_batch
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
from tests.tiers import thinned

pytestmark = pytest.mark.filterwarnings("ignore:Move the model to an accelerator")


def model_pair(change=lambda model: model, **settings):
    """A model with its weights on the host, inverted, and one with its weights on the device; each
    changed before."""
    models = [change(adapted_model(weights=weights, **settings)) for weights in ("cpu", "device")]
    invert(models[0])
    return models


@pytest.mark.fast(2)
@pytest.mark.parametrize(
    "family", thinned(FAMILIES, lambda family: family in ("gpt_oss", "falcon_h1"))
)
def test_loads_and_bytes_of_families(family):
    """At most two loads a layer and micro-batch, and the bytes that a plan counts, exactly."""
    model = adapted_model(family)
    step(model, 1)  # tries layers
    weights = weights_of(model)
    weights.loads.clear()
    step(model, 3)
    layers = len(weights.ranges.layer_states)
    assert sum(weights.loads.values()) <= 3 * (2 * layers - 2) + 2
    for index in range(layers):
        assert sum(n for (_, layer), n in weights.loads.items() if layer == index) <= 2 * 3
    counted, _ = bytes_on_host(
        weights.ranges.root,
        [layer_state.layer for layer_state in weights.ranges.layer_states.values()],
    )
    assert list(counted) == [weights.ranges.layers[index].memory.numel() for index in range(layers)]


@pytest.mark.full
def test_gradient_checkpointing_is_on():
    def on(model):
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
        return model

    model, resident = model_pair(on)
    for _ in range(2):
        assert_same(step(model), step(resident))


@pytest.mark.fast(2)
@pytest.mark.parametrize("weights", ["cpu", "auto"])
def test_an_evaluation_in_inference_mode_comes_first(weights):
    model, resident = adapted_model(weights=weights), adapted_model(weights="device")
    for _ in range(2):
        with torch.inference_mode():
            losses = [
                tested_model(**make_batch("plain"), use_cache=False).loss
                for tested_model in (model, resident)
            ]
        assert torch.equal(*losses)
        assert_same(step(model), step(resident))
    assert not any(tensor.is_inference() for tensor in model.parameters())


@pytest.mark.full
def test_embeddings_tied_to_the_head():
    results = []
    for weights in ("cpu", "device"):
        model = with_adapters(build("qwen3", num_hidden_layers=4, tie_word_embeddings=True)).train()
        model.get_input_embeddings().weight.requires_grad_(True)
        patched(model, weights)
        if weights == "cpu":
            invert(model)
        results.append(step(model))
    assert_same(*results)
    assert any("embed" in name for name in results[0][1])


@pytest.mark.full
def test_hooks_and_hooks_on_gradients():
    note_lists = []

    def hooked(model):
        notes = []
        note_lists.append(notes)
        layer = model.get_base_model().model.layers[1]
        layer.register_forward_hook(
            lambda module, args, output: notes.append(output.detach().clone())
        )
        trained = [p for p in layer.parameters() if p.requires_grad]
        trained[0].register_hook(lambda grad: 2 * grad)
        trained[1].register_post_accumulate_grad_hook(lambda p: notes.append(p.grad.clone()))
        return model

    model, resident = model_pair(hooked)
    for _ in range(2):
        assert_same(step(model), step(resident))
    assert len(note_lists[0]) == len(note_lists[1]) > 4
    assert all(map(torch.equal, *note_lists))


@pytest.mark.full
def test_adapters_that_come_after_patch():
    results = []
    for weights in ("cpu", "device"):
        base = build("qwen3", num_hidden_layers=4)
        patched(base, weights)
        model = with_adapters(base).train()
        if weights == "cpu":
            invert(model)
        results.append([step(model), step(model)])
    for ours, theirs in zip(*results, strict=True):
        assert_same(ours, theirs)


@pytest.mark.full
def test_a_scaler_of_gradients_and_clipping():
    """float16 under autocast, with a scale that overflows at first."""
    results = []
    for model in model_pair():
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=2)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=1e-2)
        losses = []
        for seed in range(6):
            with torch.autocast("cpu", torch.float16):
                loss = model(**make_batch("plain", seed=seed), use_cache=False).loss
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(trained, 0.3)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss.detach())
        results.append((losses, {str(i): p.detach().clone() for i, p in enumerate(trained)}))
        assert scaler.get_scale() < 2.0**24
    assert_same(*results)


@pytest.mark.fast(2)
@pytest.mark.parametrize("when", ["backward", "trial"])
def test_an_error_leaves_the_model_usable(when, monkeypatch):
    model, resident = model_pair()
    expected = [step(resident) for _ in range(2)]
    if when == "trial":
        real = probe._test_chunks

        def failing(call, x):
            raise MemoryError("no")

        monkeypatch.setattr(probe, "_test_chunks", failing)
        with pytest.raises(MemoryError, match="no"):
            step(model)
        monkeypatch.setattr(probe, "_test_chunks", real)
    else:
        assert_same(step(model), expected[0])
        layer, fails = model.get_base_model().model.layers[1], [True]

        def fail_once(grad):
            if fails.pop():
                raise RuntimeError("no")
            fails.append(False)

        parameter = next(p for p in layer.parameters() if p.requires_grad)
        handle = parameter.register_hook(fail_once)
        with pytest.raises(RuntimeError, match="no"):
            step(model)
        handle.remove()
    weights = weights_of(model)
    assert not weights._inside
    assert all(
        weight_slice.tensor.data_ptr() == weight_slice.home.data_ptr()
        for layer in weights.ranges.layers.values()
        for weight_slice in layer.slices
    )
    for result in expected:
        assert_same(step(model), result)


class Stops(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **_):
        control.should_save = state.global_step == self.step
        control.should_training_stop = state.global_step == self.step


def trained(weights, folder, stop=None, resume=False):
    """Logs and adapters of HF's Trainer on rows of random tokens."""
    rows = [
        {name: x[0] for name, x in make_batch("plain", seed=seed, rows=1).items()}
        for seed in range(8)
    ]
    arguments = TrainingArguments(
        str(folder), max_steps=4, gradient_accumulation_steps=2, per_device_train_batch_size=1, max_grad_norm=0.3,
        learning_rate=1e-2, logging_steps=1, report_to=[], disable_tqdm=True, use_cpu=True, save_strategy="no",
        gradient_checkpointing=True, eval_strategy="steps", eval_steps=2,
    )  # fmt: skip
    model = adapted_model(weights=weights)
    if weights == "cpu":
        invert(model)
    trainer = Trainer(
        model,
        arguments,
        train_dataset=rows,
        eval_dataset=rows[:2],
        callbacks=[Stops(stop)] if stop else None,
    )
    trainer.train(resume_from_checkpoint=os.path.join(folder, "checkpoint-2") if resume else None)
    keys = ("loss", "eval_loss", "grad_norm", "step")
    logs = [
        {key: entry[key] for key in keys if key in entry} for entry in trainer.state.log_history
    ]
    return logs, {
        name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad
    }


@pytest.mark.full
def test_trainer_evaluates_is_stopped_and_goes_on(tmp_path):
    full_logs, expected = trained("device", tmp_path / "device")
    stopped, _ = trained("cpu", tmp_path / "cpu", stop=2)
    logs, adapters = trained("cpu", tmp_path / "cpu", resume=True)
    with_loss = [entry for entry in full_logs if "loss" in entry or "eval_loss" in entry]
    assert [entry for entry in logs if "loss" in entry or "eval_loss" in entry] == with_loss
    assert stopped[:2] == full_logs[:2]
    assert adapters.keys() == expected.keys()
    assert all(torch.equal(adapters[name], parameter) for name, parameter in expected.items())


def quantised(weights, dtype=torch.float32):
    """With its MLPs in bitsandbytes' NF4, whose statistics are quantised, too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import bitsandbytes as bnb

    model = (
        build("qwen3", num_hidden_layers=4, hidden_size=64, intermediate_size=128)
        .requires_grad_(False)
        .to(dtype)
    )
    for layer in model.model.layers:
        for name in ("gate_proj", "up_proj", "down_proj"):
            old = getattr(layer.mlp, name)
            new = bnb.nn.Linear4bit(
                old.in_features,
                old.out_features,
                False,
                dtype,
                compress_statistics=True,
                quant_type="nf4",
            )
            new.weight = bnb.nn.Params4bit(
                old.weight.detach().clone(),
                requires_grad=False,
                compress_statistics=True,
                quant_type="nf4",
            )
            setattr(layer.mlp, name, new.to("cpu"))  # where it is quantised
    return patched(with_adapters(model).train(), weights)


def test_nf4_of_bitsandbytes():
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    model, resident = quantised("cpu"), quantised("device")
    weight = model.get_base_model().model.layers[1].mlp.up_proj.base_layer.weight
    assert weight.dtype == torch.uint8
    invert(model)
    for _ in range(2):
        assert_same(step(model), step(resident))
    slice_ids = {
        id(weight_slice.tensor) for weight_slice in weights_of(model).ranges.layers[1].slices
    }
    state = weight.quant_state
    assert {id(weight), id(state.absmax), id(state.state2.absmax)} <= slice_ids
    streambp.unpatch(model)


# -- weights="auto"


@pytest.mark.full
def test_on_a_cpu_all_weights_stay_where_they_are():
    model, resident = adapted_model(weights="auto"), adapted_model(weights="device")
    assert_same(step(model), step(resident))
    weights = weights_of(model)
    assert not weights.ranges.layers
    assert weights.ranges.staying == {0, 1, 2, 3}
    assert "weights of all 4 layers have room on the device" in str(streambp.describe(model))


def staying_layers(weights, headroom):
    """What stays, of so many bytes of room."""
    weights.ranges.keep_on_device(headroom, 2)
    return sorted(weights.ranges.staying)


def test_the_last_layers_stay_as_many_as_have_room():
    weights = weights_of(adapted_model(weights="auto"))
    size = bytes_on_host(
        weights.ranges.root,
        [layer_state.layer for layer_state in weights.ranges.layer_states.values()],
    )[0][0]
    assert staying_layers(weights, 4 * size) == [0, 1, 2, 3]
    assert staying_layers(weights, 4 * size - 1) == [3]  # two layers more are at work
    assert staying_layers(weights, 3 * size - 1) == []
    weights.ranges.layers = {index: SimpleNamespace(tensors=(), slices=()) for index in range(3)}
    weights.ranges.staying = frozenset({3})
    assert staying_layers(weights, 100 * size) == [3]  # what is on the host does not come back
    assert staying_layers(weights, 3 * size - 1) == []
