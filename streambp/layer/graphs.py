"""A chunk with its graph: made in backward, or kept since forward where a whole call is one chunk.

[Note: kept graphs] A short sequence that is one chunk, on a device with room for everything, is computed as unpatched: its
forward makes the graph that backward differentiates, and nothing is recomputed. The graph stands in front of the layer's
own input and the parameters' shadows, as a recomputation's does, so that the rest of backward is the same; if it is let go
of, backward recomputes. It is kept only where that cannot be told apart from a recomputation: no hooks and no engine's
hooks inside, no states, no autocast, nothing written through pointers, and nobody who takes what graphs save (a checkpoint
around the model).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from streambp.attention.prefix import Stage
from streambp.chunks import Chunk
from streambp.distributed.engines import engine_hooks
from streambp.instance_forward import is_fsdp_unit
from streambp.layer.call import LayerCall
from streambp.layer.outputs import ChunkOutput
from streambp.layer.side_effects import Origin
from streambp.recurrent.states import States


@dataclasses.dataclass
class Graph:
    """What a chunk gave, and what it depends on: hidden_states [..., B, C, h], the differentiable arguments, and the
    parameters' shadows, as they lie in memory."""

    output: ChunkOutput
    origin: Origin
    hidden_chunk: Tensor
    leaves: list[Tensor]
    shadows: list[Tensor]

    def is_of(self, shadows: list[Tensor]) -> bool:
        """Whether the parameters lie where they did: an engine may have gathered them anew."""
        pairs = zip(self.shadows, shadows, strict=True)
        return all(one is other or one.data_ptr() == other.data_ptr() for one, other in pairs)


def can_keep_graph(call: LayerCall) -> bool:
    """[Note: kept graphs]"""
    site, autocast = call.site, torch.is_autocast_enabled(call.device.type)
    hooked = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    return not (
        len(call.plan) > 1
        or autocast
        or hooked
        or is_fsdp_unit(call.layer)
        or site.overwritten.inputs
        or site.kind.states.carries
        or site.kind.attention.picks_keys
        or not site.linears
        or site.of(engine_hooks)
    )


def computed_with_graph(
    call: LayerCall, x: Tensor, chunk: Chunk, wanted: tuple[bool, list[bool]], shadows: list[Tensor], states: States
) -> Graph:
    """The layer's own forward on x [..., B, C, h], with a graph.

    Args:
        wanted: whether the input and each differentiable argument wants a gradient. shadows: in the parameters' slots.
    """
    needs_input, arguments = wanted
    hidden_chunk = x.detach().requires_grad_(needs_input)
    leaves = call.arguments.leaves(chunk, arguments)
    origin = Origin()
    with torch.enable_grad():
        given = origin.behind(hidden_chunk) if chunk.stop == call.plan.length else hidden_chunk
        output, _ = call.compute(given, chunk, Stage.RECOMPUTE, leaves=leaves, states=states)
    assert output is not None
    return Graph(output, origin, hidden_chunk, leaves, shadows)


@contextlib.contextmanager
def counting(call: LayerCall, known: Iterable[Tensor]) -> Iterator[None]:
    """Within, what graphs save is told to the call's watch, in bytes: without tensors [...] that are there anyway."""
    watch = call.kept.watch
    if watch is None or call.site.chooser is None:
        yield
        return
    there = {x.untyped_storage()._cdata for x in known}
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            if storage._cdata not in there:
                sizes[storage._cdata] = storage.nbytes()
        return tensor.detach()  # the tensor itself would tie a node to its own output

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
        yield
    watch.graph_done(sum(sizes.values()))
