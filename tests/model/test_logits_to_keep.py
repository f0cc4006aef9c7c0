"""`logits_to_keep`, as ms-swift and NeMo pass it: every form that transformers knows, with labels
and without.

covers: model/causal_lm.py
"""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from transformers import modeling_utils

import streambp
from tests import zoo
from tests.families import LENGTH, make_batch
from tests.oracle import worst_error
from tests.tiers import thinned

SHARED_KV = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
}
FAMILIES = {"qwen3": {}, "gemma4_text": SHARED_KV}
POSITION_MASK = torch.zeros(2, LENGTH, dtype=torch.bool)
POSITION_MASK[0, [3, 9, 10, 22]] = True
POSITION_MASK[1, [0, 1, 7, 21]] = True
FORMS = {
    "none": 0, "last one": 1, "last seven": 7, "all": LENGTH,
    "positions": torch.tensor([3, 4, 9, 22]), "mask": POSITION_MASK[0],
    "positions of each row": POSITION_MASK.nonzero()[:, 1].view(2, 4),
    "mask of each row": POSITION_MASK,
}  # fmt: skip
PER_ROW_MESSAGE = "of each row"


def positions_kept(labels, form):
    if isinstance(form, int):
        return labels[:, -form:]
    if form.dim() == 1:
        return labels[:, form]
    return labels[form] if form.dtype == torch.bool else labels.gather(1, form)


def gradients_of(model, batch, labels):
    model.zero_grad(set_to_none=True)
    output = model(**batch, use_cache=False, **labels)
    loss = output.loss if labels else output.logits.square().mean()
    loss.backward()
    return loss.detach(), {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


CASES = [("qwen3", form) for form in FORMS] + [
    ("gemma4_text", form) for form in ("last one", "last seven", "positions")
]


@pytest.mark.sees_padding("its losses of logits have padding in them")
@pytest.mark.fast(3)
@pytest.mark.parametrize(
    ("family", "form"),
    thinned(CASES, lambda family, form: family == "qwen3" or form == "positions"),
)
def test_exact(family, form, float64_oracle, attended_chunks):
    takes_rows = "logits_to_keep" in inspect.getsource(modeling_utils)
    if PER_ROW_MESSAGE in form and not takes_rows:
        pytest.skip("this transformers knows no positions of each row")
    stock = zoo.build(family, **FAMILIES[family])
    ours = streambp.patch(copy.deepcopy(stock), streambp.StreamConfig(chunk_size=5))
    batch = make_batch("right-padded")
    labels = {"labels": positions_kept(batch.pop("labels").clamp(min=3), FORMS[form])}
    batch["logits_to_keep"] = FORMS[form]
    for extra_inputs in (
        {},
        labels if form != "last one" else {},
    ):  # one position has no next token
        (expected_loss, expected), (loss, grads) = (
            gradients_of(model, batch, extra_inputs) for model in (stock, ours)
        )
        assert abs(loss - expected_loss) <= 1e-12 * abs(expected_loss)
        assert worst_error(grads, expected) <= 1e-10
    assert attended_chunks
    description = streambp.describe(ours)
    assert {layer.path for layer in description.layers} == {"streams"}
    if form != "last one":
        assert description.head.startswith("blockwise loss, no logits")


def test_generation_without_a_cache_keeps_one_position(float64_oracle):
    stock = zoo.build("gemma4_text", **SHARED_KV).eval()
    ours = streambp.patch(copy.deepcopy(stock), streambp.StreamConfig(chunk_size=5))
    prompt = make_batch("plain", length=11)["input_ids"]
    settings = {"max_new_tokens": 4, "do_sample": False, "use_cache": False}
    assert torch.equal(ours.generate(prompt, **settings), stock.generate(prompt, **settings))
