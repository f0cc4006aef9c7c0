"""What passes from one chunk of a layer call to the next.

    keys, values   every later chunk's queries read them: the `Prefix`      in attention
    states         the next chunk goes on from them: `States`               in recurrences and convolutions

A chunk reaches both through arguments of the layer's own forward; which ones the layer's carriers know.
[Note: carriers]

[Note: states of branches] In a tree of rows several chunks may go on from one: `ChunkPlan.before` says from which. Its
states stay until the last of them has started. In backward the gradients of these are summed, in promote_types(dtype,
float32), and rounded once, when the chunk is differentiated.
"""

from __future__ import annotations

import dataclasses

import torch

from streambp.attention.carriers import Layout
from streambp.attention.prefix import Prefix
from streambp.chunks import Chunk, ChunkPlan
from streambp.recurrent.states import States


@dataclasses.dataclass
class Carried:
    """What the chunks of one layer call hand on to each other.

    Args:
        layout: what the queries of the whole sequence may read, and where no chunk may end.
        prefix: keys and values. in_tiles: it may be cut into tiles, of which some are elsewhere.

    states: what chunks ended with, by their index, as long as others are to go on from them. upstream: in backward, the
    gradients of that. Both stay empty in a layer without states.
    """

    layout: Layout
    prefix: Prefix
    in_tiles: bool
    states: dict[int, States] = dataclasses.field(default_factory=dict)
    upstream: dict[int, States] = dataclasses.field(default_factory=dict)

    def start(self, plan: ChunkPlan, chunk: Chunk) -> States:
        """The states that a chunk starts from, in forward; {} where it starts anew. [Note: states of branches]"""
        if not self.states:
            return {}
        before = plan.before[chunk.index]
        found = {} if before is None else self.states[before]
        for index in [index for index in self.states if plan.behind[index][1] <= chunk.index]:
            del self.states[index]
        return found

    def went_on(self, plan: ChunkPlan, chunk: Chunk, grads: States) -> None:
        """The gradients of the states that a chunk started from. [Note: states of branches]"""
        before = plan.before[chunk.index] if grads else None
        if before is None:
            return
        summed = self.upstream.setdefault(before, {})
        for key, grad in grads.items():
            if key in summed:
                wide = torch.promote_types(grad.dtype, torch.float32)
                grad = summed[key].to(wide) + grad
            summed[key] = grad
