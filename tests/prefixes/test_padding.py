"""Padded batches that are computed as one packed row, in float64 against the unpatched [B, T]
batch.

covers: prefixes/calls.py, prefixes/tree.py, prefixes/row_outputs.py, prefixes/admission.py,
model/causal_lm.py, model/padding.py
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import itertools
import pathlib

import pytest
import torch
import transformers

import streambp
from streambp.attention.spans import Spans
from streambp.errors import BackwardError
from streambp.model import causal_lm
from streambp.prefixes import calls
from streambp.prefixes.tree import PrefixTree, find_tree
from tests import families, zoo
from tests.conftest import SHARES_PREFIXES
from tests.families import VOCABULARY
from tests.oracle import MAX_FLOAT64_ERROR, gradients, lift_float32_casts, worst_error
from tests.prefixes.test_calls import (
    float64_everywhere,  # noqa: F401 - a fixture
    tokens_or_reason,
)
from tests.seeds import seeded
from tests.versions import needs_states

WIDTH = 23
ROUTER_OUTPUTS = {"output_router_logits": True}
FAMILIES = {
    "llama": {}, "qwen3": {}, "mistral": {}, "gemma2": {}, "gemma3": {}, "gpt_oss": ROUTER_OUTPUTS,
    "qwen3_moe": ROUTER_OUTPUTS,
    "mixtral": ROUTER_OUTPUTS, "deepseek_v3": {}, "gpt2": {}, "lfm2": {},
    "qwen3_next": ROUTER_OUTPUTS,
}  # fmt: skip
RECURRENT_FAMILIES = ("lfm2", "qwen3_next")
WITHOUT_LINEARS = ("gpt2",)  # it has Conv1D, whose products have no name among saves
SHAPES = {  # of each row: columns of padding on the left, tokens
    "left": [(0, 23), (9, 14), (16, 7), (20, 3)],
    "right": [(0, 23), (0, 14), (0, 7), (0, 1)],
    "both": [(2, 21), (5, 9), (0, 12), (19, 4)],
    "an empty row": [(0, 20), (0, 0), (3, 9)],
    "one token of padding": [(0, 22), (1, 22)],
    "all alike": [(4, 11)] * 4,
    "one row": [(3, 12)],
    "many rows": [(i % 5, 1 + i * 7 % 17) for i in range(64)],
}


ALL_SHAPES = {**SHAPES, "one token, then many": [(0, 1), (0, 15), (3, 5)]}


@functools.cache
def padded_batch(shape):
    """Labels are of all tokens but a row's first two."""
    generator, ranges = seeded(len(shape)), ALL_SHAPES[shape]
    ids = torch.randint(3, VOCABULARY, (len(ranges), WIDTH), generator=generator)
    if shape == "all alike":
        ids[:] = ids[0].clone()
    mask = torch.zeros_like(ids)
    labels = torch.full_like(ids, -100)
    for row, (start, length) in enumerate(ranges):
        mask[row, start : start + length] = 1
        labels[row, start + 2 : start + length] = ids[row, start + 2 : start + length]
    return {"input_ids": ids.masked_fill(mask == 0, 0), "labels": labels, "attention_mask": mask}


def make(shape):
    return {name: value.clone() for name, value in padded_batch(shape).items()}


@pytest.fixture(autouse=True)
def any_saving(monkeypatch, float64_everywhere):  # noqa: F811
    """One token of padding in 46 is too little."""
    monkeypatch.setattr(
        calls, "find_tree", functools.partial(find_tree, min_savings=0.0, min_prefix=8)
    )


def build(family):
    if family in families.FAMILIES and not FAMILIES.get(family):
        return families.build(family, torch.float64)
    return zoo.build(family, **FAMILIES.get(family, {}))


def packed(stock, rows="packed", chunk_size=7, **settings):
    return streambp.patch(
        copy.deepcopy(stock), streambp.StreamConfig(chunk_size=chunk_size, rows=rows, **settings)
    )


def lazily(model, **batch):
    """A program's own loss of logits, with another weight for each row."""
    model.zero_grad(set_to_none=True)
    labels = batch.pop("labels")[:, 1:]
    logits = model(**batch, use_cache=False).logits[:, :-1]
    scored = torch.log_softmax(logits, -1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    weights = torch.linspace(-1, 2, len(scored))[:, None] * (labels >= 0)
    loss = (scored * weights).sum()
    loss.backward()
    return loss.detach(), {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


LOSS_FUNCTIONS = {"labels": gradients, "lazy": lazily}


@functools.cache
def reference(family, shape, how):
    with pytest.MonkeyPatch.context() as patch:
        lift_float32_casts(patch)
        return LOSS_FUNCTIONS[how](build(family), **make(shape))


def check(ours, family, shape, how="labels", expected=None, **batch):
    expected_loss, expected = expected or reference(family, shape, how)
    loss, our_gradients = LOSS_FUNCTIONS[how](ours, **(batch or make(shape)))
    assert abs(loss - expected_loss) <= 1e-12 * abs(expected_loss)
    assert worst_error(our_gradients, expected) <= MAX_FLOAT64_ERROR
    ranges = ALL_SHAPES[shape]
    tokens = ranges[0][1] if shape == "all alike" else sum(length for _, length in ranges)
    assert tokens_or_reason(ours) == (sum(length for _, length in ranges), tokens)


SAVES = {"saves that fit": {}, "no saves": {"saves": ()}, "saves": {"saves": ("attn_out", "kv")}}
SAVES["products"] = {"saves": ("attn_out", "kv", "*proj")}
SETTINGS = {  # as many as shapes
    f"{name}, {offload}": {**saves, "offload": offload}
    for offload, (name, saves) in itertools.product(("none", "cpu"), SAVES.items())
}


def setting_of(family, shape, how):
    """A covering part of the product: each family meets each setting with labels and with lazy
    logits, and so does each shape; a family and a shape meet two settings."""
    return (family + shape + 3 * how) % len(SETTINGS)


def cases():
    """Fast: of each family one shape with labels and another with lazy logits, and of one all
    shapes."""
    for (f, family), (s, shape), (h, how) in itertools.product(
        *map(enumerate, (FAMILIES, SHAPES, LOSS_FUNCTIONS))
    ):
        fast = s == (f + 4 * h) % 8 or (family == "qwen3" and h == s % 2)
        fast = fast and (shape != "many rows" or (family == "qwen3" and how == "lazy"))
        marks = [] if fast else [pytest.mark.full]
        marks += [needs_states] if family in RECURRENT_FAMILIES else []
        yield pytest.param(family, shape, how, list(SETTINGS)[setting_of(f, s, h)], marks=marks)


def test_cases_cover_the_product():
    combinations = [case.values for case in cases()]
    for triple, number in {
        (0, 2, 3): 12 * 2 * 8,
        (1, 2, 3): 8 * 2 * 8,
        (0, 1, 2): 12 * 8 * 2,
    }.items():
        assert len({tuple(case[index] for index in triple) for case in combinations}) == number
    product_size = len(FAMILIES) * len(SHAPES) * len(LOSS_FUNCTIONS) * len(SETTINGS)
    print(
        f"{len(combinations)} of {product_size:,} combinations, {sum(not case.marks for case in cases())} "
        "in the fast tier"
    )


@pytest.mark.fast(3)
@pytest.mark.parametrize(("family", "shape", "how", "setting"), cases())
def test_gradients_are_exact(family, shape, how, setting):
    settings = dict(SETTINGS[setting])
    if family in WITHOUT_LINEARS and settings.get("saves") == SAVES["products"]["saves"]:
        settings["saves"] = ("attn_out",)
    check(packed(build(family), lazy_logits=how == "lazy", **settings), family, shape, how)


@pytest.mark.fast("dtype0", "dtype3")
@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int32, torch.float32, torch.bfloat16]
)
def test_masks_of_any_dtype(dtype):
    batch = make("both")
    check(
        packed(build("qwen3")),
        "qwen3",
        "both",
        **{**batch, "attention_mask": batch["attention_mask"].to(dtype)},
    )


@pytest.mark.fast("gpt2-left", "llama-both")
@pytest.mark.parametrize("shape", ["left", "both"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_positions_that_count_tokens(family, shape):
    """As generation and TRL count them, 1 at padding."""
    batch, stock = make(shape), build(family)
    positions = batch["attention_mask"].cumsum(1) - 1
    batch["position_ids"] = positions.masked_fill(batch["attention_mask"] == 0, 1)
    check(packed(stock), family, shape, expected=gradients(stock, **batch), **batch)


HYBRIDS = (
    *RECURRENT_FAMILIES,
    "falcon_h1",
    "bamba",
    "granitemoehybrid",
    "jamba",
    "olmo_hybrid",
    "nemotron_h",
)


@pytest.mark.full
@pytest.mark.parametrize("number", range(8))
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=needs_states if name in HYBRIDS else ())
        for name in {**FAMILIES, **dict.fromkeys(HYBRIDS)}
    ],
)
def test_random_lengths(family, number):
    """Rows of 0 to 23 tokens, wherever they stand, in chunks of any size; at times they begin
    alike."""
    generator = seeded(100 * number + len(family))

    def draw(low, high):
        return int(torch.randint(low, high + 1, (), generator=generator))

    ranges = [(start, draw(0, WIDTH - start)) for start in (draw(0, 6) for _ in range(draw(2, 7)))]
    ranges.insert(draw(0, len(ranges)), (0, WIDTH))
    batch = {"input_ids": torch.randint(3, VOCABULARY, (len(ranges), WIDTH), generator=generator)}
    begin_alike = number % 2 == 1
    mask = torch.zeros_like(batch["input_ids"])
    for row, (start, length) in enumerate(ranges):
        mask[row, start : start + length] = 1
        if begin_alike and row % 2 and length:
            common = min(length, WIDTH - ranges[row - 1][0], draw(1, 20))
            first = ranges[row - 1][0]
            batch["input_ids"][row, start : start + common] = batch["input_ids"][
                row - 1, first : first + common
            ]
    scored = (mask * (mask.cumsum(1) > 2)).bool()
    batch |= {"labels": batch["input_ids"].masked_fill(~scored, -100), "attention_mask": mask}
    stock = build(family)
    saves = ((), ("attn_out", "kv"))[draw(0, 1)]
    ours = packed(stock, chunk_size=draw(1, 24), saves=saves, lazy_logits=bool(draw(0, 1)))
    how = LOSS_FUNCTIONS["lazy" if ours._streambp.config.lazy_logits else "labels"]
    expected_loss, expected = how(stock, **batch)
    loss, our_gradients = how(ours, **batch)
    assert abs(loss - expected_loss) <= 1e-12 * abs(expected_loss)
    assert our_gradients.keys() == expected.keys()
    assert worst_error(our_gradients, expected) <= MAX_FLOAT64_ERROR


@needs_states
@pytest.mark.parametrize("family", RECURRENT_FAMILIES)
def test_a_row_of_one_token_comes_first(family):
    """Its chunk goes on to no other, those of the row behind it do."""
    check(packed(build(family)), family, "one token, then many")


def test_a_batch_of_padding_alone():
    batch = make("left")
    batch["attention_mask"].zero_()
    ours = packed(build("llama"))
    ours(**{**batch, "labels": torch.full_like(batch["labels"], -100)})
    assert "padding alone" in tokens_or_reason(ours)


class RepackedModel(torch.nn.Module):
    """A Linear of frozen bytes that is for evaluation alone once it was run in eval mode, as
    bitsandbytes' are on a CPU."""

    def __init__(self, inner):
        super().__init__()
        scaled = (inner.weight.detach() * 512).round().clamp(-128, 127).to(torch.int8)
        self.weight = torch.nn.Parameter(scaled, requires_grad=False)
        self.for_evaluation = False

    def forward(self, x):
        self.for_evaluation |= not self.training and not x.requires_grad
        product = torch.nn.functional.linear(x, self.weight.to(x.dtype) / 512)
        return product.detach() if self.for_evaluation else product


def test_a_trial_leaves_quantised_weights_as_they_are(monkeypatch):
    """It is run in eval mode, without gradients."""
    # bitsandbytes' modules are not foreign
    monkeypatch.setattr(calls, "why_rows", lambda module: None)
    stock = families.build("llama", torch.float64)
    for layer in stock.model.layers:
        layer.mlp.up_proj = RepackedModel(layer.mlp.up_proj)
    model, batch = packed(stock, rows="auto"), make("right")
    our_gradients = gradients(model, **batch)[1]
    assert tokens_or_reason(model) == (45, 45)
    assert not any(layer.mlp.up_proj.for_evaluation for layer in model.model.layers)
    assert worst_error(our_gradients, gradients(stock, **batch)[1]) <= MAX_FLOAT64_ERROR


def test_the_token_at_the_highest_position_of_padding_has_a_gradient():
    """Its outputs are zero where its embedding is, and Gemma 3n takes a root of their size."""
    batch = make("right")
    batch = {name: value[1:2] for name, value in batch.items()}  # one row, with padding behind it
    stock = zoo.build("gemma3n_text")
    model = packed(stock, rows="auto")
    our_gradients = gradients(model, **batch)[1]
    assert tokens_or_reason(model) == (14, 14)
    expected = gradients(copy.deepcopy(stock), **batch)[1]
    assert all(bool(gradient.isfinite().all()) for gradient in expected.values())
    assert worst_error(our_gradients, expected) <= MAX_FLOAT64_ERROR


def test_a_tenth_has_to_be_saved(monkeypatch):
    monkeypatch.setattr(calls, "find_tree", find_tree)
    ours = packed(build("llama"))
    gradients(ours, **make("one token of padding"))
    assert "saves too little: the last call's 46 tokens would be 44" in tokens_or_reason(ours)


def test_layers_compute_no_padding(attended_chunks):
    ours = packed(build("llama"))
    gradients(ours, **make("right"))
    attended_chunks.clear()
    ours(**make("right"), use_cache=False)
    assert sum(attended_chunks) == len(ours.model.layers) * sum(
        length for _, length in SHAPES["right"]
    )


def with_labels(model, batch):
    return model(**batch, use_cache=False)


def without_labels(model, batch):
    return model(
        **{name: value for name, value in batch.items() if name != "labels"}, use_cache=False
    )


CALLERS = {  # of the model, settings, whether it trains, whether padding is shown
    "labels": (with_labels, {}, True, False),
    "labels, evaluated": (with_labels, {}, False, False),
    "labels, evaluated with logits": (with_labels, {"eval_logits": True}, False, True),
    "labels and hidden states": (
        lambda m, b: m(**b, use_cache=False, output_hidden_states=True),
        {},
        True,
        True,
    ),
    "labels and router logits": (
        lambda m, b: m(**b, use_cache=False, output_router_logits=True),
        {},
        True,
        True,
    ),
    "per-token values": (
        lambda m, b: m(**b, use_cache=False, output_log_probs=True),
        {},
        True,
        False,
    ),
    "labels, the model's head": (with_labels, {"head": False}, True, True),
    "logits": (without_labels, {}, True, True),
    "lazy logits": (without_labels, {"lazy_logits": True}, True, False),
    "hidden states": (
        lambda m, b: m.model(input_ids=b["input_ids"], attention_mask=b["attention_mask"]),
        {},
        True,
        True,
    ),
}


@pytest.mark.fast("labels, evaluated with logits", "labels and router logits")
@pytest.mark.parametrize("caller", CALLERS)
def test_auto_packs_where_nobody_sees_padding(caller):
    """Where somebody does, all values at padding are the unpatched model's."""
    call, settings, trains, reads_padding = CALLERS[caller]
    stock, batch = zoo.build("qwen3_moe"), make("both")
    ours = packed(stock, rows="auto", **settings).train(trains)
    output = call(ours, batch)
    assert ("gets values at padding" in tokens_or_reason(ours)) == reads_padding
    assert isinstance(tokens_or_reason(ours), str) == reads_padding
    if reads_padding:
        expected = call(stock.train(trains), batch)
        for name in ("logits", "last_hidden_state"):
            if getattr(output, name, None) is not None:
                torch.testing.assert_close(output[name], expected[name], rtol=1e-10, atol=1e-12)
    packed_model = packed(stock, rows="packed", **settings).train(trains)
    call(packed_model, batch)
    assert isinstance(tokens_or_reason(packed_model), tuple)


def test_auto_shares_prefixes_where_there_is_no_padding():
    batch = {"input_ids": make("all alike")["input_ids"]}
    ours = packed(build("llama"), rows="auto")
    logits = ours(**batch, use_cache=False).logits
    assert tokens_or_reason(ours) == (4 * WIDTH, WIDTH)
    torch.testing.assert_close(
        logits, build("llama")(**batch, use_cache=False).logits, rtol=1e-10, atol=1e-12
    )


@pytest.mark.skipif(SHARES_PREFIXES, reason="STREAMBP_TEST_ROWS changes the default")
def test_it_is_the_default():
    """Of `patch` with no settings: a user's padded batch with labels."""
    stock, batch = build("llama"), make("both")
    (_, expected), ours = gradients(stock, **batch), streambp.patch(copy.deepcopy(stock))
    assert worst_error(gradients(ours, **batch)[1], expected) <= MAX_FLOAT64_ERROR
    assert isinstance(tokens_or_reason(ours), tuple)


def test_auto_is_found_where_it_looks_at_no_caller(monkeypatch):
    monkeypatch.setattr(causal_lm, "hides_padding", lambda *_: True)
    with pytest.raises(AssertionError):
        test_auto_packs_where_nobody_sees_padding("labels and router logits")


@pytest.mark.parametrize("shape", ["left", "right"])
def test_labels_that_padding_predicts_compute_rows(shape):
    """The first token of a row on the left, and labels of padding itself on the right."""
    batch, stock = make(shape), build("llama")
    batch["labels"] = batch["input_ids"].clone()
    (expected_loss, expected), ours = gradients(stock, **batch), packed(stock)
    loss, our_gradients = gradients(ours, **batch)
    assert abs(loss - expected_loss) <= 1e-12 * abs(expected_loss)
    assert worst_error(our_gradients, expected) <= MAX_FLOAT64_ERROR
    assert "predicts a label" in tokens_or_reason(ours)


def router_losses():
    """transformers' own, from every modeling file that has one; those that are made of another's
    are the same function."""
    root = pathlib.Path(transformers.__file__).parent / "models"
    for file in sorted(root.glob("*/modeling_*.py")):
        # Others' scores have another form: Doge's layers do not share, Switch Transformers are
        # encoders and decoders.
        if "def load_balancing_loss_func(" in file.read_text() and file.parent.name not in (
            "doge",
            "switch_transformers",
        ):
            yield pytest.param(
                f"transformers.models.{file.parent.name}.{file.stem}", id=file.parent.name
            )


@pytest.mark.fast("mixtral", "gpt_oss")
@pytest.mark.parametrize("home", router_losses())
def test_router_losses_that_leave_padding_out(home):
    loss = importlib.import_module(home).load_balancing_loss_func
    mask, generator = make("both")["attention_mask"], seeded(3)
    logits = [torch.randn(mask.numel(), 4, generator=generator) for _ in range(2)]
    other_logits = [
        x.where(mask.flatten()[:, None] > 0, torch.randn(x.shape, generator=generator))
        for x in logits
    ]
    assert "attention_mask" in inspect.signature(loss).parameters
    computed, expected = (loss(tuple(x), 4, 2, attention_mask=mask) for x in (other_logits, logits))
    torch.testing.assert_close(computed, expected, rtol=1e-12, atol=0)


@needs_states
def test_a_loss_that_takes_padding_in_computes_rows():
    """Bamba's z-loss is a mean over all logits."""
    stock, batch = zoo.build("bamba", z_loss_coefficient=0.1), make("right")
    ours = packed(stock)
    assert (
        worst_error(gradients(ours, **batch)[1], gradients(stock, **batch)[1]) <= MAX_FLOAT64_ERROR
    )
    assert "z_loss_coefficient" in tokens_or_reason(ours)


def first_tokens_that_read_the_row_before(monkeypatch):
    real = PrefixTree.spans

    def mutant(self, window=None):
        spans = real(self, window)
        runs = [
            run if run.k1 is not None or not run.q0 else type(run)(run.q0, run.q1, run.q0 - 1)
            for run in spans.rows[0]
        ]
        return Spans(spans.length, (tuple(runs),), window)

    monkeypatch.setattr(PrefixTree, "spans", mutant)
    monkeypatch.setattr(calls.PackedRowTrials, "_try", lambda *_: None)
    check(packed(build("llama")), "llama", "right")


def positions_of_tokens_alone(monkeypatch):
    """A left-padded row's first token has its column's position, where nobody says otherwise."""
    real = calls.pack_arguments

    def mutant(kwargs, tree, takes_positions):
        counted = (kwargs["attention_mask"].cumsum(1) - 1).clamp(min=0)
        return real({**kwargs, "position_ids": counted}, tree, takes_positions)

    monkeypatch.setattr(calls, "pack_arguments", mutant)
    check(packed(build("gpt2")), "gpt2", "left")


def labels_behind_padding(monkeypatch):
    monkeypatch.setattr(calls, "_label_mask", lambda *_: None)
    try:
        test_labels_that_padding_predicts_compute_rows("left")
    except BackwardError as error:
        raise AssertionError from error


def a_router_loss_that_counts_padding(monkeypatch):
    stock = build("qwen3_moe")
    expected = gradients(stock, **make("both"))
    home = importlib.import_module(type(stock).__module__)
    real = home.load_balancing_loss_func
    monkeypatch.setattr(home, "load_balancing_loss_func", lambda *args, **_: real(*args[:3]))
    try:
        check(packed(stock), "qwen3_moe", "both", expected=expected)
    except BackwardError as error:
        raise AssertionError from error


@pytest.mark.parametrize(
    "mutant",
    [
        first_tokens_that_read_the_row_before, positions_of_tokens_alone, labels_behind_padding,
        a_router_loss_that_counts_padding,
    ],
)  # fmt: skip
def test_mutants_are_found(mutant, monkeypatch):
    with pytest.raises(AssertionError):
        mutant(monkeypatch)
