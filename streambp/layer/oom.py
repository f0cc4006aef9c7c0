"""Handling of out-of-memory errors in a streamed layer: free saves and retry, or raise an error
with the remedy.

[Note: once for each chunk] A chunk's forward, refill and backward can be retried after they ran out
of memory, once automatic saves are freed. A retry restores the random states and writes keys and
values to the same positions. Sums that backward accumulates count each term once. The sums of
weight gradients, and the gradients of keys and values, count the terms that the first attempt
added. The retry skips this number of terms, in the same order.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from streambp.chunks import ChunkPlan
from streambp.config import StreamConfig
from streambp.device import MEMORY_ERRORS, is_out_of_memory, make_room
from streambp.errors import DeviceMemoryError
from streambp.layer.layer_state import LayerState

MIN_ADVISED_CHUNK_SIZE = 1024
T = TypeVar("T")


def run_with_retry(
    compute: Callable[[bool], T],
    device: torch.device,
    drop_saves: Callable[[], bool] | None,
    check_room: Callable[[], None] | None = None,
) -> T:
    """Return the result of `compute`. If `compute` runs out of device memory, free saved tensors
    that backward can recompute, and call it again. [Note: once for each chunk]

    Args:
        compute: the computation; its argument is True in the retry, otherwise False.
        device: the device whose memory is freed.
        drop_saves: frees saved tensors and returns True if there were any. None or a result False:
            the error is raised without a retry.
        check_room: called before the first attempt; frees saved tensors if memory is short. None:
            memory is not checked.
    """
    if check_room is not None:
        check_room()
    try:
        return compute(False)
    except MEMORY_ERRORS as error:
        if not is_out_of_memory(error) or drop_saves is None or not drop_saves():
            raise
        allocators = isinstance(error, torch.OutOfMemoryError)
    make_room(device, allocators)  # after the handler: the error's frames hold tensors
    return compute(True)


# for calls without a retry
RUN_ONCE: Callable[[Callable[[bool], Any]], Any] = operator.methodcaller("__call__", False)


def layer_memory_error(
    error: BaseException, layer_state: LayerState, plan: ChunkPlan
) -> DeviceMemoryError:
    """Return the error to raise in place of an out-of-memory error of a decoder layer. The new
    error's message names the setting to change. A `DeviceMemoryError` already does, and is returned
    unchanged.

    The failure is recorded in `layer_state`, and the policy for `saves="auto"` then saves less in
    similar steps.

    Args:
        error: the out-of-memory error.
        layer_state: settings and state of the layer.
        plan: the chunks of the call.
    """
    if isinstance(error, DeviceMemoryError):
        return error
    layer_state.last_call.error_has_advice = True
    if layer_state.saves_policy is not None:
        layer_state.saves_policy.failed()
    details = str(error).splitlines()[0] if str(error) else "torch gave no details"
    moves_saves = (
        layer_state.saves_policy is not None and layer_state.saves_policy.moving is not None
    )
    lever = advise_setting(layer_state.config, plan, moves_saves)
    return DeviceMemoryError(
        f"The device ran out of memory in {type(layer_state.layer).__name__} on {plan.length} positions a "
        f"row in chunks of {plan.longest}. {lever} Run `streambp plan` to compute what fits. "
        f"({details})"
    )


def advise_setting(config: StreamConfig, plan: ChunkPlan, moves_saves: bool = False) -> str:
    """Return one sentence, for the message of an out-of-memory error, that advises to change a
    setting. The first possible change is advised: move saved tensors to the host, halve the chunk
    size, compute the loss without logits, or limit `gpu_memory`. If no change is possible, the
    sentence says so.

    Args:
        config: the user's settings.
        plan: the chunks of the call that ran out of memory.
        moves_saves: True if saved tensors went to the host because the step was predicted to be
            faster so; False: only `config` decides if saved tensors go to the host.
    """
    if not (config.always_moves or moves_saves):
        saved = f" and saves={config.named_saves!r}" if config.named_saves else ""
        return f"Set offload='cpu' in StreamConfig: it moves layer inputs{saved} to host memory."
    if min(plan.size, plan.length) > MIN_ADVISED_CHUNK_SIZE:
        return f"Set chunk_size={max(MIN_ADVISED_CHUNK_SIZE, plan.size // 2)} in StreamConfig."
    if not config.head:
        return "Set head=True in StreamConfig: it computes the loss without logits."
    if config.gpu_memory is None:
        offload = "" if config.always_moves else "offload='cpu' and "
        return (
            f"Set {offload}gpu_memory='1GiB' in StreamConfig: keys, values and their gradients "
            "beyond it are stored in host memory."
        )
    return (
        "No setting of streambp lowers it further: shorten the sequence, or divide weights and "
        "gradients over GPUs (ZeRO-3, FSDP2)."
    )


def advise_after_backward(
    tokens: int, streamed: tuple[StreamConfig, ChunkPlan, bool] | None
) -> str:
    """Return the text of a warning for a backward that ran out of memory outside the autograd
    Functions of streambp, with advice which setting to change. Torch's error cannot contain the
    advice, because no code of streambp runs when this error is raised.

    Args:
        tokens: the token count of the micro-batch, over all rows.
        streamed: arguments of `advise_setting`: the user's settings, the chunks of the decoder
            layers, and True if saved tensors went to the host for a faster step. None: the
            micro-batch ran as in the unpatched model.
    """
    if streamed is not None:
        where = "outside of streamed layers"
        lever = advise_setting(*streamed)
    else:
        where = f"of {tokens:,} tokens that ran as the unpatched model would"
        lever = (
            f"Micro-batches of more than {tokens // 2:,} tokens stream from now on, which takes "
            "less memory. Set unpatched_runs=False in StreamConfig to stream all micro-batches."
        )
    return (
        f"The device ran out of memory in a backward {where}. {lever} `streambp plan` computes "
        "what fits."
    )


@contextlib.contextmanager
def explain_memory_errors(where: str) -> Iterator[None]:
    """Context manager for code outside of decoder layers, such as the loss: replaces an
    out-of-memory error by a `DeviceMemoryError`, whose message names the setting to change.

    Args:
        where: words of the error message that name the computation, such as "in the loss".

    Raises:
        DeviceMemoryError: the device ran out of memory.
    """
    try:
        yield
    except MEMORY_ERRORS as error:
        if isinstance(error, DeviceMemoryError) or not is_out_of_memory(error):
            raise
        details = str(error).splitlines()[0] if str(error) else "torch gave no details"
        raise DeviceMemoryError(
            f"The device ran out of memory {where}. Set offload='cpu' in StreamConfig, or a "
            "smaller chunk_size, or shorten the batch. `streambp plan` computes what fits. "
            f"({details})"
        ) from error


def run_outside_with_retry(
    device: torch.device,
    drop_saves: Callable[[], bool] | None,
    compute: Callable[[], T],
    where: str,
) -> T:
    """Return the result of `compute`, for code outside of decoder layers. If `compute` runs out of
    memory, free tensors that the layers saved and call `compute` once more.

    Args:
        device: the device whose memory is freed.
        drop_saves: frees saved tensors and returns True if there were any. None or a result False:
            the error is raised without a retry.
        compute: the computation. No state may change before the computation ends, because a failed
            attempt is repeated.
        where: words of the error message that name the computation, such as "in the loss".

    Raises:
        DeviceMemoryError: the device ran out of memory in the retry as well.
    """
    with explain_memory_errors(where):
        return run_with_retry(lambda _: compute(), device, drop_saves)
