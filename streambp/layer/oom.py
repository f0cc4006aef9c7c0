"""When a streamed layer runs out of device memory: saves are let go of, or an error says what to change.

[Note: once for each chunk] A chunk's forward, refill and backward can be computed again when the device had no memory for
them, once what layers have saved of their own accord is let go of. Random numbers are drawn from the same states, and keys
and values are written to their place once more. What backward adds up while it runs is added once: the sums of weights'
gradients, and those of keys and values, count what the first attempt has added, and the second leaves as much out, in the
same order.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from streambp.chunks import ChunkPlan
from streambp.config import StreamConfig
from streambp.device import MEMORY_ERRORS, DeviceMemoryError, is_out_of_memory, make_room
from streambp.layer.site import LayerSite

SMALL_CHUNK = 1024
T = TypeVar("T")


def with_memory(
    compute: Callable[[bool], T],
    device: torch.device,
    let_go: Callable[[], bool] | None,
    check_room: Callable[[], None] | None = None,
) -> T:
    """The result of `compute`, which is called once more, without saves, if there was no memory for them.
    [Note: once for each chunk]

    Args:
        compute: is told whether it runs again.
        let_go: lets go of saves, and says whether some were there; None: there are none. check_room: does so before.
    """
    if check_room is not None:
        check_room()
    try:
        return compute(False)
    except MEMORY_ERRORS as error:
        if not is_out_of_memory(error) or let_go is None or not let_go():
            raise
        allocators = isinstance(error, torch.OutOfMemoryError)
    make_room(device, allocators)  # not above: the error's frames hold tensors
    return compute(True)


AT_ONCE: Callable[[Callable[[bool], Any]], Any] = operator.methodcaller("__call__", False)  # where nobody can let go


def explained(error: BaseException, site: LayerSite, plan: ChunkPlan) -> DeviceMemoryError:
    """The error to raise from this one, which carries the next lever; the error itself if it does already."""
    if isinstance(error, DeviceMemoryError):
        return error
    site.advised = True
    if site.chooser is not None:
        site.chooser.failed()
    details = str(error).splitlines()[0] if str(error) else "torch gave no details"
    return DeviceMemoryError(
        f"The device ran out of memory in {type(site.layer).__name__} on {plan.length} positions a row in chunks of "
        f"{plan.longest}. {next_lever(site.config, plan)} `streambp plan` computes what fits. ({details})"
    )


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


def bare_advice(tokens: int, streamed: tuple[StreamConfig, ChunkPlan] | None) -> str:
    """What to change where torch's own part of a backward ran out of memory. [Note: bare errors]

    Args:
        tokens: over all rows. streamed: how its layers streamed; None: the micro-batch ran as unpatched.
    """
    if streamed is not None:
        where = "outside of streamed layers"
        lever = next_lever(*streamed)
    else:
        where = f"of {tokens:,} tokens that ran as the unpatched model would"
        lever = (
            f"Micro-batches of more than {tokens // 2:,} tokens stream from now on, which takes less. Set "
            "unpatched_runs=False in StreamConfig: then all stream, and repeat what runs out of memory."
        )
    return f"The device ran out of memory in a backward {where}. {lever} `streambp plan` computes what fits."


@contextlib.contextmanager
def explaining(where: str) -> Iterator[None]:
    """Within, outside of layers, running out of memory raises an error that carries the next lever. where: "in ...".

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
            f"The device ran out of memory {where}. Set offload='cpu' in StreamConfig, or a smaller chunk_size, or shorten "
            f"the batch. `streambp plan` computes what fits. ({details})"
        ) from error


def once_more(device: torch.device, let_go: Callable[[], bool] | None, compute: Callable[[], T], where: str) -> T:
    """The result of `compute`, outside of layers. It runs once more if there was no memory, and layers had saves to let go
    of; so it must change nothing before it ends.

    Raises:
        DeviceMemoryError: the device ran out of memory all the same.
    """
    with explaining(where):
        return with_memory(lambda _: compute(), device, let_go)
