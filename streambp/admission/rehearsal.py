"""Run a layer on trial: chunk by chunk, on a few random tokens, with weights as after training.

Hidden states are random, because padding is equal at every position, and no token is masked: the
trial judges the layer, not the batch. Zero weights are replaced, since gates start at values
without effect. Dropout is disabled where two runs are compared, since dropout draws other numbers
for other chunks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from streambp.attention.prefix import Prefix, Stage
from streambp.attention.self_attending import OwnMask
from streambp.attention.spans import Spans
from streambp.chunks import Chunk
from streambp.device import RandomState
from streambp.known_names import PICKED_KEYS_ARGUMENT, QUANT_STATE
from streambp.layer.call import ChunkOutput, LayerCall
from streambp.layer.products import TENSOR_TYPES
from streambp.layer.recompute import Parameters, slots_of
from streambp.recurrent.states import States

MAX_TRIAL_TOKENS = 12
TRIAL_CHUNK_SIZE = 5
MAX_MATRIX_ELEMENTS = 2**24  # elements of a matrix that the device can hold three times
SCALE_SAMPLES = 64  # positions that are sampled for the scale of the hidden states


def rehearse(
    call: LayerCall,
    x: Tensor,
    chunks: Iterable[Chunk],
    stage: Stage,
    prefix: Prefix,
    start: Callable[[States], States | None] = lambda ended: ended,
    leaves: Callable[[Chunk], list[Tensor] | None] = lambda chunk: None,
) -> Iterator[tuple[States | None, ChunkOutput | None]]:
    """Run the layer's own forward on chunks of x [..., B, t, h], in order, for a test.

    Args:
        call: the layer's call on one batch, with its arguments and chunks.
        x: [..., B, t, h], the input.
        chunks: the chunks.
        stage: the pass to run: forward, recomputation of keys and values alone, or recomputation
            with a graph.
        prefix: the keys and values that attention reads and appends to.
        start: function from the previous chunk's end states to the next chunk's start states. If
            the function returns None, the chunk gets no cache. Default: start states are the end
            states.
        leaves: function from a chunk to the autograd leaves that replace its differentiable
            arguments. If the function returns None, the arguments get no gradients.

    Yields:
        Pairs of a chunk's start states and outputs; the outputs are None if only keys and values
        are computed.
    """
    ended: States = {}
    for chunk in chunks:
        states = start(ended)
        part = chunk.part(x, -2)
        output, _ = call.compute(part, chunk, stage, prefix, leaves(chunk), states)
        yield states, output
        ended = {} if output is None else output.states


def causal_prefix(call: LayerCall, length: int) -> Prefix:
    """Return an empty store for the keys and values of a test run of a layer. Causal attention
    reads keys and values from this store, and appends those of each chunk.

    Args:
        call: the layer's call on one batch, which has the number of rows.
        length: number of tokens of the test in each row.
    """
    return Prefix(Spans.causal(call.rows, length), length, call.carried.prefix.attention)


@contextlib.contextmanager
def prepare_rehearsal(call: LayerCall) -> Iterator[None]:
    """Context manager for a test run of a layer on random tokens. The layer is prepared for chunks,
    and torch's random generators are restored afterwards, so that training draws the same numbers
    as without a test.

    Autocast's weight cache is disabled, and so are saved_tensors_hooks of a checkpoint around the
    model. The checkpoint would raise, because test chunks write to one buffer of keys and values.
    """
    without_outer_hooks = torch.autograd.graph.saved_tensors_hooks(Tensor.detach, Tensor.detach)
    restored = RandomState.capture(call.device).replay()
    with without_outer_hooks, call.prepare_layer(), restored, disable_autocast_cache():
        yield


def random_like(hidden_states: Tensor) -> Tensor:
    """Return random hidden states for a test of a layer, with at most `MAX_TRIAL_TOKENS` tokens:
    [..., B, t, h]. The random numbers have the median absolute value of `hidden_states` as scale.

    Args:
        hidden_states: [..., B, T, h], the layer's input in the call that caused the test.
    """
    sample = hidden_states[..., :: max(1, hidden_states.shape[-2] // SCALE_SAMPLES), :]
    median = sample.float().abs().median()
    median = torch.where(median.isfinite() & (median > 0), median, 1.0)
    # [..., B, MAX_TRIAL_TOKENS, h]
    x = torch.randn_like(hidden_states[..., :MAX_TRIAL_TOKENS, :], dtype=torch.float32) * median
    return x.to(hidden_states.dtype)


def unmask_arguments(named_arguments: Mapping[str, Any], length: int) -> dict[str, Any]:
    """Return a dict from argument name to its replacement for a test. Masks are replaced by causal
    masks without padding. Key indices selected by an earlier layer's indexer (sparse attention) are
    replaced by two keys that every query may read.

    Args:
        named_arguments: the layer's arguments by name.
        length: number of tokens of the test.
    """
    replacements = {
        name: _unmasked(mask, length)
        for name, mask in named_arguments.items()
        if name.endswith("mask")
    }
    if isinstance(named_arguments.get(PICKED_KEYS_ARGUMENT), Tensor):
        queries = torch.arange(length, device=named_arguments[PICKED_KEYS_ARGUMENT].device)
        # [B, T, 2]
        replacements[PICKED_KEYS_ARGUMENT] = torch.stack((queries, queries // 2), -1).expand(
            len(named_arguments[PICKED_KEYS_ARGUMENT]), -1, -1
        )
    return replacements


def _unmasked(mask: Any, length: int) -> Any:
    """Return a causal mask without padding in place of `mask`, for a test on random tokens; `mask`
    itself if its form is unknown."""
    if isinstance(mask, OwnMask):
        return mask.causal(length)
    if isinstance(mask, Mapping):
        return {key: _unmasked(part, length) for key, part in mask.items()}
    return torch.ones_like(mask) if isinstance(mask, Tensor) and mask.dim() == 2 else mask


@contextlib.contextmanager
def disable_autocast_cache() -> Iterator[None]:
    """Context manager for a test run of a layer that disables autocast's weight cache. The cache
    would hold copies of the run's random weights until the model's forward ends."""
    cache = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(cache)


def disable_compilation() -> contextlib.AbstractContextManager[Any]:
    """Return a context manager in which compiled modules and functions run eagerly.

    Used for test runs of a layer on a few tokens. Compiled code would count the number of these
    tokens as one more shape towards torch's recompile limit.
    """
    return torch.compiler.set_stance("force_eager")


@contextlib.contextmanager
def set_eval_mode(call: LayerCall) -> Iterator[None]:
    """Context manager that sets the layer's modules to eval mode, so that dropout does not make two
    runs differ. Modules with quantized weights keep their mode, because some repack weights in eval
    mode."""
    modules = [
        module for module in call.layer_state.cached_result(_plain_modules) if module.training
    ]
    try:
        for module in modules:
            _set_mode(module, False)
        yield
    finally:
        for module in modules:
            _set_mode(module, True)


def _set_mode(module: nn.Module, training: bool) -> None:
    """Set the training flag of a module for a test run of its layer, without the slow setter of
    nn.Module."""
    if "training" in module.__dict__:
        # nn.Module's own setter is slow for hundreds of modules
        module.__dict__["training"] = training
    else:
        module.training = training


def _plain_modules(layer: nn.Module) -> list[nn.Module]:
    """Return the modules inside a layer whose parameters are all plain floating-point tensors. Test
    runs of the layer set these modules to eval mode. Modules with quantized weights keep their
    mode, because some repack weights in eval mode. Under FSDP2 the bytes of a 4-bit weight may look
    plain (`bnb_4bit_quant_storage`), so a module with a quantization state is left out as well."""
    return [
        module
        for module in layer.modules()
        if getattr(module, QUANT_STATE, None) is None
        and all(
            p is None or (type(p) in TENSOR_TYPES and p.is_floating_point())
            for p in module._parameters.values()
        )
    ]


def may_have_graphs(call: LayerCall) -> bool:
    """True if autograd can record the layer's operations: inference mode is off, and no parameter
    of the layer is an inference tensor. Otherwise a test compares outputs alone."""
    return not torch.is_inference_mode_enabled() and not any(
        p.is_inference() for p in call.snapshot.body.parameters
    )


def randomize_zero_weights(call: LayerCall) -> contextlib.AbstractContextManager[Any]:
    """Return a context manager for a test of a layer, in which random numbers replace weights that
    are zero. Zeros, for example in a gate or in a new adapter's B, would hide what the layer
    computes after training. The context manager yields the replacements of the trainable
    parameters, or None if the layer cannot have a graph."""
    if not may_have_graphs(call):
        return contextlib.nullcontext()
    return Parameters(
        call.layer_state.layer, call.device, call.layer_state.cached_result(slots_of)
    ).shadow(with_random_zeros)


def with_random_zeros(parameter: Tensor) -> Tensor:
    """Return a parameter's detached value [...] with zeros replaced by random numbers, for a test:
    a gate that is zero would hide what the layer computes.

    Random numbers are added to all elements of vectors and scalars. A matrix of over
    `MAX_MATRIX_ELEMENTS` elements is changed only if it is all zero. Integers, 8-bit floats and
    tensor subclasses do not change, because they may be quantized weights.
    """
    value = parameter.detach()
    if type(parameter) not in TENSOR_TYPES or not value.is_floating_point() or value.itemsize < 2:
        return value
    if value.dim() < 2:
        return value + torch.randn_like(value) * 0.1
    zeros = value == 0 if value.numel() <= MAX_MATRIX_ELEMENTS else ~value.any()
    if not bool(zeros.any()):
        return value
    return torch.where(zeros, torch.randn_like(value) * value.shape[-1] ** -0.5, value)
