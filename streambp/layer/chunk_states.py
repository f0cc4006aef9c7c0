"""Values that pass from one chunk of a layer call to the next.

    keys, values   read by every later chunk's queries: the `Prefix`        in attention
    states         the next chunk's start states: `States`                  in recurrences and
                                                                            convolutions

A chunk gets both through arguments of the layer's own forward; the layer's carriers define the
arguments. [Note: carriers]

[Note: states of branches] In a tree of rows several chunks may continue one chunk, named by
`ChunkPlan.before`. Its end states stay until the last of the later chunks has started. In backward
the gradients of these end states are summed in promote_types(dtype, float32), and rounded once when
the chunk is differentiated.
"""

from __future__ import annotations

import dataclasses

import torch

from streambp.attention.interface import Layout
from streambp.attention.prefix import Prefix
from streambp.chunks import Chunk, ChunkPlan
from streambp.recurrent.states import States


@dataclasses.dataclass
class Carried:
    """Values that the chunks of one layer call pass on.

    Attributes:
        layout: the keys that each query of the full sequence may read, and the positions where no
            chunk may end.
        prefix: keys and values.
        in_tiles: True if the prefix may be split into tiles, some of which are offloaded.
        states: end states by chunk index, until no later chunk needs them; empty in a layer without
            states.
        upstream: in backward, the gradients of the end states; empty in a layer without states.
    """

    layout: Layout
    prefix: Prefix
    in_tiles: bool
    states: dict[int, States] = dataclasses.field(default_factory=dict)
    upstream: dict[int, States] = dataclasses.field(default_factory=dict)

    def start(self, plan: ChunkPlan, chunk: Chunk) -> States:
        """Return a chunk's start states in forward; {} if the chunk has none. [Note: states of
        branches]
        """
        if not self.states:
            return {}
        before = plan.before[chunk.index]
        found = {} if before is None else self.states[before]
        for index in [index for index in self.states if plan.behind[index][1] <= chunk.index]:
            del self.states[index]
        return found

    def went_on(self, plan: ChunkPlan, chunk: Chunk, grads: States) -> None:
        """Accumulate the gradients of a chunk's start states. [Note: states of branches]"""
        before = plan.before[chunk.index] if grads else None
        if before is None:
            return
        summed = self.upstream.setdefault(before, {})
        for key, grad in grads.items():
            if key in summed:
                wide = torch.promote_types(grad.dtype, torch.float32)
                grad = summed[key].to(wide) + grad
            summed[key] = grad
