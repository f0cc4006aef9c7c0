"""bf16: gradients of losses on lazy logits are as precise as those of full logits.

covers: lazy/dispatch.py, lazy/row_rules.py
"""

from __future__ import annotations

import copy

import pytest
import torch

import streambp
from tests.families import build, make_batch
from tests.head.losses_on_logits import FRAMEWORKS
from tests.oracle import assert_as_precise, relative_l2


def gradients_of(model, loss, ids):
    loss(model(input_ids=ids, use_cache=False).logits, ids).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def errors(loss):
    """Ours and the unpatched model's, one random model after the other, against the same weights in
    float32."""
    for seed in range(128):
        model = build("qwen3", seed=seed, num_hidden_layers=2).to(torch.bfloat16)
        ids = make_batch("plain", seed=seed)["input_ids"]
        truth = gradients_of(copy.deepcopy(model).float(), loss, ids)
        stock = gradients_of(copy.deepcopy(model), loss, ids)
        ours = gradients_of(
            streambp.patch(model, streambp.StreamConfig(chunk_size=5, lazy_logits=True)), loss, ids
        )
        yield relative_l2(ours, truth), relative_l2(stock, truth)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "in_float32"),
    [
        ("entropy_from_softmax", True),  # a logsumexp and a sum that cancel
        *(
            pytest.param(name, in_float32, marks=pytest.mark.full)
            for name in ("dpo", "grpo", "dft", "label_smoothing", "weighted")
            for in_float32 in (True, False)
        ),
    ],
)
def test_as_precise_as_full_logits(name, in_float32):
    """`in_float32`: the program, or accelerate, converts the logits, as most do."""
    loss = FRAMEWORKS[name]
    assert_as_precise(errors((lambda z, ids: loss(z.float(), ids)) if in_float32 else loss))


def test_results_have_the_dtypes_of_full_logits():
    ids = make_batch("plain")["input_ids"]
    model = build("qwen3").to(torch.bfloat16)
    take = {
        "entries": lambda z: z.log_softmax(-1).gather(-1, ids[..., None]),
        "loss": lambda z: torch.nn.functional.cross_entropy(z.flatten(0, 1), ids.flatten()),
        "wide": lambda z: z.float().logsumexp(-1),
        "softmax in float32": lambda z: z.softmax(-1, dtype=torch.float32).amax(-1),
        "best": lambda z: z.argmax(-1),
        "places": lambda z: z.topk(3, dim=-1).indices,
        "compared": lambda z: (z > 0.0).any(-1),
        "built": lambda z: z.cumsum(-1),
    }
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            expected = {
                name: f(model(input_ids=ids, use_cache=False).logits) for name, f in take.items()
            }
            streambp.patch(model, streambp.StreamConfig(chunk_size=5, lazy_logits=True))
            results = {
                name: f(model(input_ids=ids, use_cache=False).logits) for name, f in take.items()
            }
            streambp.unpatch(model)
        for name in take:
            assert (results[name].dtype, results[name].shape) == (
                expected[name].dtype,
                expected[name].shape,
            ), name


def errors_under_autocast():
    """Of float32 weights; ours of a loss that a GradScaler has multiplied."""
    for seed in range(128):
        model = build("qwen3", seed=seed, num_hidden_layers=2)
        ids = make_batch("plain", seed=seed)["input_ids"]
        truth = gradients_of(copy.deepcopy(model), FRAMEWORKS["grpo"], ids)
        gradients_by_head = []
        for patched in (False, True):
            model.zero_grad()
            if patched:
                streambp.patch(model, streambp.StreamConfig(chunk_size=5, lazy_logits=True))
            with torch.autocast("cpu", torch.bfloat16):
                loss = FRAMEWORKS["grpo"](model(input_ids=ids, use_cache=False).logits.float(), ids)
            (loss * (2.0**12 if patched else 1.0)).backward()
            gradients_by_head.append(
                {n: p.grad / (2.0**12 if patched else 1.0) for n, p in model.named_parameters()}
            )
        yield relative_l2(gradients_by_head[1], truth), relative_l2(gradients_by_head[0], truth)


@pytest.mark.full
def test_as_precise_under_autocast_with_a_scaled_loss():
    assert_as_precise(errors_under_autocast())
