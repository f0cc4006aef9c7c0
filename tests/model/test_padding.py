"""Padding on the left: what it may decide, which is nothing, and the one label that eager attention
predicts otherwise.

covers: admission/rehearsal.py, model/padding.py, verify/compare.py
"""

from __future__ import annotations

import copy
import warnings

import pytest
import torch

import streambp
from streambp.admission import rehearsal
from streambp.verify.compare import verify
from tests import zoo
from tests.families import LENGTH, build, make_batch
from tests.model.test_families import EXACT_FAMILIES
from tests.oracle import gradients, worst_error
from tests.seeds import seed_torch
from tests.tiers import thinned

PADDING_TOKENS = 7  # of the first row of a left-padded batch; the second has 2
CACHED_MASK_FAMILIES = (
    "bloom",
    "codegen",
    "falcon",
    "gpt_neo",
    "gptj",
    "mpt",
    "xglm",
    "inkling_text",
)
EAGER = ("gemma2", "vaultgemma", "mimo_v2_flash")


pytestmark = pytest.mark.usefixtures("float64_everywhere")


def padded(labelled=None, pads=(PADDING_TOKENS, 2), length=LENGTH):
    """A left-padded batch; only "after padding": its first real token alone is labelled, "others":
    all but that."""
    batch = make_batch("plain", length=length)
    mask = torch.ones_like(batch["input_ids"])
    first_tokens = torch.zeros_like(mask)
    for row, count in enumerate(pads):
        mask[row, :count] = 0
        first_tokens[row, count] = 1
    batch["labels"][mask == 0] = -100
    if labelled is not None:
        batch["labels"][(first_tokens == 1) == (labelled == "others")] = -100
    batch["attention_mask"] = mask
    return {**batch, "num_items_in_batch": 1}  # a sum: labels' gradients add up


def patched(stock, chunk_size=5, **settings):
    return streambp.patch(
        copy.deepcopy(stock), streambp.StreamConfig(chunk_size=chunk_size, **settings)
    )


def difference(grads, expected):
    """Of the whole gradient, relative."""
    assert grads.keys() == expected.keys()
    total = torch.stack([g.norm() for g in expected.values()]).norm()
    return float(torch.stack([(grads[n] - g).norm() for n, g in expected.items()]).norm() / total)


def with_attention(model, attention):
    twin = copy.deepcopy(model)
    twin.config._attn_implementation = attention
    return twin


def paths(model):
    return {layer.path for layer in streambp.describe(model).layers}


@pytest.mark.fast("llama")
@pytest.mark.parametrize(
    "name",
    thinned(
        ["llama", "qwen3_moe", "cohere2", *EAGER],
        lambda name: name not in ("qwen3_moe", "cohere2", "vaultgemma"),
    ),
)
@pytest.mark.filterwarnings("ignore:Set the label of the first token after left padding")
def test_one_label_is_all_that_eager_attention_predicts_otherwise(name):
    stock = with_attention(zoo.build(name), "eager")
    ours = patched(stock)
    assert (
        worst_error(gradients(ours, **padded("others"))[1], gradients(stock, **padded("others"))[1])
        <= 1e-10
    )
    expected, grads = (gradients(model, **padded("after padding"))[1] for model in (stock, ours))
    assert difference(grads, expected) > 0.01
    full_grads = gradients(ours, **padded())[1]
    parts = [gradients(ours, **padded(labelled))[1] for labelled in ("others", "after padding")]
    assert (
        difference(
            {name: parts[0].get(name, 0) + parts[1].get(name, 0) for name in full_grads}, full_grads
        )
        <= 1e-12
    )
    if name in ("llama", "qwen3_moe", "cohere2"):  # sdpa knows all of their attention
        expected = gradients(with_attention(stock, "sdpa"), **padded("after padding"))[1]
        assert worst_error(grads, expected) <= 1e-10


def cached(name):
    changes = {"new_decoder_architecture": False, "alibi": True} if name == "falcon" else {}
    return zoo.build(name, **changes)


@pytest.mark.fast(4)
@pytest.mark.parametrize(
    ("first", "name"),
    [
        pytest.param(first, name, marks=() if (number - order) % 3 == 0 else pytest.mark.full)
        for order, first in enumerate(["plain", "left-padded", "long padding"])
        for number, name in enumerate(CACHED_MASK_FAMILIES)
    ],
)
def test_layers_that_attend_by_themselves_whatever_came_first(name, first):
    stock = cached(name)
    ours = patched(stock)
    batches = {
        "plain": make_batch("plain"),
        "left-padded": padded("others"),
        "long padding": padded("others", (14, 16)),
    }
    for batch in [first, *(batch_name for batch_name in batches if batch_name != first)]:
        (expected_loss, expected), (loss, grads) = (
            gradients(model, **batches[batch]) for model in (stock, ours)
        )
        assert abs(loss - expected_loss) <= 1e-12 * abs(expected_loss)
        assert worst_error(grads, expected) <= 1e-10
        assert paths(ours) == {"streams"}


@pytest.mark.filterwarnings("ignore:Set the label of the first token after left padding")
@pytest.mark.parametrize(
    "name",
    [
        name
        if name in ("bloom", "falcon", "gptj", "mpt")
        else pytest.param(name, marks=pytest.mark.full)
        for name in CACHED_MASK_FAMILIES
    ],
)
def test_what_padding_predicts_does_not_depend_on_chunks(name):
    """A query that reads nothing gives 0 in these as well, so every chunk size gives the same
    gradients."""
    check_chunk_sizes(name)


def check_chunk_sizes(name):
    stock = cached(name)
    runs = [gradients(patched(stock, size), **padded())[1] for size in (3, 5, 16)]
    assert difference(runs[0], runs[2]) <= 1e-12
    assert difference(runs[1], runs[2]) <= 1e-12


def test_empty_queries_of_layers_that_attend_by_themselves_give_zero():
    """A layer's output at padding is what it would be without attention's part."""
    check_zero()


def check_zero():
    stock = zoo.build("gptj")
    inputs = padded()
    model = copy.deepcopy(stock)
    for layer in model.transformer.h:
        torch.nn.init.zeros_(layer.attn.out_proj.weight)
    streambp.patch(model, streambp.StreamConfig(chunk_size=5))
    hidden = model.transformer(
        inputs["input_ids"], attention_mask=inputs["attention_mask"], use_cache=False
    ).last_hidden_state
    ours = patched(stock)
    output = ours.transformer(
        inputs["input_ids"], attention_mask=inputs["attention_mask"], use_cache=False
    ).last_hidden_state
    assert torch.equal(output[0, :PADDING_TOKENS], hidden[0, :PADDING_TOKENS])
    assert not torch.equal(output[0, PADDING_TOKENS:], hidden[0, PADDING_TOKENS:])


FIRST_TOKENS = {"one token": 1, "two tokens": 2, "five tokens": 5}


@pytest.mark.fast(4)
@pytest.mark.parametrize(
    "first",
    [*FIRST_TOKENS, "padding alone", "position_ids of another length", "weights to be loaded"],
)
@pytest.mark.parametrize("name", ["qwen3", "bloom"])
def test_the_first_batch_decides_nothing(name, first):
    stock = zoo.build(name)
    ours = patched(stock)
    if first in FIRST_TOKENS:
        gradients(ours, **make_batch("plain", length=FIRST_TOKENS[first]))
    elif first == "padding alone":
        gradients(ours, **padded("others", (LENGTH - 2, LENGTH - 2)))
    elif first == "weights to be loaded":
        weights = {name: tensor.clone() for name, tensor in ours.state_dict().items()}
        with torch.no_grad():
            for parameter in ours.parameters():
                parameter.fill_(torch.nan)
        gradients(ours, **make_batch("plain"))
        ours.load_state_dict(weights)
    elif name == "qwen3":
        with pytest.raises((streambp.StreamBPError, RuntimeError)):
            ours(
                **make_batch("plain"), position_ids=torch.arange(LENGTH - 3)[None], use_cache=False
            )
    for mode in ("plain", "left-padded"):
        expected, grads = (gradients(model, **make_batch(mode))[1] for model in (stock, ours))
        assert worst_error(grads, expected) <= 1e-10
        assert paths(ours) == {"streams"}


@pytest.mark.parametrize("pads", [(14, 16), (20, 20)])
def test_padding_does_not_hide_a_convolution(pads):
    """Hidden states of padding are all alike: a layer that mixes neighbours could pass for one that
    does not."""
    stock = zoo.build("llama")
    mlp = type(stock.model.layers[1].mlp)
    real = mlp.forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mlp, "forward", lambda self, x: real(self, x + 0.5 * torch.roll(x, 1, 1)))
        first = padded("others", pads)
        first["input_ids"][first["attention_mask"] == 0] = 0
        ours = patched(stock)
        for batch in (first, make_batch("plain")):
            expected, grads = (gradients(model, **batch)[1] for model in (stock, ours))
            assert worst_error(grads, expected) <= 1e-10
        assert paths(ours) == {"checkpoints"}


def test_a_verdict_is_of_one_kind_of_call():
    """A layer that mixes tokens only when it is given something stays whole for such calls
    alone."""
    stock = zoo.build("llama")
    layer = type(stock.model.layers[0])
    real = layer.forward

    def mixing(self, hidden_states, *args, mix=None, **kwargs):
        hidden_states = (
            hidden_states if mix is None else hidden_states + torch.roll(hidden_states, 1, 1) * mix
        )
        return real(self, hidden_states, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer, "forward", mixing)
        ours = patched(stock)
        for mix, path in (
            (torch.tensor(0.5), "checkpoints"),
            (None, "streams"),
            (torch.tensor(0.2), "checkpoints"),
        ):
            batch = make_batch("plain") if mix is None else {**make_batch("plain"), "mix": mix}
            expected, grads = (gradients(model, **batch)[1] for model in (stock, ours))
            assert worst_error(grads, expected) <= 1e-10
            assert paths(ours) == {path}


def test_the_probe_leaves_the_random_numbers_alone():
    stock = zoo.build("llama")
    seed_torch(3)
    expected = torch.rand(())
    ours = patched(stock)
    seed_torch(3)
    gradients(ours, **make_batch("plain"))
    assert all(
        layer.layer_state.tests.results
        for layer in ours._streambp.wrappers
        if hasattr(layer, "layer_state")
    )
    assert torch.equal(torch.rand(()), expected)


@pytest.mark.parametrize("scale", [0.0, 1e-4, 1e4])
def test_probed_tokens_are_as_large_as_the_layers_own(scale):
    hidden_states = torch.randn(2, LENGTH, 64) * scale
    tokens = rehearsal.random_like(hidden_states)
    assert tokens.shape == (2, rehearsal.MAX_TRIAL_TOKENS, 64)
    assert 0.8 < tokens.std() / (scale * 0.67 if scale else 1.0) < 1.2


def test_warning_names_the_label_once():
    stock = with_attention(build("qwen3", torch.float64), "eager")
    ours = patched(stock)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours(**padded("others"), use_cache=False)
        ours(**make_batch("right-padded"), use_cache=False)
        patched(with_attention(stock, "sdpa"))(**padded(), use_cache=False)
    with pytest.warns(UserWarning, match="label of the first token after left padding to -100"):
        ours(**padded(), use_cache=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours(**padded(), use_cache=False)
    shifted = padded()
    labels = torch.nn.functional.pad(shifted["labels"][:, 1:], (0, 1), value=-100)
    with pytest.warns(UserWarning, match="first token after left padding to -100"):
        patched(stock)(**{**shifted, "labels": labels, "shift_labels": labels}, use_cache=False)


@pytest.mark.parametrize("name", ["gemma2", "bloom"])
def test_verify_does_not_blame_streaming_for_padding(name):
    model = zoo.build(name)
    result = verify(model, 33, left_padding=9)
    assert result.exact, str(result)
    assert "has no label here" in str(result)
    assert "has no label here" not in str(verify(model, 33))
    with pytest.raises(streambp.StreamBPError, match="pass 0 to 16"):
        verify(model, 33, left_padding=17)


@pytest.mark.full
@pytest.mark.parametrize("name", EXACT_FAMILIES)
def test_every_family_streams_the_same_layers_whatever_came_first(name):
    stock = zoo.build(name)
    layer_lists = []
    for first in ("plain", "left-padded"):
        ours = patched(stock)
        for mode in (first, "left-padded"):
            ours(**make_batch(mode), use_cache=False)
        layer_lists.append([(layer.path, layer.reason) for layer in streambp.describe(ours).layers])
    assert layer_lists[0] == layer_lists[1]
