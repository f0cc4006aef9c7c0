"""Whether training steps at another commit gave the same bits: losses, gradients and what
`describe` says, case by case.

    mkdir /tmp/before && git archive 58ea65a | tar -x -C /tmp/before
    OMP_NUM_THREADS=1 python -m scripts.compare_commits --against /tmp/before

Two processes of scripts/compare_served.py, one for each tree (it comes first in PYTHONPATH), build
the same tiny models and batches with this tree's tests/zoo.py, patch them and run two steps: the
first, in which layers are tried, and a warm one. Cases are all families, modes, `saves` and
`offload` in float64, with transformers' float32 casts lifted, and a few in bfloat16. Printed for
each case that differs is how far the tensors are apart, how far those of each tree are from the
unpatched model's (in float64), and the lines of `describe` that are not the same. KNOWN lists the
differences that are meant to be, each with its reason; the exit status is 1 if there are others.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scripts.compare_served import FAMILIES, RECURRENT_FAMILIES, ROOT, Case

SERVED_SCRIPT = ROOT / "scripts" / "compare_served.py"
MODES = ("plain", "padded", "packed")
SAVES = ("none", "attn_out", "kv")
OFFLOAD = ("none", "cpu")
HALF_PRECISION_CASES = (
    ("plain", "none", "none"),
    ("packed", "attn_out", "cpu"),
)  # what is run in bfloat16 too


@dataclasses.dataclass(frozen=True)
class KnownDifference:
    """A difference that is meant to be.

    Args:
        reason: why.
        families, modes, dtypes: globs of the cases.
        lines: what the lines of `describe` match that come or go; "": none may.
        within: the largest relative difference of a tensor.
        same_with: settings of this tree's StreamConfig under which its tensors must be those of the
            other tree.
    """

    reason: str
    families: tuple[str, ...] = ("*",)
    modes: tuple[str, ...] = ("*",)
    dtypes: tuple[str, ...] = ("*",)
    lines: str = ""
    within: float = 0.0
    same_with: dict[str, Any] | None = None

    def covers(self, case: Case) -> bool:
        pairs = ((case.family, self.families), (case.mode, self.modes), (case.dtype, self.dtypes))
        return all(any(fnmatch(value, glob) for glob in globs) for value, globs in pairs)


KNOWN_DIFFERENCES = (
    KnownDifference(
        "describe names the kernels that attention took", lines=r"^[-+]attention +auto"
    ),
    KnownDifference(
        "describe begins with the last step, and tells sizes in the unit that fits and the size "
        "of a chunk before its rule",
        lines=r"^\+last step: |^[-+](chunk_size|saves|offload) |^\+ {12}(\S+|the graph) of \d+ layer|^\+ {12}auto:",
    ),
    KnownDifference(
        "describe says where attention takes a row for several documents",
        modes=("packed",),
        lines=r"^[-+]note +position_ids (restart|do not grow by one): attention ",
    ),
    KnownDifference(
        "describe says how the last call's rows were computed, or why as given",
        lines=r"^\+note +rows: ",
    ),
    KnownDifference(
        "describe says that a chunk is longer because states are handed on",
        families=RECURRENT_FAMILIES,
        lines=r"^-.*has no end sooner|^\+.*its states are handed on from ",
    ),
    KnownDifference(
        "describe names towers that are left as they are, and the setting that streams them",
        families=("llava",),
        lines=r"^\+note +left as it is: CLIPVisionModel: ",
    ),
    KnownDifference(
        "padded rows are computed without their padding; with rows='as_given' they are not",
        modes=("padded",),
        same_with={"rows": "as_given"},
    ),
    KnownDifference(
        "recurrences and convolutions start anew with each document of packed rows; with "
        "documents='as_given' they go on",
        families=RECURRENT_FAMILIES,
        modes=("packed",),
        lines=r"^\+.+ documents of packed rows, told by position_ids: |^-(layers)? +streams: ",
        same_with={"documents": "as_given"},
    ),
)


class Tree:
    """A tree, and the process that runs it."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        command = [sys.executable, str(SERVED_SCRIPT)]
        environment = {
            **os.environ,
            "PYTHONPATH": str(self.root),
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_VERBOSITY": "error",
        }
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the process
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )
        served = self._reply("import streambp")
        if served != str(self.root):
            raise SystemExit(
                f"{self.root} was to be compared, but the streambp that its process imports is in "
                f"{served}."
            )

    def _reply(self, request: object) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            status = self.process.wait()
            self.errors.seek(0)
            output = self.errors.read()[-2000:]
            raise SystemExit(
                f"The process of {self.root} ended with status {status} at: {request}. It "
                f"printed:\n{output}"
            )
        return json.loads(line)

    def start(
        self, case: Case, settings: dict[str, Any] | None, file: str = ""
    ) -> Callable[[], dict[str, Any]]:
        """Asks; what is returned waits for the reply."""
        assert self.process.stdin is not None
        request = {"case": dataclasses.asdict(case), "settings": settings, "file": file}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return lambda: self._reply(case)

    def tensors(self, case: Case, settings: dict[str, Any] | None) -> dict[str, Tensor]:
        with tempfile.TemporaryDirectory() as folder:
            file = f"{folder}/tensors.pt"
            self.start(case, settings, file)()
            return torch.load(file) if os.path.exists(file) else {}


@dataclasses.dataclass(frozen=True)
class Difference:
    """What is not the same in a case: the tensors or the error (in words), and lines of
    `describe`."""

    summary: str
    largest: float
    lines: tuple[str, ...]

    def known_reasons(self, case: Case, same_with: Callable[[dict[str, Any]], bool]) -> list[str]:
        """The reasons, if those of KNOWN explain all of it; else none."""
        covering = [entry for entry in KNOWN_DIFFERENCES if entry.covers(case)]
        reasons = []
        if self.summary:
            of_tensors = [k for k in covering if self._explains(k, same_with)]
            if not of_tensors:
                return []
            reasons.append(of_tensors[0].reason)
        for line in self.lines:
            of_line = [k for k in covering if k.lines and re.search(k.lines, line)]
            if not of_line:
                return []
            reasons.append(of_line[0].reason)
        return list(dict.fromkeys(reasons))

    def _explains(
        self, entry: KnownDifference, same_with: Callable[[dict[str, Any]], bool]
    ) -> bool:
        return self.largest <= entry.within or (
            entry.same_with is not None and same_with(entry.same_with)
        )


def relative(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference of two elements over the largest element."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return float("inf")
    max_difference = (ours.double() - theirs.double()).abs().max()
    return float(
        max_difference / theirs.double().abs().max().clamp(min=torch.finfo(torch.float64).tiny)
    )


def whole_error(tensors: dict[str, Tensor], oracle: dict[str, Tensor]) -> str:
    """Relative L2 error of all tensors taken together, or which of them are missing."""
    if tensors.keys() != oracle.keys():
        return f"{len(tensors.keys() ^ oracle.keys())} tensors missing or too many"
    squares = [
        ((tensors[n].double() - o.double()).square().sum(), o.double().square().sum())
        for n, o in oracle.items()
    ]
    return f"{float((sum(a for a, _ in squares) / sum(b for _, b in squares)) ** 0.5):.0e}"


def tensors_apart(case: Case, this_tree: Tree, base_tree: Tree) -> tuple[str, float]:
    """In words and as a number; ("", 0.0) if torch.equal finds them the same."""
    ours, theirs = this_tree.tensors(case, {}), base_tree.tensors(case, {})
    errors = {
        n: relative(ours[n], theirs[n])
        for n in theirs
        if n in ours and not torch.equal(ours[n], theirs[n])
    }
    extra, only_in_base = sorted(ours.keys() - theirs.keys()), sorted(theirs.keys() - ours.keys())
    parts = []
    if errors:
        name = max(errors, key=lambda n: errors[n])
        parts.append(
            f"{len(errors)} of {len(theirs)} tensors differ, by up to {errors[name]:.1e} ({name})"
        )
    parts += [
        f"only {where}: {', '.join(names)}"
        for where, names in (("here", extra), ("there", only_in_base))
        if names
    ]
    if parts and case.dtype == "float64":
        oracle = this_tree.tensors(dataclasses.replace(case, saves="none", offload="none"), None)
        parts.append(
            f"from the unpatched model: here {whole_error(ours, oracle)}, there "
            f"{whole_error(theirs, oracle)}"
        )
    return "; ".join(parts), float("inf") if extra or only_in_base else max(
        errors.values(), default=0.0
    )


def difference(case: Case, this_tree: Tree, base_tree: Tree) -> Difference | None:
    """None: it is the same in both trees.

    Raises:
        NothingComparedError: both trees raise the same error.
    """
    replies = [tree.start(case, {}) for tree in (this_tree, base_tree)]
    ours, theirs = (reply() for reply in replies)
    if ours["error"] and ours["error"] == theirs["error"]:
        raise NothingComparedError(ours["error"])
    summary, largest = "", 0.0
    if ours["error"] != theirs["error"]:
        summary, largest = (
            f"here {ours['error'] or 'no error'}; there {theirs['error'] or 'no error'}",
            float("inf"),
        )
    elif ours["tensors"] != theirs["tensors"]:
        summary, largest = tensors_apart(case, this_tree, base_tree)
    lines = (
        () if summary and largest == float("inf") else changed_lines(theirs["text"], ours["text"])
    )
    return Difference(summary, largest, lines) if summary or lines else None


class NothingComparedError(Exception):
    """A case that says nothing: both trees raise the same error."""


def changed_lines(old_text: str, new_text: str) -> tuple[str, ...]:
    diff = difflib.unified_diff(old_text.splitlines(), new_text.splitlines(), n=0, lineterm="")
    return tuple(line for line in itertools.islice(diff, 2, None) if not line.startswith("@@"))


def cases(arguments: argparse.Namespace) -> Iterator[Case]:
    for family in arguments.families:
        for mode, saves, offload in itertools.product(
            arguments.modes, arguments.saves, arguments.offload
        ):
            yield Case(family, mode, saves, offload)
            if (mode, saves, offload) in HALF_PRECISION_CASES:
                yield Case(family, mode, saves, offload, "bfloat16")


def compare(arguments: argparse.Namespace, say: Callable[[str], object] = print) -> int:
    """The number of cases whose difference nothing in KNOWN explains."""
    this_tree, base_tree = Tree(arguments.tree), Tree(arguments.against)
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for case in cases(arguments):
        counts["cases"] += 1
        try:
            case_difference = difference(case, this_tree, base_tree)
        except NothingComparedError as error:
            counts["not known"] += 1
            say(f"NOTHING COMPARED: {case}: both trees: {error}")
            continue
        if case_difference is None:
            continue
        base_tensors = base_tree.start(case, {})()["tensors"]  # it remembers
        case_reasons = case_difference.known_reasons(
            case,
            lambda s, case=case, base_tensors=base_tensors: (
                this_tree.start(case, s)()["tensors"] == base_tensors
            ),
        )
        counts["known" if case_reasons else "not known"] += 1
        reasons.update(case_reasons)
        lines = () if case_reasons else case_difference.lines
        say(
            "\n".join(
                [
                    f"{'known' if case_reasons else 'DIFFERS'}: {case}: "
                    f"{case_difference.summary or 'describe'}",
                    *lines,
                ]
            )
        )
    for tree in (this_tree, base_tree):
        tree.process.communicate()
    for reason, number in reasons.items():
        say(f"known in {number} cases: {reason}")
    equal = counts["cases"] - counts["known"] - counts["not known"]
    say(
        f"{counts['cases']} cases: {equal} equal, {counts['known']} known to differ, "
        f"{counts['not known']} not known"
    )
    return counts["not known"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", type=Path, help="the root of another commit's tree")
    parser.add_argument(
        "--tree", type=Path, default=ROOT, help="the root of the tree that is compared with it"
    )
    for name, values in (
        ("families", FAMILIES),
        ("modes", MODES),
        ("saves", SAVES),
        ("offload", OFFLOAD),
    ):
        parser.add_argument(f"--{name}", nargs="*", default=values, choices=values)
    arguments = parser.parse_args()
    if arguments.against is None:
        parser.error("name another tree with --against")
    sys.exit(compare(arguments) > 0)


if __name__ == "__main__":
    main()
