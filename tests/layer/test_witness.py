"""What changes between a forward and its backward without a trace of its own is found by what
backward computes again.

covers: layer/witness.py
"""

from __future__ import annotations

import contextlib
import functools
import itertools

import pytest
import torch
from torch import nn

import streambp
from streambp.attention import prefix
from streambp.errors import BackwardError
from streambp.layer import products, saved_tensors, witness
from tests.counting import Dispatches
from tests.distributed.one_rank import split_over_one_rank, with_shifted_labels
from tests.families import build, make_batch, mix_neighbours
from tests.oracle import MAX_FLOAT64_ERROR, gradients, worst_error
from tests.seeds import seed_torch

CHUNK, TOKENS = 5, 23
PROGRAM_GLOBALS = {"scale": 1.0, "added": 0.0}  # a program's globals
ALL_SAVES = ("attn_out", "self_attn.*", "mlp.gate_proj", "mlp.up_proj")
SAVES = {
    "nothing": (),
    "attention": ("attn_out",),
    "keys": ("kv",),
    "everything": ALL_SAVES,
    "auto": "auto",
}


@pytest.fixture(autouse=True)
def numbers():
    yield
    PROGRAM_GLOBALS.update(scale=1.0, added=0.0)


def scaled(module):
    """By a global number."""
    class_forward = type(module).forward
    module.forward = lambda x: class_forward(module, x) * PROGRAM_GLOBALS["scale"]


def added_to_one(module, min_tokens=0):
    """A global number is added to the second token of each chunk of at least so many; the last has
    three."""
    class_forward = type(module).forward

    def forward(x):
        if x.shape[1] < min_tokens:
            return class_forward(module, x)
        one_hot = torch.nn.functional.one_hot(torch.tensor(1), x.shape[1]).to(x)
        return class_forward(module, x + one_hot[None, :, None] * PROGRAM_GLOBALS["added"])

    module.forward = forward


def fused_step(model):
    """It marks no change of a parameter."""
    versions = [p._version for p in model.parameters()]
    seed_torch(5)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True).step()
    assert versions == [p._version for p in model.parameters()]


def by_data(model):
    model.model.layers[1].mlp.down_proj.weight.data.mul_(1.01)


STEP_CHANGES = {
    "a global behind the MLP": (
        lambda m: scaled(m.model.layers[0].mlp),
        lambda _: PROGRAM_GLOBALS.update(scale=0.5),
    ),
    "a global in a norm": (
        lambda m: scaled(m.model.layers[1].input_layernorm),
        lambda _: PROGRAM_GLOBALS.update(scale=0.5),
    ),
    "one token": (
        lambda m: added_to_one(m.model.layers[0].mlp),
        lambda _: PROGRAM_GLOBALS.update(added=0.5),
    ),
    "a fused step": (lambda m: None, fused_step),
    "the last Linear's weight by .data": (lambda m: None, by_data),
}


INNER_CHANGES = {
    "one token of inner chunks": (
        lambda m: added_to_one(m.model.layers[0].mlp, CHUNK),
        STEP_CHANGES["one token"][1],
    )
}


def changed_within(change, saves=(), steps=1, dtype=torch.float64, family="qwen3"):
    """A model whose change comes between a forward and its backward, after so many steps; and its
    loss."""
    prepare, apply = {**STEP_CHANGES, **INNER_CHANGES}[change]
    model = build(family, dtype)
    prepare(model)
    streambp.patch(
        model,
        streambp.StreamConfig(chunk_size=CHUNK, saves=SAVES.get(saves, saves), rows="as_given"),
    )
    for _ in range(steps):
        gradients(model, **make_batch("plain"))
    model.zero_grad()
    loss = model(**make_batch("plain"), use_cache=False).loss
    apply(model)
    return model, loss


@pytest.mark.fast(9)
@pytest.mark.usefixtures("float64_oracle")
@pytest.mark.parametrize(
    ("change", "saves", "steps"), itertools.product(STEP_CHANGES, SAVES, (0, 1))
)
def test_a_change_without_a_trace_raises(change, saves, steps):
    """In the first step, which leaves out no product, and later. What comes after is exact."""
    model, loss = changed_within(change, saves, steps)
    with pytest.raises(BackwardError, match="the same input has another output"):
        loss.backward()
    PROGRAM_GLOBALS.update(scale=1.0, added=0.0)
    our_gradients = gradients(model, **make_batch("plain"))[1]
    assert (
        worst_error(our_gradients, gradients(streambp.unpatch(model), **make_batch("plain"))[1])
        <= MAX_FLOAT64_ERROR
    )


def test_it_may_be_switched_off(monkeypatch):
    """For kernels whose roundings differ each time; then such a change is the program's own
    affair."""
    model = streambp.patch(
        build("qwen3"), streambp.StreamConfig(chunk_size=CHUNK, compare_backward=False)
    )
    loss = model(**make_batch("plain"), use_cache=False).loss
    monkeypatch.setattr(witness.Witness, "see", None)
    by_data(model)
    loss.backward()
    assert all(
        layer_state.last_call.report.plan is not None
        for layer_state in model._streambp.steps.layer_states
    )


@pytest.mark.usefixtures("float64_oracle")
@pytest.mark.parametrize("steps", [0, 1])
def test_a_change_of_one_token_in_inner_chunks(steps):
    """Where nothing is saved. Inputs of saved values are compared in the last chunk alone."""
    test_a_change_without_a_trace_raises("one token of inner chunks", "nothing", steps)


@pytest.mark.fast(2)
@pytest.mark.parametrize("change", STEP_CHANGES)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["float32", "bfloat16", "float16"]
)
def test_in_lower_precision(change, dtype):
    if change == "the last Linear's weight by .data" and dtype.itemsize == 2:
        pytest.skip("one percent of what a layer adds is less than the roundings of its output")
    _, loss = changed_within(change, dtype=dtype)
    with pytest.raises(BackwardError):
        loss.backward()


@pytest.mark.parametrize("runs", ["whole", "in halves"])
def test_layers_that_run_whole_and_in_halves(runs, monkeypatch):
    model, batch = build("qwen3", torch.float64), make_batch("plain")
    if runs == "whole":
        mix_neighbours(monkeypatch, model)
    else:
        split_over_one_rank(monkeypatch)
        batch = with_shifted_labels(batch)
    scaled(model.model.layers[0].mlp)
    streambp.patch(model, streambp.StreamConfig(chunk_size=CHUNK))
    for _ in range(2):
        gradients(model, **batch)
    loss = model(**batch, use_cache=False).loss
    PROGRAM_GLOBALS["scale"] = 0.5
    with pytest.raises(BackwardError, match="the same input has another output"):
        loss.backward()


class Split(nn.Module):
    """A Linear that adds up in another order where there is a graph, as compiled code may, and is
    off by so much."""

    def __init__(self, inner, off):
        super().__init__()
        self.inner, self.off = inner, off

    def forward(self, x):
        if not torch.is_grad_enabled():
            return self.inner(x)
        halves = zip(x.chunk(2, -1), self.inner.weight.chunk(2, -1), strict=True)
        return sum(torch.nn.functional.linear(part, weight) for part, weight in halves) * (
            1 + self.off
        )


@pytest.mark.fast(3)
@pytest.mark.parametrize(("off", "raises"), [(0.0, False), (16.0, True)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_another_order_of_adding_up_is_no_alarm(dtype, off, raises):
    """off: in units of what half precision may be off."""
    model = build("qwen3", dtype)
    for layer in model.model.layers:
        layer.mlp.up_proj = Split(
            layer.mlp.up_proj, off * torch.finfo(torch.float16 if dtype.itemsize > 2 else dtype).eps
        )
    streambp.patch(model, streambp.StreamConfig(chunk_size=CHUNK))
    for step in range(2):
        loss = model(**make_batch("plain"), use_cache=False).loss
        # what the layer adds to its input is small: half precision need not show it yet
        if raises and not step:
            with contextlib.suppress(BackwardError):
                loss.backward()
        elif raises:
            with pytest.raises(BackwardError):
                loss.backward()
        else:
            loss.backward()


class InHalfPrecision(nn.Module):
    """A frozen Linear with float32 outside and bfloat16 inside, which another kernel multiplies
    where there is a graph or many rows, as bitsandbytes' 4-bit Linears and float32 products in TF32
    do."""

    def __init__(self, inner):
        super().__init__()
        self.register_buffer("weight", inner.weight.detach().bfloat16())

    def forward(self, x):
        x = x.bfloat16()
        if torch.is_grad_enabled() or x[..., 0].numel() > 12:
            halves = zip(x.chunk(2, -1), self.weight.chunk(2, -1), strict=True)
            return sum(torch.nn.functional.linear(part, weight) for part, weight in halves).float()
        return torch.nn.functional.linear(x.float(), self.weight.float()).bfloat16().float()


@pytest.fixture
def precision():
    """As the program set it, afterwards."""
    previous = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(previous)


@pytest.mark.usefixtures("precision")
@pytest.mark.parametrize("known_by", ["compute_dtype", "matmul_precision"])
def test_products_rounded_to_less_than_float32_are_no_alarm(known_by):
    model = build("qwen3")
    for layer in model.model.layers:
        layer.mlp.up_proj = InHalfPrecision(layer.mlp.up_proj)
        layer.self_attn.q_proj = InHalfPrecision(layer.self_attn.q_proj)
        if known_by == "compute_dtype":
            layer.mlp.up_proj.compute_dtype = torch.bfloat16
    if known_by == "matmul_precision":
        torch.set_float32_matmul_precision("medium")
    streambp.patch(model, streambp.StreamConfig(chunk_size=CHUNK, saves=()))
    for _ in range(2):
        model(**make_batch("plain"), use_cache=False).loss.backward()
    assert all(
        len(layer_state.last_call.report.plan) == 5
        for layer_state in model._streambp.steps.layer_states
    )


def test_autocast_around_a_step_of_the_optimizer_is_named():
    """Its copies of the weights are those of before, for forward alone. Unpatched they are in both,
    and nothing is said."""
    model = streambp.patch(build("qwen3"), streambp.StreamConfig(chunk_size=CHUNK))
    optimizer = torch.optim.SGD(model.parameters(), lr=100.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(**make_batch("plain"), use_cache=False).loss.backward()
        optimizer.step()
        loss = model(**make_batch("plain"), use_cache=False).loss
        with pytest.raises(BackwardError, match="Autocast keeps its copies"):
            loss.backward()


VIEWS = (
    "detach",
    "view",
    "t",
    "slice",
    "select",
    "expand",
    "unsqueeze",
    "as_strided",
    "alias",
    "_unsafe_view",
    "reshape",
)


@pytest.mark.parametrize(("saves", "max_launches"), [((), 5), (("attn_out",), 5.5)])
def test_launches_and_questions(saves, max_launches, monkeypatch):
    """Few operations for each layer and chunk beside those at the end of the whole backward, which
    asks once: of a device, or of a CPU that gave other bits."""
    dtypes, real = [], torch.Tensor.tolist
    monkeypatch.setattr(witness, "equal_on_cpu", lambda recorded, value: False)
    model = build("qwen3")
    streambp.patch(model, streambp.StreamConfig(chunk_size=CHUNK, saves=saves))
    batch = make_batch("plain", 8 * CHUNK)
    gradients(model, **batch)
    loss = model(**batch, use_cache=False).loss
    with Dispatches() as forward:
        loss = model(**batch, use_cache=False).loss
    monkeypatch.setattr(
        torch.Tensor, "tolist", lambda self: dtypes.append(self.dtype) or real(self)
    )
    with Dispatches() as backward:
        loss.backward()
    assert dtypes.count(torch.bool) == 1
    counts = forward.counts + backward.counts
    of_witness = {
        key: count
        for key, count in counts.items()
        if key[0].startswith("layer/witness.py") and not key[0].endswith(("evaluate", "_differ"))
    }
    launches = sum(
        count for (_, name), count in of_witness.items() if name.split(".")[0] not in VIEWS
    )
    print(f"{launches / 2 / 8:.2f} launches for each layer and chunk")
    assert 2 <= launches / 2 / 8 <= max_launches


def test_a_cpu_that_gives_the_same_bits_is_asked_nothing_more(monkeypatch):
    model = streambp.patch(build("qwen3"), streambp.StreamConfig(chunk_size=CHUNK, saves=()))
    gradients(model, **make_batch("plain"))
    monkeypatch.setattr(witness.Witnesses, "submit", lambda *_: pytest.fail("something differs"))
    noted, real = [], witness.Witnesses.combine_rows
    monkeypatch.setattr(
        witness.Witnesses, "combine_rows", lambda *args: noted.append(args) or real(*args)
    )
    gradients(model, **make_batch("plain"))
    assert noted


def one_input(change=None):
    """What a witness compares of three Linears of one x [1, C, n]: how many combinations it made,
    and whether it raises.

    change: comes between the first and the second Linear of the recomputation.
    """
    combinations, real = [], witness.Witnesses()
    combined = real.combine_rows
    real.combine_rows = lambda x: combinations.append(x) or combined(x)
    compared = witness.Witness(
        real, lambda: functools.partial(witness.ValuePair, nn.Identity(), 0, False, 1e-8)
    )
    value = torch.randn(1, CHUNK, 4, dtype=torch.float64)
    for in_backward in (False, True):
        x = value.clone()
        compared.begin(0, True, in_backward)
        for name in "qkv":
            compared.see(name, x)
            if in_backward and name == "q" and change is not None:
                x = change(x)
    try:
        compared.end()
    except BackwardError:
        return len(combinations), True
    return len(combinations), False


INTERMEDIATE_CHANGES = {"in place": lambda x: x.add_(0.5), "another tensor": lambda x: x + 0.5}


def test_one_input_of_several_linears_is_combined_once():
    """And a change between two of them is found."""
    assert one_input() == (2, False)
    for change in INTERMEDIATE_CHANGES.values():
        assert one_input(change) == (3, True)


def test_a_backward_that_raises_leaves_nothing_behind():
    model, loss = changed_within("a fused step", dtype=torch.float32)
    with pytest.raises(BackwardError):
        loss.backward()
    state = model._streambp
    assert not len(state.witnesses._questions)
    gradients(model, **make_batch("plain"))


@pytest.mark.parametrize("length", range(1, 40))
def test_rows(length):
    rows = range(length)[witness.rows_of(length)]
    assert len(rows) == min(witness.MAX_COMPARED_ROWS, length)
    assert rows[-1] == length - 1


def nobody_asks(patch):
    patch.setattr(witness.Witnesses, "submit", lambda self, pairs: None)


def last_row_alone(patch):
    real = witness.Witness.see

    def see(self, name, x, unchanged=None, rows=None):
        unchanged = None if unchanged is None else unchanged[..., -1:, :]
        real(self, name, x[..., -1:, :], unchanged, None if rows is None else slice(None))

    patch.setattr(witness.Witness, "see", see)


def no_inputs_of_saved_products(patch):
    real = saved_tensors.SavedProducts.use_outputs
    patch.setattr(
        saved_tensors.SavedProducts,
        "use_outputs",
        lambda *args, see=None, **kwargs: real(*args, **kwargs),
    )


def nothing_of_attention(patch):
    real = prefix.PrefixChunkAttention.attend

    def attend(self, arguments):
        self.see = None
        return real(self, arguments)

    patch.setattr(prefix.PrefixChunkAttention, "attend", attend)


def no_rows(patch):
    patch.setattr(products, "rows_of", lambda length: products.UNREAD_OUTPUT)


def no_inputs_of_what_is_left_out(patch):
    patch.setattr(witness.Witness, "see", _but(witness.Witness.see, "mlp.down_proj"))


def _but(see, name):
    return lambda self, tensor_name, *args: (
        None if tensor_name == name else see(self, tensor_name, *args)
    )


def one_combination_for_all(patch):
    real = witness.Witness._combine_rows

    def combined(self, x):
        return real(self, x) if self._combined_input is None else self._combined_input[2]

    patch.setattr(witness.Witness, "_combine_rows", combined)


later = functools.partial(test_a_change_without_a_trace_raises, steps=1)


@pytest.mark.usefixtures("float64_oracle")
@pytest.mark.parametrize(
    ("mutant", "test"),
    [
        (nobody_asks, functools.partial(later, "a fused step", "nothing")),
        (last_row_alone, functools.partial(later, "one token", "nothing")),
        (no_rows, functools.partial(later, "a global behind the MLP", "nothing")),
        (one_combination_for_all, test_one_input_of_several_linears_is_combined_once),
        (no_inputs_of_what_is_left_out, lambda: test_a_change_of_one_token_in_inner_chunks(1)),
    ],
)
def test_mutants_turn_these_red(mutant, test, monkeypatch):
    mutant(monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception, BackwardError)):
        test()


@pytest.mark.fast(2)
@pytest.mark.usefixtures("float64_oracle")
@pytest.mark.parametrize("mutant", [no_inputs_of_saved_products, nothing_of_attention])
def test_saved_values_need_their_inputs_compared(mutant, monkeypatch):
    """A number that a saved value hides: of the norm before keys that are attended, and before
    products."""

    def run():
        model = build("qwen3", torch.float64)
        for layer in model.model.layers:
            scaled(
                layer.self_attn.k_norm
                if mutant is nothing_of_attention
                else layer.post_attention_layernorm
            )
        saves = (
            ("attn_out",) if mutant is nothing_of_attention else ("mlp.gate_proj", "mlp.up_proj")
        )
        streambp.patch(model, streambp.StreamConfig(chunk_size=CHUNK, saves=saves))
        for _ in range(2):
            gradients(model, **make_batch("plain"))
        loss = model(**make_batch("plain"), use_cache=False).loss
        PROGRAM_GLOBALS["scale"] = 0.5
        loss.backward()

    with pytest.raises(BackwardError):
        run()
    PROGRAM_GLOBALS["scale"] = 1.0
    mutant(monkeypatch)
    run()
