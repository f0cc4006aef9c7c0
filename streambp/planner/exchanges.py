"""Predict the bytes that ranks with shared sequences exchange in a step, and the seconds for which
the step waits.

A step waits for all of Ulysses' all-to-alls. Data for other nodes pass each rank's own network
adapter; data for ranks of the same node pass the links between GPUs at the same time. Gathered keys
of context parallelism enter a node once, over all its adapters. A group of heads is transferred
during the attention of the previous group. A step waits for the first group of each pass, and for
the other groups if their transfers take longer than attention. A step also waits for the sums of
key gradients over ranks. Reordering keys moves bytes on the device.
"""

from __future__ import annotations

import math

from streambp.planner.profile import ULYSSES, Method, SequenceSplit, Setting
from streambp.rates import Rates


def exchanged_bytes(
    split: SequenceSplit, seq_len: int, setting: Setting
) -> tuple[float, float, int, float]:
    """Return the bytes that a rank exchanges in a step with the ranks that share its sequences, to
    predict by how much the exchanges lengthen the step. The bytes include the rank's own part,
    which is not sent.

    Args:
        split: the kind of sequence sharding (Ulysses or context parallelism), with the bytes that
            are exchanged for each token.
        seq_len: positions of a full row, over all ranks.
        setting: the training setting, which has the number of ranks.

    Returns:
        Four numbers. The first is the bytes of all-to-alls (Ulysses), or of gradients of keys and
            values that are summed over ranks (context parallelism); the step waits for these. The
            second is the bytes of gathered keys and values; 0 under Ulysses. The third is the
            number of groups of heads that are gathered one after the other; 1 under Ulysses. The
            fourth is the bytes read and written on the device to reorder keys.
    """
    ranks = setting.ranks
    if split.by == ULYSSES:
        tokens = seq_len / ranks
        repeats = split.repeats(ranks)
        return (
            (split.traded + split.traded_keys * repeats) * tokens,
            0.0,
            1,
            split.moved * repeats * tokens,
        )
    groups = 1
    for heads in split.heads:
        at_once = max(1, min(heads.keys, math.floor(setting.room / (heads.size * seq_len))))
        groups = max(groups, math.ceil(heads.keys / at_once))
    if groups > 1:
        gathered = split.gathered
    else:
        gathered = split.gathered_at_once
    return split.summed * seq_len, gathered * seq_len, groups, split.moved * seq_len


def link_bytes(method: Method, seq_len: int, setting: Setting) -> float:
    """Return the bytes that a rank sends in a step to the ranks that share its sequences, for rows
    of `seq_len` positions over all ranks. Each rank receives equally many bytes. 0 without sequence
    sharding."""
    if method.split is None:
        return 0.0
    waited, gathered, _, _ = exchanged_bytes(method.split, seq_len, setting)
    return (waited + gathered) * (setting.ranks - 1) / setting.ranks


def exchange_seconds(
    method: Method, seq_len: int, setting: Setting | None, rates: Rates, attention: float
) -> float:
    """Return the seconds by which exchanges between the ranks of a sequence lengthen a step; 0
    without sequence sharding.

    Args:
        method: the way to run the step, with its exchanged bytes (`Method.split`).
        seq_len: positions of a full row, over all ranks.
        setting: the training setting; None: no exchanges.
        rates: the device's speeds (FLOP/s, bytes/s).
        attention: seconds of a step's attention on one rank; context parallelism gathers keys
            during this time.
    """
    if method.split is None or setting is None:
        return 0.0
    waited, gathered, groups, reordered = exchanged_bytes(method.split, seq_len, setting)
    ranks = setting.ranks
    local_ranks = min(ranks, rates.node)
    order = reordered / rates.bandwidth
    if method.split.by == ULYSSES:
        in_node, outside = (
            waited * part / ranks for part in (local_ranks - 1, ranks - local_ranks)
        )
        return max(in_node / rates.peers, outside / rates.network) + order
    if ranks <= rates.node:
        rate = rates.peers
    else:
        rate = min(rates.peers, rates.node * rates.network)
    gathers, sums = (size * (ranks - 1) / ranks / rate for size in (gathered, waited))
    later_groups = 1 - 1 / groups  # fraction of the groups behind the first
    return sums + gathers / groups + later_groups * max(0.0, gathers - attention) + order
