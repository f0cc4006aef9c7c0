"""Show the exactness, memory and time of several methods on one model as a table."""

from __future__ import annotations

import dataclasses

from streambp.verify.verdict import ERROR_FLOOR, Verification

MIB = 2**20
NAME_COLUMNS = 30  # columns of a method's name


@dataclasses.dataclass(frozen=True)
class MethodResult:
    """Exactness and cost of a way to train (a method): under streambp or with "checkpointing", for
    example.

    Attributes:
        name: name of the method in the table.
        exact: True if the method's gradients equal the unpatched model's, up to rounding.
        problems: texts about evidence against exactness; empty if exact.
        error: relative error of the gradient of all parameters together, compared with the
            unpatched model's in a wider dtype.
        peak: peak bytes of forward and backward beyond the weights, gradients included.
        seconds: seconds of forward and backward, of the fastest of several steps.
    """

    name: str
    exact: bool
    problems: tuple[str, ...]
    error: float
    peak: int
    seconds: float

    def __str__(self) -> str:
        """Return one line of text: the method's name, verdict and error."""
        return f"{self.name}: {self.verdict}, error {self.error:.1e}"

    @property
    def verdict(self) -> str:
        """Return "exact" if the method's gradients are those of the unpatched model, otherwise "NOT
        EXACT"."""
        return "exact" if self.exact else "NOT EXACT"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Result of `compare_methods`; `str()` is a report.

    Attributes:
        verification: the verdict on the gradients under streambp.
        methods: results of streambp, then of each other method (way to train); empty if no other
            method was requested.
    """

    verification: Verification
    methods: tuple[MethodResult, ...]

    def table(self, top: int = 20) -> str:
        """Return the report as text: the verdict on streambp, the errors of parameters, and one
        line for each method (way to train).

        Args:
            top: number of parameters in the report, those with the largest errors; 0: all.
        """
        verdict = self.verification.table(top)
        if not self.methods:
            return verdict
        lines = [
            verdict,
            "",
            f"{'method':<{NAME_COLUMNS}}  {'gradient':>9}  {'error':>9}  {'x noise':>7}  "
            f"{'peak MiB':>9}  {'seconds':>8}",
        ]
        noise = max(self.verification.whole_unpatched, ERROR_FLOOR)
        for method in self.methods:
            lines.append(
                f"{method.name:<{NAME_COLUMNS}}  {method.verdict:>9}  {method.error:>9.2e}  "
                f"{method.error / noise:>7.2f}  {method.peak / MIB:>9.1f}  {method.seconds:>8.3f}"
            )
        for method in self.methods[1:]:
            for problem in method.problems:
                lines.append(f"{method.name}: {problem}")
        lines.append(
            "peak: of forward and backward, with gradients and without weights; seconds: of "
            "the faster of two steps, after a first one"
        )
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()
