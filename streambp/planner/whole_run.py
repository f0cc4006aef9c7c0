"""Predict hours and money of training on a data set, from the tokens of its rows."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence

from streambp.planner.plan import Plan
from streambp.planner.seconds import seconds
from streambp.planner.suggestions import seconds_of

LENGTHS_PER_DOUBLING = 8  # lengths within a factor of two that are told apart


@dataclasses.dataclass(frozen=True)
class WholeRun:
    """Predicted hours and price of all forwards and backwards of a training on a data set.
    Optimizer steps, data loading and evaluation are not included.

    Attributes:
        rows: number of rows of the data set.
        tokens: tokens of all rows, each cut at the plan's sequence length.
        epochs: passes over the data set.
        packed_hours: hours if the data set is packed into rows of the plan's sequence length.
        hours: hours without packing, in steps of one row of the data set with its own length; None
            if the plan has micro-batches of several rows.
        gpu_hours: the smaller of the two numbers of hours, times the number of GPUs.
        price: money for `gpu_hours`; None without a price.
    """

    rows: int
    tokens: int
    epochs: float
    packed_hours: float
    hours: float | None
    gpu_hours: float
    price: float | None


def whole_run(
    plan: Plan, lengths: Sequence[int], epochs: float = 1.0, price: float | None = None
) -> WholeRun | None:
    """Return the predicted hours and price of a training on a data set; None if the plan's step
    does not fit into memory.

    Args:
        plan: the plan of one step.
        lengths: tokens of each row of the data set.
        epochs: passes over the data set.
        price: money for an hour of one GPU; None: no price.
    """
    choice = plan.choice
    if choice is None:
        return None
    row_lengths = [min(length, plan.seq_len) for length in lengths]
    tokens = sum(row_lengths)
    setting = plan.setting
    replicas = setting.gpus / setting.ranks
    rows_at_once = plan.profile.batch_size * replicas
    steps = math.ceil(epochs * tokens / (rows_at_once * plan.seq_len))
    packed = steps * seconds_of(plan) / 3600
    hours = None
    if plan.profile.batch_size == 1:
        placed_setting = dataclasses.replace(setting, on_host=choice.on_host)
        method = plan.profile.method(choice.method)
        total = 0.0
        for length, number in Counter(map(round_up, row_lengths)).items():
            tokens_of_row = min(length, plan.seq_len)
            tokens_of_row += -tokens_of_row % setting.ranks
            chunk = min(choice.chunk_size, tokens_of_row)
            total += (
                number * seconds(method, tokens_of_row, chunk, plan.rates, placed_setting).total
            )
        hours = epochs * total / replicas / 3600
    fastest = min(packed, hours) if hours is not None else packed
    spent = setting.gpus * fastest
    money = None if price is None else price * spent
    return WholeRun(len(row_lengths), tokens, epochs, packed, hours, spent, money)


def round_up(length: int) -> int:
    """Return a row length rounded up to a power of 2 ** (1/8), at most a tenth more. The rows of a
    data set then have few different lengths, and the seconds of a step are predicted only for
    these."""
    return math.ceil(
        2 ** (math.ceil(LENGTHS_PER_DOUBLING * math.log2(length)) / LENGTHS_PER_DOUBLING)
    )


def whole_run_text(run: WholeRun, seq_len: int) -> str:
    """Return a training's cost as one line of text: rows, tokens, hours with and without packing,
    GPU hours and money.

    Args:
        run: the cost of all steps.
        seq_len: the plan's sequence length, to which rows are packed.
    """
    ways = [f"{hours_text(run.packed_hours)} packed into rows of {seq_len:,} tokens"]
    if run.hours is not None:
        ways.append(f"{hours_text(run.hours)} row by row")
    money = "" if run.price is None else f", {run.price:,.2f} of money"
    return (
        f"{run.rows:,} rows with {run.tokens:,} tokens, {run.epochs:g} epochs: "
        f"{' or '.join(ways)}; {run.gpu_hours:,.3g} GPU hours{money}. Without the optimizer's "
        "time, loading and evaluation."
    )


def hours_text(hours: float) -> str:
    """Return a number of hours as text: "3.5 hours", or "90 minutes" below two hours."""
    if hours < 2:
        return f"{60 * hours:,.3g} minutes"
    return f"{hours:,.3g} hours"
