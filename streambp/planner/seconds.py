"""Predict the seconds of a step from its FLOPs, bytes and dispatches, and a device's speeds
(`Rates`: FLOP/s, bytes/s).

    seconds = products + attention forward + attention backward + bytes moved
              + extra time for copies, the host and exchanges

The rates are fitted to measured steps. Only copies and the host's dispatches overlap with kernels;
a step waits if either takes longer. Seconds are those of forward and backward alone: no optimizer,
no communication of parameters and gradients between GPUs. The first step is excluded, because it
pins host memory (about 0.5 s a GiB) and compiles kernels. Exchanges of ranks that share a sequence
are in `planner/exchanges.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from streambp.planner.exchanges import exchange_seconds
from streambp.planner.host_weights import HOST_WEIGHTS_SUFFIX, MAX_TOKENS, add_copies
from streambp.planner.profile import Method, Setting, work
from streambp.planner.work import Work
from streambp.rates import Rates


@dataclasses.dataclass(frozen=True)
class Seconds:
    """Predicted seconds of a step on one rank, by kind of operation.

    Attributes:
        total: products + attention + elementwise + waiting + exchange.
        products: seconds of matrix products.
        attention: seconds of attention kernels.
        elementwise: seconds of all other kernels.
        waiting: seconds in which no kernel runs, because copies to or from the host, or the host's
            dispatches of operations, take longer than the kernels.
        phases: dict from parts of the step, such as "forward" of all layers, to seconds; exchanges
            between ranks are left out.
        exchange: seconds of exchanges between the ranks that share a sequence.
    """

    total: float
    products: float
    attention: float
    elementwise: float
    waiting: float
    phases: Mapping[str, float]
    exchange: float = 0.0


def seconds(
    method: Method, seq_len: int, chunk_size: int, rates: Rates, setting: Setting | None = None
) -> Seconds:
    """Return the predicted seconds of a training step (forward and backward) on one rank.

    Args:
        method: the way to run the step, with its memory and FLOPs, counted on tensors without data.
        seq_len: positions of a row.
        chunk_size: positions of a chunk.
        rates: the device's speeds (FLOP/s, bytes/s).
        setting: the training setting, whose ranks share the work of a sequence evenly; None: one
            rank.
    """
    if setting is None:
        ranks = 1
    else:
        ranks = setting.ranks
    if setting is not None and method.chunked:
        on_host = setting.on_host
    else:
        on_host = None
    without_exchange = seconds_of(
        add_copies(work(method, seq_len, chunk_size, setting), on_host), rates, ranks
    )
    exchange = exchange_seconds(method, seq_len, setting, rates, without_exchange.attention)
    return dataclasses.replace(
        without_exchange, total=without_exchange.total + exchange, exchange=exchange
    )


def seconds_of(step: Mapping[str, Work], rates: Rates, ranks: int = 1) -> Seconds:
    """Return the seconds of a step on a device, without exchanges between ranks.

    Args:
        step: dict from parts of the step, such as "forward" of all layers, to costs: FLOPs, bytes,
            dispatches (operations that torch starts).
        rates: the device's FLOP/s, bytes/s and seconds for each dispatch.
        ranks: number of ranks that share FLOPs and bytes evenly.
    """
    products = attention = elementwise = waiting = total = 0.0
    phases: dict[str, float] = {}
    for name, part in step.items():
        parts = kernels(part, rates, ranks)
        busy = parts[0] + parts[1] + parts[2]
        copies = max(part.to_host, part.from_host) / ranks / rates.link
        phases[name] = max(busy, copies, part.dispatches * rates.dispatch)
        products += parts[0]
        attention += parts[1]
        elementwise += parts[2]
        waiting += phases[name] - busy
        total += phases[name]
    return Seconds(total, products, attention, elementwise, waiting, phases)


def kernels(part: Work, rates: Rates, ranks: int = 1) -> tuple[float, float, float]:
    """Return three numbers, for a part of a step on one rank: the seconds of matrix products, of
    attention, and of all other kernels.

    Args:
        part: FLOPs and bytes of the part of the step, such as the forward of all layers.
        rates: the device's FLOP/s and bytes/s.
        ranks: number of ranks that share FLOPs and bytes evenly.
    """
    return (
        part.products / ranks / rates.products,
        part.forward / ranks / rates.forward + part.backward / ranks / rates.backward,
        part.traffic / ranks / rates.bandwidth,
    )


def min_hiding_length(
    method: Method, chunk_size: int, rates: Rates, setting: Setting
) -> int | None:
    """Return the smallest row length (in positions) at which copies of weights from the host do not
    slow a step down. The copies run at the same time as the layers' kernels, and shorter rows need
    less kernel time. None if the copies take longer at every length up to 2^24 positions.

    Args:
        method: the way to run the step, with its memory and FLOPs, counted on tensors without data.
        chunk_size: positions of a chunk.
        rates: the device's speeds (FLOP/s, bytes/s).
        setting: the training setting, with the layers whose weights are on the host.
    """

    def is_hidden(seq_len: int) -> bool:
        """True if copies of weights from the host add no time to a step with rows of `seq_len`
        positions. The copies run at the same time as the layers with these weights, and must take
        no longer than those layers' kernels, in forward and in backward."""
        step = add_copies(work(method, seq_len, min(chunk_size, seq_len), setting), setting.on_host)
        for name, part in step.items():
            if name.endswith(HOST_WEIGHTS_SUFFIX):
                computing = max(sum(kernels(part, rates)), part.dispatches * rates.dispatch)
                if part.from_host / rates.link > computing:
                    return False
        return True

    if not is_hidden(MAX_TOKENS):
        return None
    low = 1
    high = MAX_TOKENS
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if is_hidden(middle) else (middle + 1, high)
    return low


def throughput(step: Seconds, seq_len: int, batch_size: int, setting: Setting) -> float:
    """Return the number of tokens that all ranks together process in a second.

    Args:
        step: the predicted seconds of a step.
        seq_len: positions of a row.
        batch_size: rows of a rank's batch.
        setting: the training setting, with the number of GPUs.
    """
    return seq_len * batch_size * (setting.gpus / setting.ranks) / step.total
