"""A wrapper around a function of torch runs as often as with real logits, and what it wraps stays
blockwise.

covers: foreign.py, lazy/base.py
"""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import cross_entropy

import streambp
from streambp import foreign
from streambp.errors import StreamBPError
from streambp.foreign import torch_own
from streambp.lazy import base, dispatch, lazy_hidden
from tests.families import VOCABULARY, build, make_batch
from tests.oracle import MAX_FLOAT64_ERROR, gradients, worst_error

pytestmark = pytest.mark.usefixtures("float64_oracle")
BATCH = make_batch("plain")
IDS = BATCH["input_ids"]
ONE_HOT = F.one_hot(IDS, VOCABULARY).double()

BINARY = (
    "pow", "add", "sub", "subtract", "rsub", "float_power", "maximum", "minimum", "logaddexp", "xlogy", "eq", "ne", "lt",
    "le", "gt", "ge", "logical_and", "logical_or", "mul", "multiply", "div", "divide", "true_divide", "__add__", "__radd__",
    "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__", "__pow__", "__rpow__", "__eq__", "__ne__",
    "__lt__", "__le__", "__gt__", "__ge__",
)  # fmt: skip
# want a tensor for their second
TENSORS = ("maximum", "minimum", "logaddexp", "xlogy", "logical_and", "logical_or")
POSITIVE_INPUT_OPERATIONS = (
    "log",
    "log2",
    "log10",
    "log1p",
    "sqrt",
    "rsqrt",
    "pow",
    "float_power",
    "xlogy",
    "reciprocal",
    "__pow__",
)
ARGUMENTS = {
    "clamp": (-0.5, 0.5), "clip": (-0.5, 0.5), "clamp_min": (0.0,), "clamp_max": (0.0,), "topk": (3,), "norm": (2, -1),
    "take_along_dim": (IDS[..., None], 2), "gather": (2, IDS[..., None]), "masked_fill": (ONE_HOT > 0, -3.0),
    "kl_div": (ONE_HOT,), "view": (-1, VOCABULARY), "reshape": ((-1, VOCABULARY),), "flatten": (0, 1), "split": (5, 1),
    "chunk": (3, 1), "select": (1, 4), "narrow": (1, 2, 5), "index_select": (1, torch.tensor([1, 4, 4])), "unsqueeze": (0,),
    "transpose": (0, 1), "swapaxes": (0, 1), "swapdims": (0, 1), "permute": ((1, 0, 2),), "to": (torch.float64,),
    "type_as": (ONE_HOT,), "new_zeros": ((3,),), "new_ones": ((3,),), "new_empty": ((0,),), "new_full": ((3,), 2.0),
    "new_tensor": ([1.0, 2.0],), "__and__": (ONE_HOT > 0,), "__or__": (ONE_HOT > 0,),
    "register_hook": (lambda gradient: gradient * 0.5,),
}  # fmt: skip
BOOL_OPERATIONS = ("logical_not", "logical_and", "logical_or", "__invert__", "__and__", "__or__")
OTHER_MODULES = {
    "where": (torch, Tensor),
    "linear": (F,),
    "cross_entropy": (F,),
    "nll_loss": (F,),
}


def use(name, f, z):
    """One number, of what `f`, the function of this name, makes of logits z [B, T, V]."""
    if name == "linear":
        return z.square().mean()  # the model's own projection calls it
    if name in ("cross_entropy", "nll_loss"):
        rows = z.reshape(-1, VOCABULARY)
        return f(rows if name == "cross_entropy" else rows.log_softmax(-1), IDS.flatten())
    if name == "where":
        return total(
            f(ONE_HOT > 0, z, torch.zeros((), dtype=z.dtype))
            if f is torch.where
            else f(z, ONE_HOT > 0, 0.5)
        )
    z = (
        z * 0.1 + 2.0
        if name in POSITIVE_INPUT_OPERATIONS
        else z > 0
        if name in BOOL_OPERATIONS
        else z
    )
    arguments = ARGUMENTS.get(name)
    if arguments is None and name in dispatch.DIM_ARGUMENT:
        arguments = (-1,)
    if arguments is None and (
        name.strip("_").lstrip("r") in BINARY
        or name in BINARY
        or name in ("__truediv__", "__rtruediv__")
    ):
        arguments = (torch.full((), 0.7, dtype=torch.float64) if name in TENSORS else 0.7,)
    result = f(z, *(arguments or ()))
    return total(z if name == "register_hook" else result)


def total(result):
    if isinstance(result, Tensor):
        return result.double().square().mean() if result.numel() else 0.0
    return sum(total(part) for part in list(result)[:3])


def owners_of(name):
    if name in OTHER_MODULES:
        return OTHER_MODULES[name]
    owners = (Tensor,) if name.startswith("__") else (F, torch, Tensor)
    return [owner for owner in owners if callable(getattr(owner, name, None))]


# No `__getitem__`: once set on a class, it leaves a slot of C that takes tensors of no dimension
# for sequences.
NAMES = sorted(
    {*lazy_hidden.LazyHidden.rules, *dispatch.ROW_RULES, *dispatch.LazyLogits.rules}
    - {"__iter__", "__div__", "__rdiv__", "__getitem__"}
)
CASES = [(owner, name) for name in NAMES for owner in owners_of(name)]
FAST_CASES = (
    "cross_entropy",
    "log_softmax",
    "softmax",
    "linear",
    "split",
    "logsumexp",
    "mul",
    "gather",
    "norm",
)


class Wrapper:
    """Stands in the place of a function; counts its calls with logits, and changes what they give.

    Methods are counted with [B, T, V] alone: blocks of streambp's own arithmetic, [n, V], go
    through them as well.
    """

    def __init__(self, owner, name, by_functools):
        self.owner, self.name, self.calls = owner, name, 0
        original = self.original = getattr(owner, name)

        def around(*args, **kwargs):
            result = original(*args, **kwargs)
            if not self.counts(args, result):
                return result
            self.calls += 1
            return (
                torch_own.mul(result, 1.5)
                if isinstance(result, Tensor) and result.is_floating_point()
                else result
            )

        self.around = functools.wraps(original)(around) if by_functools else around

    def counts(self, args, result):
        tensor = (
            args[1] if self.name == "linear" else next(x for x in args if isinstance(x, Tensor))
        )
        if self.name == "linear":
            return tensor.shape[0] == VOCABULARY
        return VOCABULARY in tensor.shape and (self.owner is not Tensor or tensor.dim() == 3)

    def __enter__(self):
        self.inherited = self.name not in vars(self.owner)
        setattr(self.owner, self.name, self.around)
        return self

    def __exit__(self, *exc):
        if self.inherited:
            delattr(Tensor, self.name)  # it stands in the base class
        else:
            setattr(self.owner, self.name, self.original)


def step(model, owner, name, labelled):
    """The loss and all gradients of a program that uses the function on logits."""
    f = lambda *args, **kwargs: getattr(owner, name)(*args, **kwargs)  # noqa: E731 - as it stands when it runs
    if owner is torch and name == "where":
        f = torch.where
    model.zero_grad()
    if labelled:
        model.loss_function = lambda logits, labels, *_, **__: use(name, f, logits)
        loss = model(**BATCH, use_cache=False).loss
    else:
        loss = use(name, f, model(input_ids=IDS, use_cache=False).logits)
    if isinstance(loss, Tensor) and loss.requires_grad:
        loss.backward()
    return torch.as_tensor(loss).detach(), {
        n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
    }


def compare(owner, name, labelled, moment, by_functools=False):
    """What `describe` says of the head, after a comparison with the unpatched model."""
    config = streambp.StreamConfig(chunk_size=5, lazy_logits=not labelled)
    stock, ours = MODELS["stock"], MODELS["ours"]
    if moment != "before patch":
        streambp.patch(ours, config)
    if moment == "between steps":
        step(ours, F, "cross_entropy", labelled)
    with Wrapper(owner, name, by_functools) as wrapper:
        expected_loss, expected = step(stock, owner, name, labelled)
        expected_calls, wrapper.calls = wrapper.calls, 0
        if moment == "before patch":
            streambp.patch(ours, config)
        loss, our_gradients = step(ours, owner, name, labelled)
        assert wrapper.calls == expected_calls > 0, (name, owner, wrapper.calls, expected_calls)
    assert abs(loss - expected_loss) <= 1e-12 * abs(expected_loss), (name, owner)
    assert our_gradients.keys() == expected.keys(), (name, owner)
    assert not our_gradients or worst_error(our_gradients, expected) <= MAX_FLOAT64_ERROR, (
        name,
        owner,
    )
    return streambp.describe(ours).head


MODELS = {}


@pytest.fixture(autouse=True)
def models():
    for name in ("stock", "ours"):
        MODELS[name] = build("llama", torch.float64)
    yield
    MODELS.clear()


@pytest.mark.fast(2)
@pytest.mark.parametrize(
    ("labelled", "moment", "names"),
    [
        pytest.param(
            labelled, moment, names, marks=() if names == "some" and on else pytest.mark.full
        )
        for labelled in (True, False)
        for moment, on in (
            ("before patch", labelled),
            ("after patch", False),
            ("between steps", not labelled),
        )
        for names in ("some", "all")
    ],
)
def test_a_wrapper_runs_as_often_as_with_real_logits(labelled, moment, names):
    cases = [case for case in CASES if names == "all" or case[1] in FAST_CASES]
    blockwise = set()
    for number, (owner, name) in enumerate(cases):
        head = compare(owner, name, labelled, moment, by_functools=number % 2 == 0)
        if "builds the logits" not in head:
            blockwise.add(name)
    assert len(cases) > 100 or names == "some"
    assert {"cross_entropy"} <= blockwise
    if not labelled:
        assert {"log_softmax", "softmax", "gather", "logsumexp", "mul"} <= blockwise


def held_elsewhere(logits, labels, *_, **__):
    return cross_entropy(logits.reshape(-1, VOCABULARY), labels.flatten())


def with_z_loss(function):
    return lambda x, y, **kwargs: function(x, y, **kwargs) + 0.1 * x.logsumexp(-1).pow(2).mean()


@pytest.mark.parametrize(
    ("loss", "head"),
    [
        (None, "builds the logits: the loss uses logsumexp on them"),
        (held_elsewhere, "blockwise loss, no logits"),
    ],
)
def test_a_z_loss_and_a_module_that_holds_torchs_own_function(monkeypatch, loss, head):
    """What a module imported by name is torch's own function, whatever stands in
    `torch.nn.functional` by now."""
    monkeypatch.setattr(F, "cross_entropy", with_z_loss(F.cross_entropy))
    runs = []
    for model in (
        MODELS["stock"],
        streambp.patch(MODELS["ours"], streambp.StreamConfig(chunk_size=5)),
    ):
        if loss is not None:
            model.loss_function = loss
        runs.append(gradients(model, **BATCH))
    (expected_loss, expected), (ours, of_ours) = runs
    assert abs(ours - expected_loss) <= 1e-12 * abs(expected_loss)
    assert worst_error(of_ours, expected) <= MAX_FLOAT64_ERROR
    assert streambp.describe(MODELS["ours"]).head.startswith(head)


def test_a_function_that_was_wrapped_before_streambp_was_imported(monkeypatch):
    monkeypatch.setattr(foreign, "ORIGINAL_FUNCTIONS", {})
    assert "blockwise loss" in compare(F, "cross_entropy", True, "after patch")


def test_one_function_in_the_place_of_two_methods_is_refused(monkeypatch):
    monkeypatch.setattr(Tensor, "exp", lambda x, original=torch._C.TensorBase.exp: original(x))
    monkeypatch.setattr(Tensor, "sin", Tensor.exp)
    streambp.patch(MODELS["ours"], streambp.StreamConfig(chunk_size=5, lazy_logits=True))
    with pytest.raises(
        StreamBPError, match=r"replaces several methods of torch.Tensor \(.*exp.*\)"
    ):
        MODELS["ours"](input_ids=IDS, use_cache=False).logits.exp()


@pytest.mark.parametrize(
    ("owner", "name", "labelled"), [(F, "cross_entropy", True), (Tensor, "log_softmax", False)]
)
def test_mutant_the_function_that_stands_under_the_name_is_called(
    monkeypatch, owner, name, labelled
):
    monkeypatch.setattr(base, "torch_function_of", lambda func: func)
    with pytest.raises(AssertionError):
        compare(owner, name, labelled, "after patch")


def test_a_custom_operator_has_no_rule_of_torchs():
    assert foreign.rule_name(F.cross_entropy) == "cross_entropy"
    assert foreign.rule_name(torch.ops.aten.softmax) not in dispatch.ROW_RULES
