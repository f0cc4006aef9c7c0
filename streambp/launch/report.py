"""What each process of a launched program did, and the report that is made of it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from streambp.fields import check_fields
from streambp.reporting import reason, told

FOLDER = "STREAMBP_LAUNCH_REPORT"  # in the environment: where processes leave their accounts
DIGITS = 10  # fewer are a rank's number


@dataclasses.dataclass
class Model:
    """One model of a process: what `describe` says of it, or why it was left as it was."""

    kind: str
    description: str | None = None
    left: str | None = None


@dataclasses.dataclass
class Account:
    """What launch did in one process.

    peak: bytes of device memory, if the process used a GPU.
    """

    process: int
    rank: str | None
    program: str
    models: list[Model]
    peak: int | None = None

    def __post_init__(self) -> None:
        check_fields(self, process=0, peak=0)
        for model in self.models:
            check_fields(model)


def leave(account: Account) -> bool:
    """Write an account where the command that started the program will look; False if there is no such place."""
    folder = os.environ.get(FOLDER, "")
    file = Path(folder, f"{account.process}.json")
    try:
        if not folder:
            return False
        written = file.with_suffix(f".{os.getpid()}")
        written.write_text(json.dumps(dataclasses.asdict(account)), "utf-8")
        written.replace(file)  # at once: the program may be killed at any time
    except (OSError, ValueError):  # another machine's folder, or none that can be written to
        return False
    return True


def collect(folder: Path) -> tuple[list[Account], list[str]]:
    """The accounts in a folder, by rank, and why others could not be told. [Note: reports]"""
    found: list[Account] = []
    left = []
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"a")
    except Exception as error:
        left.append(f"what processes did could not be told: no account can be left in {folder} ({reason(error)})")
    for path in told(lambda: sorted(folder.glob("*.json")), otherwise=lambda why: []):
        try:
            fields = json.loads(path.read_text("utf-8"))
            fields["models"] = [Model(**model) for model in fields["models"]]
            found.append(Account(**fields))
        except Exception as error:
            left.append(f"what process {path.stem} did could not be told ({reason(error)})")
    return sorted(found, key=lambda account: (*_place(account.rank), account.process)), left


def _place(rank: str | None) -> tuple[bool, int, str]:
    """Ranks by their numbers, then those that a scheduler names otherwise ("worker-0")."""
    text = rank or ""
    number = int(text) if text.isdecimal() and len(text) < DIGITS else -1
    return bool(text) and number < 0, number, text


def streamed(accounts: Iterable[Account]) -> int:
    """How many models were patched."""
    return sum(model.description is not None for account in accounts for model in account.models)


def table(accounts: list[Account]) -> str:
    """The report; processes that did the same are told of together."""
    if not accounts:
        return "no process made a Trainer or trained a model that streambp launch could have patched"
    groups: dict[str, list[Account]] = {}
    for account in accounts:
        lines = [f"  program     {account.program}"]
        models = [(model.kind, model.left, model.description) for model in account.models]
        for model in dict.fromkeys(models):
            kind, left, description = model
            count = f"{models.count(model)} x " if models.count(model) > 1 else ""
            lines.append(f"  model       {count}{kind}, " + ("patched" if left is None else f"left as it was: {left}"))
            lines += ["  " + line for line in (description or "").splitlines()]
        groups.setdefault("\n".join(lines), []).append(account)
    told_of = []
    for text, group in groups.items():
        names = "; ".join(
            f"process {a.process}"
            + ("" if a.rank is None else f" (rank {a.rank})")
            + ("" if a.peak is None else f", peak memory {a.peak / 2**30:.2f} GiB")
            for a in group
        )
        told_of.append(f"{names}\n{text}")
    return "\n".join(told_of)


def say(text: str) -> None:
    """To people, beside what the program prints; to nobody, where they have closed it. [Note: reports]"""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        print("\n".join(f"streambp: {line}" for line in text.splitlines()), file=sys.stderr, flush=True)
