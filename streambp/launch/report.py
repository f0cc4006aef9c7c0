"""Record the results of each process of a launched program, and combine them in one report."""

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
from streambp.reporting import reason, report_safely

FOLDER_VARIABLE = "STREAMBP_LAUNCH_REPORT"  # environment variable with the folder for the records
MAX_RANK_DIGITS = 10  # a longer number is no rank


@dataclasses.dataclass
class ModelRecord:
    """Entry for one model in the report of `streambp launch`.

    Attributes:
        kind: the model's class name.
        description: text of `streambp.describe` about the patched model; None: not patched.
        left: the reason why the model was left unpatched; None: patched.
    """

    kind: str
    description: str | None = None
    left: str | None = None


@dataclasses.dataclass
class ProcessRecord:
    """Record of one process and its models, for the report of `streambp launch`.

    Attributes:
        process: process id.
        rank: value of the environment variable RANK; None: it is not set.
        program: path of the program that the process runs (`sys.argv[0]`).
        models: a record of each model that was patched, or could not be patched.
        peak: bytes of peak device memory; None: no device was used.
    """

    process: int
    rank: str | None
    program: str
    models: list[ModelRecord]
    peak: int | None = None

    def __post_init__(self) -> None:
        check_fields(self, process=0, peak=0)
        for model in self.models:
            check_fields(model)


def write_record(account: ProcessRecord) -> bool:
    """Write the record of a process and its models as a JSON file, named after the process id. The
    command `streambp launch` reads these files from the folder, which an environment variable
    names. Return True if the file was written, and False if no folder is set or writing failed."""
    folder = os.environ.get(FOLDER_VARIABLE, "")
    file = Path(folder, f"{account.process}.json")
    try:
        if not folder:
            return False
        temporary = file.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(dataclasses.asdict(account)), "utf-8")
        temporary.replace(file)  # atomic, because the program may be killed at any time
    except (OSError, ValueError):  # folder of another machine, or not writable
        return False
    return True


def collect(folder: Path) -> tuple[list[ProcessRecord], list[str]]:
    """Read the records that the processes under `streambp launch` have written into a folder.
    Return two lists: the records, sorted by rank, and messages about a folder or records that
    cannot be written or read.

    Args:
        folder: the folder in which `write_record` has written the records.
    """
    accounts: list[ProcessRecord] = []
    complaints = []
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"a")
    except Exception as error:
        complaints.append(
            f"what processes did could not be told: no account can be left in {folder} "
            f"({reason(error)})"
        )
    for path in report_safely(lambda: sorted(folder.glob("*.json")), otherwise=lambda why: []):
        try:
            fields = json.loads(path.read_text("utf-8"))
            fields["models"] = [ModelRecord(**model) for model in fields["models"]]
            accounts.append(ProcessRecord(**fields))
        except Exception as error:
            complaints.append(f"what process {path.stem} did could not be told ({reason(error)})")
    return sorted(
        accounts, key=lambda account: (*_place(account.rank), account.process)
    ), complaints


def _place(rank: str | None) -> tuple[bool, int, str]:
    """Return a key to sort processes by their environment variable RANK: processes without a rank
    first, then numbers, then other names ("worker-0")."""
    text = rank or ""
    if text.isdecimal() and len(text) < MAX_RANK_DIGITS:
        number = int(text)
    else:
        number = -1
    return bool(text) and number < 0, number, text


def count_patched_models(accounts: Iterable[ProcessRecord]) -> int:
    """Return the number of patched models over all processes."""
    return sum(model.description is not None for account in accounts for model in account.models)


def table(accounts: list[ProcessRecord]) -> str:
    """Return the report of `streambp launch` as text: the models of each process, and how each was
    patched or why not. Processes with the same models and results are listed together."""
    if not accounts:
        return (
            "no process made a Trainer or trained a model that streambp launch could have patched"
        )
    groups: dict[str, list[ProcessRecord]] = {}
    for account in accounts:
        lines = [f"  program     {account.program}"]
        models = [(model.kind, model.left, model.description) for model in account.models]
        for model in dict.fromkeys(models):
            kind, reason_left, description = model
            if models.count(model) > 1:
                count = f"{models.count(model)} x "
            else:
                count = ""
            lines.append(
                f"  model       {count}{kind}, "
                + ("patched" if reason_left is None else f"left as it was: {reason_left}")
            )
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
    """Print text to stderr, with "streambp: " before each line. A closed stderr is ignored."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        print(
            "\n".join(f"streambp: {line}" for line in text.splitlines()),
            file=sys.stderr,
            flush=True,
        )
