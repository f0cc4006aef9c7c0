"""Seconds of a step, from its work and a device's rates.

    seconds = products + attention forward + attention backward + bytes moved + what copies, the host and exchanges add

Four rates, fitted on measured steps. Nothing overlaps but copies and the host, which are waited for where they take longer
than the kernels. Forward and backward alone: no optimizer, no communication of parameters and gradients between GPUs, and
not the first step, which pins host memory (about 0.5 s a GiB) and compiles kernels. Exchanges of ranks that share a
sequence are in `planner/exchanges.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from streambp.planner.exchanges import exchange_seconds
from streambp.planner.host_weights import MOST_TOKENS, MOVED, with_copies
from streambp.planner.profile import Method, Setting, work
from streambp.planner.work import Work
from streambp.rates import Rates


@dataclasses.dataclass(frozen=True)
class Seconds:
    """Of a step on one rank: total = products + attention + elementwise + waiting + exchange; phases: the total by kind of
    phase, without exchange."""

    total: float
    products: float
    attention: float
    elementwise: float
    waiting: float
    phases: Mapping[str, float]
    exchange: float = 0.0


def seconds(method: Method, seq_len: int, chunk_size: int, rates: Rates, setting: Setting | None = None) -> Seconds:
    """Of a step of `seq_len` positions a row in chunks of `chunk_size`.

    Args:
        setting: its ranks share the work evenly; None: one rank.
    """
    ranks = 1 if setting is None else setting.ranks
    on_host = setting.on_host if setting is not None and method.chunked else None
    found = seconds_of(with_copies(work(method, seq_len, chunk_size, setting), on_host), rates, ranks)
    exchange = exchange_seconds(method, seq_len, setting, rates, found.attention)
    return dataclasses.replace(found, total=found.total + exchange, exchange=exchange)


def seconds_of(step: Mapping[str, Work], rates: Rates, ranks: int = 1) -> Seconds:
    """Of work by kind of phase, which `ranks` share evenly."""
    products = attention = elementwise = waiting = total = 0.0
    phases: dict[str, float] = {}
    for name, part in step.items():
        parts = kernels(part, rates, ranks)
        busy = parts[0] + parts[1] + parts[2]
        copies = max(part.out, part.back) / ranks / rates.link
        phases[name] = max(busy, copies, part.dispatches * rates.dispatch)
        products += parts[0]
        attention += parts[1]
        elementwise += parts[2]
        waiting += phases[name] - busy
        total += phases[name]
    return Seconds(total, products, attention, elementwise, waiting, phases)


def kernels(part: Work, rates: Rates, ranks: int = 1) -> tuple[float, float, float]:
    """Seconds of matrix products, of attention and of all other kernels."""
    return (
        part.products / ranks / rates.products,
        part.forward / ranks / rates.forward + part.backward / ranks / rates.backward,
        part.moved / ranks / rates.bandwidth,
    )


def hides_from(method: Method, chunk_size: int, rates: Rates, setting: Setting) -> int | None:
    """The fewest positions a row from which copies of weights from the host cost nothing; None: they do at any
    length that is heard of."""

    def is_hidden(seq_len: int) -> bool:
        step = with_copies(work(method, seq_len, min(chunk_size, seq_len), setting), setting.on_host)
        parts = [part for name, part in step.items() if name.endswith(MOVED)]
        return all(
            part.back / rates.link <= max(sum(kernels(part, rates)), part.dispatches * rates.dispatch) for part in parts
        )

    if not is_hidden(MOST_TOKENS):
        return None
    low, high = 1, MOST_TOKENS
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if is_hidden(middle) else (middle + 1, high)
    return low


def throughput(found: Seconds, seq_len: int, batch_size: int, setting: Setting) -> float:
    """Tokens a second over all ranks."""
    return seq_len * batch_size * (setting.gpus / setting.ranks) / found.total
