"""Build the tree of a model's modules: parameters, and bytes for each token that a module's forward
saves for backward."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from streambp.planner.count import StepCount
from streambp.planner.model_class import counted_stack
from streambp.planner.packed_weights import parameters_of
from streambp.planner.profile import Node
from streambp.planner.skeleton import ShrunkModel, Skeleton
from streambp.planner.step import fused_attention

MEASURED_LENGTH = 4096
Activations = dict[nn.Module, float]


def module_tree(skeleton: Skeleton, shrunk_model: ShrunkModel, batch_size: int) -> Node:
    """Return the tree of a model's modules with their parameters and activations, for the unpatched
    model without checkpointing.

    All layers of the same structure are one node. Equal entries of a `ModuleList` or `Sequential`
    share a node, too.

    Args:
        skeleton: the model on meta or fake tensors, with one or a few layers of each structure.
        shrunk_model: the structure of each layer of the full model, and the layer of `skeleton`
            that represents it.
        batch_size: number of rows of the batch with which activations are measured.
    """
    layers = counted_stack(skeleton.model).layers
    bytes_by_module = _activations(skeleton, batch_size)

    def node(name: str, module: nn.Module, count: int) -> Node:
        """Return the node of a module, with the nodes of the modules inside as children.

        Args:
            name: name or range of numbers of the module, such as "0-35" for 36 equal layers.
            module: the module.
            count: number of equal modules that the node represents.
        """
        children = []
        if tuple(module.children()) == layers:
            for kind in dict.fromkeys(shrunk_model.kinds):
                indices = []
                for index, layer_kind in enumerate(shrunk_model.kinds):
                    if layer_kind == kind:
                        indices.append(index)
                inner = indices[len(indices) // 2]
                label = ",".join(map(str, indices))
                if indices == list(range(indices[0], indices[-1] + 1)):
                    if len(indices) == 1:
                        label = str(indices[0])
                    else:
                        label = f"{indices[0]}-{indices[-1]}"
                elif len(indices) > 4:
                    label = ",".join(map(str, indices[:3])) + f",..,{indices[-1]}"
                children.append(
                    node(label, layers[shrunk_model.representative(inner)], len(indices))
                )
        else:
            groups: dict[str, list[tuple[str, nn.Module]]] = {}
            for child_name, child in module.named_children():
                shapes = repr(child) + str([tuple(p.shape) for p in child.parameters()])
                groups.setdefault(shapes if child_name.isdigit() else child_name, []).append(
                    (child_name, child)
                )
            for members in groups.values():
                if len(members) == 1:
                    label = members[0][0]
                else:
                    label = f"{members[0][0]}-{members[-1][0]}"
                children.append(node(label, members[0][1], len(members)))
        # without dropouts, empty lists and the like
        children = [child for child in children if child.parameters or child.activation]
        own_parameters = sum(parameters_of(p) for p in module._parameters.values() if p is not None)
        parameters = own_parameters + sum(child.count * child.parameters for child in children)
        activation = bytes_by_module.get(module, 0.0)
        # For parents of removed layers, the saved bytes do not apply to the full model.
        reduces = module is not layers[0] and any(child is layers[0] for child in module.modules())
        if reduces or isinstance(module, nn.ModuleList):
            remainder = activation - sum(
                bytes_by_module.get(child, 0.0) for child in _direct_children(module)
            )
            activation = max(0.0, remainder) + sum(
                child.count * child.activation for child in children
            )
        return Node(name, type(module).__name__, count, parameters, activation, tuple(children))

    return node("", skeleton.model, 1)


def _activations(skeleton: Skeleton, batch_size: int) -> Activations:
    """Return the activation memory of each module, as a dict from modules to bytes for each token.
    The bytes are those of tensors that the module's forward allocates and backward needs: the
    tensors still exist at the end of the model's forward.

    Args:
        skeleton: the model, on meta or fake tensors.
        batch_size: number of rows of the batch that is run.
    """
    count = StepCount(None)
    spans: dict[nn.Module, tuple[int, int]] = {}
    handles: list[Any] = []

    for module in skeleton.model.modules():
        handles.append(
            module.register_forward_pre_hook(
                lambda module, _: spans.update({module: (count.tracked, count.tracked)})
            )
        )
        handles.append(
            module.register_forward_hook(
                lambda module, *_: spans.update({module: (spans[module][0], count.tracked)})
            )
        )
    attention: AbstractContextManager[None]
    if skeleton.device == "cuda":
        attention = fused_attention(skeleton.model)
    else:
        attention = contextlib.nullcontext()
    try:
        with attention, skeleton.running():
            ids = torch.empty(batch_size, MEASURED_LENGTH, dtype=torch.long)  # [B, T]
            with count:
                output = skeleton.loss(ids)
            bytes_by_module = {}
            for module, span in spans.items():
                bytes_by_module[module] = count.alive(*span) / (batch_size * MEASURED_LENGTH)
            del output
    finally:
        for handle in handles:
            handle.remove()
    return bytes_by_module


def _direct_children(module: nn.Module) -> list[nn.Module]:
    """Return a module's children, with the entries of each `ModuleList` in place of the list,
    because a list has no forward and no activations of its own."""
    direct: list[nn.Module] = []
    for child in module.children():
        direct += _direct_children(child) if isinstance(child, nn.ModuleList) else [child]
    return direct
