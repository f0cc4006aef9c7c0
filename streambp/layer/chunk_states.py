"""Values that pass from one chunk of a layer call to the next.

    keys, values   read by every later chunk's queries: the `Prefix`        in attention
    states         the next chunk's start states: `States`                  in recurrences and
                                                                            convolutions

A chunk gets both through arguments of the layer's own forward; the layer's carriers define the
arguments. [Note: carriers]

Several chunks may continue one chunk in a tree of rows, which `ChunkPlan.predecessors` names. The
one chunk's end states stay until the last of the later chunks has started. Backward sums the
gradients of these end states in promote_types(dtype, float32), and rounds once when the chunk is
differentiated.
"""

from __future__ import annotations

import dataclasses

import torch

from streambp.attention.interface import Layout
from streambp.attention.prefix import Prefix
from streambp.chunks import Chunk, ChunkPlan
from streambp.recurrent.states import States


@dataclasses.dataclass
class CrossChunkState:
    """Values that one chunk of a layer call passes to later chunks.

    Attributes:
        layout: the keys that each query of the full sequence may read, and the positions where no
            chunk may end.
        prefix: keys and values of all tokens so far.
        in_tiles: True if keys and values may be stored as one tensor for each chunk instead of one
            for all. Some of these tensors are moved to the host if device memory is short.
        states: the recurrent states at each chunk's end, by chunk index, until no later chunk needs
            them; empty in a layer without states.
        upstream: used in backward: the gradients of `states`, by the same chunk index; empty in a
            layer without states.
    """

    layout: Layout
    prefix: Prefix
    in_tiles: bool
    states: dict[int, States] = dataclasses.field(default_factory=dict)
    upstream: dict[int, States] = dataclasses.field(default_factory=dict)

    def start(self, plan: ChunkPlan, chunk: Chunk) -> States:
        """Return the recurrent states that a chunk starts from in forward: the end states of its
        predecessor, the chunk from which it continues; {} without a predecessor. End states that no
        later chunk needs are removed from `states`.

        Args:
            plan: the chunks. If the documents of a packed row share prefixes, several chunks may
                follow the same one.
            chunk: the chunk's range of positions.
        """
        if not self.states:
            return {}
        predecessor = plan.predecessors[chunk.index]
        states = {} if predecessor is None else self.states[predecessor]
        for index in [index for index in self.states if plan.successors[index][1] <= chunk.index]:
            del self.states[index]
        return states

    def add_state_gradients(self, plan: ChunkPlan, chunk: Chunk, grads: States) -> None:
        """Add the gradients of a chunk's start states to `upstream`, as gradients of the end states
        of its predecessor. The predecessor is the chunk whose end states are the start states.

        Several chunks may have the same predecessor, if documents of a packed row share a prefix.
        Gradients from these chunks are summed in promote_types(dtype, float32).

        Args:
            plan: the chunks, with each chunk's predecessor.
            chunk: the chunk's range of positions.
            grads: gradients of the chunk's start states, by `StateKey`; {}: nothing is added.
        """
        predecessor = plan.predecessors[chunk.index] if grads else None
        if predecessor is None:
            return
        summed = self.upstream.setdefault(predecessor, {})
        for key, grad in grads.items():
            if key in summed:
                wide = torch.promote_types(grad.dtype, torch.float32)
                grad = summed[key].to(wide) + grad
            summed[key] = grad
