"""What a layer gives besides its hidden states, chunk by chunk and put together.

Three things leave a decoder layer by the side. Modules inside it are recorded by transformers' forward hooks (router
logits, from which the load-balancing loss is computed), some layers write their keys and values into a mapping that later
layers read, and some return a tensor behind their hidden states. All are outputs of the layer's autograd Function: a
gradient comes back for them. States are not: they leave a chunk, not the layer. [Note: states]
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
RETURNED = "returned"  # the name of what a layer returns behind its hidden states


@dataclasses.dataclass(frozen=True)
class Place:
    """Where an extra output goes: the recorded tensor `name`[`index`], part `index` of entry `key` of mapping `name`, or,
    by the name of `RETURNED`, the layer's return value `index` behind its hidden states.

    flat: the recorded tensor merges rows and tokens, [B * C, ...]; here it is handled as [B, C, ...].
    """

    name: str
    index: int
    key: str | None = None
    flat: bool = False

    @property
    def dim(self) -> int:
        """The dimension of tokens: -2 in what a mapping holds, 1 in what is recorded or returned."""
        return 1 if self.key is None else -2


@dataclasses.dataclass
class ChunkOutput:
    """hidden_states [..., C, h] and the extra outputs of one chunk, and the states it ends with."""

    hidden_states: Tensor
    extras: dict[Place, Tensor]
    states: States = dataclasses.field(default_factory=dict)


def collect(
    hidden_states: Tensor, returned: dict[int, Tensor], recorded: Collected, mappings: dict[str, tuple[Any, Any]]
) -> ChunkOutput:
    """The output of a chunk.

    Args:
        hidden_states: what the layer returned, [..., C, h].
        returned: what it returned behind them, [B, C, ...], by place.
        recorded: what hooks recorded, by key.
        mappings: the mappings among the arguments, as they were before the chunk and as they are now.

    Raises:
        UnsupportedModelError: what a hook recorded is neither [B * C, ...] nor [B, C, ...].
    """
    extras = {Place(RETURNED, index): tensor for index, tensor in returned.items()} if returned else {}
    rows, tokens = hidden_states.shape[-3:-1]
    for name, tensors in recorded.items():
        for index, tensor in enumerate(tensors):
            flat = tensor.shape[0] == rows * tokens and tuple(tensor.shape[:2]) != (rows, tokens)
            if not flat and tuple(tensor.shape[:2]) != (rows, tokens):
                raise UnsupportedModelError(
                    f"{name} recorded inside a layer has shape {tuple(tensor.shape)}; expected was [{rows * tokens}, ...] "
                    f"or [{rows}, {tokens}, ...]. Leave output_{name} out, or run this model unpatched."
                )
            extras[Place(name, index, flat=flat)] = tensor.unflatten(0, (rows, tokens)) if flat else tensor
    for name, (before, after) in mappings.items():
        for key, parts in after.items():
            if key not in before or parts is not before[key]:  # tuples of tensors [..., C, D] that this forward put there
                extras.update({Place(name, index, key): part for index, part in enumerate(parts)})
    return ChunkOutput(hidden_states, extras)


Whole = dict[Place | None, Tensor]  # hidden states [..., T, h] and the extra outputs of the whole sequence


def put(whole: Whole, output: ChunkOutput, chunk: Chunk, length: int) -> ChunkOutput:
    """Put what a chunk gave at its place in the whole of T = `length` positions; a part that has all of them itself is the
    whole."""
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
            # Keys that each query picked; the first chunks have fewer and pick all, so the first one again is the same.
            whole[place] = torch.nn.functional.pad(whole[place], (0, part.shape[-1] - whole[place].shape[-1]))
        chunk.part(whole[place], dim).copy_(part)
    return output


def deliver(extras: dict[Place, Tensor], mappings: Mapping[str, Any]) -> None:
    """Hand extra outputs of the whole sequence to transformers' collector and to the caller's mappings.

    What was returned is left out: `LayerCall.wrap` hands it on.

    Args:
        extras: of recordings [B, T, ...], which the collector gets as [B * T, ...] if `flat`; of mappings [..., T, D].
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
    """Within, hooks record these keys here: in the model's own collector chunks would look like layers."""
    collected: Collected = {key: [] for key in keys}
    token = output_capturing._active_collector.set(collected)
    try:
        yield collected
    finally:
        output_capturing._active_collector.reset(token)
