"""What a step of several rows costs, as rows and as one packed row: without padding, and with a shared prompt once.

Both are steps of so many tokens whose queries read so many keys, so the profile of one row
serves them. G rows are G times the longest one's tokens, and each query reads its own row. The packed row has P + sum(C_i)
tokens, P that all rows begin with and C_i of each row alone. Its pairs are those of the prompt with itself, of each rest
with the prompt, and of each rest with itself:

    P^2 / 2 + sum(P C_i + C_i^2 / 2)

What grows with the square of the length grows with these pairs, what is read again for each chunk with the keys that a
query reads on average. The head scores each row's own tokens in both. Chunks that end on branch ends, which layers with
states need, are not counted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from streambp.errors import ConfigError
from streambp.fields import check_fields
from streambp.planner.laws import features
from streambp.planner.plan import Memory, Plan, chunk_sizes, fits
from streambp.planner.profile import Method, Peak, Profile, Setting, peak
from streambp.planner.report import GIB, columns, duration, headline
from streambp.planner.seconds import seconds_of
from streambp.planner.work import Work
from streambp.rates import DEFAULT, DEVICES, Rates

COMPLETIONS = (1024, 4096, 16384)  # tokens, where nobody says how many
HEAD = "head"  # what the names of the head's phases start with
NEAR = 1.005  # steps are as fast if their seconds differ by less


@dataclasses.dataclass(frozen=True)
class Batch:
    """A micro-batch: the tokens of each row, of which the first `prompt` are the same in all rows.

    Raises:
        ConfigError: there is no row, or one of no token behind the prompt.
    """

    lengths: tuple[int, ...]
    prompt: int = 0

    def __post_init__(self) -> None:
        check_fields(self, prompt=0)
        if not self.lengths or min(self.lengths) <= self.prompt:
            raise ConfigError(
                f"lengths is {self.lengths} and prompt {self.prompt}; a batch has rows, each longer than the prompt."
            )

    @classmethod
    def of_data(cls, lengths: Sequence[int], rows: int) -> Batch:
        """`rows` of a data set, at equal steps through the sorted lengths of its rows; the longest is among them."""
        found = sorted(lengths)
        return cls(tuple(found[-(-len(found) * row // rows) - 1] for row in range(1, rows + 1)))

    @classmethod
    def of_mean(cls, longest: int, mean: int, rows: int) -> Batch:
        """One row of `longest` tokens, and others that are alike, `mean` tokens on average."""
        rest = (rows * mean - longest) // (rows - 1)
        return cls((*(rest,) * (rows - 1), longest))

    @property
    def row(self) -> int:
        """Tokens of the longest row, which all have with their padding."""
        return max(self.lengths)

    @property
    def scored(self) -> int:
        """Tokens that are scored: those behind the prompt."""
        return sum(self.lengths) - self.prompt * len(self.lengths)

    def tokens(self, packed: bool) -> int:
        """Tokens that layers compute."""
        return self.prompt + self.scored if packed else len(self.lengths) * self.row

    def reach(self, packed: bool) -> float:
        """T of a causal row whose queries read as many keys on average."""
        rests = sum(length**2 - self.prompt**2 for length in self.lengths)  # 2 P C + C^2
        return (self.prompt**2 + rests) / self.tokens(True) if packed else float(self.row)

    def __str__(self) -> str:
        rows, padding = len(self.lengths), 1 - sum(self.lengths) / self.tokens(False)
        if self.prompt:
            return f"A group of {rows} rows with a prompt of {self.prompt:,} tokens"
        return f"{rows} rows of {min(self.lengths):,} to {self.row:,} tokens, {padding:.0%} padding"


@dataclasses.dataclass(frozen=True)
class Way:
    """The fastest way to compute a batch that fits; of those that do not, the one that takes least.

    chunk_size: positions per row of the batch, which is one if it is packed. peak: in bytes; resident:
    what it would be with nothing saved and nothing on the host.
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


def both_ways(
    profile: Profile, batch: Batch, memory: Memory, setting: Setting, rates: Rates = DEVICES[DEFAULT]
) -> tuple[Way, Way]:
    """A batch as rows, and as one packed row.

    Args:
        profile: of one row (batch_size 1).

    Raises:
        ConfigError: the profile is of several rows, or sequences are split over ranks, where rows are computed.
    """
    if profile.batch_size != 1 or setting.ranks != 1:
        raise ConfigError(
            f"batch_size is {profile.batch_size}, and {setting.ranks} ranks share a sequence; a batch of rows is "
            "planned from one row on one rank. Leave both at 1."
        )
    methods = [method for method in profile.methods if method.chunked]
    plain = min(methods, key=lambda method: (method.offload != "none", len(method.saves)))
    ways = []
    for packed in (False, True):
        rows, tokens, found = 1 if packed else len(batch.lengths), batch.tokens(packed), []
        for method in methods:
            for size in dict.fromkeys(min(size, tokens // rows) for size in chunk_sizes(rows)):
                at = peak(profile, method, tokens, rows * size, setting)
                parts = work(method, batch, packed, size)
                flops = sum(part.products + part.forward + part.backward for part in parts.values())
                spent = seconds_of(parts, rates).total
                kept = peak(profile, plain, tokens, rows * size, setting).total
                found.append(Way(batch, packed, tokens, fits(at, memory), method.name, size, at, kept, flops, spent))
        fitting = [way for way in found if way.fits]
        fastest = min((way.seconds for way in fitting), default=0.0)
        near = [way for way in fitting if way.seconds <= NEAR * fastest]
        best = min(near, key=lambda way: (way.peak.host, -way.chunk_size), default=None)
        ways.append(best or min(found, key=lambda way: way.peak.total))
    return ways[0], ways[1]


def work(method: Method, batch: Batch, packed: bool, chunk_size: int) -> dict[str, Work]:
    """Of a step of a batch in chunks of `chunk_size` positions per row, by kind of phase."""
    rows, tokens, reach = 1 if packed else len(batch.lengths), batch.tokens(packed), batch.reach(packed)
    length = tokens / rows
    found = {}
    for part in method.work:
        step = features(length, chunk_size, k_block=part.k_block)
        chunk, blocks = rows * chunk_size, step.blocks * reach / length
        counted = batch.scored if part.name.startswith(HEAD) else tokens
        again, window = rows * reach * step.chunks, tokens * chunk_size
        step = step._replace(tokens=counted, chunk=chunk, tokens_chunks=again, tokens_chunk=window)
        step = step._replace(square=tokens * reach, blocks=blocks, queries_blocks=chunk * blocks)
        found[part.name] = part.at(step)
    return found


def batches_table(plan: Plan, found: Sequence[tuple[Way, Way]]) -> str:
    """Both ways side by side, for each batch. "no host" is GiB with nothing saved and nothing on the host.

    Args:
        plan: of the model. found: of batches that differ in the length of their rows.
    """
    rows: list[tuple[str, ...]] = [("rows of", "tokens", "GiB", "no host", "PFLOP", "seconds", "chunk")]
    methods = ["by"]
    for plain, packed in found:
        own = plain.batch.row - plain.batch.prompt
        for label, way in ((f"{own:,}: as given", plain), ("rows='packed'", packed)):
            memory = (f"{size / GIB:.1f}" for size in (way.peak.total, way.resident))
            spent = duration(way.seconds).removesuffix(" s")
            rows.append((label, f"{way.tokens:,}", *memory, f"{way.flops / 1e15:.2f}", spent, f"{way.chunk_size:,}"))
            methods.append(f"{way.method}{'' if way.fits else ', does not fit'}")
        ratios = [getattr(plain, name) / getattr(packed, name) for name in ("tokens", "resident", "flops", "seconds")]
        rows.append(("ratio", f"{ratios[0]:.2f}", "", *(f"{ratio:.2f}" for ratio in ratios[1:]), ""))
        methods.append("")
    table = [f"{line}  {by}".rstrip() for line, by in zip(columns(rows), methods, strict=True)]
    return "\n".join([headline(plan.profile, plan.setting), str(found[0][0].batch), "", *table])
