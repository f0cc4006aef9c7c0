"""Kernels that write through pointers, beside the unpatched model with the same kernels. [Note:
writes through pointers]

covers: admission/own_run.py, admission/trials.py, layer/layer_state.py, sharded/call.py
"""

from __future__ import annotations

import copy
import itertools

import pytest
import torch

import streambp
from streambp.admission import trials
from streambp.admission.own_run import StreamingMismatchError
from streambp.errors import BackwardError, UnsupportedModelError
from streambp.layer.layer_state import OverwrittenTensors
from streambp.offload import manager_of
from streambp.sharded import call as sharded_call
from streambp.source import undecorate
from tests import zoo
from tests.distributed.one_rank import split_over_one_rank, with_shifted_labels
from tests.families import build, make_batch, mix_neighbours
from tests.offload.test_auto import Injected
from tests.opaque_kernels import install
from tests.oracle import MAX_FLOAT64_ERROR, gradients, relative_l2, worst_error
from tests.versions import needs_states

HYBRID = "qwen3_next"
LIGER = ("norm", "rotation", "gate")
SINGLE_KERNELS = (("norm",), ("rotation",), ("gate",))
DENSE = (
    *SINGLE_KERNELS,
    LIGER,
    ("qkv",),
    ("add",),
    ("add over x",),
    ("add over residual",),
    ("norm", "gate", "qkv", "add"),
)
KERNELS = {
    "qwen3": DENSE,
    "llama": DENSE,
    "gemma3": (*SINGLE_KERNELS, LIGER),
    HYBRID: (*SINGLE_KERNELS, LIGER),
}
SAVES = ((), ("attn_out",), ("attn_out", "kv"), ("*",))
FAST_CASES = (
    ("qwen3", ("norm",), (), "none", False),
    ("qwen3", LIGER, ("*",), "cpu", False),
    ("qwen3", LIGER, ("attn_out", "kv"), "none", True),
    ("qwen3", ("qkv",), ("attn_out",), "none", False),
    ("qwen3", ("add over residual",), ("*",), "none", True),
    ("llama", LIGER, ("*",), "none", False),
    ("llama", LIGER, (), "auto", False),
    ("llama", ("gate",), (), "none", True),
    ("llama", ("add over x",), (), "auto", False),
    ("llama", ("add over residual",), ("*",), "cpu", False),
    ("llama", ("add over residual",), (), "none", False),
    ("gemma3", LIGER, ("attn_out",), "none", False),
    ("gemma3", LIGER, ("attn_out", "kv"), "none", True),
    (HYBRID, LIGER, (), "none", False),
)


def rows():
    for family, sets in KERNELS.items():
        for kernels, split, offload in itertools.product(
            sets, (False, True), ("none", "cpu", "auto")
        ):
            for saves in ((),) if offload == "auto" else SAVES:
                row = (family, kernels, saves, offload, split)
                if split and family == HYBRID:
                    continue
                marks = [
                    *([] if row in FAST_CASES else [pytest.mark.full]),
                    *([needs_states] if family == HYBRID else []),
                ]
                names = (
                    family,
                    "+".join(kernels),
                    "+".join(saves) or "nothing",
                    offload,
                    "split" if split else "whole",
                )
                yield pytest.param(*row, marks=marks, id="-".join(names))


@pytest.fixture
def float64(float64_oracle):
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def model_with(monkeypatch, family, *kernels):
    dtype = torch.get_default_dtype()
    stock = build(family, dtype) if family != HYBRID else zoo.build(family)
    install(monkeypatch, stock, *kernels)
    return stock


def patched(stock, **settings):
    ours = streambp.patch(copy.deepcopy(stock), streambp.StreamConfig(chunk_size=5, **settings))
    if settings.get("offload") == "auto":
        manager_of(ours)._given_engine = Injected()  # on a link that carries everything
    return ours


def error(stock, batch=None, steps=1, **settings):
    """Of the last step's gradients."""
    batch = make_batch("plain") if batch is None else batch
    expected_loss, expected = gradients(stock, **batch)
    ours = patched(stock, **settings)
    for _ in range(steps):
        loss, grads = gradients(ours, **batch)
    assert abs(loss - expected_loss) <= 1e-6 * abs(expected_loss)
    return worst_error(grads, expected), ours


def refusal(family, kernels, saves, split):
    """What is refused by name; None: all is exact."""
    if split and "add over residual" in kernels:
        return "DecoderLayer overwrites its hidden_states"
    if saves == ("*",) and "add over x" in kernels:
        return r"The output of self_attn\.o_proj is changed in place"
    if saves == ("*",) and family == "llama" and "rotation" in kernels:
        return r"The outputs of self_attn\.q_proj and self_attn\.k_proj are changed in place"
    return None


@pytest.mark.fast(15)
@pytest.mark.parametrize(("family", "kernels", "saves", "offload", "split"), rows())
def test_gradients_are_exact_or_refused_at_the_first_call(
    family, kernels, saves, offload, split, float64, monkeypatch
):
    stock, batch = model_with(monkeypatch, family, *kernels), make_batch("plain")
    if split:
        batch = with_shifted_labels(batch)
    message = refusal(family, kernels, saves, split)
    expected = gradients(stock, **make_batch("plain"))[1]
    if split:
        split_over_one_rank(monkeypatch)
    ours = patched(stock, saves=saves, offload=offload)
    if message is not None:
        with pytest.raises(UnsupportedModelError, match=message):
            ours(**batch, use_cache=False)
        return
    for _ in range(3 if offload == "auto" else 1):
        grads = gradients(ours, **batch)[1]
    assert worst_error(grads, expected) <= MAX_FLOAT64_ERROR
    assert {layer.path for layer in streambp.describe(ours).layers} == {"streams"}, (
        streambp.describe(ours)
    )


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_in_float32(family, monkeypatch):
    stock = model_with(monkeypatch, family, *LIGER)
    expected = gradients(stock, **make_batch("plain"))[1]
    assert relative_l2(gradients(patched(stock), **make_batch("plain"))[1], expected) <= 1e-6


def test_what_is_overwritten_is_neither_chosen_nor_counted(float64, monkeypatch):
    """Llama's rotation writes over q_proj's and k_proj's outputs."""
    plain = error(build("llama", torch.float64), steps=2, offload="auto")[1]
    ours = error(model_with(monkeypatch, "llama", "rotation"), steps=2, offload="auto")[1]
    described = streambp.describe(ours)
    assert {"attn_out", "kv", "self_attn.v_proj", "mlp.gate_proj"} <= set(described.saves)
    assert not {"self_attn.q_proj", "self_attn.k_proj"} & set(described.saves)
    assert "not self_attn.q_proj: layers that overwrite it compute it again" in str(described)
    layers, tokens = 2, make_batch("plain")["input_ids"].numel()
    features = (4 + 2) * 8
    spared = saved(plain) - saved(ours)
    assert spared == layers * tokens * features * 8


def saved(model):
    return sum(model._streambp.saves_policy.latest.bytes.values())


def test_what_only_some_layers_overwrite_is_saved_in_the_others(float64, monkeypatch):
    stock = model_with(monkeypatch, "llama", "rotation")
    rotated = stock.model.layers[0].self_attn
    monkeypatch.setattr(type(rotated), "forward", only_in(rotated, type(rotated).forward))
    off, ours = error(stock, steps=2, offload="auto")
    assert off <= MAX_FLOAT64_ERROR
    described = streambp.describe(ours)
    assert "self_attn.q_proj" in described.saves
    assert "not self_attn.q_proj: layers that overwrite it compute it again" in str(described)


def only_in(module, real):
    """The forward of a module's class with its keys rotated in this one alone."""

    def forward(self, *args, position_embeddings, **kwargs):
        cos, sin = position_embeddings
        if self is not module and self.layer_idx != module.layer_idx:
            space = undecorate(real).__globals__
            kernel, space["apply_rotary_pos_emb"] = (
                space["apply_rotary_pos_emb"],
                lambda q, k, cos, sin: (q, k),
            )
            try:
                return real(self, *args, position_embeddings=position_embeddings, **kwargs)
            finally:
                space["apply_rotary_pos_emb"] = kernel
        return real(self, *args, position_embeddings=(cos, sin), **kwargs)

    forward.__wrapped__ = real
    return forward


class TestAttentionsOutput:
    """A kernel halves it where it is."""

    @pytest.fixture
    def stock(self, float64, monkeypatch):
        stock = model_with(monkeypatch, "qwen3", "qkv and halves")
        # which does not save it for its own backward, as sdpa does
        stock.set_attn_implementation("eager")
        return stock

    @pytest.mark.fast(3)
    @pytest.mark.parametrize("settings", [{}, {"saves": ("kv",)}, {"offload": "auto"}], ids=str)
    def test_is_recomputed(self, stock, settings):
        off, ours = error(stock, steps=2, **settings)
        assert off <= MAX_FLOAT64_ERROR
        assert "attn_out" not in streambp.describe(ours).saves

    def test_is_recomputed_in_halves(self, stock, monkeypatch):
        expected = gradients(stock, **make_batch("plain"))[1]
        split_over_one_rank(monkeypatch)
        grads = gradients(
            patched(stock, saves=("attn_out",)), **with_shifted_labels(make_batch("plain"))
        )[1]
        assert worst_error(grads, expected) <= MAX_FLOAT64_ERROR

    def test_is_not_saved(self, stock):
        with pytest.raises(UnsupportedModelError, match="Leave 'attn_out' out"):
            patched(stock, saves=("attn_out",))(**make_batch("plain"), use_cache=False)

    def test_would_be_taken_for_unchanged(self, stock, monkeypatch):
        monkeypatch.setattr(trials, "_is_changed", lambda *_: False)
        assert error(stock)[0] > 0.01


def left_padded():
    """One row whose first 20 tokens are padding at position 0, as trainers count positions from a
    mask."""
    batch = make_batch("plain", length=41, rows=1)
    batch["attention_mask"] = (torch.arange(41)[None] >= 20).long()
    batch["position_ids"] = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    batch["labels"][:, :21] = -100
    return batch


def test_a_rotation_is_seen_behind_padding(float64, monkeypatch):
    """At position 0 it changes nothing, and the first tokens of the batch are all there."""
    stock = model_with(monkeypatch, "llama", "rotation")
    with pytest.raises(UnsupportedModelError, match="are changed in place"):
        patched(stock, saves=("*",), rows="as_given")(**left_padded(), use_cache=False)
    monkeypatch.setattr(trials, "_rolled_positions", lambda *_: {})
    with pytest.raises(BackwardError, match="the same input has another output"):
        error(stock, left_padded(), saves=("*",), rows="as_given")


def test_a_layer_that_runs_whole_keeps_its_input(float64, monkeypatch):
    stock = model_with(monkeypatch, "llama", "add over residual")
    mix_neighbours(monkeypatch, stock)
    off, ours = error(stock)
    assert off <= MAX_FLOAT64_ERROR
    assert {layer.path for layer in streambp.describe(ours).layers} == {"checkpoints"}


def test_products_that_a_kernel_reads_as_zero(float64, monkeypatch):
    """Where it is left out its NaN counts as 0: gradients are finite and wrong."""
    stock = model_with(monkeypatch, "qwen3", "add what is finite")
    off, ours = error(stock)
    assert off <= MAX_FLOAT64_ERROR
    unread = [
        unread
        for layer in ours.model.layers
        for unread in layer.forward.layer_state.tests.unread.values()
    ]
    assert [unread.recompute for unread in unread] == [{"mlp.down_proj"}] * 2


def test_what_holds_by_itself_is_still_left_out(float64, monkeypatch):
    """Liger's norm hides that keys read k_proj; the queries' product is left out all the same."""
    ours = error(model_with(monkeypatch, "qwen3", "norm"))[1]
    for layer in ours.model.layers:
        (unread,) = layer.forward.layer_state.tests.unread.values()
        assert "self_attn.q_proj" in unread.refill
        assert not {"self_attn.k_proj", "self_attn.v_proj"} & unread.refill


def test_a_layer_is_tried_once(float64, monkeypatch):
    trial_names = []
    for name in ("_find_writes", "_find_unread"):
        real = getattr(trials, name)
        monkeypatch.setattr(
            trials, name, lambda *a, real=real, name=name: trial_names.append(name) or real(*a)
        )
    ours = patched(model_with(monkeypatch, "llama", "norm", "gate"), rows="as_given")
    for _ in range(3):
        gradients(ours, **make_batch("plain"))
    assert sorted(trial_names) == ["_find_unread"] * 2 + ["_find_writes"] * 2


MUTANTS = {
    "refill not tried": (trials, "_find_refillable", lambda linears, *_: linears, "qwen3",
        ("norm",), {"saves": ()}),
    "refill tried by its shapes": (
        trials, "_bits_equal", lambda tensors, expected: all(a.shape == b.shape for a,
            b in zip(tensors, expected, strict=True)),
        "qwen3", ("norm",), {"saves": ()},
    ),
    "recomputation not tried": (trials, "same_gradients", lambda *_: True, "qwen3", ("add what is finite",), {}),
    "recomputation tried for numbers": (
        trials, "same_gradients", lambda call, gradients, expected: all(g is None or g.isfinite().all() for g in gradients),
        "qwen3", ("add what is finite",), {},
    ),
    "products not looked at": (trials, "_find_writes", lambda *_: OverwrittenTensors(), "llama",
        ("rotation",), {"saves": ("*",)}),
    "chosen products not looked at": (
        trials, "_find_writes", lambda *_: OverwrittenTensors(), "llama", ("rotation",),
        {"offload": "auto", "steps": 2},
    ),
    "input not looked at": (trials, "_find_writes", lambda *_: OverwrittenTensors(), "llama",
        ("add over residual",), {}),
    "halves not tried": (sharded_call, "confirm_names", lambda names, _: names, "llama", ("gate",),
        {"split": True}),
}  # fmt: skip


@pytest.mark.fast(9)
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_turn_gradients_wrong(name, float64, monkeypatch):
    owner, attribute, mutant, family, kernels, settings = MUTANTS[name]
    settings = dict(settings)
    stock, batch = model_with(monkeypatch, family, *kernels), make_batch("plain")
    expected = gradients(stock, **batch)[1]
    if settings.pop("split", False):
        split_over_one_rank(monkeypatch)
        batch = with_shifted_labels(batch)
    monkeypatch.setattr(owner, attribute, mutant)
    steps = settings.pop("steps", 2)  # the first leaves out no product
    ours = patched(stock, **settings)
    try:
        for _ in range(steps):
            grads = gradients(ours, **batch)[1]
    except (
        StreamingMismatchError,
        BackwardError,
    ):  # the comparison with the unpatched layer comes first, or the witness
        return
    wrong = [not gradient.isfinite().all() for gradient in grads.values()]
    assert any(wrong) or worst_error(grads, expected) > 0.01
