"""When a streamed layer runs out of device memory: saves are let go of, or an error says what to change.

[Note: once for each chunk] A chunk's forward, refill and backward can be computed again after an OutOfMemoryError, once
what layers have saved of their own accord is let go of. Random numbers are drawn from the same states, and keys and values
are written to their place once more. What backward adds up while it runs is added once: the sums of weights' gradients, and
those of keys and values, count what the first attempt has added, and the second leaves as much out, in the same order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

from streambp.chunks import ChunkPlan
from streambp.config import StreamConfig
from streambp.errors import DeviceMemoryError
from streambp.layer.call import LayerCall

SMALL_CHUNK = 1024
T = TypeVar("T")


def with_memory(call: LayerCall, compute: Callable[[bool], T]) -> T:
    """The result of `compute`, which is called once more, without saves, if there was no memory for them.
    [Note: once for each chunk]

    Args:
        compute: is told whether it runs again.
    """
    chooser = call.site.chooser
    if chooser is None:
        return compute(False)
    chooser.look(call.kept)
    try:
        return compute(False)
    except torch.OutOfMemoryError:
        if not chooser.let_go(call.kept):
            raise
    return compute(True)  # not above: the error's frames hold tensors


@contextlib.contextmanager
def explained(call: LayerCall) -> Iterator[None]:
    """Within, running out of device memory raises an error that carries the next lever.

    Raises:
        DeviceMemoryError: from the torch.OutOfMemoryError.
    """
    try:
        yield
    except DeviceMemoryError:
        raise
    except torch.OutOfMemoryError as error:
        if call.site.chooser is not None:
            call.site.chooser.failed()
        details = str(error).splitlines()[0] if str(error) else "torch gave no details"
        raise DeviceMemoryError(
            f"The device ran out of memory in {type(call.layer).__name__} on {call.plan.length} positions a row in "
            f"chunks of {call.plan.longest}. {next_lever(call.site.config, call.plan)} `streambp plan` computes what fits. "
            f"({details})"
        ) from error


def next_lever(config: StreamConfig, plan: ChunkPlan) -> str:
    """The least costly change that lowers the peak, as a sentence."""
    if config.offload == "none":
        saved = f" and saves={config.named_saves!r}" if config.named_saves else ""
        return f"Set offload='cpu' in StreamConfig: it moves layer inputs{saved} to host memory."
    if min(plan.size, plan.length) > SMALL_CHUNK:
        return f"Set chunk_size={max(SMALL_CHUNK, plan.size // 2)} in StreamConfig."
    if not config.head:
        return "Set head=True in StreamConfig: it computes the loss without logits."
    if config.gpu_memory is None:
        return "Set gpu_memory='1GiB' in StreamConfig: keys, values and their gradients beyond it wait in host memory."
    return (
        "No setting of streambp's is left: divide weights and gradients over GPUs (ZeRO-3, FSDP2), train adapters, keep "
        "the optimizer's state on the host, or shorten the sequence."
    )
