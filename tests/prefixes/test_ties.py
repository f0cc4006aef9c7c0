"""A router that ties to rounding keeps no rows from sharing; other scores do. [Note: choices]

The last expert that a token goes to and the next one are liked as much, and the trial's packed row
prefers the other one.

covers: prefixes/admission.py, layer/choices.py, admission/agreement.py
"""

from __future__ import annotations

import functools

import pytest
import torch

import streambp
from streambp.layer.choices import ReplayedChoices
from streambp.prefixes import admission, calls
from streambp.prefixes.tree import find_tree
from tests.layer.test_choices import mixture, step
from tests.prefixes.batches import counted, make_batch
from tests.prefixes.test_calls import tokens_or_reason

FAMILIES = ("gpt_oss", "mixtral", "deepseek_v3")
PRECISIONS = ("weights", "autocast", "float32")


def first_step(family, precision, monkeypatch, mode="padded", change=None):
    """What became of the rows, where the trial's packed row chooses otherwise than the rows do.

    Args:
        change: of scores [..., n] in the trial's packed row; None: the tie falls otherwise.
    """
    monkeypatch.setattr(calls, "find_tree", functools.partial(find_tree, min_prefix=8))
    model, batch = (
        mixture(family, "weights" if precision == "weights" else "autocast"),
        make_batch(mode),
    )
    model.set_attn_implementation("eager" if family == "gpt_oss" else "sdpa")
    streambp.patch(model, streambp.StreamConfig(chunk_size=7, saves=(), rows="packed"))
    one_row = {name: value[:1] for name, value in batch.items() if name != "attention_mask"}
    step(model, precision, **one_row)  # the layers' own trials are over, and no rows were tried
    packed, real, in_second_run = admission.pack_arguments, torch.topk, []

    def topk(x, k, *args, **kwargs):
        if k >= x.shape[-1] or x.dim() > 2:
            return real(x, k, *args, **kwargs)
        if change is None:
            last, following = real(x.detach(), k + 1).indices[..., k - 1 :].unbind(-1)
            first, second = (following, last) if in_second_run else (last, following)
            best = x.gather(-1, last[..., None])
            second_best = best - torch.finfo(x.dtype).eps * best.detach().abs()
            x = x.scatter(-1, first[..., None], best).scatter(-1, second[..., None], second_best)
        return real(change(x) if change and in_second_run else x, k, *args, **kwargs)

    monkeypatch.setattr(torch, "topk", topk)
    monkeypatch.setattr(
        admission, "pack_arguments", lambda *args: in_second_run.append(True) or packed(*args)
    )
    trial_of = admission.trial_arguments
    monkeypatch.setattr(
        admission,
        "trial_arguments",
        lambda *args, **kwargs: in_second_run.clear() or trial_of(*args, **kwargs),
    )
    over = admission.PackedRowTrials._try
    monkeypatch.setattr(
        admission.PackedRowTrials, "_try", lambda *args: (over(*args), in_second_run.clear())[0]
    )
    step(model, precision, **batch)
    return tokens_or_reason(model), counted(batch)


@pytest.mark.fast(4)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_tie_keeps_no_rows_apart(family, precision, monkeypatch):
    differing, note = [], ReplayedChoices._note
    monkeypatch.setattr(
        ReplayedChoices,
        "_note",
        lambda self, *args: (note(self, *args), differing.append(self.differing)),
    )
    outcome, expected = first_step(family, precision, monkeypatch)
    assert max(differing) >= 20  # of 36 tokens of a packed row
    assert outcome == expected


@pytest.mark.parametrize("precision", PRECISIONS)
def test_mutant_a_tie_decides(precision, monkeypatch):
    monkeypatch.setattr(ReplayedChoices, "rearrange", lambda self, change: ReplayedChoices())
    outcome, _ = first_step("mixtral", precision, monkeypatch)
    assert "gave something else than rows do" in outcome


@pytest.mark.fast(3)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    "change",
    [lambda x: x.roll(1, -1), lambda x: x.roll(1, 0), lambda x: 1.2 * x + x.roll(1, -1) / 4],
)
def test_other_scores_are_found(change, precision, monkeypatch):
    """The choices of the rows hide what the packed row would have chosen."""
    outcome, _ = first_step("mixtral", precision, monkeypatch, change=change)
    assert "gave something else than rows do" in outcome
