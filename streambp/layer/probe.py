"""Whether a layer mixes tokens anywhere but in its attention: found out by running it, before it is first streamed.

A convolution, a recurrence or a token-shift inside a decoder layer would make chunks compute something else, silently.
So the first call of every layer runs a few tokens twice, whole and in chunks, and compares. What it cannot see: effects
of positions far beyond these tokens.
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
from streambp.errors import UnsupportedModelError
from streambp.layer.call import LayerCall
from streambp.layer.recompute import RandomState

TOKENS = 12
CHUNK = 5
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}  # of what the layer adds to its input
HALF_TOLERANCE = 3e-2  # in half precision, or under autocast


def check_chunks_agree(call: LayerCall) -> None:
    """Raise if the layer's chunks do not compute what the whole computes. Does nothing without data (meta, fake)."""
    x = call.hidden_states.detach()[:, :TOKENS]
    if call.site.probed or x.device.type == "meta" or isinstance(x, FakeTensor) or x.shape[1] <= CHUNK:
        return
    with torch.no_grad(), call.streaming(), _evaluated(call.layer), RandomState.capture(x.device).replayed():
        whole, pieces = (_run(call, x, size) for size in (x.shape[1], CHUNK))
    autocast = any(enabled for _, enabled, _ in call.autocast.states)
    tolerance = HALF_TOLERANCE if autocast else TOLERANCE.get(x.dtype, HALF_TOLERANCE)
    scale = tolerance * (whole - x).float().norm() + 8 * torch.finfo(x.dtype).eps * whole.float().norm()
    if bool((whole - pieces).float().norm() > scale):
        raise UnsupportedModelError(
            f"{type(call.layer).__name__} mixes tokens outside of its attention (a convolution, a recurrence?): on "
            f"{x.shape[1]} tokens, chunks of {CHUNK} give another result than the whole. It cannot be streamed exactly; "
            "use gradient checkpointing for this model (streambp.unpatch(model))."
        )
    call.site.probed = True


def _run(call: LayerCall, x: Tensor, chunk_size: int) -> Tensor:
    length = x.shape[1]
    prefix = Prefix(Spans.causal(x.shape[0], length), length, call.prefix.attention)
    parts = []
    for chunk in ChunkPlan(length, chunk_size):
        result, _ = call.compute(x[:, chunk.start : chunk.stop], chunk, Stage.FORWARD, prefix)
        parts.append(call.unwrap(result))
    return torch.cat(parts, 1)  # [B, TOKENS, h]


@contextlib.contextmanager
def _evaluated(layer: nn.Module) -> Iterator[None]:
    """Dropout draws other numbers for other chunks; without it the two runs must agree."""
    before = [(module, module.training) for module in layer.modules()]
    try:
        for module, _ in before:
            module.training = False
        yield
    finally:
        for module, training in before:
            module.training = training
