"""Whether a layer can be cut: found out by running it, before it is first streamed.

A convolution, a recurrence or a token-shift inside a decoder layer would make chunks compute something else, silently.
So the first call of every layer runs a few tokens twice, whole and in chunks, and compares. What it cannot see: effects
of positions far beyond these tokens, which is why layers that count positions get a `ChunkCache`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from streambp.attention.prefix import Prefix, Stage
from streambp.attention.spans import Spans
from streambp.chunks import ChunkPlan
from streambp.errors import AttentionChoiceError
from streambp.layer.call import LayerCall
from streambp.layer.recompute import RandomState

TOKENS = 12
CHUNK = 5
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}  # of what the layer adds to its input
HALF_TOLERANCE = 3e-2  # in half precision, or under autocast


def can_stream(call: LayerCall) -> bool:
    """Whether chunks of the layer compute what the whole computes; if not, the site is told why.

    Without data (meta, fake) it cannot be tried: layers that attend then stream. A single token has nothing to cut; it runs
    whole, because some layers would not run on chunks at all. Few tokens are tried as well, and the layer again on more.
    """
    x = call.hidden_states.detach()[..., :TOKENS, :]
    if call.site.probed:
        return True
    if x.device.type == "meta" or isinstance(x, FakeTensor):
        return call.site.attends
    if x.shape[-2] == 1:
        return False
    chunk_size = min(CHUNK, -(-x.shape[-2] // 2))
    with torch.no_grad(), call.streaming(), _evaluated(call.layer), RandomState.capture(x.device).replayed():
        try:
            whole, pieces = (_run(call, x, size) for size in (x.shape[-2], chunk_size))
        except (torch.OutOfMemoryError, AttentionChoiceError):
            raise
        except Exception as error:  # whatever it is, it comes from cutting the layer
            call.site.whole_because = f"its forward does not work on chunks ({type(error).__name__}: {error})"
            return False
    autocast = any(enabled for _, enabled, _ in call.autocast.states)
    tolerance = HALF_TOLERANCE if autocast else TOLERANCE.get(x.dtype, HALF_TOLERANCE)
    scale = tolerance * (whole - x).float().norm() + 8 * torch.finfo(x.dtype).eps * whole.float().norm()
    if bool((whole - pieces).float().norm() > scale):
        call.site.whole_because = "it mixes tokens outside of its attention (a convolution, a recurrence?)"
        return False
    call.site.probed = x.shape[-2] > CHUNK
    return True


def _run(call: LayerCall, x: Tensor, chunk_size: int) -> Tensor:
    length = x.shape[-2]
    prefix = Prefix(Spans.causal(x.shape[-3], length), length, call.carried.prefix.attention)
    parts = []
    for chunk in ChunkPlan(length, chunk_size):
        output, _ = call.compute(x[..., chunk.start : chunk.stop, :], chunk, Stage.FORWARD, prefix)
        assert output is not None
        parts.append(output.hidden_states)
    return torch.cat(parts, -2)  # [..., B, TOKENS, h]


@contextlib.contextmanager
def _evaluated(layer: nn.Module) -> Iterator[None]:
    """Dropout draws other numbers for other chunks; without it the two runs must agree.

    Modules that only hold weights keep their mode: quantised ones repack their weights when they are run in eval mode.
    """
    modules = [m for m in layer.modules() if next(m.children(), None) is not None or not m._parameters]
    before = [(module, module.training) for module in modules]
    try:
        for module, _ in before:
            module.training = False
        yield
    finally:
        for module, training in before:
            module.training = training
