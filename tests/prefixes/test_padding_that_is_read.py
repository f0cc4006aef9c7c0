"""Statistics over lazy logits of padded batches, padding included, in float64 against the unpatched
model.

covers: prefixes/deferred_rows.py, prefixes/calls.py, head/token_positions.py, lazy/head.py,
    lazy/tensor.py,
model/padding.py
"""

from __future__ import annotations

import copy
import functools

import pytest
import torch

import streambp
from streambp.errors import BackwardError, StreamBPError
from streambp.known_names import SCALING_HOOK
from streambp.lazy.tensor import LazyLogits
from streambp.prefixes import calls, deferred_rows
from streambp.prefixes.tree import find_tree
from tests import zoo
from tests.oracle import MAX_FLOAT64_ERROR, worst_error
from tests.prefixes.test_calls import (
    float64_everywhere,  # noqa: F401 - a fixture
    tokens_or_reason,
)
from tests.prefixes.test_padding import build, make

LAUNCH_SETTINGS = {"lazy_logits": True, "rows": "auto"}
PADDING_READ_MESSAGE = "has read logits at padding"


@pytest.fixture(autouse=True)
def any_saving(monkeypatch, float64_everywhere):  # noqa: F811
    """One token of padding is enough for a packed row."""
    monkeypatch.setattr(
        calls, "find_tree", functools.partial(find_tree, min_savings=0.0, min_prefix=8)
    )


def at_padding(logits, batch):
    return logits[batch["attention_mask"] == 0].square().sum()


def by_index(logits, batch):
    rows, columns = (batch["attention_mask"] == 0).nonzero(as_tuple=True)
    return logits[rows, columns, torch.zeros_like(rows)].sum()


def masked_in_place(logits, batch):
    logits = logits.clone()
    logits[batch["attention_mask"] == 1] = 0.0
    return logits.square().mean()


def masked_by_a_rule(logits, batch):
    logits = logits.masked_fill(batch["attention_mask"][..., None] == 1, -5.0)
    return torch.logsumexp(logits, -1).mean()


def of_a_function(logits, batch):
    """Whose gradient at padding is zero, as a fused loss has it."""
    return Squares.apply(logits, batch["attention_mask"])


class Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, mask):
        values = logits * mask[..., None]
        ctx.save_for_backward(values)
        return values.square().sum()

    @staticmethod
    def backward(ctx, upstream):
        (values,) = ctx.saved_tensors
        return 2 * upstream * values, None


def entropy(logits, batch):
    log_probs = torch.log_softmax(logits, -1)
    return -(log_probs.exp() * log_probs).sum(-1).mean()


def z_loss(logits, batch):
    return 1e-2 * torch.logsumexp(logits.float(), -1).square().mean()


def labels_of_all(logits, batch):
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["input_ids"].flatten())


def row_by_row(logits, batch):
    return torch.stack([torch.logsumexp(row, -1).sum() for row in logits]).sum()


STATISTICS = {
    "mean of squares": lambda logits, _: logits.float().square().mean(),
    "logsumexp": lambda logits, _: torch.logsumexp(logits, -1).mean(),
    "z-loss": z_loss,
    "mean": lambda logits, _: logits.mean(),
    "std": lambda logits, _: logits.std(),
    "norm": lambda logits, _: logits.norm(),
    "max": lambda logits, _: logits.max(),
    "max of rows": lambda logits, _: logits.max(-1).values.sum(),
    "topk": lambda logits, _: logits.topk(3, -1).values.sum(),
    "softmax": lambda logits, _: torch.softmax(logits, -1)[..., 3].sum(),
    "entropy": entropy,
    "gather": lambda logits, batch: logits.gather(-1, batch["input_ids"][..., None]).sum(),
    "labels of all": labels_of_all,
    "at padding": at_padding,
    "by index": by_index,
    "the last column": lambda logits, _: logits[:, -1].square().sum(),
    "row by row": row_by_row,
    "masked in place": masked_in_place,
    "masked by a rule": masked_by_a_rule,
    "cumsum": lambda logits, _: logits.cumsum(1).square().mean(),
    "an autograd.Function": of_a_function,
}
WITHOUT_GRADIENT = {
    "argmax": lambda logits, _: logits.argmax(-1),
    "any": lambda logits, _: (logits > 0.1).any(-1),
    "comparison": lambda logits, _: (logits > 0).sum(-1),
    "numpy": lambda logits, _: torch.from_numpy(logits.detach().numpy().copy()),
    "list": lambda logits, _: torch.tensor(logits.tolist()),
    "finite": lambda logits, _: torch.isfinite(logits).all(),
}
FAST_CASES = ("mean of squares", "logsumexp", "std", "argmax", "at padding", "masked in place")


def statistics():
    for name in (*STATISTICS, *WITHOUT_GRADIENT):
        yield pytest.param(name, marks=() if name in FAST_CASES else pytest.mark.full)


@functools.cache
def stock(family="llama"):
    return build(family)


def launched(model=None, **settings):
    settings = {"chunk_size": 7, **LAUNCH_SETTINGS, **settings}
    return streambp.patch(copy.deepcopy(model or stock()), streambp.StreamConfig(**settings))


def value_of(model, batch, read):
    """A statistic and, if it has a gradient, those of all parameters, the loss's among them if
    there are labels."""
    model.zero_grad(set_to_none=True)
    output = model(**batch, use_cache=False)
    value = read(output.logits, batch)
    if value.requires_grad:
        (value if output.loss is None else value + output.loss).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return value.detach(), gradients


def batch_of(labelled, shape="both"):
    return {name: x for name, x in make(shape).items() if labelled or name != "labels"}


def check(ours, plain, batch, read):
    (value, our_gradients), (expected, gradients) = (
        value_of(model, batch, read) for model in (ours, plain)
    )
    torch.testing.assert_close(value, expected, rtol=1e-11, atol=1e-12)
    assert our_gradients.keys() == gradients.keys()
    assert not gradients or worst_error(our_gradients, gradients) <= MAX_FLOAT64_ERROR


@pytest.mark.fast(3)
@pytest.mark.parametrize("trains", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("labelled", [True, False], ids=["labels", "no labels"])
@pytest.mark.parametrize("name", statistics())
def test_statistics_are_the_unpatched_models(name, labelled, trains):
    """In the first call, which is a packed row until something reads padding, and in the next,
    which is none."""
    read = {**STATISTICS, **WITHOUT_GRADIENT}[name]
    ours, plain = launched().train(trains), copy.deepcopy(stock()).train(trains)
    batch = batch_of(labelled)
    check(ours, plain, batch, read)
    assert PADDING_READ_MESSAGE in tokens_or_reason(ours)
    check(ours, plain, batch, read)
    assert PADDING_READ_MESSAGE in tokens_or_reason(ours)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_statistics_without_a_graph(mode):
    """Of a call without one, and of one with a graph in which the statistic is logged."""
    ours, batch, read = launched(), batch_of(labelled=True), STATISTICS["std"]
    plain = copy.deepcopy(stock())
    with mode():
        expected = read(plain(**batch, use_cache=False).logits, batch)
        logits = ours(**batch, use_cache=False).logits
        torch.testing.assert_close(read(logits, batch), expected, rtol=1e-11, atol=0)
    torch.testing.assert_close(read(logits, batch), expected, rtol=1e-11, atol=0)

    def logged(logits, batch):
        with mode():
            torch.testing.assert_close(read(logits, batch), expected, rtol=1e-11, atol=0)
        return read(logits, batch)

    check(launched(), plain, batch, logged)


SETTINGS = {
    "offloaded": {"offload": "cpu", "saves": ("attn_out", "kv")},
    "weights on the host": {"weights": "cpu"},
    "without comparisons": {"compare_backward": False},
}


@pytest.mark.fast("left-llama-offloaded", "right-qwen3_moe-weights on the host")
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3_moe"])
@pytest.mark.parametrize("shape", ["left", "right"])
def test_shapes_families_and_settings(shape, family, settings):
    plain = zoo.build("qwen3_moe") if family == "qwen3_moe" else stock(family)
    ours, batch = launched(plain, **SETTINGS[settings]), batch_of(True, shape)
    for _ in range(2):
        check(ours, copy.deepcopy(plain), batch, STATISTICS["mean of squares"])


def masked_loss(logits, batch):
    """Of labels, which leave padding out by a rule."""
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)[:, 1:]
    first = batch["attention_mask"][:, :-1] == 0
    labels = labels.masked_fill(first, -100)
    logits = logits[:, :-1].float()
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="sum"
    )
    return loss + logits[labels != -100].logsumexp(-1).sum()


def test_whoever_leaves_padding_out_by_a_rule_has_a_packed_row():
    ours, plain = launched(), copy.deepcopy(stock())
    for _ in range(2):
        check(ours, plain, batch_of(labelled=False), masked_loss)
        assert isinstance(tokens_or_reason(ours), tuple)


def test_the_first_read_comes_late():
    """A statistic every third step, and one of evaluations alone."""
    ours, plain, batch = launched(), copy.deepcopy(stock()), batch_of(labelled=True)
    zero = lambda logits, _: torch.zeros(())  # noqa: E731
    for step in range(6):
        check(ours, plain, batch, zero if step % 3 < 2 else STATISTICS["std"])
        assert isinstance(tokens_or_reason(ours), tuple) == (step < 2)
    check(ours.eval(), plain.eval(), batch, zero)
    assert isinstance(tokens_or_reason(ours), tuple)


def test_one_position_is_real():
    """The last column, which is padding on the right."""
    ours, plain, batch = launched(), copy.deepcopy(stock()), batch_of(False, "right")
    expected = plain(**batch, use_cache=False, logits_to_keep=1).logits
    logits = ours(**batch, use_cache=False, logits_to_keep=1).logits
    assert not isinstance(logits, LazyLogits)
    torch.testing.assert_close(logits, expected, rtol=1e-11, atol=1e-12)


def scale_by_three(gradient):
    return gradient * 3


scale_by_three.__qualname__ = f"Engine.{SCALING_HOOK}.hook"


def test_an_engines_scale_reaches_padding():
    ours, plain, batch = launched(), copy.deepcopy(stock()), batch_of(labelled=False)
    expected = value_of(plain, batch, lambda logits, _: 3 * logits.square().mean())[1]

    def hooked(logits, _):
        logits.register_hook(scale_by_three)
        return logits.square().mean()

    assert worst_error(value_of(ours, batch, hooked)[1], expected) <= MAX_FLOAT64_ERROR


def test_a_function_with_a_gradient_at_padding_is_refused():
    """In the first call alone: the next one's rows are computed."""

    def read(logits, batch):
        return Squares.apply(logits, torch.ones_like(batch["attention_mask"]))

    ours, plain, batch = launched(), copy.deepcopy(stock()), batch_of(labelled=False)
    with pytest.raises(BackwardError, match="at padding"):
        value_of(ours, batch, read)
    check(ours, plain, batch, read)


def stepped(model, batch, read):
    """A statistic that is read when a layer's weights have changed; the head's are frozen."""
    model.lm_head.requires_grad_(False)
    model.model.norm.requires_grad_(False)
    output = model(**batch, use_cache=False)
    output.loss.backward()
    with torch.no_grad():
        for parameter in model.model.layers.parameters():
            parameter.data.mul_(1.5)  # a version that does not change
    return read(output.logits, batch)


def test_a_model_that_has_changed_is_noticed():
    ours, batch = launched(), batch_of(labelled=True)
    with pytest.raises(StreamBPError, match="after the model has changed"):
        stepped(ours, batch, STATISTICS["std"])
    check(ours, copy.deepcopy(ours).train(), batch, STATISTICS["std"])


def other_flags(model):
    model.model.layers[0].self_attn.scaling *= 2


def other_weights(model):
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(2)


@pytest.mark.parametrize("change", [other_flags, other_weights])
def test_a_model_that_drops_values_and_has_changed_is_noticed(change):
    """Where two draws cannot be compared."""
    noisy = copy.deepcopy(stock())
    for layer in noisy.model.layers:
        layer.self_attn.attention_dropout = 0.1
    ours, batch = launched(noisy), batch_of(labelled=True)
    logits = ours(**batch, use_cache=False).logits
    assert isinstance(tokens_or_reason(ours), tuple)
    change(ours)
    with pytest.raises(StreamBPError, match="after the model has changed"):
        STATISTICS["std"](logits, batch)


def padding_of_the_first_token(monkeypatch):
    """What a packed row had before: another token's values."""
    monkeypatch.setattr(deferred_rows.DeferredRows, "set_packed_states", lambda *_: None)
    try:
        test_statistics_are_the_unpatched_models("mean of squares", True, True)
    except BackwardError as error:
        raise AssertionError from error


def rows_without_a_graph(monkeypatch):
    real = deferred_rows.DeferredRows.compute
    monkeypatch.setattr(
        deferred_rows.DeferredRows, "compute", lambda self, graded: real(self, graded=False)
    )
    test_statistics_are_the_unpatched_models("mean of squares", True, True)


def no_comparison(monkeypatch):
    monkeypatch.setattr(deferred_rows.DeferredRows, "_compare", lambda *_: None)
    try:
        test_a_model_that_has_changed_is_noticed()
    except pytest.fail.Exception as error:
        raise AssertionError from error


def no_moment(monkeypatch):
    monkeypatch.setattr(deferred_rows.ModelSnapshot, "is_outdated", lambda *_: False)
    try:
        test_a_model_that_drops_values_and_has_changed_is_noticed(other_flags)
    except pytest.fail.Exception as error:
        raise AssertionError from error


def nobody_hears(monkeypatch):
    monkeypatch.setattr(calls.SharedPrefixes, "_caller", lambda *_: object())
    test_the_first_read_comes_late()


MUTANTS = [padding_of_the_first_token, rows_without_a_graph, no_comparison, no_moment, nobody_hears]


@pytest.mark.fast(3)
@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_found(mutant, monkeypatch):
    with pytest.raises(AssertionError):
        mutant(monkeypatch)
