"""What the sentences "**Expect** ..." of pages promise, and how a run of the page's program shows
it.
"""

from __future__ import annotations

import atexit
import dataclasses
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from tests.docs.pages import ROOT
from tests.docs.stand_ins import SHORT

SENTENCE = re.compile(r"^\*\*Expect\*\*.*?(?=\n\n|\Z)", re.DOTALL | re.MULTILINE)
WORD = re.compile(r"\bExpect\b")
GATHERS_PREFIX = "gathers of a parameter in each step: "
STEP_LINE = re.compile(r"^step \d+: loss ([\d.]+)$", re.MULTILINE)
BASE_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What the programs of a page left: their output, lines of the logger, and files in a
    folder."""

    printed: str
    logged: str
    folder: Path


def sentence(page: str) -> str:
    """A page's sentence, in one line; empty if it has none."""
    match = SENTENCE.search((ROOT / page).read_text("utf-8"))
    return " ".join(match[0].split()) if match else ""


def codes(text: str) -> list[str]:
    """What stands in backticks."""
    return re.findall(r"`([^`]+)`", text)


def losses_fall(text: str, outcome: Outcome) -> None:
    """docs/how-to/embeddings.md and small-cards-mixtures.md: the loss of each step is below the one
    before, and what the sentence quotes is printed behind the last step."""
    assert "falling loss" in text
    losses = [float(loss) for loss in STEP_LINE.findall(outcome.printed)]
    assert len(losses) > 1
    assert losses == sorted(set(losses), reverse=True)
    last = outcome.printed[list(STEP_LINE.finditer(outcome.printed))[-1].end() :]
    assert codes(text)
    assert all(code in last for code in codes(text))


def weights_are_copied(text: str, outcome: Outcome) -> None:
    """docs/how-to/70b-24gb.md: bytes on the host, copies, and seconds of waiting."""
    for words in ("how many bytes live on the host", "copies were made", "GPU waited"):
        assert words in text
    match = re.search(
        r"[\d.]+ \w+ of weights of \d+ layers live on the host.* ([\d,]+) copies of a layer so "
        r"far, for which the device waited [\d.]+ s",
        outcome.printed,
    )
    assert match
    assert int(match[1].replace(",", "")) > 0


def fields_are_logged(text: str, outcome: Outcome) -> None:
    """docs/how-to/qlora-24gb.md: fields in each log, a line of the logger, the adapter alone."""
    assert "`stream_*` fields in every log" in text
    logs = [line for line in outcome.printed.splitlines() if "'loss'" in line]
    assert logs
    assert all("'stream_tokens'" in line and "'stream_chunk_size'" in line for line in logs)
    (line,) = [code for code in codes(text) if code.startswith("step 1: ")]
    tokens, chunks = re.fullmatch(r"step 1: ([\d,]+) tokens in (\d+) chunks", line).groups()
    assert re.search(r"step 1: [\d,]+ tokens.* in (?:one chunk|\d+ chunks)", outcome.logged)
    planned = re.search(r"chunk_size=(\d+)", (ROOT / "docs/how-to/qlora-24gb.md").read_text())
    assert int(tokens.replace(",", "")) == int(chunks) * int(planned[1])
    assert "weights of the adapter alone" in text.lower()
    file_names = {path.name for path in outcome.folder.glob("qlora/**/*") if path.is_file()}
    assert (outcome.folder / "qlora/adapter/adapter_model.safetensors").is_file()
    assert not file_names.intersection(BASE_WEIGHTS)


def positions_are_long(text: str, outcome: Outcome) -> None:
    """docs/how-to/extend-the-context.md: rows are single documents, not packed, and as long as the
    program allows."""
    page = (ROOT / "docs/how-to/extend-the-context.md").read_text("utf-8")
    (longest,) = re.findall(r"^ +max_length=(\d+),$", page, re.MULTILINE)
    assert f"`stream_tokens` of up to {int(longest):,} in every log" in text
    assert "packing=True" not in page
    logs = [line for line in outcome.printed.splitlines() if "'loss'" in line]
    assert logs
    assert all(re.search(rf"'stream_tokens': '?{SHORT}\b", line) for line in logs)


def gathered_twice(text: str, outcome: Outcome) -> None:
    """docs/how-to/zero3.md: `count_gathers` printed two for each step, whatever the chunks."""
    assert "two gathers of each parameter a step, whatever the number of chunks" in text
    lines = [line for line in outcome.printed.splitlines() if GATHERS_PREFIX in line]
    assert len(lines) == 2
    for line in lines:
        counts = json.loads(line.partition(GATHERS_PREFIX)[2])
        assert len(counts) > 1
        assert set(counts[1:]) == {2}  # in the first step ZeRO-3 learns the order


def both_stacks_are_described(text: str, outcome: Outcome) -> None:
    """docs/how-to/encoder-decoders.md: a loss in each log, and what the sentence quotes is printed
    behind the last of them."""
    assert "a loss for each step" in text
    logs = [line for line in outcome.printed.splitlines() if "'loss'" in line]
    assert len(logs) > 1
    last = outcome.printed[outcome.printed.index(logs[-1]) :]
    assert codes(text)
    assert all(code in last for code in codes(text))


CHECKS: Mapping[str, Callable[[str, Outcome], None]] = MappingProxyType(
    {
        "docs/how-to/embeddings.md": losses_fall,
        "docs/how-to/encoder-decoders.md": both_stacks_are_described,
        "docs/how-to/extend-the-context.md": positions_are_long,
        "docs/how-to/70b-24gb.md": weights_are_copied,
        "docs/how-to/qlora-24gb.md": fields_are_logged,
        "docs/how-to/small-cards-mixtures.md": losses_fall,
        "docs/how-to/zero3.md": gathered_twice,
    }
)
OWN_RUN = ("docs/how-to/zero3.md",)  # counted in processes of ranks, with two sizes of chunks


def count_gathers() -> None:
    """Count how often this process gathers a parameter in each step, at most; rank 0 prints it."""
    import deepspeed

    from tests.distributed.traffic import Gathers

    gathers = Gathers().__enter__()
    real = deepspeed.DeepSpeedEngine.step
    previous: Counter[int] = Counter()
    max_gathers: list[int] = []

    def step(engine: object, *args: object) -> object:
        nonlocal previous
        max_gathers.append(max((gathers - previous).values()))
        previous = Counter(gathers)
        return real(engine, *args)

    def show() -> None:
        print(GATHERS_PREFIX + json.dumps(max_gathers))

    deepspeed.DeepSpeedEngine.step = step
    atexit.register(show)
