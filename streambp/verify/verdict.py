"""The verdict of `verify`, from distances between gradients.

Every parameter's gradient has two distances from the truth, the unpatched model's gradient in a
wider dtype:

    streamed    |streamed - truth| / |truth|, the error
    unpatched   |unpatched - truth| / |truth|, the noise: rounding in this dtype without streaming

|truth| counts as at least `NEGLIGIBLE_NORM_FRACTION` times the norm of the full gradient, because
some gradients are zero except for rounding.

An exact streamed gradient differs from the unpatched one by roundings in another order. The error
is then a second random draw from the distribution of the noise. The verdict tests these conditions:

- The same parameters get a gradient, and every number is finite.
- The full gradient's error is at most `WHOLE_ERROR_FACTOR` times its noise. Two correct runs of a
  small model often differ by more than a few percent, because all parameters share a rounding near
  the loss. Two layers of width 32 give ratios of 0.6 to 1.5, in every dtype, so one draw allows no
  tighter bound. In half precision a ratio above `NOTABLE_RATIO` gets a note. If several seeds agree
  on such a ratio, streaming loses precision, but no term is missing.
- Each parameter's error is at most `PARAMETER_ERROR_FACTOR` times the largest of three noises: its
  own, that of the same parameter in another layer, that of the full gradient. A norm's weight or a
  bias has few elements, so its own noise can be small by chance. For n elements, the logarithm of
  the ratio of two norms has a spread of about 1 / sqrt(n - 1). Under 8 elements (a router's bias)
  the factor is therefore exp(`CHANCE_QUANTILE` / sqrt(n - 1)). Chance exceeds this factor once in
  ten thousand.
- The loss error is at most `PARAMETER_ERROR_FACTOR` times the unpatched loss error, plus a small
  floor. The loss is a mean over hundreds of tokens. The unpatched loss may be right by chance, but
  both losses are far more precise than a gradient.

A lost or doubly counted term changes some parameter's gradient by percents. Noise is about 1e-6 in
float32, too small to hide such a change. In half precision noise is about 1e-2 and the verdict is
weaker; a note gives the size.
"""

from __future__ import annotations

import dataclasses
import math
import re

NEGLIGIBLE_NORM_FRACTION = 1e-6
WHOLE_ERROR_FACTOR, NOTABLE_RATIO, PARAMETER_ERROR_FACTOR = 2.0, 1.05, 4.0
CHANCE_QUANTILE = 3.72  # quantile of a normal distribution: one value in ten thousand is beyond
ERROR_FLOOR = 1e-10  # smaller differences mean nothing in any dtype
LOSS_FLOOR = 2.0**-20  # sixteen roundings of float32, the dtype of the loss


@dataclasses.dataclass(frozen=True)
class Distances:
    """Distances of one parameter's gradients, or of losses, from the truth: the result of the
    unpatched model in a wider dtype. The distance of two gradients is the norm of their difference.

    Attributes:
        truth: norm of the truth's gradient, or the truth's loss.
        streamed: distance of the run under streambp, or of another way to train, from the truth.
        unpatched: distance of the unpatched run from the truth.
        elements: number of elements of the gradient; not read for losses.
    """

    truth: float
    streamed: float
    unpatched: float
    elements: int = 1_000_000


@dataclasses.dataclass(frozen=True)
class ParameterError:
    """Distances of one parameter's gradients from the truth's gradient, divided by the norm of the
    truth's gradient. The truth is the unpatched model in a wider dtype. `rate` replaces a tiny norm
    by a small fraction of the full gradient's norm.

    Attributes:
        name: the parameter's name.
        streamed: relative distance of the run under streambp, or of another way to train.
        unpatched: relative distance of the unpatched run.
        bar: maximal allowed value of `streamed`.
    """

    name: str
    streamed: float
    unpatched: float
    bar: float

    @property
    def exact(self) -> bool:
        """True if the gradient under streambp is exact for this parameter: its relative distance
        from the truth is at most `bar`."""
        return self.streamed <= self.bar


@dataclasses.dataclass(frozen=True)
class Verification:
    """Result of `verify`, which compares gradients under streambp ("streamed") with the unpatched
    model's; `str()` is a table. Errors are relative to the truth, the unpatched model in a wider
    dtype.

    Attributes:
        exact: True if the streamed gradients equal the unpatched ones, up to rounding.
        problems: texts about evidence against exactness; empty if exact.
        parameters: errors of all parameters with a gradient, the largest streamed error first.
        whole_streamed: relative error of the streamed gradient of all parameters together.
        whole_unpatched: relative error of the unpatched gradient of all parameters together.
        loss_streamed: loss of the streamed run.
        loss_unpatched: loss of the unpatched run.
        loss_truth: loss of the truth.
        model: class name of the model.
        dtype: least precise dtype of the parameters.
        truth_dtype: dtype of the truth.
        seq_len: tokens of the row.
        chunk_size: tokens of a chunk.
        chunks: number of chunks.
        window: largest number of keys that a query reads in layers with sliding-window or chunked
            attention; None: no such layer.
        notes: texts about limits of the verdict, such as parts of the model that did not stream.
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
        """Return the report as text: a table of the errors of parameters, and the verdict.

        Args:
            top: number of parameters in the table, those with the largest errors; 0: all.
        """
        parameters = self.parameters[: top or None]
        width = max(map(len, ["whole gradient", *(p.name for p in parameters)]))
        lines = [
            f"{self.model}, {self.dtype}: {self.seq_len} tokens in {self.chunks} chunks of "
            f"{self.chunk_size}, the last of {self.seq_len % self.chunk_size}",
            "",
            f"{'relative error of the gradient of':<{width}}  {'streamed':>10}  {'unpatched':>10}",
        ]
        for p in parameters:
            bar = "" if p.exact else f"  > {p.bar:.1e}"
            lines.append(f"{p.name:<{width}}  {p.streamed:>10.2e}  {p.unpatched:>10.2e}{bar}")
        hidden = len(self.parameters) - len(parameters)
        lines += [f"and {hidden} more, none worse"] if hidden else []
        lines += [
            f"{'whole gradient':<{width}}  {self.whole_streamed:>10.2e}  "
            f"{self.whole_unpatched:>10.2e}",
            "",
            f"loss: {self.loss_streamed:.8g} streamed, {self.loss_unpatched:.8g} unpatched, "
            f"{self.loss_truth:.8g} in {self.truth_dtype}, the truth that errors refer to",
        ]
        lines += [f"note: {note}" for note in self.notes]
        lines += [f"NOT EXACT: {problem}" for problem in self.problems]
        if self.exact:
            ratio = f"{self.whole_streamed / max(self.whole_unpatched, ERROR_FLOOR):.2f}"
            lines.append(
                f"EXACT: to rounding in {self.dtype}; the whole gradient's error is {ratio} x the "
                "model's own"
            )
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()


def rate(distances: dict[str, Distances]) -> tuple[tuple[ParameterError, ...], ParameterError]:
    """Return the relative errors of each parameter's gradient, the largest `streamed` error first,
    and those of the full gradient (all parameters together). Each `ParameterError` includes `bar`,
    the largest error that rounding explains.

    Args:
        distances: dict from parameter names to the distances of the streamed gradient (under
            streambp) and of the unpatched gradient from the truth (the unpatched model in a wider
            dtype).
    """
    columns = zip(*((d.truth, d.streamed, d.unpatched) for d in distances.values()), strict=True)
    norm, streamed, unpatched = (math.hypot(*column) for column in columns)
    norm = max(norm, 1e-300)
    of_full_gradient = ParameterError(
        "whole gradient",
        streamed / norm,
        unpatched / norm,
        WHOLE_ERROR_FACTOR * unpatched / norm + ERROR_FLOOR,
    )
    sizes = {name: max(d.truth, NEGLIGIBLE_NORM_FRACTION * norm) for name, d in distances.items()}
    noises: dict[str, float] = {}
    for name, d in distances.items():
        noises[_role(name)] = max(
            noises.get(_role(name), of_full_gradient.unpatched), d.unpatched / sizes[name]
        )
    rated = []
    for name, d in distances.items():
        rated.append(
            ParameterError(
                name,
                d.streamed / sizes[name],
                d.unpatched / sizes[name],
                max(
                    PARAMETER_ERROR_FACTOR,
                    math.exp(CHANCE_QUANTILE / math.sqrt(max(d.elements - 1, 1))),
                )
                * noises[_role(name)]
                + ERROR_FLOOR,
            )
        )
    return tuple(
        sorted(rated, key=lambda p: -math.inf if math.isnan(p.streamed) else -p.streamed)
    ), of_full_gradient


def _role(name: str) -> str:
    """Return a parameter's name with "*" in place of the layer index, such as
    "model.layers.*.mlp.up_proj.weight". `rate` compares a parameter's error under streambp with the
    unpatched model's errors of the same parameter in all layers."""
    return re.sub(r"\.\d+(?=\.)", ".*", name)


def find_problems(
    rated: tuple[ParameterError, ...],
    total: ParameterError,
    loss: Distances,
    expected: set[str],
    received: set[str],
    run: str = "streamed",
) -> tuple[str, ...]:
    """Return the reasons why a run's gradients are not exact, one text for each; () if they are
    exact. The run is a step under streambp or with another way to train.

    Args:
        rated: errors of every parameter, relative to the truth (the unpatched model in a wider
            dtype).
        total: the full gradient's errors.
        loss: distances of the run's and the unpatched model's loss from the truth's.
        expected: names of parameters with a gradient in the unpatched run.
        received: names of parameters with a gradient in the run.
        run: words for the run in messages: "streamed" or "by this method". Parameters that have no
            gradient in the run "get none streamed", for example.
    """
    problems = []
    for names, difference in (
        (expected - received, f"get none {run}"),
        (received - expected, f"get one only {run}"),
    ):
        if names:
            problems.append(
                f"{len(names)} parameters differ in having a gradient: {', '.join(sorted(names))} "
                f"{difference}"
            )
    if not total.exact:
        problems.append(
            f"the whole gradient's error {total.streamed:.2e} is more than {WHOLE_ERROR_FACTOR:g} "
            "x "
            f"the model's own rounding noise {total.unpatched:.2e}"
        )
    inexact = []
    for p in rated:
        if not p.exact:
            inexact.append(p)
    if inexact:
        worst = inexact[0]
        problems.append(
            f"{len(inexact)} of {len(rated)} parameters have errors that rounding does not "
            f"explain; {worst.name} has {worst.streamed:.2e}, at most {worst.bar:.1e} was expected"
        )
    allowed = PARAMETER_ERROR_FACTOR * loss.unpatched + abs(loss.truth) * max(
        total.unpatched / 4, LOSS_FLOOR
    )
    if not loss.streamed <= allowed:
        problems.append(
            f"the loss is off by {loss.streamed:.1e}; rounding explains at most {allowed:.1e}"
        )
    return tuple(problems)
