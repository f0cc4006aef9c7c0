"""From distances between gradients to a verdict: what `verify` reports.

Every parameter's gradient has two distances from the truth, which is the unpatched model's in a wider dtype:

    streamed    |streamed - truth| / |truth|, the error
    unpatched   |unpatched - truth| / |truth|, the noise: what this dtype does to the model anyway

|truth| counts as at least `NEGLIGIBLE` of the whole gradient's norm: some gradients are zero but for rounding.

[Note: verdict] A streamed gradient that is exact is the unpatched one but for roundings, made in another order. So error is
to noise as one draw of a noise to another, and the verdict says whether it looks like that:

- The same parameters get a gradient, and every number is finite.
- The whole gradient's error is at most `WHOLE` times its noise. Two correct runs of a small model easily differ by more
  than a few percent, because a rounding near the loss is shared by all parameters: two layers of width 32 give 0.6 to 1.5,
  in every dtype. One draw cannot bear a tighter bar. In half precision a ratio above `NOTABLE` gets a note: if several
  seeds agree on it, streaming loses precision, though no term is missing.
- Each parameter's error is at most `EACH` times the largest of three noises: its own, that of the same parameter in another
  layer, the whole gradient's. A norm's weight or a bias has few elements: its own noise may be small by luck. Of n elements
  the ratio of two norms has a logarithm with a spread of about 1 / sqrt(n - 1), so under 8 elements (a router's bias) the
  factor is exp(`SPREADS` / sqrt(n - 1)), which chance passes once in ten thousand.
- The loss is off by at most `EACH` times what the unpatched loss is, or by a little. It is a mean over hundreds of tokens:
  the unpatched one may be right by luck, but both are far better than a gradient.

A term lost or counted twice changes some parameter by percents. Noise is about 1e-6 in float32, so nothing of that kind can
hide there. In half precision noise is about 1e-2 and the verdict says less; a note says how much.
"""

from __future__ import annotations

import dataclasses
import math
import re

NEGLIGIBLE = 1e-6
WHOLE, NOTABLE, EACH = 2.0, 1.05, 4.0
SPREADS = 3.72  # of a normal distribution: one in ten thousand is beyond
FLOOR = 1e-10  # differences that say nothing in any dtype
LOSS_FLOOR = 2.0**-20  # sixteen roundings of float32, in which the loss is computed


@dataclasses.dataclass(frozen=True)
class Distances:
    """Of one parameter's gradients the truth's norm, and how far the other two lie from it; or of losses. elements: of the
    gradient."""

    truth: float
    streamed: float
    unpatched: float
    elements: int = 1_000_000


@dataclasses.dataclass(frozen=True)
class ParameterError:
    """One parameter's relative distances from the truth, and how large `streamed` may be. [Note: verdict]"""

    name: str
    streamed: float
    unpatched: float
    bar: float

    @property
    def exact(self) -> bool:
        """Whether the streamed gradient's relative distance is within the bar."""
        return self.streamed <= self.bar


@dataclasses.dataclass(frozen=True)
class Verification:
    """What `verify` found; `str()` is a table.

    parameters: all that get a gradient, worst error first. problems: what speaks against exactness; none if exact.
    """

    exact: bool
    problems: tuple[str, ...]
    parameters: tuple[ParameterError, ...]
    whole_streamed: float
    whole_unpatched: float
    loss_streamed: float
    loss_unpatched: float
    loss_truth: float
    model: str
    dtype: str
    truth_dtype: str
    seq_len: int
    chunk_size: int
    chunks: int
    window: int | None
    notes: tuple[str, ...] = ()

    def table(self, top: int = 20) -> str:
        """The report with the `top` worst parameters; 0 means all."""
        shown = self.parameters[: top or None]
        width = max(len(name) for name in ["whole gradient", *(p.name for p in shown)])
        lines = [
            f"{self.model}, {self.dtype}: {self.seq_len} tokens in {self.chunks} chunks of {self.chunk_size}, "
            f"the last of {self.seq_len % self.chunk_size}",
            "",
            f"{'relative error of the gradient of':<{width}}  {'streamed':>10}  {'unpatched':>10}",
        ]
        lines += [
            f"{p.name:<{width}}  {p.streamed:>10.2e}  {p.unpatched:>10.2e}" + ("" if p.exact else f"  > {p.bar:.1e}")
            for p in shown
        ]
        hidden = len(self.parameters) - len(shown)
        lines += [f"and {hidden} more, none worse"] if hidden else []
        lines += [
            f"{'whole gradient':<{width}}  {self.whole_streamed:>10.2e}  {self.whole_unpatched:>10.2e}",
            "",
            f"loss: {self.loss_streamed:.8g} streamed, {self.loss_unpatched:.8g} unpatched, {self.loss_truth:.8g} in "
            f"{self.truth_dtype}, the truth that errors refer to",
        ]
        lines += [f"note: {note}" for note in self.notes]
        lines += [f"NOT EXACT: {problem}" for problem in self.problems]
        if self.exact:
            ratio = f"{self.whole_streamed / max(self.whole_unpatched, FLOOR):.2f}"
            lines.append(f"EXACT: to rounding in {self.dtype}; the whole gradient's error is {ratio} x the model's own")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()


def rate(distances: dict[str, Distances]) -> tuple[tuple[ParameterError, ...], ParameterError]:
    """Every parameter's errors and bar, worst error first; then the whole gradient's."""
    columns = zip(*((d.truth, d.streamed, d.unpatched) for d in distances.values()), strict=True)
    norm, streamed, unpatched = (math.hypot(*column) for column in columns)
    norm = max(norm, 1e-300)
    whole = ParameterError("whole gradient", streamed / norm, unpatched / norm, WHOLE * unpatched / norm + FLOOR)
    sizes = {name: max(d.truth, NEGLIGIBLE * norm) for name, d in distances.items()}
    noises: dict[str, float] = {}
    for name, d in distances.items():
        noises[_role(name)] = max(noises.get(_role(name), whole.unpatched), d.unpatched / sizes[name])
    rated = [
        ParameterError(
            name,
            d.streamed / sizes[name],
            d.unpatched / sizes[name],
            max(EACH, math.exp(SPREADS / math.sqrt(max(d.elements - 1, 1)))) * noises[_role(name)] + FLOOR,
        )
        for name, d in distances.items()
    ]
    return tuple(sorted(rated, key=lambda p: -math.inf if math.isnan(p.streamed) else -p.streamed)), whole


def _role(name: str) -> str:
    """The same for one parameter in every layer."""
    return re.sub(r"\.\d+(?=\.)", ".*", name)


def find_problems(
    rated: tuple[ParameterError, ...], whole: ParameterError, loss: Distances, expected: set[str], found: set[str]
) -> tuple[str, ...]:
    """What keeps the streamed gradient from being exact. [Note: verdict]

    Args:
        expected, found: the parameters that got a gradient in the unpatched and in the streamed run.
    """
    problems = []
    for names, what in ((expected - found, "get none streamed"), (found - expected, "get one only streamed")):
        if names:
            problems.append(f"{len(names)} parameters differ in having a gradient: {', '.join(sorted(names))} {what}")
    if not whole.exact:
        problems.append(
            f"the whole gradient's error {whole.streamed:.2e} is more than {WHOLE:g} x the model's own rounding noise "
            f"{whole.unpatched:.2e}"
        )
    beyond = [p for p in rated if not p.exact]
    if beyond:
        worst = beyond[0]
        problems.append(
            f"{len(beyond)} of {len(rated)} parameters have errors that rounding does not explain; {worst.name} has "
            f"{worst.streamed:.2e}, at most {worst.bar:.1e} was expected"
        )
    allowed = EACH * loss.unpatched + abs(loss.truth) * max(whole.unpatched / 4, LOSS_FLOOR)
    if not loss.streamed <= allowed:
        problems.append(f"the loss is off by {loss.streamed:.1e}; rounding explains at most {allowed:.1e}")
    return tuple(problems)
