"""Real steps on a CPU whose storages are tracked, and the same steps counted without data."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import streambp
from streambp.admission.stacks import find_stacks
from streambp.planner.compose import unroll
from streambp.planner.count import LiveBytes
from streambp.planner.measure import uncount_host
from streambp.planner.model_class import counted_stack, loss_of
from streambp.planner.skeleton import Skeleton
from streambp.planner.step import run_step
from streambp.planner.survey import CHECKPOINTING_RECIPE, Counter, streamed_recipe
from tests import zoo

RECIPES = {
    "checkpointing": CHECKPOINTING_RECIPE,
    "streambp": streamed_recipe(),
    "saves": streamed_recipe(("attn_out", "kv")),
    "offload": streamed_recipe(("attn_out",), "cpu"),
}
WINDOWED = {"sliding_window": 512}
FAMILIES = {
    "llama": {}, "qwen2": {}, "qwen3": {}, "mistral": WINDOWED, "phi3": {}, "olmo2": {}, "gemma3_text": WINDOWED,
    "glm4": {}, "granite": {}, "gpt_oss": WINDOWED, "qwen3_moe": {}, "deepseek_v3": {},
}  # fmt: skip
HYBRIDS = {
    "qwen3_next": {},
    "bamba": {"attn_layer_indices": [1, 3, 5, 7]},
    "jamba": {},
    "lfm2": {},
    "zaya": {},
}
EXPERTS = ("gpt_oss", "qwen3_moe", "deepseek_v3", "qwen3_next", "jamba", "zaya")
LAYERS = 9


def build(family, lora, layers=LAYERS):
    """Layers whose kinds repeat, so that most of them are not counted but follow from others."""
    pattern = zoo.tiny_config(family).to_dict().get("layer_types")
    changes = {**(FAMILIES | HYBRIDS)[family], "num_hidden_layers": layers}
    if pattern:
        changes["layer_types"] = (list(pattern) * layers)[:layers]
    # torch knows the shapes of grouped products in bf16 alone.
    model = zoo.build(family, torch.bfloat16 if family in EXPERTS else torch.float32, **changes)
    model.config._experts_implementation = "grouped_mm"
    if lora:
        peft = pytest.importorskip("peft", reason="peft is not installed")
        config = peft.LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.0)
        model = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    return model.train()


def predict(model, recipe, length, chunk_size):
    """Phases of a first step of the whole model, from a few of its layers."""
    skeleton = Skeleton(model, torch.float32, None, 16, "cpu")
    counter = Counter(skeleton, skeleton.reduce(), 1, None)
    (spans,) = counter.count(recipe, (length, chunk_size), accumulate=False)
    return unroll(spans, counter.shrunk_model)


def measure(model, recipe, length, chunk_size):
    """Spans of a real first step; its offloading's host memory is not counted."""
    ids = torch.randint(3, zoo.VOCABULARY, (1, length))
    layers = max((stack.layers for stack in find_stacks(model).stacks), key=len)
    if recipe.config is None:
        next(
            m for m in model.modules() if hasattr(m, "gradient_checkpointing_enable")
        ).gradient_checkpointing_enable({"use_reentrant": False})
    else:
        streambp.patch(model, dataclasses.replace(recipe.config, chunk_size=chunk_size))
        uncount_host(model)

    def loss():
        return model(input_ids=ids, labels=ids, use_cache=False).loss

    loss().backward()  # what happens once in a layer's life (probes, traces) is over
    model.zero_grad(set_to_none=True)
    return run_step(model, layers, loss, LiveBytes())


def peaks(model, recipe, length, chunk_size, encoder_len=None):
    """Peaks of activations in a first step, predicted and measured by live storages, of a model
    that need not be a causal language model."""
    skeleton = Skeleton(model, torch.float32, None, 16, "cpu", encoder_len=encoder_len)
    counter = Counter(skeleton, skeleton.reduce(), 1, None)
    (spans,) = counter.count(recipe, (length, chunk_size), accumulate=False)
    phases = unroll(spans, counter.shrunk_model)[0]
    if recipe.config is None:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    else:
        streambp.patch(model, dataclasses.replace(recipe.config, chunk_size=chunk_size))
    ids = torch.randint(3, 60, (1, length))
    layers = counted_stack(model).layers
    has_head = model.get_output_embeddings() is not None

    def loss():
        return loss_of(model, ids, has_head, encoder_len)

    loss().backward()  # what happens once in a layer's life (probes, traces) is over
    model.zero_grad(set_to_none=True)
    real_spans = run_step(model, layers, loss, LiveBytes())
    gradients_before = [0, *(span.gradients for span in real_spans[:-1])]
    measured = max(span.peak - old for span, old in zip(real_spans, gradients_before, strict=True))
    return max(phase.peak - phase.gradients for phase in phases), measured
