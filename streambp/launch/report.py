"""What each process of a launched program did, and the report that is made of it."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path

FOLDER = "STREAMBP_LAUNCH_REPORT"  # in the environment: where processes leave their accounts


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
    except OSError:  # another machine's folder
        return False
    return True


def collect(folder: Path) -> list[Account]:
    """The accounts in a folder, by rank."""
    found = []
    for file in folder.glob("*.json"):
        fields = json.loads(file.read_text("utf-8"))
        fields["models"] = [Model(**model) for model in fields["models"]]
        found.append(Account(**fields))
    return sorted(found, key=lambda account: (int(account.rank or -1), account.process))


def streamed(accounts: Iterable[Account]) -> int:
    """How many models were patched."""
    return sum(model.description is not None for account in accounts for model in account.models)


def table(accounts: list[Account]) -> str:
    """The report; processes that did the same are told of together."""
    if not accounts:
        return "no process made a Trainer or trained a model that streambp launch could have patched"
    groups: dict[str, list[Account]] = {}
    for account in accounts:
        groups.setdefault("\n".join(_lines(account)), []).append(account)
    return "\n".join(f"{_named(group)}\n{text}" for text, group in groups.items())


def _named(group: list[Account]) -> str:
    return "; ".join(
        f"process {a.process}"
        + ("" if a.rank is None else f" (rank {a.rank})")
        + ("" if a.peak is None else f", peak memory {a.peak / 2**30:.2f} GiB")
        for a in group
    )


def _lines(account: Account) -> Iterable[str]:
    yield f"  program     {account.program}"
    models = [(model.kind, model.left, model.description) for model in account.models]
    for model in dict.fromkeys(models):
        kind, left, description = model
        count = f"{models.count(model)} x " if models.count(model) > 1 else ""
        yield f"  model       {count}{kind}, " + ("patched" if left is None else f"left as it was: {left}")
        yield from ("  " + line for line in (description or "").splitlines())


def say(text: str) -> None:
    """To people, beside what the program prints."""
    print("\n".join(f"streambp: {line}" for line in text.splitlines()), file=sys.stderr, flush=True)
