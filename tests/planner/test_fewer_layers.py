"""A count of a model copies the layers that stand for others alone, and finds what a copy of all
finds.

covers: planner/skeleton.py, planner/survey.py
"""

from __future__ import annotations

import itertools

import pytest
import torch

import streambp
from streambp.errors import UnsupportedModelError
from streambp.planner.layer_costs import observed_layer_costs
from streambp.planner.skeleton import ShrunkModel, Skeleton
from streambp.planner.survey import SurveyRecipe, survey
from tests import zoo
from tests.tiers import thinned

FAMILIES = ("qwen3", "qwen3_moe", "gemma2", "qwen3_5_text")
TIMES = 4  # as many layers: of two kinds six are kept
RECIPE = SurveyRecipe("streambp", streambp.StreamConfig(chunk_size="auto", saves=()))


def deep(family, lora=False):
    """Patched, with layers of each kind to leave out."""
    config = zoo.tiny_config(family)
    depth = config.num_hidden_layers
    changes = {"num_hidden_layers": TIMES * depth}
    if getattr(config, "layer_types", None):
        changes["layer_types"] = list(config.layer_types) * TIMES
    # of a few tokens it makes thousands of blocks of the lengths counted
    if getattr(config, "sliding_window", None):
        changes["sliding_window"] = 4096
    model = zoo.build(family, torch.bfloat16, device="cpu", **changes)
    if lora:
        peft = pytest.importorskip("peft", reason="peft is not installed")
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear"))
    return streambp.patch(model, streambp.StreamConfig(chunk_size=8))


def counted(model, fewer):
    def skeleton():
        return Skeleton(model, torch.bfloat16, None, 16, "cuda", mixers="installed", fewer=fewer)

    method = survey(skeleton(), [RECIPE], tree=False).methods[0]
    depth = len(skeleton().reduce().kinds)
    return method, observed_layer_costs(skeleton(), streambp.StreamConfig(), range(depth))


def check(family, lora):
    model = deep(family, lora)
    modules_before = [(name, type(module)) for name, module in model.named_modules()]
    full, shrunk = (counted(model, fewer) for fewer in (False, True))
    assert full == shrunk
    assert [(name, type(module)) for name, module in model.named_modules()] == modules_before
    return Skeleton(model, torch.bfloat16, None, 16, "cuda", fewer=True)


FAST_CASES = (("qwen3", False), ("qwen3", True), ("qwen3_moe", True))


@pytest.mark.fast(3)
@pytest.mark.parametrize(
    ("family", "lora"),
    thinned(itertools.product(FAMILIES, (False, True)), lambda *case: case in FAST_CASES),
)
def test_what_is_counted_is_the_same(family, lora):
    shrunk_model = check(family, lora).reduce()
    assert len(shrunk_model.layer_indices) < len(shrunk_model.kinds)


class NotCopyable:
    """Must not be copied."""

    def __deepcopy__(self, memo):
        raise AssertionError("copied")


def test_the_others_are_not_copied():
    model = deep("qwen3")
    layer_indices = (
        Skeleton(model, torch.bfloat16, None, 16, "cuda", fewer=True).reduce().layer_indices
    )
    for index, layer in enumerate(model.model.layers):
        if index not in layer_indices:
            layer.stays = NotCopyable()
    with pytest.raises(AssertionError, match="copied"):
        Skeleton(model, torch.bfloat16, None, 16, "cuda")
    Skeleton(model, torch.bfloat16, None, 16, "cuda", fewer=True)


def test_a_layer_too_few_is_seen(monkeypatch):
    monkeypatch.setattr(
        ShrunkModel, "left_out", lambda self, model: iter(model.get_submodule(self.backbone).layers)
    )
    with pytest.raises(UnsupportedModelError, match="no stack of transformers decoder layers"):
        check("qwen3", False)


def test_one_layer_several_times():
    model = zoo.build(
        "qwen3",
        torch.bfloat16,
        device="cpu",
        num_hidden_layers=6,
        layer_types=["full_attention"] * 6,
    )
    layer = model.model.layers[0]
    model.model.layers = torch.nn.ModuleList([layer] * 6)
    full, shrunk = (
        Skeleton(model, torch.bfloat16, None, 16, "cuda", fewer=fewer) for fewer in (False, True)
    )
    assert full.reduce() == shrunk.reduce()
    assert {type(shrunk_layer) for shrunk_layer in shrunk.model.model.layers} == {type(layer)}
