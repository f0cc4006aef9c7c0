"""Profiles are counted once for a model, options and code; progress is told; routing is shared
evenly.

covers: planner/profile_cache.py, planner/report.py, planner/routing.py, planner/survey.py
"""

from __future__ import annotations

import io
import json

import pytest
import torch

import streambp.planner.profile_cache as module
from streambp.planner import Setting
from streambp.planner.count import StepCount, aten
from streambp.planner.profile import peak, work
from streambp.planner.profile_cache import CountRequest, count_profile, folder
from streambp.planner.report import progress
from streambp.planner.routing import answer
from streambp.planner.skeleton import Skeleton
from streambp.planner.survey import (
    CHECKPOINTING_HEAD_RECIPE,
    CHECKPOINTING_RECIPE,
    streamed_recipe,
    survey,
)
from tests import zoo
from tests.planner.test_estimates import SMALL_CONFIG
from tests.planner.test_plans import two_methods


@pytest.fixture
def surveys(tmp_path, monkeypatch):
    """The number of surveys so far, in a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calls = []

    def survey_made_up(*arguments, **keywords):
        calls.append(arguments)
        return two_methods()

    monkeypatch.setattr(module, "survey", survey_made_up)
    monkeypatch.setattr(module, "counted_saves", lambda *_: None)
    return calls


def test_a_second_plan_of_a_model_counts_nothing(surveys, tmp_path):
    SMALL_CONFIG.save_pretrained(tmp_path / "model")
    first = count_profile(CountRequest(SMALL_CONFIG), [streamed_recipe()], cache=True)
    assert (
        count_profile(CountRequest(SMALL_CONFIG), [streamed_recipe()], cache=True)
        == first
        == two_methods()
    )
    assert (
        count_profile(CountRequest(str(tmp_path / "model")), [streamed_recipe()], cache=True)
        == first
    )
    assert len(surveys) == 1
    assert [path.parent for path in folder().iterdir()] == [tmp_path / "streambp" / "plans"]


@pytest.mark.parametrize(
    "change",
    ["options", "configuration", "recipes", "source", "torch", "a broken file", "no cache"],
)
def test_another_plan_is_counted_anew(change, surveys, monkeypatch, caplog):
    count_profile(CountRequest(SMALL_CONFIG), [streamed_recipe()], cache=True)
    request, recipes, cache = CountRequest(SMALL_CONFIG), [streamed_recipe()], True
    if change == "options":
        request = CountRequest(SMALL_CONFIG, kernels="liger")
    if change == "configuration":
        request = CountRequest(
            type(SMALL_CONFIG)(**{**SMALL_CONFIG.to_dict(), "rms_norm_eps": 1e-3})
        )
    if change == "recipes":
        recipes = [streamed_recipe(("kv",))]
    if change == "source":
        monkeypatch.setattr(module, "_source", lambda: "changed")
    if change == "torch":
        monkeypatch.setattr(module.importlib.metadata, "version", lambda package: "0.0")
    if change == "a broken file":
        (path,) = folder().iterdir()
        path.write_text("{")
    if change == "no cache":
        cache = False
    assert count_profile(request, recipes, cache=cache) == two_methods()
    assert len(surveys) == 2
    if change == "a broken file":
        (line,) = caplog.messages
        assert line.startswith(f"{path} is ignored, and the count is made again: JSONDecodeError")
    else:
        assert caplog.messages == []


@pytest.mark.parametrize("damage", ["number", "list", "text"])
def test_a_plan_file_whose_content_changed_is_ignored_with_one_line(damage, surveys, caplog):
    """Whatever the content is now: nothing of it is taken."""
    count_profile(CountRequest(SMALL_CONFIG), [streamed_recipe()], cache=True)
    (path,) = folder().iterdir()
    data = json.loads(path.read_text())
    if damage == "number":
        data["methods"][0]["first"][0]["law"][0] += 1.0
    if damage == "text":
        data["groups"] = "none"
    path.write_text(json.dumps([data] if damage == "list" else data))
    assert (
        count_profile(CountRequest(SMALL_CONFIG), [streamed_recipe()], cache=True) == two_methods()
    )
    assert len(surveys) == 2
    (line,) = caplog.messages
    assert line.startswith(f"{path} is ignored, and the count is made again: ")


def test_a_model_that_is_built_is_always_counted(surveys):
    model = zoo.build("qwen3", torch.bfloat16)
    for _ in range(2):
        count_profile(CountRequest(model), [streamed_recipe()], cache=True)
    assert len(surveys) == 2
    assert not folder().exists()


def test_progress_is_told():
    messages = []
    skeleton = Skeleton(SMALL_CONFIG, torch.bfloat16, None, 16, "cuda")
    survey(
        skeleton,
        [CHECKPOINTING_RECIPE, CHECKPOINTING_HEAD_RECIPE],
        at=(64, 32),
        tree=False,
        on_progress=lambda *args: messages.append(args),
    )
    assert messages == [("checkpointing", 0.0), ("checkpointing, fused head", 0.5)]


def test_a_bar_is_for_terminals_alone():
    stream = io.StringIO()
    with progress(stream, "counting") as on_progress:
        on_progress("streambp", 0.5)
    assert not stream.getvalue()
    stream.isatty = lambda: True
    with progress(stream, "counting") as on_progress:
        on_progress("streambp", 0.5)
    assert "██░" in stream.getvalue()
    assert " 50 % counting streambp" in stream.getvalue()
    assert stream.getvalue().endswith("\r\033[K")


def test_experts_get_equal_shares():
    """32 tokens with two experts of five each: 64 pairs, 13 of them or 12 for each expert, and all
    experts are picked."""
    mask = torch.empty(2, 32, dtype=torch.long, device="meta")
    with StepCount(None) as count:
        for _ in range(2):
            torch.empty(32, 5, device="meta").topk(2)
            sizes = torch.empty(5, dtype=torch.long, device="meta").tolist()
            assert torch.empty(5, dtype=torch.bool, device="meta").nonzero().shape == (5, 1)
            assert mask.nonzero().shape == (13, 2)
            assert sizes == [13, 13, 13, 13, 12]
    assert count.routed == 64
    # nothing was routed: torch says so itself
    assert answer(aten.nonzero.default, mask, 0, 0) is None


@pytest.mark.full
@pytest.mark.parametrize(
    "family",
    ["jetmoe", *(pytest.param(name, marks=pytest.mark.full) for name in ("dbrx", "longcat_flash"))],
)
def test_experts_that_look_at_their_routing_do_the_work_of_their_shares(family):
    """Twice the tokens are twice the products, or more where scores are products too."""
    skeleton = Skeleton(zoo.tiny_config(family), torch.bfloat16, None, 16, "cuda")
    profile = survey(skeleton, [streamed_recipe()], at=(512, 256), accumulating=False, tree=False)
    method = profile.methods[0]
    assert peak(profile, method, 512, 256, Setting(optimizer=0)).activations > 0
    products = [work(method, length, 256)["forward"].products for length in (512, 1024)]
    assert 1.95 <= products[1] / products[0] <= 4
