"""Count the bytes and FLOPs of the tensors that each layer may save for backward, in a step of a
model without data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from streambp.admission.stacks import find_stacks
from streambp.config import StreamConfig
from streambp.model.patching import install
from streambp.model.state import PatchState
from streambp.model.unpatched import is_plain
from streambp.offload.costs import Cost, LayerCost, LinearOutput, StepFigures
from streambp.offload.policy import SavesPolicy
from streambp.planner.count import StepCount
from streambp.planner.skeleton import Skeleton

OBSERVED_CHUNK_TOKENS = 1024  # tokens of a chunk in the observed step
PLAN_DEVICE = torch.device("cuda", 0)  # the device of all layers in a plan


def observed_layer_costs(
    skeleton: Skeleton, config: StreamConfig, layers: Iterable[int]
) -> tuple[dict[int, LayerCost], bool]:
    """Run a step of two chunks on tensors without data, to see which tensors each layer could save
    for backward. Return a dict from layer index to the bytes of these tensors, and to the FLOPs
    that saving them avoids. The second result is True if every layer could also run its unpatched
    forward with the same results.

    The result is ({}, False) for a model with several backbones, such as an encoder-decoder. The
    step changes `skeleton`, which cannot be used again.

    Args:
        skeleton: the model, on meta or fake tensors.
        config: settings of `patch`; chunk size, saves, offloading and memory limits are replaced.
        layers: indices of the layers.
    """
    if len(find_stacks(skeleton.model).stacks) > 1:
        return {}, False
    shrunk_model = skeleton.reduce()
    skeleton.model.eval()  # without dropout, because tensors without data have no random numbers
    install(
        skeleton.model,
        dataclasses.replace(
            config,
            chunk_size=OBSERVED_CHUNK_TOKENS,
            saves=(),
            offload="none",
            host_memory=None,
            gpu_memory=None,
            weights="device",
        ),
    )
    sees = SavesPolicy(
        len(shrunk_model.layer_indices), lambda _: None, lambda _: (no_figures, 0.0), False, True
    )
    no_figures = StepFigures()
    installed: PatchState = skeleton.model._streambp  # type: ignore[assignment]
    for layer_state in installed.steps.layer_states:
        layer_state.saves_policy = sees
    with skeleton.running(), StepCount(None):
        ids = torch.empty(1, 2 * OBSERVED_CHUNK_TOKENS, dtype=torch.long)  # [B, T]
        skeleton.loss(ids).backward()
    measured = sees.learn()
    costs = {}
    for index in layers:
        if (position := shrunk_model.representative(index)) in measured:
            costs[index] = measured[position]
    return costs, all(map(is_plain, installed.steps.layer_states))


def counted_saves(skeleton: Skeleton, layers: int) -> dict[str, Any] | None:
    """Run a step on meta tensors, to see which tensors each layer may save for backward with
    saves="auto". Return the bytes and FLOPs of these tensors, as JSON types for `Profile.saves`.
    None if the step cannot run on meta tensors.

    The dict has the keys "kinds" and "layers" of `costs_as_json`. "vocabulary" is the vocabulary
    size, 0 without an output projection. "plain" is True if every layer could also run unpatched.

    Args:
        skeleton: the model for a GPU, on meta tensors; cannot be used again.
        layers: number of layers of the model.
    """
    vocabulary = 0
    if skeleton.head is not None:
        vocabulary = getattr(skeleton.language_model.config.get_text_config(), "vocab_size", 0)
    try:
        config = StreamConfig(kernels="own" if skeleton.own_adapters else "auto")
        costs, plain = observed_layer_costs(skeleton, config, range(layers))
    except Exception:  # the plan then lacks this row only
        return None
    if len(costs) < layers:
        return None
    fields = costs_as_json(map(costs.__getitem__, range(layers)))
    return {"vocabulary": vocabulary, "plain": plain, **fields}


def costs_as_json(costs: Iterable[LayerCost]) -> dict[str, Any]:
    """Return the bytes and FLOPs of the tensors that each layer may save for backward, as JSON
    types for a file. The dict has two lists: "kinds" has the different costs, and "layers" has for
    each layer the index of its costs in "kinds".

    Args:
        costs: the layers' costs, in order. Devices of the layers are left out.
    """
    kinds: list[dict[str, Any]] = []  # distinct kinds of layers, which are few
    numbers = []
    for layer_cost in costs:
        cost = dataclasses.asdict(layer_cost.cost) | {
            "overwritten": sorted(layer_cost.cost.overwritten)
        }
        kind = layer_cost._asdict() | {"device": str(PLAN_DEVICE), "cost": cost}
        if kind not in kinds:
            kinds.append(kind)
        numbers.append(kinds.index(kind))
    return {"kinds": kinds, "layers": numbers}


def costs_from_json(saves: Mapping[str, Any]) -> dict[int, LayerCost]:
    """Return the bytes and FLOPs of the tensors that each layer may save, as a dict by layer index.

    Args:
        saves: this data as JSON types, from `counted_saves` or `costs_as_json`.
    """
    kinds = []
    for kind in saves["kinds"]:
        products = {}
        for name, product in kind["cost"]["products"].items():
            products[name] = LinearOutput(**product)
        overwritten = frozenset(kind["cost"]["overwritten"])
        cost = Cost(**{**kind["cost"], "products": products, "overwritten": overwritten})
        kinds.append(LayerCost(**{**kind, "device": PLAN_DEVICE, "cost": cost}))
    return {index: kinds[number] for index, number in enumerate(saves["layers"])}
