"""Whether a recomputed chunk depends on what the layer's backward differentiates, and on nothing else.

A tensor that wants a gradient can get into a layer without being one of its parameters or arguments: as a plain attribute,
in a closure, inside an object among the arguments, as a view of FSDP1's flat parameter. Unpatched its gradient goes through
the graph; a chunk's graph ends inside the layer's autograd Function, where it would be lost.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from streambp.errors import UnsupportedModelError
from streambp.known_names import ACCUMULATE_GRAD, FLAT_PARAMETER
from streambp.nested import nodes_behind


def refuse_other_leaves(layer: nn.Module, outputs: Iterable[Tensor], differentiated: Iterable[Tensor]) -> None:
    """Go through the graph of a chunk's outputs, a fifth of a millisecond for a usual layer.

    Args:
        outputs: hidden_states [..., B, C, h], extra outputs and end states.

    Raises:
        UnsupportedModelError: it ends at a leaf that is not among those that are differentiated.
    """
    leaf = leaf_besides(outputs, differentiated)
    if leaf is not None:
        raise UnsupportedModelError(
            why_flat(layer, leaf)
            or f"{type(layer).__name__} {depends(leaf)}, so that streaming would lose that gradient. Register it as a "
            "parameter of the layer, or set requires_grad to False, or run the model unpatched "
            "(streambp.unpatch(model)) with gradient checkpointing."
        )


def leaf_besides(outputs: Iterable[Tensor], differentiated: Iterable[Tensor]) -> Tensor | None:
    """A leaf that the graph of these outputs ends at and that is not among those that are differentiated."""
    known = {id(tensor) for tensor in differentiated}
    for node in nodes_behind(outputs):
        if node.name() == ACCUMULATE_GRAD and id(node.variable) not in known:
            leaf: Tensor = node.variable
            return leaf
    return None


def why_flat(layer: nn.Module, leaf: Tensor) -> str | None:
    """Why nothing can be done for such a leaf: it is FSDP1's flat parameter. None if it is not."""
    if not getattr(leaf, FLAT_PARAMETER, False):
        return None
    return (
        f"{type(layer).__name__} {depends(leaf)}: FSDP1 keeps the layer's parameters in it. Use FSDP2 (fully_shard; "
        "fsdp_version: 2 in accelerate's config), DeepSpeed ZeRO or DDP."
    )


def depends(leaf: Tensor) -> str:
    """What a layer does that has such a leaf."""
    return (
        f"depends on a tensor of shape {tuple(leaf.shape)} that wants a gradient and is neither one of its parameters nor "
        "one of its arguments"
    )
