"""What the look at a batch raises ends no step: its rows are computed, and `describe` says why.

covers: prefixes/calls.py, prefixes/tree.py, prefixes/arguments.py, prefixes/admission.py,
model/padding.py
"""

from __future__ import annotations

import copy

import pytest
import torch

import streambp
from streambp.errors import StreamBPError
from streambp.model import causal_lm
from streambp.prefixes import admission, arguments, calls, tree
from streambp.prefixes.admission import PackedRowTrials
from streambp.prefixes.calls import SharedPrefixes
from tests.oracle import MAX_FLOAT64_ERROR, gradients, worst_error
from tests.prefixes.test_arguments import check, qwen3_vl, three_positions
from tests.prefixes.test_calls import (
    float64_everywhere,  # noqa: F401 - a fixture
    tokens_or_reason,
)
from tests.prefixes.test_padding import (
    any_saving,  # noqa: F401 - a fixture
    build,
    make,
)

STEPS = {
    "why not": (calls, "why_not"),
    "arguments": (admission, "why_not_packed"),
    "others inside": (calls, "why_rows"),
    "kinds": (PackedRowTrials, "kind_of"),
    "known kinds": (PackedRowTrials, "knows"),
    "what tokens are known by": (calls, "token_numbers"),
    "labels": (calls, "_label_mask"),
    "chunk ends": (calls, "_fork_distance"),
    "chunk costs": (calls, "_chunk_overhead"),
    "tree": (calls, "find_tree"),
    "rows": (tree, "_locate_rows"),
    "branches": (tree, "_build_segments"),
    "noise": (calls, "draws_noise"),
    "who sees padding": (causal_lm, "hides_padding"),
    "one row": (SharedPrefixes, "_is_one_row"),
    "trial": (PackedRowTrials, "make"),
    "trial's rows": (admission, "trial_arguments"),
    "trial's packed row": (admission, "pack_arguments"),
    "verdict": (SharedPrefixes, "_trial_verdict"),
    "packed row": (calls, "pack_arguments"),
    "outputs": (calls, "spread_outputs"),
}
ERRORS = [RuntimeError("odd"), StreamBPError("odd"), torch.OutOfMemoryError("no memory")]
STEP_LOOKS = ("packed row", "outputs")  # the step itself, which ends where there is no memory


def default(stock, **settings):
    config = streambp.StreamConfig(chunk_size=7, rows="auto", **settings)
    return streambp.patch(copy.deepcopy(stock), config)


def cases():
    for number, step in enumerate(STEPS):
        for index, error in enumerate(ERRORS):
            if step in STEP_LOOKS and isinstance(error, torch.OutOfMemoryError):
                continue
            marks = () if index == number % 2 * 2 or step in STEP_LOOKS else pytest.mark.full
            yield pytest.param(step, error, id=f"{step}-{type(error).__name__}", marks=marks)


@pytest.mark.fast(3)
@pytest.mark.parametrize(("step", "error"), cases())
def test_whatever_a_look_raises_is_a_reason(step, error, monkeypatch):
    """Padding on both sides, and rows that begin alike."""
    stock, batch = build("llama"), make("all alike")
    batch["attention_mask"][0, -2:] = 0
    batch["labels"][0, -2:] = -100
    expected_loss, expected = gradients(copy.deepcopy(stock), **batch)
    ours, reached = default(stock), []

    def raising(*args, **kwargs):
        reached.append(step)
        raise error

    real = vars(STEPS[step][0])[STEPS[step][1]]
    monkeypatch.setattr(
        *STEPS[step], staticmethod(raising) if isinstance(real, staticmethod) else raising
    )
    for _ in range(2):
        loss, our_gradients = gradients(ours, **batch)
        assert abs(loss - expected_loss) <= 1e-12 * abs(expected_loss)
        assert worst_error(our_gradients, expected) <= MAX_FLOAT64_ERROR
        assert f"{type(error).__name__}: {error}" in tokens_or_reason(ours) or isinstance(
            error, StreamBPError
        )
    assert reached
    monkeypatch.setattr(*STEPS[step], real)
    loss, our_gradients = gradients(ours, **batch)
    assert worst_error(our_gradients, expected) <= MAX_FLOAT64_ERROR


def counted(batch, dtype):
    return (batch["attention_mask"].to(dtype).cumsum(-1) - 1).clamp(min=0)


def halves(batch, dtype):
    """Of two rows that begin alike, at positions half a step apart."""
    positions = torch.arange(batch["input_ids"].shape[1], dtype=dtype).repeat(
        len(batch["input_ids"]), 1
    )
    positions[::2] += 0.5
    return positions


def stretched(batch, dtype):
    return torch.arange(batch["input_ids"].shape[1], dtype=dtype)[None] / 2


def one_row(batch, dtype):
    return torch.arange(batch["input_ids"].shape[1], dtype=dtype)[None]


def unknown(batch, dtype):
    return torch.full(batch["input_ids"].shape, float("nan"), dtype=dtype).nan_to_num(nan=3.0)


def left_out(batch, dtype):
    """Some libraries mark padding so."""
    return (batch["attention_mask"].to(dtype).cumsum(-1) - 1).masked_fill(
        batch["attention_mask"] == 0, 1.0
    )


POSITIONS = {
    "counted": counted,
    "halves": halves,
    "stretched": stretched,
    "one row": one_row,
    "all alike": unknown,
    "padding at one": left_out,
}
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int32)


@pytest.mark.fast(
    "both-counted-dtype0",
    "all alike-halves-dtype1",
    "right-stretched-dtype1",
    "left-counted-dtype3",
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", POSITIONS)
@pytest.mark.parametrize("shape", ["both", "left", "right", "all alike"])
def test_positions_of_any_dtype(shape, kind, dtype):
    stock, batch = build("llama"), make(shape)
    made_in = dtype if dtype.is_floating_point else torch.float64
    batch["position_ids"] = POSITIONS[kind](batch, made_in).to(dtype)
    (expected_loss, expected), ours = gradients(copy.deepcopy(stock), **batch), default(stock)
    loss, our_gradients = gradients(ours, **batch)
    assert abs(loss - expected_loss) <= 1e-12 * abs(expected_loss)
    assert worst_error(our_gradients, expected) <= MAX_FLOAT64_ERROR
    if kind in ("counted", "padding at one") and dtype in DTYPES[:2]:
        assert isinstance(tokens_or_reason(ours), tuple)


@pytest.mark.parametrize("fraction", [0.0, 0.25])
def test_positions_of_several_axes_in_floats(fraction):
    """As Qwen3-Omni's own code makes them; tokens that differ in a fraction alone are not
    shared."""
    batch = three_positions(alike=True)
    batch.pop("labels")
    batch["position_ids"] = batch["position_ids"].double()
    batch["position_ids"][2, 0, 6:] += fraction

    def run(model):
        hidden = model.model.language_model(**batch, use_cache=False)[0]
        return (hidden * batch["attention_mask"][..., None]).pow(2).mean()

    assert tokens_or_reason(check(qwen3_vl(), run)) == (44, 11 if fraction == 0.0 else 22)


def no_net(monkeypatch):
    """A look that raises in the user's step."""

    def find_without_net(self, kwargs, layer_states, labels, padding_unseen, on_all_ranks=False):
        reason = self._why_not(kwargs, layer_states())
        tree = (
            self._find_tree(kwargs, layer_states(), labels, padding_unseen)
            if reason is None
            else reason
        )
        return tree, reason is None

    monkeypatch.setattr(SharedPrefixes, "_decide", find_without_net)
    try:
        test_whatever_a_look_raises_is_a_reason("tree", RuntimeError("odd"), monkeypatch)
    except RuntimeError as error:
        raise AssertionError from error


def whole_axes(monkeypatch):
    monkeypatch.setattr(arguments, "_number_positions", lambda axis: axis)
    test_positions_of_several_axes_in_floats(0.25)


@pytest.mark.parametrize("mutant", [no_net, whole_axes])
def test_mutants_are_found(mutant, monkeypatch):
    with pytest.raises(AssertionError):
        mutant(monkeypatch)
