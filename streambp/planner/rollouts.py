"""What a step of one prompt's completions costs, as rows and with their prompt computed once (`rows`).

[Note: a group's work] Both are steps of so many tokens whose queries read so many keys, so the profile of one row serves
them. G rows are G times the tokens, and each reads its own P + C. The packed row has P + G C tokens, and its pairs are
those of the prompt with itself, of each completion with the prompt, and of each completion with itself:

    P^2 / 2 + G (P C + C^2 / 2)

What grows with the square of the length grows with these pairs, what is read again for each chunk with the keys that a
query reads on average. The head scores completions in both. Chunks that end on branch ends, which layers with states need,
are not counted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

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
class Rollouts:
    """`group` rows, each of the same prompt and a completion of its own; tokens of a row."""

    prompt: int
    completion: int
    group: int

    def __post_init__(self) -> None:
        check_fields(self, prompt=1, completion=1, group=1)

    @property
    def row(self) -> int:
        """Tokens of a row."""
        return self.prompt + self.completion

    @property
    def scored(self) -> int:
        """Tokens that are scored."""
        return self.group * self.completion

    def tokens(self, shared: bool) -> int:
        """Tokens that layers compute."""
        return self.prompt + self.scored if shared else self.group * self.row

    def reach(self, shared: bool) -> float:
        """T of a causal row whose queries read as many keys on average."""
        branch = 2 * self.prompt * self.completion + self.completion**2
        return (self.prompt**2 + self.group * branch) / self.tokens(True) if shared else float(self.row)


@dataclasses.dataclass(frozen=True)
class Way:
    """The fastest way to compute a group that fits; of those that do not, the one that takes least.

    chunk_size: positions per row of the batch, which is one packed row if the prompt is shared. peak: in bytes; resident:
    what it would be with nothing saved and nothing on the host.
    """

    rollouts: Rollouts
    shared: bool
    tokens: int
    fits: bool
    method: str
    chunk_size: int
    peak: Peak
    resident: float
    flops: float
    seconds: float


def both_ways(
    profile: Profile, rollouts: Rollouts, memory: Memory, setting: Setting, rates: Rates = DEVICES[DEFAULT]
) -> tuple[Way, Way]:
    """A group as rows, and with its prompt computed once.

    Args:
        profile: of one row (batch_size 1).

    Raises:
        ConfigError: the profile is of several rows, or sequences are split over ranks, where rows are computed.
    """
    if profile.batch_size != 1 or setting.ranks != 1:
        raise ConfigError(
            f"batch_size is {profile.batch_size}, and {setting.ranks} ranks share a sequence; a group of rows is "
            "planned from one row on one rank. Leave both at 1."
        )
    rows, shared = (_way(profile, rollouts, shared, memory, setting, rates) for shared in (False, True))
    return rows, shared


def _way(profile: Profile, rollouts: Rollouts, shared: bool, memory: Memory, setting: Setting, rates: Rates) -> Way:
    found = list(_ways(profile, rollouts, shared, memory, setting, rates))
    fitting = [way for way in found if way.fits]
    if not fitting:
        return min(found, key=lambda way: way.peak.total)
    fastest = min(way.seconds for way in fitting)
    near = [way for way in fitting if way.seconds <= NEAR * fastest]
    return min(near, key=lambda way: (way.peak.host, -way.chunk_size))


def _ways(
    profile: Profile, rollouts: Rollouts, shared: bool, memory: Memory, setting: Setting, rates: Rates
) -> Iterator[Way]:
    rows = 1 if shared else rollouts.group
    tokens = rollouts.tokens(shared)
    methods = [method for method in profile.methods if method.chunked]
    plain = min(methods, key=lambda method: (method.offload != "none", len(method.saves)))
    for method in methods:
        for size in dict.fromkeys(min(size, tokens // rows) for size in chunk_sizes(rows)):
            at = peak(profile, method, tokens, rows * size, setting)
            parts = work(method, rollouts, shared, size)
            flops = sum(part.products + part.forward + part.backward for part in parts.values())
            spent = seconds_of(parts, rates).total
            kept = peak(profile, plain, tokens, rows * size, setting).total
            yield Way(rollouts, shared, tokens, fits(at, memory), method.name, size, at, kept, flops, spent)


def work(method: Method, rollouts: Rollouts, shared: bool, chunk_size: int) -> dict[str, Work]:
    """Of a step of a group in chunks of `chunk_size` positions per row, by kind of phase. [Note: a group's work]"""
    rows, tokens, reach = 1 if shared else rollouts.group, rollouts.tokens(shared), rollouts.reach(shared)
    length = tokens / rows
    found = {}
    for part in method.work:
        _, _, _, chunks, _, _, _, blocks, _ = features(length, chunk_size, part.k_block)
        chunk, blocks = rows * chunk_size, blocks * reach / length
        counted = rollouts.scored if part.name.startswith(HEAD) else tokens
        again, window = rows * reach * chunks, tokens * chunk_size
        given = (1, counted, chunk, chunks, again, window, tokens * reach, blocks, chunk * blocks)
        found[part.name] = part.at(given)
    return found


def rollouts_table(plan: Plan, found: Sequence[tuple[Way, Way]]) -> str:
    """Both ways side by side, for each length of completions. "no host" is GiB with nothing saved and nothing on the host.

    Args:
        plan: of the model. found: of groups with one prompt.
    """
    asked = found[0][0].rollouts
    about = f"A group of {asked.group} rows with a prompt of {asked.prompt:,} tokens"
    rows: list[tuple[str, ...]] = [("completions", "tokens", "GiB", "no host", "PFLOP", "seconds", "chunk")]
    methods = ["by"]
    for plain, shared in found:
        rows += [_cells(f"{plain.rollouts.completion:,}: rows", plain), _cells("rows='packed'", shared)]
        methods += [f"{way.method}{'' if way.fits else ', does not fit'}" for way in (plain, shared)]
        ratios = [getattr(plain, name) / getattr(shared, name) for name in ("tokens", "resident", "flops", "seconds")]
        rows.append(("ratio", f"{ratios[0]:.2f}", "", *(f"{ratio:.2f}" for ratio in ratios[1:]), ""))
        methods.append("")
    table = [f"{line}  {by}".rstrip() for line, by in zip(columns(rows), methods, strict=True)]
    return "\n".join([headline(plan.profile, plan.setting), about, "", *table])


def _cells(name: str, way: Way) -> tuple[str, ...]:
    memory = (f"{size / GIB:.1f}" for size in (way.peak.total, way.resident))
    spent = duration(way.seconds).removesuffix(" s")
    return name, f"{way.tokens:,}", *memory, f"{way.flops / 1e15:.2f}", spent, f"{way.chunk_size:,}"
