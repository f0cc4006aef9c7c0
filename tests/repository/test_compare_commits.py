"""scripts/compare_commits.py: two trees that give the same bits are equal, and what differs in one
of them is told."""

from __future__ import annotations

import argparse
import shutil

import pytest
import torch

from scripts import compare_commits, compare_served
from scripts.compare_commits import Difference, KnownDifference, compare
from scripts.compare_served import ROOT, Case

# Appended to a copy of the package: what it changes depends on the case.
MUTANT_SOURCE = """
_patch, _describe = __getattr__("patch"), __getattr__("describe")  # which are imported when asked for

def patch(model, config):
    model = _patch(model, config)
    weight, name = model.get_input_embeddings().weight, (config.saves, config.offload)
    if name == (("kv",), "none"):
        weight.register_hook(lambda gradient: gradient * (1 + 2**-50))
    if name == (("kv",), "cpu"):
        weight.requires_grad_(False)
    if name == ((), "cpu"):
        raise RuntimeError("mutant")
    model.told = name == (("attn_out",), "none")
    return model

def describe(model):
    return f"{_describe(model)}" + "\\nnote        mutant" * model.told
"""


def settings(tree, **changes):
    arguments = {
        "tree": tree, "against": ROOT, "families": ("llama",), "modes": ("plain",),
        "saves": ("none", "attn_out", "kv"),
        "offload": ("none", "cpu"),
    }  # fmt: skip
    return argparse.Namespace(**{**arguments, **changes})


@pytest.fixture
def mutant(tmp_path):
    shutil.copytree(
        ROOT / "streambp", tmp_path / "streambp", ignore=shutil.ignore_patterns("__pycache__")
    )
    with (tmp_path / "streambp" / "__init__.py").open("a") as file:
        file.write(MUTANT_SOURCE)
    return tmp_path


@pytest.mark.full
def test_what_a_mutant_changes_is_told_and_nothing_else(mutant, monkeypatch):
    monkeypatch.setattr(
        compare_commits,
        "KNOWN_DIFFERENCES",
        (KnownDifference("a mutant", lines="^.note +mutant$"),),
    )
    messages = []
    assert compare(settings(mutant), messages.append) == 3
    message_of_case = {line.split(": ")[1]: line for line in messages[:-2]}
    assert messages[-1] == "7 cases: 3 equal, 1 known to differ, 3 not known"
    assert messages[-2] == "known in 1 cases: a mutant"
    assert message_of_case.pop("llama plain, saves attn_out, kept, float64").startswith("known: ")
    assert all(line.startswith("DIFFERS: ") for line in message_of_case.values())
    assert (
        "here RuntimeError: mutant; there no error"
        in message_of_case["llama plain, saves none, offloaded, float64"]
    )
    rounding = message_of_case["llama plain, saves kv, kept, float64"]
    assert "2 of 44 tensors differ, by up to " in rounding
    assert "e-16 (first model.embed_tokens.weight); from the unpatched model: here " in rounding
    absent = message_of_case["llama plain, saves kv, offloaded, float64"]
    assert "only there: first model.embed_tokens.weight, warm model.embed_tokens.weight" in absent


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("print('\"/elsewhere\"')", "the streambp that its process imports is in /elsewhere"),
        (
            "raise SystemExit('no such model')",
            "ended with status 1 at: import streambp. It printed:\nno such model",
        ),
    ],
)
def test_a_process_that_does_not_serve_its_tree(script, message, tmp_path, monkeypatch):
    served = tmp_path / "served.py"
    served.write_text(script)
    monkeypatch.setattr(compare_commits, "SERVED_SCRIPT", served)
    with pytest.raises(SystemExit, match=message):
        compare_commits.Tree(tmp_path)


class RaisingCase:
    """In place of a tree: each case raises there."""

    def __init__(self, root):
        self.process = argparse.Namespace(communicate=lambda: None)

    def start(self, case, settings):
        return lambda: {"error": "TypeError: no such argument", "tensors": {}, "text": ""}


def test_a_case_that_raises_in_both_trees_is_no_equal_one(monkeypatch):
    monkeypatch.setattr(compare_commits, "Tree", RaisingCase)
    messages = []
    assert compare(settings(ROOT, saves=("kv",), offload=("none",)), messages.append) == 1
    assert (
        messages[0]
        == "NOTHING COMPARED: llama plain, saves kv, kept, float64: both trees: TypeError: no such argument"
    )
    assert messages[1] == "1 cases: 0 equal, 0 known to differ, 1 not known"


PACKED = Case("bamba", "packed")


@pytest.mark.parametrize(
    ("known_difference", "difference", "reasons"),
    [
        (KnownDifference("all", within=1e-15), Difference("2 tensors", 1e-16, ()), ["all"]),
        (KnownDifference("less", within=1e-15), Difference("2 tensors", 1e-14, ()), []),
        (
            KnownDifference("others", families=("llama",), within=1.0),
            Difference("2 tensors", 1e-16, ()),
            [],
        ),
        (
            KnownDifference("lines alone", lines="note"),
            Difference("2 tensors", 1e-16, ("+note",)),
            [],
        ),
        (
            KnownDifference("tensors alone", within=1.0),
            Difference("2 tensors", 1e-16, ("+note",)),
            [],
        ),
        (
            KnownDifference("as before", same_with={"documents": "as_given"}),
            Difference("2 tensors", 0.1, ()),
            ["as before"],
        ),
        (
            KnownDifference("not as before", same_with={"head": False}),
            Difference("2 tensors", 0.1, ()),
            [],
        ),
    ],
    ids=lambda value: value.reason if isinstance(value, KnownDifference) else "",
)
def test_what_is_known_explains_all_of_a_difference_or_nothing(
    known_difference, difference, reasons, monkeypatch
):
    monkeypatch.setattr(compare_commits, "KNOWN_DIFFERENCES", (known_difference,))
    assert (
        difference.known_reasons(PACKED, lambda settings: settings == {"documents": "as_given"})
        == reasons
    )


def test_documents_of_packed_rows_by_themselves():
    batch = compare_served.batch_of("bamba", "packed", torch.float64, 1)
    parts = list(compare_served.documents_apart(batch))
    assert sum(share for share, _ in parts) == pytest.approx(1.0)
    assert [part["input_ids"].shape[1] for _, part in parts] == [5, 8, 7, 9, 12], (
        "one token alone has no label"
    )
    assert all(
        (part["position_ids"] == torch.arange(part["input_ids"].shape[1])).all()
        for _, part in parts
    )
