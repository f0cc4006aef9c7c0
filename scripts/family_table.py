"""Writes docs/reference/families.md, or another file that is named: `python -m scripts.family_table
[FILE]`.

Takes about four minutes on one core.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import transformers

import streambp
from tests import zoo
from tests.families import LENGTH, MODES
from tests.model.test_families import (
    CHUNK_SIZES,
    EXACT_FAMILIES,
    REFUSED_FAMILIES,
    UNDEFINED,
    errors,
)
from tests.oracle import lift_float32_casts

TARGET = Path(__file__).parents[1] / "docs" / "reference" / "families.md"
HEADER = f"""# Model families

Every family behind `AutoModelForCausalLM` that a tiny config can build, patched and compared with the unpatched model
in float64: all parameters' gradients and the loss, {len(MODES)} kinds of batches ({", ".join(MODES)}), chunks of
{" and ".join(map(str, CHUNK_SIZES))} of {LENGTH} tokens. The error is the worst over all of these and over all
parameters, relative to each parameter's gradient (one that is zero but for rounding counts as 1e-4 of the whole
or less: `worst_error` in tests/oracle.py). Made by `python -m scripts.family_table` with transformers
{transformers.__version__} and torch {torch.__version__.split("+")[0]};
`pytest -m "" tests/model/test_families.py` asserts it (gradients <= 1e-10, loss <= 1e-12).

Left-padded batches leave out one label, that of the first token after the padding: what predicts it is padding, which
reads nothing, and there eager attention gives what no causal computation can
([how-it-works.md](../explanation/how-it-works.md), masks and padding).

*streams*: so many layers run in chunks; *checkpoints*: these cannot be cut and run whole under torch's checkpoint, which
costs memory and is exact. *head*: whether the loss is computed without logits. The last column is what `describe` says:
what keeps layers whole, or what streaming them costs.

| family | layers | head | worst gradient error | loss | note |
|---|---|---|---|---|---|
"""


def row(name: str) -> tuple[str, bool]:
    """The family's line, and whether a layer of it streams."""
    gradient, loss, model = errors(name)
    description = streambp.describe(model)
    paths = [layer.path for layer in description.layers]
    layers = ", ".join(
        f"{paths.count(path)} {path}" for path in ("streams", "checkpoints") if path in paths
    )
    head = "blockwise" if description.head.startswith("blockwise") else "logits"
    note = "".join(
        f" ({mode}: {why})" for (family, mode), why in UNDEFINED.items() if family == name
    )
    reasons = "; ".join(sorted({layer.reason for layer in description.layers} - {""}))
    return (
        f"| {name} | {layers}{note} | {head} | {gradient:.0e} | {loss:.0e} | {reasons} |",
        "streams" in paths,
    )


def refusal(name: str) -> str:
    model = zoo.build(name)
    try:
        streambp.patch(model)
    except streambp.StreamBPError as error:
        reason = (
            str(error).split(". ", 1)[1] if "cannot be streamed. " in str(error) else str(error)
        )
        return f"| {name} | {reason.split('. Use gradient')[0]} |"
    raise AssertionError(f"{name} was not refused")


def main(target: Path = TARGET) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        lift_float32_casts(patch)
        rows = [row(name) for name in EXACT_FAMILIES]
        refusals = [refusal(name) for name in sorted(set(zoo.NAMES) & REFUSED_FAMILIES.keys())]
    streaming = sum(streams for _, streams in rows)
    text = HEADER + "\n".join(line for line, _ in rows)
    text += (
        f"\n\n{len(rows)} families are exact, {streaming} of them with streamed layers.\n\n## "
        "Refused\n\n"
    )
    text += (
        "Nothing is changed and the message names the reason; use gradient checkpointing for "
        "these.\n\n"
    )
    text += "| family | reason |\n|---|---|\n" + "\n".join(refusals) + "\n"
    target.write_text(text)
    print(text)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
