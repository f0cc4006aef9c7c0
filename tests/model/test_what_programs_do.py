"""Whatever a program does to a model comes out exact, or raises: the table of
docs/explanation/exactness.md, row by row.

covers: fingerprint/hooks.py, model/patching.py
"""

from __future__ import annotations

import contextlib

import pytest

from scripts import exactness_table
from streambp.admission import kept_values
from streambp.admission.layer_checkpoint import CheckpointedForward
from streambp.admission.snapshot import Snapshot
from streambp.attention import masks
from streambp.head import log_probs
from streambp.layer import call
from streambp.layer.call import LayerCall
from streambp.layer.layer_state import LayerState
from streambp.model import causal_lm, fused_layers, state, wrappers
from streambp.model.steps import Steps
from streambp.model.wrappers import BackboneForward
from streambp.offload import weights as host_weights
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


def nothing_is_compared(patch):
    patch.setattr(LayerState, "witness", lambda *_: None)


def torchs_error_stays(patch):
    patch.setattr(CheckpointedForward, "_explain_mismatch", lambda _: contextlib.nullcontext())


def masks_of_any_shape(patch, real=masks.LazyMask.__init__):
    patch.setattr(
        masks.LazyMask,
        "__init__",
        lambda self, **description: real(self, **{**description, "attention_mask": None}),
    )


def labels_of_any_shape(patch):
    patch.setattr(log_probs, "check_tensors", lambda **_: None)


def marks_stay(patch):
    patch.setattr(fused_layers, "COMPILER_MARK_PREFIX", "no such name")


def one_reason(patch, real=LayerCall._set_plan):
    patch.setattr(
        LayerCall,
        "_set_plan",
        lambda self, plan, why: real(self, plan, call.REASON_LONG_CHUNK_MASK),
    )


def nobody_else_calls(patch):
    patch.setattr(
        Steps, "bypasses_backbone", property(lambda _: False, lambda *_: None), raising=False
    )


def each_group_is_large(patch):
    patch.setattr(host_weights, "several_ranks", host_weights.is_initialized)


def trials_leave_records(patch):
    patch.setattr(Snapshot, "restore", lambda *_, **__: None)
    patch.setattr(kept_values, "undo_changes", lambda *_, **__: contextlib.nullcontext())


def each_axis_marks_documents(patch, real=BackboneForward._packed_rows):
    def rows(self, kwargs, tokens):
        return real(self, {**kwargs, "position_ids": kwargs["position_ids"][0]}, tokens)

    patch.setattr(BackboneForward, "_packed_rows", rows)


def caches_are_left_out(patch):
    for module in (state, causal_lm, wrappers):
        patch.setattr(module, "has_cache", lambda kwargs: False)


MUTANTS = [
    (nothing_is_compared, "replaces a function that a modeling file holds"),
    (nothing_is_compared, "changes a number in a global, which a module inside reads"),
    (torchs_error_stays, "which changes no value yet"),
    (masks_of_any_shape, "passes a mask of three dimensions"),
    (labels_of_any_shape, "passes labels of another shape"),
    (marks_stay, "takes compiled norms off"),
    (one_reason, "whose last chunk is longer"),
    (nobody_else_calls, "calls a decoder layer"),
    (each_group_is_large, "in a group of one rank"),
    (trials_leave_records, "evaluates for the first time"),
    (each_axis_marks_documents, "packs rows of Qwen3.5"),
    (caches_are_left_out, "adds prefix tuning"),
]


@pytest.mark.fast(6)
@pytest.mark.parametrize(
    ("mutant", "words"), MUTANTS, ids=lambda value: getattr(value, "__name__", value)
)
def test_mutants_are_found(mutant, words, monkeypatch):
    mutant(monkeypatch)
    (program,) = (candidate for candidate in PROGRAMS if words in candidate.action)
    result = outcome(program)[0]
    assert result != exactness_table.documented()[program.when, program.action]
