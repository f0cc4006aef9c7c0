"""What ranks that share sequences send to each other in a step, and how long a step waits for it.

Ulysses' all-to-alls are waited for. Between nodes a rank's part of them goes over its own adapter, inside
a node over the links between GPUs, at the same time. Gathered keys enter a node once, over all its adapters. A group of
heads is on its way while the one before is attended: the first of each pass is waited for, of the others what takes longer
than attention. Sums of keys' gradients are waited for. What puts keys in order moves bytes on the device.
"""

from __future__ import annotations

import math

from streambp.planner.profile import ULYSSES, Method, Setting, Split
from streambp.rates import Rates


def exchanged(split: Split, seq_len: int, setting: Setting) -> tuple[float, float, int, float]:
    """Bytes of a step's exchanges on a rank, its own part among them: all-to-alls or sums, which are waited for, and
    gathers; the number of groups of heads in which keys are gathered; bytes that putting keys in order moves on the device.
    """
    ranks = setting.ranks
    if split.by == ULYSSES:
        tokens, repeats = seq_len / ranks, split.repeats(ranks)
        return (split.traded + split.traded_keys * repeats) * tokens, 0.0, 1, split.moved * repeats * tokens
    groups = 1
    for heads in split.heads:
        at_once = max(1, min(heads.keys, math.floor(setting.room / (heads.size * seq_len))))
        groups = max(groups, math.ceil(heads.keys / at_once))
    gathered = split.gathered if groups > 1 else split.gathered_at_once
    return split.summed * seq_len, gathered * seq_len, groups, split.moved * seq_len


def link_bytes(method: Method, seq_len: int, setting: Setting) -> float:
    """Bytes that a rank sends to others in a step of `seq_len` positions a row, and receives as many."""
    if method.split is None:
        return 0.0
    waited, gathered, _, _ = exchanged(method.split, seq_len, setting)
    return (waited + gathered) * (setting.ranks - 1) / setting.ranks


def exchange_seconds(method: Method, seq_len: int, setting: Setting | None, rates: Rates, attention: float) -> float:
    """Seconds of a step that exchanges add.

    Args:
        attention: seconds of a step's attention on one rank.
    """
    if method.split is None or setting is None:
        return 0.0
    waited, gathered, groups, moved = exchanged(method.split, seq_len, setting)
    ranks = setting.ranks
    near = min(ranks, rates.node)
    order = moved / rates.bandwidth
    if method.split.by == ULYSSES:
        inside, outside = (waited * part / ranks for part in (near - 1, ranks - near))
        return max(inside / rates.peers, outside / rates.network) + order
    rate = rates.peers if ranks <= rates.node else min(rates.peers, rates.node * rates.network)
    gathers, sums = (size * (ranks - 1) / ranks / rate for size in (gathered, waited))
    others = 1 - 1 / groups  # of the groups
    return sums + gathers / groups + others * max(0.0, gathers - attention) + order
