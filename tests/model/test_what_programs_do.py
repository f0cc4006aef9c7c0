"""Whatever a program does to a model comes out exact, or raises: the table of
docs/explanation/exactness.md, row by row.

covers: fingerprint/hooks.py, model/patching.py
"""

from __future__ import annotations

import contextlib

import pytest

from scripts import exactness_table
from streambp.admission.layer_checkpoint import CheckpointedForward
from streambp.layer.layer_state import LayerState
from tests.what_programs_do import OUTCOME_WRONG, PROGRAMS, outcome

pytestmark = pytest.mark.usefixtures("float64_oracle")


@pytest.mark.fast(9)
@pytest.mark.parametrize(
    "program", PROGRAMS, ids=lambda program: f"{program.when}: {program.action}"
)
def test_the_outcome_is_what_the_docs_say(program):
    result, _ = outcome(program)
    assert not result.startswith(OUTCOME_WRONG)
    assert result == exactness_table.documented()[program.when, program.action]


def test_the_docs_have_no_other_rows():
    assert set(exactness_table.documented()) == {
        (program.when, program.action) for program in PROGRAMS
    }


@pytest.mark.parametrize(
    ("mutant", "words"),
    [
        ("nothing is compared", "replaces a function that a modeling file holds"),
        ("nothing is compared", "changes a number in a global, which a module inside reads"),
        ("torch's error stays", "which changes no value yet"),
    ],
)
def test_mutants_are_found(mutant, words, monkeypatch):
    if mutant == "nothing is compared":
        monkeypatch.setattr(LayerState, "witness", lambda *_: None)
    else:
        monkeypatch.setattr(
            CheckpointedForward, "_explain_mismatch", lambda _: contextlib.nullcontext()
        )
    (program,) = (candidate for candidate in PROGRAMS if words in candidate.action)
    assert outcome(program)[0].startswith(OUTCOME_WRONG)
