"""A layer's extra outputs, for each chunk and joined for the full sequence.

A decoder layer has three kinds of outputs beside its hidden states. Transformers' forward hooks
record modules inside the layer (router logits for the load-balancing loss). Some layers write keys
and values into a mapping that later layers read. Some layers return a tensor behind their hidden
states. All three are outputs of the layer's autograd Function and receive gradients. States are not
outputs of the layer, only of a chunk. [Note: states]
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.utils import output_capturing

from streambp.chunks import Chunk
from streambp.errors import UnsupportedModelError
from streambp.recurrent.states import States

Collected = dict[str, list[Tensor]]
RETURNED = "returned"  # name of the return values behind hidden_states


@dataclasses.dataclass(frozen=True)
class Place:
    """Destination of an extra output: a recorded tensor, a part of a mapping's entry, or a return
    value.

    Attributes:
        name: the key of the recording, the mapping's argument name, or `RETURNED`.
        index: the index among the recorded tensors, the entry's parts or the return values behind
            hidden_states.
        key: the key of the mapping's entry; None: no mapping.
        flat: True if the recorded tensor merges rows and tokens, [B * C, ...]; internally it is [B,
            C, ...].
    """

    name: str
    index: int
    key: str | None = None
    flat: bool = False

    @property
    def dim(self) -> int:
        """Return the dimension of tokens: -2 in a mapping's tensors, 1 in recorded or returned
        tensors.
        """
        return 1 if self.key is None else -2


@dataclasses.dataclass
class ChunkOutput:
    """The outputs of one chunk.

    Attributes:
        hidden_states: [..., C, h].
        extras: the extra outputs.
        states: the states that the chunk ends with.
    """

    hidden_states: Tensor
    extras: dict[Place, Tensor]
    states: States = dataclasses.field(default_factory=dict)


def collect(
    hidden_states: Tensor,
    returned: dict[int, Tensor],
    recorded: Collected,
    mappings: dict[str, tuple[Any, Any]],
) -> ChunkOutput:
    """Return the output of a chunk.

    Args:
        hidden_states: the layer's hidden states, [..., C, h].
        returned: the return values behind hidden_states, [B, C, ...], by index.
        recorded: the tensors that hooks recorded, by key.
        mappings: the mappings among the arguments, before the chunk and now.

    Raises:
        UnsupportedModelError: a recorded tensor is neither [B * C, ...] nor [B, C, ...].
    """
    extras = (
        {Place(RETURNED, index): tensor for index, tensor in returned.items()} if returned else {}
    )
    rows, tokens = hidden_states.shape[-3:-1]
    for name, tensors in recorded.items():
        for index, tensor in enumerate(tensors):
            flat = tensor.shape[0] == rows * tokens and tuple(tensor.shape[:2]) != (rows, tokens)
            if not flat and tuple(tensor.shape[:2]) != (rows, tokens):
                raise UnsupportedModelError(
                    f"{name} recorded inside a layer has shape {tuple(tensor.shape)}; expected was "
                    f"[{rows * tokens}, ...] or [{rows}, {tokens}, ...]. Leave output_{name} out, "
                    "or run this model unpatched."
                )
            extras[Place(name, index, flat=flat)] = (
                tensor.unflatten(0, (rows, tokens)) if flat else tensor
            )
    for name, (before, after) in mappings.items():
        for key, parts in after.items():
            if key not in before or parts is not before[key]:  # new tuples of tensors [..., C, D]
                extras.update({Place(name, index, key): part for index, part in enumerate(parts)})
    return ChunkOutput(hidden_states, extras)


# hidden states [..., T, h] and the extra outputs of the whole sequence
Whole = dict[Place | None, Tensor]


def put(whole: Whole, output: ChunkOutput, chunk: Chunk, length: int) -> ChunkOutput:
    """Copy a chunk's outputs into the outputs of the full sequence. A part with all `length`
    positions is stored without a copy.
    """
    for place, part in ((None, output.hidden_states), *output.extras.items()):
        dim = -2 if place is None else place.dim
        if part.shape[dim] == length:
            whole[place] = part
            continue
        if place not in whole:
            shape = list(part.shape)
            shape[dim] = length
            whole[place] = part.new_empty(shape)
        if part.shape[-1] > whole[place].shape[-1] and not part.is_floating_point():
            # Keys picked by each query. Early chunks have fewer keys and pick all; padding repeats
            # key 0.
            whole[place] = torch.nn.functional.pad(
                whole[place], (0, part.shape[-1] - whole[place].shape[-1])
            )
        chunk.part(whole[place], dim).copy_(part)
    return output


def deliver(extras: dict[Place, Tensor], mappings: Mapping[str, Any]) -> None:
    """Pass extra outputs of the full sequence to transformers' collector and to the caller's
    mappings.

    Return values are left out: `LayerCall.wrap` returns them.

    Args:
        extras: recordings [B, T, ...], which the collector gets as [B * T, ...] if `flat`; mapping
            entries [..., T, D].
        mappings: the caller's mappings, by argument name.
    """
    collector = output_capturing._active_collector.get()
    entries: dict[tuple[str, str], list[Tensor]] = {}
    for place, tensor in extras.items():
        if place.name == RETURNED:
            continue
        if place.key is None:
            assert collector is not None
            collector[place.name].append(tensor.flatten(0, 1) if place.flat else tensor)
        else:
            entries.setdefault((place.name, place.key), []).append(tensor)
    for (name, key), parts in entries.items():
        mappings[name][key] = tuple(parts)


@contextlib.contextmanager
def recording(keys: tuple[str, ...]) -> Iterator[Collected]:
    """Context manager in which hooks record these keys here: in the model's own collector, chunks
    would count as layers.
    """
    collected: Collected = {key: [] for key in keys}
    token = output_capturing._active_collector.set(collected)
    try:
        yield collected
    finally:
        output_capturing._active_collector.reset(token)
