"""Nothing of streambp's own arithmetic runs under the program's autocast. [Note: autocast]

A join of float16 tensors raises under bfloat16's autocast, on a CPU, and the other way round.

covers: admission/entry.py, admission/rehearsal.py, admission/trials.py, attention/interface.py,
  head/log_probs.py, lazy/head.py, layer/call.py, layer/recompute.py, prefixes/admission.py
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import streambp
from streambp.layer import recompute
from tests import zoo
from tests.families import LENGTH, make_batch
from tests.oracle import relative_l2
from tests.versions import HYBRID_PATHS, needs_mambas_states

PACKAGE = str(Path(streambp.__file__).parent)
SETTINGS = {
    "default": {},
    "chunked": {"chunk_size": 5, "saves": ()},
    "all saved": {"chunk_size": 5, "saves": ("*",)},
    "lazy": {"chunk_size": 5, "saves": (), "lazy_logits": True},
    "packed": {"chunk_size": 5, "saves": (), "rows": "packed"},
    "offload": {"chunk_size": 5, "saves": ("attn_out", "kv"), "offload": "cpu"},
}
PAIRS = ((torch.float16, torch.bfloat16), (torch.bfloat16, torch.float16))  # weights and autocast
JOINING_FUNCTIONS = ((torch, "cat"), (torch, "stack"), (torch, "matmul"), (torch, "einsum"),
    (Tensor, "index_copy"),
         (Tensor, "index_copy_"), (Tensor, "matmul"), (Tensor, "__matmul__"), (Tensor, "bmm"))  # fmt: skip
HYBRIDS = ("lfm2", "qwen3_next")
FAMILIES = (
    "llama",
    "gpt_oss",
    "qwen3_moe",
    *HYBRIDS,
    pytest.param("mamba2", marks=needs_mambas_states),
)


def shared(batch):
    """The second row begins as the first one does."""
    batch["input_ids"][1, : LENGTH // 2] = batch["input_ids"][0, : LENGTH // 2]
    return batch


def a_step(model, autocast, lazy):
    """The gradients of one step under autocast, whose backward is called inside of it."""
    batch = shared(make_batch("plain"))
    labels = batch.pop("labels")
    with torch.autocast("cpu", autocast) if autocast else contextlib.nullcontext():
        if lazy:
            logits = model(**batch, use_cache=False).logits[:, :-1]
            loss = -torch.log_softmax(logits, -1).gather(-1, labels[:, 1:, None]).float().mean()
        else:
            loss = model(**batch, labels=labels, use_cache=False).loss
        (loss * 64).backward()
    grads = {
        name: p.grad.float() / 64 for name, p in model.named_parameters() if p.grad is not None
    }
    model.zero_grad(set_to_none=True)
    return grads


@contextlib.contextmanager
def own_joins(monkeypatch):
    """Within, collects what code of streambp's own joins or multiplies while autocast is on."""
    joins = set()

    def watched(real, name):
        def call(*args, **kwargs):
            caller = sys._getframe(1).f_code
            floating = any(
                x.is_floating_point() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)
            )
            if (
                floating
                and torch.is_autocast_enabled("cpu")
                and caller.co_filename.startswith(PACKAGE)
            ):
                joins.add((caller.co_filename.removeprefix(PACKAGE), caller.co_name, name))
            return real(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        for owner, name in JOINING_FUNCTIONS:
            patch.setattr(owner, name, watched(getattr(owner, name), name))
        yield joins


def errors(family, settings, weights, autocast, monkeypatch):
    """How far streamed and unpatched gradients lie from those in float32, and what of streambp's
    own ran under autocast."""
    model, lazy = zoo.build(family, weights), settings == "lazy"
    truth = zoo.build(family, torch.float32)
    truth.load_state_dict(model.state_dict())
    expected = a_step(truth, None, lazy)
    stock = relative_l2(a_step(model, autocast, lazy), expected)
    streambp.patch(model, streambp.StreamConfig(**SETTINGS[settings]))
    with own_joins(monkeypatch) as joins:
        ours = [relative_l2(a_step(model, autocast, lazy), expected) for _ in range(2)]
    paths = {layer.path for layer in streambp.describe(model).layers}
    expected_paths = HYBRID_PATHS if family in HYBRIDS else {"streams"}
    assert paths <= {"as unpatched", *expected_paths}
    return max(ours), stock, joins


@pytest.mark.fast("default-pair0-llama", "chunked-pair1-qwen3_moe", "lazy-pair0-llama", "offload-pair1-llama",
                  "packed-pair0-llama", "chunked-pair0-lfm2")  # fmt: skip
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("pair", PAIRS, ids=["pair0", "pair1"])
@pytest.mark.parametrize("settings", SETTINGS)
def test_the_other_half_precision(settings, pair, family, monkeypatch):
    ours, stock, joins = errors(family, settings, *pair, monkeypatch)
    assert not joins
    assert ours <= 1.5 * stock


def test_mutant_trials_and_bookkeeping_run_under_the_programs_autocast(monkeypatch):
    """As they did: torch has no common dtype for float16 tensors that are joined under bfloat16's
    autocast."""
    monkeypatch.setattr(recompute.Autocast, "disable", lambda self: contextlib.nullcontext())
    with pytest.raises((RuntimeError, AssertionError), match=r"prioritize|checkpoints"):
        errors("llama", "chunked", torch.float16, torch.bfloat16, monkeypatch)
