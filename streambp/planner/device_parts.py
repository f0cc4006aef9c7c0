"""Divide the counted memory of a step among the devices that a model's layers lie on.

[Note: parts of a step] A step is counted once, as if the model were on one device. With
accelerate's `device_map` its layers lie on several. Each counted phase has three kinds of bytes:

    inputs      tensors that each waiting layer holds from its forward to its backward
    gradients   the gradients that the step has made before the phase
    work        everything else: the tensors of one layer's forward or backward, or of the head's

Inputs and gradients are known for each layer, and lie on the layer's device. Work is needed on the
device that runs the phase. So a device's part of a phase is the inputs and gradients of its own
layers, and the phase's work if the phase runs there. A phase stands for the layers of one
structure: on a device without the counted layer, the work is that of the device's nearest layer.
The head's phases count on the head's device, and the embedding's on the embedding's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping

import torch
from torch import nn
from transformers import PreTrainedModel

from streambp.admission.stacks import find_stacks
from streambp.distributed.engines import gradient_bytes
from streambp.offload.costs import LayerCost
from streambp.planner.profile import Phase
from streambp.planner.step import EMBEDDING, EMBEDDING_BACKWARD


@dataclasses.dataclass(frozen=True)
class ModelLayout:
    """The devices of a model's head and embedding, and the bytes of gradients, for a model whose
    layers are on several devices (accelerate's `device_map`).

    Attributes:
        layers: bytes of each layer's gradients, by the layer's index.
        head: dict from a device to the bytes of gradients, on this device, of the head and the
            final norm. Backward computes these gradients before those of the layers.
        head_device: device of the head; the last layer's without a head.
        embedding_device: device of the embedding and of the model's input.
    """

    layers: Mapping[int, float]
    head: Mapping[torch.device, float]
    head_device: torch.device
    embedding_device: torch.device


@dataclasses.dataclass(frozen=True)
class DevicePart:
    """Computes which part of a step's memory is on one device, if a model's layers are on several
    devices (accelerate's `device_map`). [Note: parts of a step]

    Attributes:
        device: the device.
        layers: indices of the layers on this device; not empty.
        layout: devices of the model's head and embedding, and bytes of gradients.
        inputs: dict from the index of each layer of the model to the bytes, for each token over all
            rows, that the layer holds from its forward to its backward.
    """

    device: torch.device
    layers: tuple[int, ...]
    layout: ModelLayout
    inputs: Mapping[int, float]

    def of_phase(self, phase: Phase, size: float, share: float, tokens: int) -> tuple[float, float]:
        """Return a pair (index, bytes) for a phase of a step, such as the backward of a layer. The
        bytes are those in use on this device. The index is that of the last layer whose saved
        tensors are then in memory.

        The index is infinity in forward and in the head, whose phases come before all layers'
        backward. The index is -1 in backward of the embedding, which comes after all layers'
        backward.

        Args:
            phase: the phase, such as the backward of layer 35, with its bytes of gradients.
            size: bytes of the phase if the full model were on one device.
            share: fraction of the gradients' bytes that a step adds to this rank's memory; less
                than 1 if ZeRO or FSDP2 shards gradients.
            tokens: tokens over all rows.
        """
        kind, _, number = phase.name.rpartition(" ")
        if number.isdigit():
            counted: float = int(number)
            own_index: float = min(self.layers, key=lambda index: abs(index - counted))
            runs_here = True
        elif phase.name in (EMBEDDING, EMBEDDING_BACKWARD):
            counted = own_index = -1
            runs_here = self.device == self.layout.embedding_device
        else:
            counted = own_index = math.inf
            runs_here = self.device == self.layout.head_device
        inputs = 0.0
        for index, layer_inputs in self.inputs.items():
            if index <= counted:
                inputs += tokens * layer_inputs
        gradients = share * phase.gradients
        work = max(0.0, size - inputs - gradients) if runs_here else 0.0
        of_layers = self.layout.layers
        gradients_made = sum(self.layout.head.values())
        for index, layer_gradients in of_layers.items():
            if index > counted:
                gradients_made += layer_gradients
        own_inputs = 0.0
        own_made = self.layout.head.get(self.device, 0.0)
        for index in self.layers:
            if index <= own_index:
                own_inputs += tokens * self.inputs[index]
            else:
                own_made += of_layers[index]
        own_gradients = gradients * (own_made / gradients_made if gradients_made else 1.0)
        is_forward = kind == "forward" or phase.name == EMBEDDING
        return math.inf if is_forward else own_index, own_inputs + own_gradients + work


def device_of(parameter: nn.Parameter) -> torch.device:
    """Return the device of a parameter [...]."""
    return parameter.device


def find_layout(
    model: nn.Module, layers: Mapping[int, nn.Module], towers: bool = False
) -> ModelLayout | None:
    """Return the devices of a model's head and embedding, and the bytes of gradients
    (`ModelLayout`). None if all parameters are on one device, or if the model has several stacks of
    layers, as an encoder-decoder has.

    Args:
        model: the model.
        layers: the model's decoder layers, by index.
        towers: True if encoders of images and audio run in chunks, too (`StreamConfig.towers`).
    """
    stacks = find_stacks(model, towers).stacks
    if len(stacks) > 1 or len(set(map(device_of, model.parameters()))) < 2:
        return None
    backbone = stacks[0].backbone
    of_layers: set[int] = set()
    for layer in layers.values():
        of_layers.update(map(id, layer.parameters()))
    embedding: nn.Module | None = None
    with contextlib.suppress(NotImplementedError):
        embedding = backbone.get_input_embeddings()
    of_embedding: list[nn.Parameter] = []
    if embedding is not None:
        of_embedding.extend(embedding.parameters())
    of_head: list[nn.Parameter] = []
    for module in model.modules():
        output = None
        if isinstance(module, PreTrainedModel):
            output = module.get_output_embeddings()
        if output is not None:
            of_head.extend(output.parameters())
    head: dict[torch.device, float] = {}
    left_out = of_layers | set(map(id, of_embedding)).difference(map(id, of_head))
    for p in (*of_head, *backbone.parameters()):
        if p.requires_grad and id(p) not in left_out:
            left_out.add(id(p))
            head[device_of(p)] = head.get(device_of(p), 0.0) + gradient_bytes(p)
    return ModelLayout(
        {index: _trained_bytes(layer.parameters()) for index, layer in layers.items()},
        head,
        _device_of_first(of_head, layers[max(layers)]),
        _device_of_first(of_embedding, layers[min(layers)]),
    )


def device_part(
    device: torch.device,
    layout: ModelLayout,
    costs: Mapping[int, LayerCost],
    factor: float,
    names: Collection[str],
) -> DevicePart | None:
    """Return the object that computes one device's part of a step's memory (`DevicePart`). None if
    no layer is on the device, or if the device or bytes of a layer are unknown.

    Args:
        device: the device.
        layout: devices of the model's head and embedding, and bytes of gradients.
        costs: dict from a layer's index to its device and the bytes of its saved tensors.
        factor: number by which the step's bytes are multiplied for autocast; 1 without autocast.
        names: names of the tensors that all layers save in the step, as in `StreamConfig.saves`.
    """
    own_layers = []
    for index, cost in sorted(costs.items()):
        if cost.device.type != device.type:
            # accelerate's offloading: such weights do not tell where their layer runs
            return None
        if cost.device == device:
            own_layers.append(index)
    if not own_layers or costs.keys() != layout.layers.keys():
        return None
    inputs = {}
    for index, cost in costs.items():
        layer_bytes = cost.held_bytes(cost.tokens, layout.embedding_device)
        for name in ("attn_out", "kv"):
            if name in names:
                layer_bytes += getattr(cost.cost, name)
        inputs[index] = layer_bytes / cost.tokens / factor
    return DevicePart(device, tuple(own_layers), layout, inputs)


def _trained_bytes(parameters: Iterable[nn.Parameter]) -> float:
    """Return the bytes of the gradients of those parameters that require gradients."""
    size = 0.0
    for p in parameters:
        if p.requires_grad:
            size += gradient_bytes(p)
    return size


def _device_of_first(parameters: Iterable[nn.Parameter], layer: nn.Module) -> torch.device:
    """Return the device of the first of some parameters; without parameters, that of the layer's
    first parameter."""
    return device_of(next(iter([*parameters, *layer.parameters()])))
