"""Steps of small models whose weights live on the host, where nothing but the copies to the device
can read them."""

from __future__ import annotations

import warnings

import pytest
import torch

import streambp
from streambp.offload.engines import FROM_HOST_QUEUE, Engine
from tests import zoo
from tests.families import build, make_batch
from tests.seeds import seeded
from tests.versions import STATES_IN_CHUNKS

FAMILIES = (
    "llama",
    "qwen3",
    "gemma3_text",
    "qwen3_moe",
    "gpt_oss",
    "deepseek_v3",
    "qwen3_next",
    "falcon_h1",
)
HYBRIDS = ("qwen3_next", "falcon_h1")


class Inverting(Engine):
    """The bytes on the host are inverted but while they are copied: whatever else reads them finds
    garbage."""

    def copy(self, queue, target, source):
        if queue == FROM_HOST_QUEUE and source.dtype == torch.uint8:
            source = source.bitwise_not()
        super().copy(queue, target, source)


def weights_of(model):
    return next(m for m in model.modules() if "_streambp" in m.__dict__)._streambp.weights


def invert(model):
    """Have the weights on the host, and invert them; a second call inverts them back."""
    weights, device = weights_of(model), torch.device("cpu")
    weights._given_engine = Inverting(device)
    weights.begin(device)
    weights._start(device)
    for layer in weights.ranges.layers.values():
        layer.memory.bitwise_not_()


def with_adapters(model, rank=2, seed=3):
    """LoRA on all Linears, both factors random."""
    peft = pytest.importorskip("peft")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = peft.LoraConfig(r=rank, target_modules="all-linear", exclude_modules=["out_proj"])
        model = peft.get_peft_model(model, config)
    generator = seeded(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def patched(model, weights="cpu", **settings):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Move the model to an accelerator")
        settings = {"chunk_size": 7, "saves": (), **settings}
        return streambp.patch(model, streambp.StreamConfig(weights=weights, **settings))


def adapted_model(family="qwen3", dtype=torch.float32, weights="cpu", **settings):
    """A family's model with adapters, patched; of "qwen3" one with four layers."""
    if family in HYBRIDS and not STATES_IN_CHUNKS:
        pytest.skip(
            "before transformers 5.15 hybrids run whole, where their weights must be on the device"
        )
    model = build(family, num_hidden_layers=4) if family == "qwen3" else zoo.build(family)
    return patched(with_adapters(model.to(dtype)).train(), weights, **settings)


def step(model, micro_batches=2, **changes):
    """Loss of each micro-batch, and the gradients of their sum."""
    model.zero_grad(set_to_none=True)
    losses = []
    for seed in range(micro_batches):
        loss = model(**{**make_batch("plain", seed=seed + 1), **changes}, use_cache=False).loss
        loss.backward()
        losses.append(loss.detach())
    return losses, {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


def assert_same(actual, expected):
    assert all(map(torch.equal, actual[0], expected[0]))
    assert actual[1].keys() == expected[1].keys() != set()
    for name, gradient in expected[1].items():
        assert torch.equal(actual[1][name], gradient), name
