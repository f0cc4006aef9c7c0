"""One Linear with adapters as one operation: gradients are peft's, and what cannot be computed so
is peft's to the bit.

covers: layer/adapted_linear.py, layer/adapters.py
"""

from __future__ import annotations

import copy
import dataclasses
import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from streambp.layer import adapted_linear as operation
from streambp.layer import adapters
from streambp.layer.adapters import Adaptation, lora_modules_of
from streambp.layer.products import ADAPTATION_ATTRIBUTE, UNREAD_OUTPUT
from tests.oracle import MAX_ERROR_RATIO, MAX_FLOAT64_ERROR, worst_error
from tests.seeds import seed_torch, seeded

peft = pytest.importorskip("peft", reason="adapters need peft")
helpers = pytest.importorskip("peft.helpers", reason="adapters need peft")

IN, OUT, TOKENS = 24, 40, 13
FLOAT64_BAR = 1e-12
HALF_DTYPE = torch.bfloat16


class Holder(nn.Module):
    def __init__(self, bias=True, features=(IN, OUT)):
        super().__init__()
        self.proj = nn.Linear(*features, bias=bias)

    def forward(self, x):
        return self.proj(x)


def around(base, dtype=torch.float64, std=0.3, count=1, **settings):
    """peft's model of a Linear that has `count` adapters, of other ranks and scales each."""
    wide = settings.pop("autocast_adapter_dtype", True)
    model = None
    for number in range(count):
        lora = peft.LoraConfig(
            r=4 + number, lora_alpha=3 + 2 * number, target_modules=["proj"], **settings
        )
        if model is None:
            model = peft.get_peft_model(base.to(dtype), lora, autocast_adapter_dtype=wide)
        else:
            model.add_adapter(f"adapter {number}", lora, autocast_adapter_dtype=wide)
    if dtype == torch.float64:
        model.double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name or name.endswith("lora_bias"):
                parameter.normal_(0, std)
    if count > 1:
        model.base_model.set_adapter(
            [f"adapter {number}" if number else "default" for number in range(count)]
        )
    return model.train()


def run(model, x, value=None, fused=False, autocast=None):
    """The output, and all gradients of a random function of it."""
    model.zero_grad(set_to_none=True)
    x = x.detach().requires_grad_()
    seed_torch(5)
    proj = model.base_model.model.proj
    with torch.autocast("cpu", autocast or HALF_DTYPE, enabled=autocast is not None):
        if fused:
            with adapters.fuse_adapters(lora_modules_of(model)):
                adaptation = vars(proj)[ADAPTATION_ATTRIBUTE] if value is not None else None
                y = model(x) if adaptation is None else adaptation.product(x, value)
        else:
            y = model(x)
    upstream = torch.randn(y.shape, generator=seeded(7), dtype=torch.float64).to(y.dtype)
    y.backward(upstream)
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return y.detach(), {**gradients, "x": x.grad}


def random_input(dtype=torch.float64, rows=2, features=IN):
    return torch.randn(rows, TOKENS, features, dtype=torch.float64).to(dtype)


@pytest.fixture
def calls(monkeypatch):
    """How often the operation ran."""
    counted, real = [], operation._forward
    monkeypatch.setattr(operation, "_forward", lambda *args: (counted.append(1), real(*args))[1])
    return counted


def trained(name):
    def change(model):
        for path, parameter in model.named_parameters():
            parameter.requires_grad_(name in path)

    return change


def second_alone(model):
    model.set_adapter("adapter 1")


def rank_pattern():
    return around(Holder(), rank_pattern={"proj": 7}, alpha_pattern={"proj": 5})


SUPPORTED_ADAPTERS = {
    "plain": lambda: around(Holder(bias=False)),
    "a bias": lambda: around(Holder()),
    "rslora": lambda: around(Holder(), use_rslora=True),
    "rank and alpha patterns": rank_pattern,
    "the adapter's bias": lambda: around(Holder(), lora_bias=True),
    "the adapter's bias alone": lambda: around(Holder(bias=False), lora_bias=True),
    "two adapters": lambda: around(Holder(), count=2),
    "three with biases": lambda: around(Holder(), count=3, lora_bias=True),
    "the second of two": lambda: with_changes(around(Holder(), count=2), second_alone),
    "dropout": lambda: around(Holder(), lora_dropout=0.3),
    "two with dropout": lambda: around(Holder(), count=2, lora_dropout=0.3, lora_bias=True),
    "dropout in eval": lambda: around(Holder(), lora_dropout=0.3).eval(),
    "biases trained": lambda: around(Holder(), bias="all"),
    "everything trained": lambda: with_changes(around(Holder()), trained("")),
    "A alone": lambda: with_changes(around(Holder()), trained("lora_A")),
    "B alone": lambda: with_changes(around(Holder()), trained("lora_B")),
    "nothing but x": lambda: with_changes(around(Holder()), trained("nowhere")),
    "rank 1": lambda: around(Holder(), rank_pattern={"proj": 1}),
}


def with_changes(model, *changes):
    for change in changes:
        change(model)
    return model


def check(model, calls, **settings):
    x = random_input()
    y, expected = run(model, x)
    output, gradients = run(model, x, fused=True, **settings)
    assert calls
    assert output.dtype == y.dtype
    if not settings:
        assert (output - y).norm() <= FLOAT64_BAR * y.norm()
    assert worst_error(gradients, expected) <= FLOAT64_BAR < MAX_FLOAT64_ERROR * 0.1


@pytest.mark.parametrize("name", SUPPORTED_ADAPTERS)
def test_float64(name, calls):
    seed_torch(1)
    check(SUPPORTED_ADAPTERS[name](), calls)


@pytest.mark.parametrize(
    "name", ["plain", "three with biases", "two with dropout", "everything trained"]
)
def test_a_known_output(name, calls):
    """It is given back, and backward is as ever."""
    seed_torch(1)
    model = SUPPORTED_ADAPTERS[name]()
    value = torch.randn(2, TOKENS, OUT, dtype=torch.float64)
    check(model, calls, value=value)
    assert torch.equal(run(model, random_input(), fused=True, value=value)[0], value)


def test_an_output_that_nobody_reads(calls):
    seed_torch(1)
    model, x = SUPPORTED_ADAPTERS["two with dropout"](), random_input()
    check(model, calls, value=UNREAD_OUTPUT)
    assert run(model, x, fused=True, value=UNREAD_OUTPUT)[0].isnan().all()
    some = run(model, x, fused=True, value=slice(2, None, 5))[0]
    full_output = run(model, x, fused=True)[0]
    assert some.isfinite().any(-1).sum() == 2 * len(range(2, TOKENS, 5))
    assert torch.allclose(some[:, 2::5], full_output[:, 2::5], rtol=0, atol=1e-13)


def test_random_numbers_are_drawn_for_an_output_that_nobody_reads():
    """What comes after it in a layer draws what it drew."""
    model = SUPPORTED_ADAPTERS["two with dropout"]()
    states = []
    for value in (None, UNREAD_OUTPUT):
        with torch.no_grad(), adapters.fuse_adapters(lora_modules_of(model)):
            seed_torch(2)
            vars(model.base_model.model.proj)[ADAPTATION_ATTRIBUTE].product(random_input(), value)
            states.append(torch.get_rng_state())
    assert torch.equal(*states)


@pytest.mark.parametrize("autocast", [None, HALF_DTYPE], ids=["no autocast", "autocast"])
@pytest.mark.parametrize("adapters_in", ["float32", "bfloat16"])
def test_dropout_has_the_mask_of_peft(adapters_in, autocast):
    """With A of ones and B of ones, y shows how many features dropout has left of each token."""
    model = around(
        Holder(bias=False),
        HALF_DTYPE,
        lora_dropout=0.4,
        autocast_adapter_dtype=adapters_in == "float32",
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if "lora" in name else 0.0)
    x = torch.ones(2, TOKENS, IN, dtype=HALF_DTYPE)
    y, output = (run(model, x, fused=fused, autocast=autocast)[0] for fused in (False, True))
    assert y.unique().numel() > 4
    assert torch.allclose(output, y, rtol=0.02, atol=0)


FALLBACK_ADAPTERS = {
    "DoRA": (lambda: around(Holder(), use_dora=True), "Dora"),
    "hooks inside": (lambda: with_changes(around(Holder()), hooked), "hooks"),
    "a forward inside": (lambda: with_changes(around(Holder()), forwarded), "forward"),
    "a scale that is a tensor": (
        lambda: with_changes(around(Holder()), scaled_by_a_tensor),
        "scale",
    ),
    "all is dropped": (
        lambda: with_changes(around(Holder(), lora_dropout=0.5), all_dropped),
        "dropout",
    ),
    "float16": (lambda: around(Holder(), torch.float16), "float16"),
    "another base": (lambda: with_changes(around(Holder()), another_base), "base"),
}


def hooked(model):
    lora_a = model.base_model.model.proj.lora_A["default"]
    lora_a.register_forward_hook(lambda module, args, output: output * 1.5)


def forwarded(model):
    lora_b = model.base_model.model.proj.lora_B["default"]
    lora_b.forward = lambda x: 2.0 * type(lora_b).forward(lora_b, x)


def scaled_by_a_tensor(model):
    model.base_model.model.proj.scaling["default"] = nn.Parameter(torch.tensor(0.7))


def all_dropped(model):
    model.base_model.model.proj.lora_dropout["default"].p = 1.0


class Squared(nn.Linear):
    def forward(self, x):
        return super().forward(x) ** 2


def another_base(model):
    model.base_model.model.proj.base_layer.__class__ = Squared


def assert_same_bits(model, x, calls, **settings):
    (y, expected), (output, gradients) = (
        run(model, x, **settings),
        run(model, x, fused=True, **settings),
    )
    assert not calls
    assert torch.equal(output, y)
    assert output.dtype == y.dtype
    assert gradients.keys() == expected.keys()
    assert all(torch.equal(gradients[name], expected[name]) for name in expected)


@pytest.mark.parametrize("name", FALLBACK_ADAPTERS)
def test_what_falls_back_is_peft_to_the_bit(name, calls):
    seed_torch(1)
    make, why = FALLBACK_ADAPTERS[name]
    model = make()
    x = random_input(torch.float16 if name == "float16" else torch.float64)
    assert_same_bits(model, x, calls)
    (reading,) = lora_modules_of(model).values()
    assert why in reading.why


@pytest.mark.parametrize("case", ["disabled", "merged", "no active adapter"])
def test_what_has_no_adapter_at_work_is_no_matter_of_ours(case, calls):
    seed_torch(1)
    model = around(Holder())
    layer = model.base_model.model.proj
    if case == "disabled":
        layer.enable_adapters(False)
    if case == "merged":
        model.merge_adapter()
    if case == "no active adapter":
        layer._active_adapter = ["another"]
    assert lora_modules_of(model) == {}
    assert_same_bits(model, random_input(), calls)


def test_calls_with_more_arguments_are_for_peft(calls):
    seed_torch(1)
    model, x = around(Holder(), count=2), random_input()
    layer = model.base_model.model.proj
    model.eval()
    names = ["default", "adapter 1"]
    expected = layer(x, adapter_names=names)
    with adapters.fuse_adapters(lora_modules_of(model)):
        assert torch.equal(layer(x, adapter_names=names), expected)
    assert not calls


NARROW_CASES = {
    "a narrower adapter": (torch.float32, torch.bfloat16, None),
    "a wider adapter": (torch.float32, torch.float64, None),
    "autocast to float16": (torch.float32, torch.float32, torch.float16),
}


@pytest.mark.parametrize("name", NARROW_CASES)
def test_dtypes_in_which_peft_computes_with_other_numbers(name, calls):
    seed_torch(1)
    dtype, adapter_dtype, autocast = NARROW_CASES[name]
    model = around(Holder(), dtype)
    for path, parameter in model.named_parameters():
        if "lora" in path:
            parameter.data = parameter.data.to(adapter_dtype)
    assert_same_bits(model, random_input(dtype), calls, autocast=autocast)


def test_casts_that_are_switched_off(calls):
    seed_torch(1)
    model = around(Holder(), HALF_DTYPE)
    with helpers.disable_input_dtype_casting(model):
        with pytest.raises(RuntimeError, match="dtype"):
            run(model, random_input(HALF_DTYPE), fused=True)
        assert not calls
        run(model, random_input(HALF_DTYPE), fused=True, autocast=HALF_DTYPE)
        assert calls


def errors(model, x, true, **settings):
    def error(gradients):
        return math.sqrt(
            sum(
                float((gradients[n].double() - g).square().sum() / g.square().sum())
                for n, g in true.items()
            )
        )

    return tuple(error(run(model, x, fused=fused, **settings)[1]) for fused in (True, False))


def in_half(seed, std=0.2, autocast=None, bias=True, wide=True):
    """Our error and peft's, of all gradients of one Linear in bfloat16, against float64."""
    seed_torch(seed)
    model = around(Holder(bias, (128, 96)), HALF_DTYPE, std, autocast_adapter_dtype=wide)
    x = random_input(HALF_DTYPE, features=128)
    true = run(copy.deepcopy(model).double(), x.double())[1]
    return errors(model, x, {name: g.double() for name, g in true.items()}, autocast=autocast)


@pytest.mark.parametrize("autocast", [None, HALF_DTYPE], ids=["no autocast", "autocast"])
@pytest.mark.parametrize("wide", [True, False], ids=["float32", "bfloat16"])
def test_bfloat16_is_as_precise_as_peft(wide, autocast):
    pairs = [in_half(seed, 0.2, autocast, wide=wide) for seed in range(16)]
    ours, stock = (sum(column) for column in zip(*pairs, strict=True))
    print(f"{ours / stock:.3f} of peft's own error over {len(pairs)} Linears")
    assert ours <= MAX_ERROR_RATIO * stock


def of_two_parts():
    assert all(
        ours <= MAX_ERROR_RATIO * stock for ours, stock in (in_half(seed, 2.0) for seed in range(4))
    )


def test_grown_adapters():
    """They are as large as the base, so that rounding them shows."""
    of_two_parts()


class Kernels(TorchDispatchMode):
    """How many operations write something, or multiply: each starts a kernel."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        returns = func._schema.returns
        view = any(
            value.alias_info is not None and not value.alias_info.is_write for value in returns
        )
        name = func._overloadpacket.__name__
        self.count += not (view or name.startswith(("new_empty", "empty", "_unsafe_view")))
        return result


def kernels_of_a_forward(fused):
    """Of a chunk after the first one of a pass, which makes the factors."""
    model = around(Holder(False, (128, 96)), HALF_DTYPE)
    x = random_input(HALF_DTYPE, features=128)
    with torch.no_grad(), adapters.fuse_adapters(lora_modules_of(model) if fused else {}):
        model(x)
        # On meta, where no sum of products widens its factors, as on a GPU.
        adaptation = vars(model.base_model.model.proj).get(ADAPTATION_ATTRIBUTE)
        model.to("meta")
        if adaptation is not None:
            adaptation.factors.clear()
        model(x.to("meta"))
        with Kernels() as kernels:
            model(x.to("meta"))
    return kernels.count - 1  # x's own copy


def test_kernels_of_a_forward():
    ours, pefts = kernels_of_a_forward(True), kernels_of_a_forward(False)
    print(f"{ours} kernels, peft's {pefts}")
    assert 0 < ours < pefts == 7


def factors_for_each_call(monkeypatch):
    real = Adaptation._cached_factor
    monkeypatch.setattr(
        Adaptation,
        "_cached_factor",
        lambda self, *args: (self.factors.clear(), real(self, *args))[1],
    )


def one_part(monkeypatch):
    monkeypatch.setattr(
        operation, "_parts", lambda factor_dtype, dtype: 2 if dtype in operation.HALF_DTYPES else 1
    )


def no_low_part_of_u(monkeypatch):
    real = operation.left_operand

    def spread(gradient, factor):
        return real(
            gradient.bfloat16().float() if gradient.dtype == torch.float32 else gradient, factor
        )

    monkeypatch.setattr(operation, "left_operand", spread)


def without_masks(monkeypatch):
    monkeypatch.setattr(Adaptation, "_mask", lambda self, x, adapter: None)


def a_mask_of_its_own(monkeypatch):
    real = Adaptation._mask
    monkeypatch.setattr(
        Adaptation, "_mask", lambda self, x, adapter: (torch.rand(3), real(self, x, adapter))[1]
    )


def unmasked_dx(monkeypatch):
    real = operation._input_gradient

    def of_input(work, *args):
        groups = [group._replace(mask=None) for group in work.groups]
        return real(dataclasses.replace(work, groups=groups), *args)

    monkeypatch.setattr(operation, "_input_gradient", of_input)


def biases_left_out(monkeypatch):
    real = operation.factor_of
    monkeypatch.setattr(adapters, "factor_of", lambda matrix, dtype, rows=(): real(matrix, dtype))


def unscaled(monkeypatch):
    monkeypatch.setattr(operation.AdapterScale, "b", 1.0)


def factors_of_the_last_pass(monkeypatch):
    cache = {}
    real = Adaptation._cached_factor

    def keep_factor(self, key, tensors, make):
        return cache.setdefault(str(key), real(self, key, tensors, make))

    monkeypatch.setattr(Adaptation, "_cached_factor", keep_factor)


def base_alone(monkeypatch):
    """The base's product is written over that of the adapters: beta = 0."""
    monkeypatch.setattr(operation, "_product", lambda x, weight, u, b: x @ weight.mT)


def dx_of_the_base_alone(monkeypatch):
    monkeypatch.setattr(
        operation, "_input_gradient", lambda work, lefts, flat, weight: flat @ weight
    )


class Three(nn.Module):
    """Of one x, or some of another."""

    def __init__(self, reads="xxx"):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(IN, size, bias=size > 20) for size in (OUT, 16, 24)
        )
        self.reads = reads

    def forward(self, x):
        inputs = {"x": x, "y": 2.0 * x, "-": None, "d": x.detach()}
        pairs = zip((self.q_proj, self.k_proj, self.v_proj), self.reads, strict=True)
        return torch.cat([linear(inputs[name]).tanh() for linear, name in pairs if name != "-"], -1)


def of_three(reads, dtype=torch.float64, change=None, wide=True, **settings):
    lora = peft.LoraConfig(
        r=4,
        rank_pattern={"k_proj": 2},
        target_modules=r".*[qkv]_proj",
        init_lora_weights=False,
        **settings,
    )
    model = peft.get_peft_model(Three(reads).to(dtype), lora, autocast_adapter_dtype=wide)
    if dtype == torch.float64:
        model.double()
    if change is not None:
        change(model)
    return model.train()


def both_of_three(model, x, autocast=None, parts=False):
    """Of peft, and of ours: the output and all gradients; parts: of k and v alone."""
    results = []
    for fused in (False, True):
        model.zero_grad(set_to_none=True)
        leaf = x.detach().requires_grad_(x.requires_grad)
        seed_torch(5)
        with (
            torch.autocast("cpu", HALF_DTYPE, enabled=autocast is not None),
            adapters.fuse_adapters(lora_modules_of(model) if fused else {}),
        ):
            y = model(leaf * 1.0)
        upstream = torch.randn(y.shape, generator=seeded(7), dtype=torch.float64).to(y.dtype)
        if parts:
            y, upstream = y[..., OUT:], upstream[..., OUT:]
        y.backward(upstream)
        gradients = {
            name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
        }
        results.append((y.detach(), gradients | ({} if leaf.grad is None else {"x": leaf.grad})))
    return results


@pytest.fixture
def shared(monkeypatch):
    """How many Linears each product of an x with their A was for."""
    counts, real = [], operation.SharedInputState.read
    monkeypatch.setattr(
        operation.SharedInputState,
        "read",
        lambda self, rows: (counts.append(len(self.factors)), real(self, rows))[1],
    )
    return counts


SHARED_INPUT_CASES = {
    "all of one": ({"reads": "xxx"}, [3]),
    "one of another": ({"reads": "xyx"}, [3, 3, 3]),
    "one is not called": ({"reads": "xx-"}, [3]),
    "one of a detached x": ({"reads": "xdd"}, [3, 3]),
    "biases and scales": ({"reads": "xxx", "lora_bias": True, "use_rslora": True}, [3]),
    "dropout": ({"reads": "xxx", "lora_dropout": 0.3}, []),
    "everything trained": ({"reads": "xxx", "change": trained("")}, [3]),
    "B alone": ({"reads": "xxx", "change": trained("lora_B")}, [3]),
    "A of one alone": ({"reads": "xxx", "change": trained("v_proj.lora_A")}, [3]),
    "x alone": ({"reads": "xxx", "change": trained("nowhere")}, [3]),
}


def check_three(name, shared, wants_x=True, parts=False):
    settings, counts = SHARED_INPUT_CASES[name]
    seed_torch(1)
    model = of_three(**settings)
    (y, expected), (output, gradients) = both_of_three(
        model, random_input().requires_grad_(wants_x), parts=parts
    )
    assert (output - y).norm() <= FLOAT64_BAR * y.norm()
    assert worst_error(gradients, expected) <= FLOAT64_BAR
    assert shared == counts


@pytest.mark.parametrize("name", SHARED_INPUT_CASES)
def test_linears_of_one_input(name, shared):
    check_three(name, shared)


@pytest.mark.parametrize("name", ["all of one", "everything trained"])
def test_an_input_without_a_gradient(name, shared):
    check_three(name, shared, wants_x=False)


def test_an_output_without_a_gradient(shared):
    """Its adapters have none, and x has that of the others."""
    check_three("all of one", shared, parts=True)


@pytest.mark.parametrize("autocast", [None, HALF_DTYPE], ids=["no autocast", "autocast"])
@pytest.mark.parametrize("wide", [True, False], ids=["float32", "bfloat16"])
def test_linears_of_one_input_are_as_precise_as_peft(wide, autocast, shared):
    ours, pefts = 0.0, 0.0
    for seed in range(16):
        seed_torch(seed)
        model, x = of_three("xxx", HALF_DTYPE, wide=wide), random_input(HALF_DTYPE).requires_grad_()
        true = both_of_three(copy.deepcopy(model).double(), x.detach().double().requires_grad_())[
            0
        ][1]
        (_, stock), (_, fused) = both_of_three(model, x, autocast)
        off = [
            sum(
                float((g[name].double() - value).square().sum() / value.square().sum())
                for name, value in true.items()
            )
            ** 0.5
            for g in (fused, stock)
        ]
        ours, pefts = ours + off[0], pefts + off[1]
    print(f"{ours / pefts:.3f} of peft's own error")
    assert shared
    assert ours <= MAX_ERROR_RATIO * pefts


def test_the_product_of_one_input_is_freed_when_all_have_read_it(monkeypatch):
    """A kept graph held 640 bytes of it a token, of the 14,000 of a layer of 256 features."""
    products, real = [], operation.SharedInputState.read
    monkeypatch.setattr(
        operation.SharedInputState,
        "read",
        lambda self, rows: (products.append(self), real(self, rows))[1],
    )
    seed_torch(1)
    model = of_three("xxx", HALF_DTYPE)
    with adapters.fuse_adapters(lora_modules_of(model)):
        y = model(random_input(HALF_DTYPE).requires_grad_() * 1.0)
    (product,) = products
    assert product.products is None
    y.sum().backward()


def check_looks(monkeypatch):
    adaptations, real = [], Adaptation._cached_factor
    monkeypatch.setattr(
        Adaptation,
        "_cached_factor",
        lambda self, *args: (adaptations.append(args[0]), real(self, *args))[1],
    )
    model = of_three("xxx")
    with adapters.fuse_adapters(lora_modules_of(model)):
        model(random_input().requires_grad_() * 1.0)
    assert len(adaptations) == 2 * 3


def test_linears_of_one_input_look_at_each_tensor_once_a_call(monkeypatch):
    """At the A of each when the first one is called, and at B."""
    check_looks(monkeypatch)


def each_looks_at_its_a_again(monkeypatch):
    real = Adaptation._work
    monkeypatch.setattr(Adaptation, "_work", lambda self, *args: real(self, *args[:4]))


def looks_at_a():
    with pytest.MonkeyPatch.context() as patch:
        check_looks(patch)


def products_that_stay(monkeypatch):
    real = operation.SharedInputState.take_product

    def of(self, index):
        self.readers += 1
        return real(self, index)

    monkeypatch.setattr(operation.SharedInputState, "take_product", of)


def no_skinny_dx(monkeypatch):
    """The sum of the large products is all of dx."""
    real = operation._shared_backward

    def backward(ctx, x, grad):
        total, ctx.shared.total = ctx.shared.total, None
        gradients = real(ctx, x, grad)
        return (*gradients[:2], None if total is None else total.view(x.shape), *gradients[3:])

    monkeypatch.setattr(operation, "_shared_backward", backward)


def one_large_product_is_lost(monkeypatch):
    real = operation.SharedInputState.collect

    def collect(self, index, product_gradient, flat, weight):
        real(self, index, product_gradient, flat, weight if index else None)

    monkeypatch.setattr(operation.SharedInputState, "collect", collect)


def any_x_is_that_of_the_first(monkeypatch):
    real = adapters.Siblings.share_input

    def shared(self, tensor, x, member):
        if self.record is not None:
            self.record = (
                tensor,
                (tensor._version, torch.is_grad_enabled()),
                *self.record[2:4],
                set(),
            )
        return real(self, tensor, x, member)

    monkeypatch.setattr(adapters.Siblings, "share_input", shared)


def in_the_slot(weight):
    return lambda linear: linear._parameters.update(weight=weight(linear.weight))


def of_another_memory(linear):
    linear.weight.data = linear.weight.data * 2.0


def added_to(linear):
    with torch.no_grad():
        linear.weight.add_(1.0)


# What happens to B between two passes that share a cache, and how many factors the second makes.
CHANGES_BETWEEN_STEPS = {
    "nothing": (lambda linear: None, 0),
    "a shadow": (in_the_slot(lambda weight: weight.detach().requires_grad_()), 0),
    "another tensor": (in_the_slot(lambda weight: nn.Parameter(weight.detach().clone())), 1),
    "another memory": (of_another_memory, 1),
    "in place": (added_to, 1),
    "in place of a shadow": (
        in_the_slot(lambda weight: weight.detach().add_(1.0).requires_grad_()),
        1,
    ),
}


def check_between(name, monkeypatch):
    change, count = CHANGES_BETWEEN_STEPS[name]
    seed_torch(1)
    model, x, cache, created = around(Holder()), random_input(), {}, []
    real = adapters.factor_of
    monkeypatch.setattr(adapters, "factor_of", lambda *args: (created.append(1), real(*args))[1])
    with torch.no_grad():
        with adapters.fuse_adapters(lora_modules_of(model), cache):
            model(x)
        assert len(created) == 2
        change(model.base_model.model.proj.lora_B["default"])
        with adapters.fuse_adapters(lora_modules_of(model), cache):
            output = model(x)
        assert torch.allclose(output, model(x), rtol=1e-12, atol=1e-12)
    assert len(created) == 2 + count


@pytest.mark.parametrize("name", CHANGES_BETWEEN_STEPS)
def test_factors_of_another_pass(name, monkeypatch):
    check_between(name, monkeypatch)


def blind_to_versions(monkeypatch):
    real = adapters.memory_state
    monkeypatch.setattr(adapters, "memory_state", lambda tensor: real(tensor)[:-1])


def blind_to_memory(monkeypatch):
    real = adapters.memory_state
    monkeypatch.setattr(adapters, "memory_state", lambda tensor: real(tensor)[1:])


def blind_to_shadows(monkeypatch):
    real = adapters.memory_state
    monkeypatch.setattr(adapters, "memory_state", lambda tensor: (id(tensor), *real(tensor)))


@pytest.mark.parametrize(
    ("mutant", "name"),
    [
        (blind_to_versions, "in place"),
        (blind_to_memory, "another memory"),
        (blind_to_shadows, "a shadow"),
    ],
)
def test_mutants_of_the_cache(mutant, name, monkeypatch):
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        check_between(name, monkeypatch)


def a_step_between(calls):
    seed_torch(1)
    model, x = around(Holder()), random_input()
    run(model, x, fused=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    check(model, calls)


def test_factors_are_those_of_the_pass(calls):
    a_step_between(calls)


def test_factors_follow_a_change_within_a_pass(calls):
    seed_torch(1)
    model, x = around(Holder()), random_input()
    with adapters.fuse_adapters(lora_modules_of(model)), torch.no_grad():
        model(x)
        model.base_model.model.proj.lora_B["default"].weight.mul_(3.0)
        output = model(x)
    with torch.no_grad():
        assert torch.allclose(output, model(x), rtol=1e-12, atol=1e-12)
    assert len(calls) == 2


def freed_when_all_have_read_it():
    with pytest.MonkeyPatch.context() as patch:
        test_the_product_of_one_input_is_freed_when_all_have_read_it(patch)


@pytest.mark.parametrize(
    ("mutant", "failing_check"),
    [
        (one_part, lambda calls: of_two_parts()),
        (no_low_part_of_u, lambda calls: of_two_parts()),
        (without_masks, lambda calls: test_float64("dropout", calls)),
        (a_mask_of_its_own, lambda calls: test_float64("dropout", calls)),
        (unmasked_dx, lambda calls: test_float64("two with dropout", calls)),
        (biases_left_out, lambda calls: test_float64("the adapter's bias", calls)),
        (biases_left_out, lambda calls: test_float64("a bias", calls)),
        (unscaled, lambda calls: test_float64("plain", calls)),
        (base_alone, lambda calls: test_float64("plain", calls)),
        (dx_of_the_base_alone, lambda calls: test_float64("plain", calls)),
        (factors_of_the_last_pass, a_step_between),
        (no_skinny_dx, lambda calls: check_three("all of one", [3])),
        (one_large_product_is_lost, lambda calls: check_three("all of one", [3])),
        (products_that_stay, lambda calls: freed_when_all_have_read_it()),
        (any_x_is_that_of_the_first, lambda calls: check_three("one of another", [3])),
        (factors_for_each_call, lambda calls: test_kernels_of_a_forward()),
        (each_looks_at_its_a_again, lambda calls: looks_at_a()),
    ],
)
def test_mutants(mutant, failing_check, calls, monkeypatch):
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        failing_check(calls)
