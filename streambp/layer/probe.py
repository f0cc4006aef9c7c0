"""Whether a layer can be cut: found out by running it, before it is first streamed.

A convolution, a recurrence or a token-shift inside a decoder layer would make chunks compute something else, silently.
So the first call of every layer, and of every new kind, runs a few tokens twice, whole and in chunks, and compares. What
it cannot see: effects of positions far beyond these tokens, which is why layers that count positions get a `ChunkCache`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from streambp.attention.prefix import Prefix, Stage
from streambp.attention.spans import Spans
from streambp.chunks import ChunkPlan
from streambp.device import failed_in_a_kernel, raised_among_kernels
from streambp.errors import AttentionChoiceError, KernelError, StreamBPError
from streambp.layer.cached import OwnMask
from streambp.layer.call import LayerCall
from streambp.layer.recompute import RandomState

TOKENS = 12
CHUNK = 5
SAMPLES = 64  # positions that show how large hidden states are
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}  # of what the layer adds to its input
HALF_TOLERANCE = 3e-2  # in half precision, or under autocast


def can_stream(call: LayerCall) -> bool:
    """Whether chunks of the layer compute what the whole computes; if not, the site is told why.

    What is judged is the layer, not the batch: hidden states are random and the mask is causal, because padding looks
    alike at every position, and a verdict counts for calls with the same kinds of arguments only. Few tokens are tried as
    well, but their verdict is this call's alone. Without data (meta, fake) it cannot be tried: layers that attend then
    stream. A single token has nothing to cut; it runs whole, because some layers would not run on chunks at all.

    Raises:
        KernelError: a kernel failed, which says nothing about the layer; to run it whole would hide that.
        StreamBPError: the attention that was asked for cannot do it.
    """
    site, kind = call.site, call.arguments.kind
    x = call.hidden_states.detach()
    if kind in site.verdicts:
        return True  # what is known not to stream does not get here
    if x.device.type == "meta" or isinstance(x, FakeTensor):
        return site.attends
    if x.shape[-2] == 1:
        return False
    try:
        call.arguments.check_lengths()
    except StreamBPError as error:
        site.because = str(error)
        return False
    site.because, certain = _why_not(call, x)
    if certain:
        site.verdicts[kind] = site.because
    return site.because is None


def _why_not(call: LayerCall, hidden_states: Tensor) -> tuple[str | None, bool]:
    """Why chunks compute something else, None if they do not; and whether that will be so for any batch."""
    certain = hidden_states.shape[-2] > CHUNK
    with torch.no_grad(), call.streaming(), _evaluated(call.layer), RandomState.capture(hidden_states.device).replayed():
        x = _random_like(hidden_states)
        chunk_size = min(CHUNK, -(-x.shape[-2] // 2))
        try:
            with call.arguments.replaced(_causal_mask(call, x.shape[-2])):
                whole, pieces = (_run(call, x, size) for size in (x.shape[-2], chunk_size))
        except (torch.OutOfMemoryError, AttentionChoiceError):
            raise
        except Exception as error:
            if isinstance(error, StreamBPError) and raised_among_kernels(error):
                raise  # the attention that was asked for cannot do it
            if failed_in_a_kernel(error, x.device):
                raise KernelError(
                    f"A kernel failed when {type(call.layer).__name__} was tried on {x.shape[-2]} tokens "
                    f"({type(error).__name__}: {error}). It would fail in training as well. Set another attention in "
                    "StreamConfig ('flash', or 'math', which uses torch's own products alone), or run the model unpatched "
                    "to see whether it fails there too."
                ) from error
            # Whatever else it is, it comes from cutting the layer.
            return f"its forward does not work on chunks ({type(error).__name__}: {error})", certain
    autocast = any(enabled for _, enabled, _ in call.autocast.states)
    tolerance = HALF_TOLERANCE if autocast else TOLERANCE.get(x.dtype, HALF_TOLERANCE)
    scale = tolerance * (whole - x).float().norm() + 8 * torch.finfo(x.dtype).eps * whole.float().norm()
    if bool((whole - pieces).float().norm() <= scale):
        return None, certain
    if not bool(whole.isfinite().all()):  # weights that are still to be loaded
        return None, False
    return "it mixes tokens outside of its attention (a convolution, a recurrence?)", certain


def _random_like(hidden_states: Tensor) -> Tensor:
    """[..., B, TOKENS, h], as large as the given ones usually are."""
    some = hidden_states[..., :: max(1, hidden_states.shape[-2] // SAMPLES), :]
    usual = some.float().abs().median()
    usual = torch.where(usual.isfinite() & (usual > 0), usual, 1.0)
    x = torch.randn_like(hidden_states[..., :TOKENS, :], dtype=torch.float32) * usual
    return x.to(hidden_states.dtype)


def _causal_mask(call: LayerCall, length: int) -> dict[str, Any]:
    """The arguments that say what is read, so that a layer that attends by itself reads what is before and nothing is
    padding; the others get their mask from `_run`."""
    named = call.arguments.named
    return {name: mask.causal(length) for name, mask in named.items() if isinstance(mask, OwnMask)}


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
