"""Models of many kinds on the emulated device: gradients are those of the unpatched model on the
CPU.

covers: offload/engines.py, layer/recompute.py, model/patching.py
"""

from __future__ import annotations

import copy
import itertools

import pytest
import torch

import streambp
from streambp.offload import engines, manager_of
from tests import zoo
from tests.emulated import backend
from tests.families import build, make_batch
from tests.oracle import MAX_FLOAT64_ERROR, gradients, worst_error
from tests.tiers import thinned

pytestmark = [pytest.mark.emulated(any=True), pytest.mark.usefixtures("float64_oracle")]
FAMILIES = (
    "qwen3",
    "gpt_oss",
    "deepseek_v3",
    "qwen3_moe",
    "gemma3",
    "qwen3_next",
    "falcon_h1",
    "mamba2",
)
ALL_SAVES = ("attn_out", "kv", "*")
SAVES = {"none": {"saves": ()}, "all": {"saves": ALL_SAVES}, "auto": {}}
OFFLOAD = ("none", "cpu", "auto")
SETTINGS = {  # offload="auto" chooses saves itself
    f"{saves}-{offload}-{'shared' if shared else 'rows'}": {
        **SAVES[saves],
        "offload": offload,
        "rows": "packed" if shared else "as_given",
    }
    for saves, offload, shared in itertools.product(SAVES, OFFLOAD, (False, True))
    if offload != "auto" or saves == "auto"
}
FAST_CASES = ("all-cpu-rows", "all-cpu-shared")


def built(family, **fields):
    return (build if family in ("qwen3", "gemma3") else zoo.build)(
        family, torch.float64, device="cpu", **fields
    )


def batch_of(mode):
    batch = make_batch(mode, rows=3, device="cpu")
    if mode == "plain":  # rows that begin alike
        batch["input_ids"][:, :12] = batch["input_ids"][:1, :12]
        batch["labels"][:, :12] = -100
    return batch


@pytest.fixture(scope="module")
def truths():
    """Gradients on the CPU, unpatched, by family and mode."""
    return {}


@pytest.mark.parametrize("setting", thinned(SETTINGS, lambda setting: setting in FAST_CASES))
@pytest.mark.parametrize(
    "family", thinned(FAMILIES, lambda family: family in ("qwen3", "qwen3_next"))
)
def test_gradients_are_those_of_the_cpu(family, setting, truths, device):
    """Patched on the CPU and moved, in two steps."""
    mode = "plain" if SETTINGS[setting]["rows"] == "packed" else "left-padded"
    # Steps of thousands of tokens are counted, in plain products of windows: those of 5 tokens are
    # a minute of them.
    fields = (
        {"sliding_window": 20} if family == "gpt_oss" and setting.startswith("auto-none") else {}
    )
    model, batch, key = built(family, **fields), batch_of(mode), (family, mode, *fields)
    if key not in truths:
        truths[key] = gradients(copy.deepcopy(model), **batch)[1]
    streambp.patch(model, streambp.StreamConfig(chunk_size=7, **SETTINGS[setting])).to(device)
    model.tie_weights()  # `to` makes new parameters for such devices, one by one
    device_batch = {name: x.to(device) for name, x in batch.items()}
    for _ in range(2):
        _, actual = gradients(model, **device_batch)
        assert (
            worst_error({name: g.cpu() for name, g in actual.items()}, truths[key])
            <= MAX_FLOAT64_ERROR
        )
    if SETTINGS[setting]["offload"] == "cpu":
        transfers = manager_of(model).transfers
        assert all(
            type(engine) is engines.AcceleratorEngine for engine in transfers.engines.values()
        )
        assert transfers.bytes[engines.TO_HOST_QUEUE] > 0


def divided(model, first_device, second_device):
    """A `device_map`: the first half of the layers, and the rest with the final norm and the
    head."""
    device_map = {"lm_head": first_device if model.config.tie_word_embeddings else second_device}
    for name, child in model.base_model.named_children():
        path = f"{model.base_model_prefix}.{name}"
        if isinstance(child, torch.nn.ModuleList):
            device_map |= {
                f"{path}.{index}": first_device if 2 * index < len(child) else second_device
                for index in range(len(child))
            }
        else:
            device_map[path] = second_device if "norm" in name else first_device
    return device_map


@pytest.mark.emulated
@pytest.mark.parametrize("offload", ["none", "cpu"])
@pytest.mark.parametrize("family", thinned(FAMILIES, lambda family: family in ("qwen3", "gemma3")))
def test_layers_on_two_devices(family, offload, truths):
    """gemma3's output projection is its embedding: on the first device, where the final norm is on
    the second."""
    accelerate = pytest.importorskip("accelerate")
    batch, model = batch_of("left-padded"), built(family)
    if (family, "left-padded") not in truths:
        truths[family, "left-padded"] = gradients(copy.deepcopy(model), **batch)[1]
    first_device, second_device = f"{backend.NAME}:0", f"{backend.NAME}:1"
    device_map = divided(model, first_device, second_device)
    model = accelerate.dispatch_model(
        model, device_map=device_map, main_device=first_device, force_hooks=True
    )
    streambp.patch(model, streambp.StreamConfig(chunk_size=7, saves=("attn_out",), offload=offload))
    device_batch = {name: x.to(first_device) for name, x in batch.items()}
    for _ in range(2):
        _, actual = gradients(model, **device_batch)
        assert {g.device.index for g in actual.values()} == {0, 1}
        assert (
            worst_error(
                {name: g.cpu() for name, g in actual.items()}, truths[family, "left-padded"]
            )
            <= MAX_FLOAT64_ERROR
        )
    if offload == "cpu":
        assert len(manager_of(model).transfers.engines) == 2
