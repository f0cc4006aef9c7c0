"""How a layer is run when it is tried: chunk by chunk, on a few random tokens, with weights as training might make them.

Hidden states are random, because padding looks alike at every position, and nothing is masked: what is
judged is the layer, not the batch. Weights that are zero have other values, since gates start at values for which they do
nothing. Dropout is off where two runs are compared, since it draws other numbers for other chunks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from streambp.attention.own import OwnMask
from streambp.attention.prefix import Prefix, Stage
from streambp.attention.spans import Spans
from streambp.chunks import Chunk
from streambp.known_names import PICKED
from streambp.layer.call import LayerCall
from streambp.layer.outputs import ChunkOutput
from streambp.layer.products import PLAIN
from streambp.layer.recompute import RandomState
from streambp.layer.shadows import Parameters, slots_of
from streambp.recurrent.states import States

TOKENS = 12
CHUNK = 5
LARGE = 2**24  # elements of a matrix that the device may well hold thrice
SAMPLES = 64  # positions that show how large hidden states are


def rehearsed(
    call: LayerCall,
    x: Tensor,
    chunks: Iterable[Chunk],
    stage: Stage,
    prefix: Prefix,
    start: Callable[[States], States | None] = lambda ended: ended,
) -> Iterator[tuple[States | None, ChunkOutput | None]]:
    """The layer's own forward on trial over chunks of x [..., B, t, h], one after the other.

    Args:
        prefix: what attention reads, and where it leaves keys and values.
        start: the states that a chunk starts from, by those that the one before it ended with; None: it gets no cache.

    Yields:
        What each chunk started from and what it gave, None in a refill.
    """
    ended: States = {}
    for chunk in chunks:
        started = start(ended)
        output, _ = call.compute(chunk.part(x, -2), chunk, stage, prefix, states=started)
        yield started, output
        ended = {} if output is None else output.states


def causal_prefix(call: LayerCall, length: int) -> Prefix:
    """A prefix of so many tokens in each of the call's rows, whose queries read all before them."""
    return Prefix(Spans.causal(call.rows, length), length, call.carried.prefix.attention)


@contextlib.contextmanager
def rehearsing(call: LayerCall) -> Iterator[None]:
    """Within, the call streams, random numbers are drawn that are drawn again afterwards, and nothing is cached."""
    with call.streaming(), RandomState.capture(call.device).replayed(), nothing_cached():
        yield


def random_like(hidden_states: Tensor) -> Tensor:
    """[..., B, TOKENS, h], as large as the given ones usually are."""
    some = hidden_states[..., :: max(1, hidden_states.shape[-2] // SAMPLES), :]
    usual = some.float().abs().median()
    usual = torch.where(usual.isfinite() & (usual > 0), usual, 1.0)
    x = torch.randn_like(hidden_states[..., :TOKENS, :], dtype=torch.float32) * usual  # [..., B, TOKENS, h]
    return x.to(hidden_states.dtype)


def nothing_masked(named: Mapping[str, Any], length: int) -> dict[str, Any]:
    """The masks among the arguments, so that a layer that attends by itself reads what is before and nothing is padding;
    the others get attention's mask from `_run`. Keys that an earlier layer picked become two that every query may read."""
    found = {name: _unmasked(mask, length) for name, mask in named.items() if name.endswith("mask")}
    if isinstance(named.get(PICKED), Tensor):
        queries = torch.arange(length, device=named[PICKED].device)
        found[PICKED] = torch.stack((queries, queries // 2), -1).expand(len(named[PICKED]), -1, -1)  # [B, T, 2]
    return found


def _unmasked(mask: Any, length: int) -> Any:
    if isinstance(mask, OwnMask):
        return mask.causal(length)
    if isinstance(mask, Mapping):
        return {key: _unmasked(part, length) for key, part in mask.items()}
    return torch.ones_like(mask) if isinstance(mask, Tensor) and mask.dim() == 2 else mask


@contextlib.contextmanager
def nothing_cached() -> Iterator[None]:
    """Within, autocast keeps no copies of weights: those of stand-ins would stay until the model's forward ends."""
    cache = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(cache)


def nothing_compiled() -> contextlib.AbstractContextManager[Any]:
    """Within, compiled modules and functions run as they were written.

    A trial judges what a layer computes. Compiled, its few tokens would each time be one more shape to compile for, of the
    eight that torch allows before it compiles no more, and the backward of compiled code frees what a second one reads.
    """
    return torch.compiler.set_stance("force_eager")


@contextlib.contextmanager
def evaluated(call: LayerCall) -> Iterator[None]:
    """Dropout draws other numbers for other chunks; without it the two runs must agree.

    Modules of quantised weights keep their mode: some repack them when they are run in eval mode.
    """
    modules = [module for module in call.site.of(_plain_modules) if module.training]
    try:
        for module in modules:
            _set_mode(module, False)
        yield
    finally:
        for module in modules:
            _set_mode(module, True)


def _set_mode(module: nn.Module, training: bool) -> None:
    if "training" in module.__dict__:
        module.__dict__["training"] = training  # nn.Module's own way takes long for hundreds of modules
    else:
        module.training = training


def _plain_modules(layer: nn.Module) -> list[nn.Module]:
    return [
        module
        for module in layer.modules()
        if all(p is None or (type(p) in PLAIN and p.is_floating_point()) for p in module._parameters.values())
    ]


def may_have_graphs(call: LayerCall) -> bool:
    """Whether autograd can run through the layer: no inference mode is on, and no parameter was made in one."""
    return not torch.is_inference_mode_enabled() and not any(p.is_inference() for p in call.look.body.parameters)


def as_trained(call: LayerCall) -> contextlib.AbstractContextManager[Any]:
    """Within, the layer has weights as training might make them. [Note: a trial]"""
    if not may_have_graphs(call):
        return contextlib.nullcontext()
    return Parameters(call.layer, call.device, call.site.of(slots_of)).shadowed(with_random_zeros)


def with_random_zeros(parameter: Tensor) -> Tensor:
    """A parameter's value [...], detached, with random numbers for zeros; vectors and numbers are changed everywhere.

    Gates start at values for which they do nothing. A matrix of over LARGE elements is copied only if all of it is zero.
    Integers, floats of 8 bits and tensor subclasses keep their values: these may be quantised weights.
    """
    value = parameter.detach()
    if type(parameter) not in PLAIN or not value.is_floating_point() or value.itemsize < 2:
        return value
    if value.dim() < 2:
        return value + torch.randn_like(value) * 0.1
    zeros = value == 0 if value.numel() <= LARGE else ~value.any()
    if not bool(zeros.any()):
        return value
    return torch.where(zeros, torch.randn_like(value) * value.shape[-1] ** -0.5, value)
