"""Predict a step of a batch as padded rows, and as one packed row with a shared prompt.

The cost of either step depends on the number of tokens and on the number of keys for each query, so
the profile (counted costs) of one row applies. G padded rows have G times the tokens of the longest
row, and each query reads its own row. The packed row has P + sum(C_i) tokens: the shared prompt's P
and each row's own C_i. The query-key pairs are those of the prompt with itself, of each row's own
tokens with the prompt, and of these tokens with themselves:

    P^2 / 2 + sum(P C_i + C_i^2 / 2)

Costs that are quadratic in the length scale with these pairs. Costs of reading keys once for each
chunk scale with the average number of keys that a query reads. The head scores each row's own
tokens in both cases. Layers with states need chunk ends at branch ends; these additional chunks are
not counted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from streambp.errors import ConfigError
from streambp.fields import check_fields
from streambp.planner.host_weights import add_copies
from streambp.planner.launch_commands import code_of_fields, fields_of, launcher_settings_of
from streambp.planner.laws import features
from streambp.planner.plan import (
    Choice,
    Memory,
    Plan,
    allow_host_weights,
    chunk_sizes,
    fits,
    place_weights,
)
from streambp.planner.profile import Method, Peak, Profile, Setting, peak
from streambp.planner.report import GIB, columns, duration, headline
from streambp.planner.seconds import seconds_of
from streambp.planner.work import Work
from streambp.rates import DEFAULT_DEVICE, DEVICES, Rates

COMPLETION_TOKENS = (1024, 4096, 16384)  # default numbers of completion tokens
HEAD_PREFIX = "head"  # prefix of the head's phase names
EQUAL_SECONDS_FACTOR = 1.005  # steps whose seconds differ by less count as equally fast


@dataclasses.dataclass(frozen=True)
class Batch:
    """Row lengths of a micro-batch, and the length of the prompt with which all rows begin.

    Attributes:
        lengths: tokens of each row, the prompt included.
        prompt: number of leading tokens that are equal in all rows; 0: no shared prompt.

    Raises:
        ConfigError: there are no rows, or a row has no token behind the prompt.
    """

    lengths: tuple[int, ...]
    prompt: int = 0

    def __post_init__(self) -> None:
        check_fields(self, prompt=0)
        if not self.lengths or min(self.lengths) <= self.prompt:
            raise ConfigError(
                f"lengths is {self.lengths} and prompt {self.prompt}. lengths must not be empty, "
                "and each row must be longer than the prompt."
            )

    @classmethod
    def of_data(cls, lengths: Sequence[int], rows: int) -> Batch:
        """Return a batch whose `rows` row lengths represent a data set: evenly spaced quantiles of
        the data set's `lengths`, the maximum included."""
        ascending = sorted(lengths)
        return cls(
            tuple(ascending[-(-len(ascending) * row // rows) - 1] for row in range(1, rows + 1))
        )

    @classmethod
    def of_mean(cls, longest: int, mean: int, rows: int) -> Batch:
        """Return a batch of `rows` rows with `mean` tokens on average. One row has `longest`
        tokens, and all other rows have one equal length."""
        length = (rows * mean - longest) // (rows - 1)
        return cls((*(length,) * (rows - 1), longest))

    @property
    def row(self) -> int:
        """Return the number of tokens of the longest row, to which all rows are padded."""
        return max(self.lengths)

    @property
    def scored(self) -> int:
        """Return the number of tokens for which the head computes a loss: all tokens behind the
        prompt, summed over the rows."""
        return sum(self.lengths) - self.prompt * len(self.lengths)

    def tokens(self, packed: bool) -> int:
        """Return the number of tokens that layers compute for the batch.

        Args:
            packed: True for the batch as one packed row: the shared prompt once, and all other
                tokens, without padding. False for padded rows, padding included.
        """
        if packed:
            return self.prompt + self.scored
        return len(self.lengths) * self.row

    def reach(self, packed: bool) -> float:
        """Return the length of an equivalent causal row, from which the cost of the batch's
        attention is predicted. A query reads the same average number of keys in both.

        Args:
            packed: True for the batch as one packed row; False for padded rows.
        """
        rests = sum(length**2 - self.prompt**2 for length in self.lengths)  # 2 P C + C^2
        if packed:
            return (self.prompt**2 + rests) / self.tokens(True)
        return float(self.row)

    def __str__(self) -> str:
        rows = len(self.lengths)
        padding = 1 - sum(self.lengths) / self.tokens(False)
        if self.prompt:
            return f"A group of {rows} rows with a prompt of {self.prompt:,} tokens"
        return f"{rows} rows of {min(self.lengths):,} to {self.row:,} tokens, {padding:.0%} padding"


@dataclasses.dataclass(frozen=True)
class BatchStep:
    """Predicted training step of a batch of rows of different lengths, either padded or packed into
    a single row.

    The step is the fastest that fits in memory, over all methods (ways to run a step) and chunk
    sizes. If none fits, the step has the lowest peak memory.

    Attributes:
        batch: the batch.
        packed: True if the rows are computed as one packed row.
        tokens: tokens that layers compute, padding included.
        fits: True if the step fits in memory.
        method: name of the way to run the step, such as "streambp saves attn_out".
        chunk_size: positions of a chunk in each row; a packed batch is one row.
        peak: peak memory of the step on device and host, in bytes.
        resident: peak bytes of the same step if layers save only their inputs, and nothing is moved
            to host memory.
        flops: FLOPs of the step.
        seconds: seconds of the step.
        choice: the settings that run this step.
    """

    batch: Batch
    packed: bool
    tokens: int
    fits: bool
    method: str
    chunk_size: int
    peak: Peak
    resident: float
    flops: float
    seconds: float
    choice: Choice


def predict_padded_and_packed(
    profile: Profile,
    batch: Batch,
    memory: Memory,
    setting: Setting,
    rates: Rates = DEVICES[DEFAULT_DEVICE],
) -> tuple[BatchStep, BatchStep]:
    """Return the fastest step of a batch with padded rows, and the fastest step of the batch as one
    packed row.

    The steps are compared over all methods (ways to run a step) and chunk sizes. If no step fits in
    memory, the step with the lowest peak is returned.

    Args:
        profile: the model's memory and FLOPs for one row (batch_size 1), counted on tensors without
            data.
        batch: the batch.
        memory: limits of the GPU and the host.
        setting: the training setting, such as optimizer and number of GPUs.
        rates: the device's speeds (FLOP/s, bytes/s).

    Raises:
        ConfigError: the profile has several rows, or sequences are sharded over ranks.
    """
    if profile.batch_size != 1 or setting.ranks != 1:
        raise ConfigError(
            f"batch_size is {profile.batch_size}, and {setting.ranks} ranks share a sequence; a "
            "batch of rows is planned from one row on one rank. Leave both at 1."
        )
    methods = [method for method in profile.methods if method.chunked]
    plain = min(methods, key=lambda method: (method.offload != "none", len(method.saves)))
    setting = allow_host_weights(profile, setting)
    resident = dataclasses.replace(setting, on_host=None)
    ways = []
    for packed in (False, True):
        rows = 1 if packed else len(batch.lengths)
        tokens = batch.tokens(packed)
        candidates = []
        for method in methods:
            for size in dict.fromkeys(min(size, tokens // rows) for size in chunk_sizes(rows)):
                at, part_setting = place_weights(
                    profile, method, tokens, rows * size, memory, setting
                )
                parts = work(method, batch, packed, size)
                flops = sum(part.products + part.forward + part.backward for part in parts.values())
                spent = seconds_of(add_copies(parts, part_setting.on_host), rates)
                resident_peak = peak(profile, plain, tokens, rows * size, resident).total
                free_bytes = None
                if method.prefix_on_host:
                    free_bytes = max(1, int(memory.usable - at.total))
                how = (method.name, method.saves, method.offload, size, tokens // rows)
                choice = Choice(*how, at, flops, spent, free_bytes, on_host=part_setting.on_host)
                candidates.append(
                    BatchStep(
                        batch,
                        packed,
                        tokens,
                        fits(at, memory),
                        method.name,
                        size,
                        at,
                        resident_peak,
                        flops,
                        spent.total,
                        choice,
                    )
                )
        fitting = [way for way in candidates if way.fits]
        fastest = min((way.seconds for way in fitting), default=0.0)
        nearly_fastest = [way for way in fitting if way.seconds <= EQUAL_SECONDS_FACTOR * fastest]
        best = min(nearly_fastest, key=lambda way: (way.peak.host, -way.chunk_size), default=None)
        ways.append(best or min(candidates, key=lambda way: way.peak.total))
    return ways[0], ways[1]


def work(method: Method, batch: Batch, packed: bool, chunk_size: int) -> dict[str, Work]:
    """Return the FLOPs, bytes and dispatches of a batch's step, as a dict by kind of phase:
    "forward" of all layers, "backward", "head" and so on.

    Args:
        method: the way to run the step, with its memory and FLOPs, counted on tensors without data.
        batch: the batch.
        packed: True for the batch as one packed row; False for padded rows.
        chunk_size: positions of a chunk in each row.
    """
    rows = 1 if packed else len(batch.lengths)
    tokens = batch.tokens(packed)
    reach = batch.reach(packed)
    length = tokens / rows
    costs = {}
    for part in method.work:
        step = features(length, chunk_size, k_block=part.k_block)
        chunk = rows * chunk_size
        blocks = step.blocks * reach / length
        if part.name.startswith(HEAD_PREFIX):
            counted = batch.scored
        else:
            counted = tokens
        recomputed = rows * reach * step.chunks
        window = tokens * chunk_size
        step = step._replace(
            tokens=counted, chunk=chunk, tokens_chunks=recomputed, tokens_chunk=window
        )
        step = step._replace(square=tokens * reach, blocks=blocks, queries_blocks=chunk * blocks)
        costs[part.name] = part.at(step)
    return costs


def batches_table(plan: Plan, ways_of_batches: Sequence[tuple[BatchStep, BatchStep]]) -> str:
    """Return a table that compares, for each batch, a step of padded rows with a step of one packed
    row. Below the table are the settings of the last batch's faster step, as code to paste.

    Args:
        plan: the model's plan, for the headline and the training setting.
        ways_of_batches: a pair for each batch: the step of padded rows, and the step of one packed
            row. The batches differ in row length.
    """
    rows: list[tuple[str, ...]] = [
        ("rows of", "tokens", "GiB", "without saves", "PFLOP", "seconds", "chunk")
    ]
    methods = ["by"]
    for plain, packed in ways_of_batches:
        tokens_behind_prompt = plain.batch.row - plain.batch.prompt
        for label, way in (
            (f"{tokens_behind_prompt:,}: as given", plain),
            ("rows='packed'", packed),
        ):
            memory = (f"{size / GIB:.1f}" for size in (way.peak.total, way.resident))
            spent = duration(way.seconds).removesuffix(" s")
            rows.append(
                (
                    label,
                    f"{way.tokens:,}",
                    *memory,
                    f"{way.flops / 1e15:.2f}",
                    spent,
                    f"{way.chunk_size:,}",
                )
            )
            methods.append(f"{way.method}{'' if way.fits else ', does not fit'}")
        ratios = []
        for name in ("tokens", "resident", "flops", "seconds"):
            ratios.append(f"{getattr(plain, name) / getattr(packed, name):.2f}")
        rows.append(("ratio", ratios[0], "", *ratios[1:], ""))
        methods.append("")
    table = []
    for line, by in zip(columns(rows), methods, strict=True):
        table.append(f"{line}  {by}".rstrip())
    lines = [headline(plan.profile, plan.setting), str(ways_of_batches[0][0].batch), "", *table]
    lines.append("without saves: GiB with nothing saved and nothing in host memory")
    return "\n".join([*lines, *_code_lines(plan, ways_of_batches[-1])])


def _code_lines(plan: Plan, ways: tuple[BatchStep, BatchStep]) -> list[str]:
    """Return lines of text with the settings of the batch's faster step, to paste as Python code or
    into a launcher's command or file. [] if neither step fits into memory.

    Args:
        plan: the model's plan, which has the training setting.
        ways: the batch's step of padded rows, and its step of one packed row.
    """
    fitting = [way for way in ways if way.fits]
    if not fitting:
        return []
    way = min(fitting, key=lambda way: way.seconds)
    fields = fields_of(way.choice)
    if way.packed:
        fields["rows"] = "packed"
    tokens_behind_prompt = way.batch.row - way.batch.prompt
    of = "completions" if way.batch.prompt else "rows"
    lines = ["", f"For {of} of {tokens_behind_prompt:,} tokens: {code_of_fields(fields)}"]
    for door, text in launcher_settings_of(
        fields, plan.setting, way.choice.on_host is not None
    ).items():
        lines.append(f"  {door:<10}{text}")
    return lines
