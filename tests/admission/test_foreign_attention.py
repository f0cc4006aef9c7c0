"""Attention that is not transformers' own is refused by name, or by what it computes: streamed
layers do not call it.

covers: admission/entry.py, admission/own_run.py, admission/third_party.py,
distributed/context_parallel.py
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import types

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import and_masks, causal_mask_function, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama
from transformers.utils.deprecation import deprecate_kwarg

import streambp
from streambp.admission import entry, own_run, third_party
from streambp.errors import UnsupportedModelError
from tests.families import FAMILIES, build, make_batch
from tests.oracle import gradients, worst_error
from tests.tiers import thinned

CONFIG = streambp.StreamConfig(chunk_size=5)
WINDOW = 64  # more than the tokens that a layer is tried on
pytestmark = pytest.mark.usefixtures("float64_oracle")


@pytest.fixture(autouse=True)
def _tables(monkeypatch):
    """Names that a test registers are gone after it."""
    for table in (AttentionInterface, AttentionMaskInterface):
        monkeypatch.setattr(table, "_global_mapping", dict(table._global_mapping))
    monkeypatch.setattr(ALL_ATTENTION_FUNCTIONS, "_local_mapping", {})


def normalised(module, query, key, value, attention_mask, **kwargs):
    query, key = (torch.nn.functional.normalize(x, dim=-1) for x in (query, key))
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


def local(module, query, key, value, attention_mask, **kwargs):
    """Each query reads the last WINDOW keys alone."""
    positions = torch.arange(query.shape[2])
    window_mask = (positions[:, None] >= positions) & (positions[:, None] - positions < WINDOW)
    return sdpa_attention_forward(module, query, key, value, window_mask, **kwargs)


def counting(module, *args, **kwargs):
    """The same numbers, and a count of its calls."""
    module.calls = getattr(module, "calls", 0) + 1
    return sdpa_attention_forward(module, *args, **kwargs)


@dataclasses.dataclass
class Scaled:
    """A function with settings, which has no hash."""

    scaling: float

    def __call__(self, module, *args, **kwargs):
        return sdpa_attention_forward(module, *args, **{**kwargs, "scaling": self.scaling})


def windowed_mask(mask_function=None, **description):
    in_window = lambda batch, head, query, key: query - key < WINDOW  # noqa: E731
    return sdpa_mask(
        mask_function=and_masks(mask_function or causal_mask_function, in_window), **description
    )


def over_ranks(attend, *args, dist_attn=None, **kwargs):
    """The shape of ms-swift's sequence parallelism: a partial in the place of transformers'
    function."""
    return attend(*args, **kwargs)


def registered(model, attention=sdpa_attention_forward, mask=sdpa_mask):
    AttentionInterface.register("custom", attention)
    AttentionMaskInterface.register("custom", mask)
    model.set_attn_implementation("custom")


def set_sdpa(model, attention):
    ALL_ATTENTION_FUNCTIONS["sdpa"] = attention


def eager_replaced(model, attention):
    model.set_attn_implementation("eager")
    setattr(modeling_llama, "eager_attention_forward", attention)  # noqa: B010 - put back by `_eager`


@pytest.fixture(autouse=True)
def _eager(monkeypatch):
    monkeypatch.setattr(
        modeling_llama, "eager_attention_forward", modeling_llama.eager_attention_forward
    )


def eager(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling * 2)


def without_mask_function(model):
    AttentionInterface.register("custom", sdpa_attention_forward)
    model.set_attn_implementation("custom")


def mask_replaced(model):
    AttentionMaskInterface.register("sdpa", windowed_mask)


CASES = {
    "by name": (lambda m: registered(m, normalised), r"implementation='custom'\) is .*test_foreign_attention\.normalised"),
    "a local window by name": (lambda m: registered(m, local), r"test_foreign_attention\.local"),
    "a mask function by name": (lambda m: registered(m, mask=windowed_mask), "mask function .*windowed_mask"),
    "no mask function": (without_mask_function, "no mask function registered by its name"),
    "the mask function of sdpa": (mask_replaced, "mask function .*windowed_mask"),
    "in sdpa's place": (lambda m: set_sdpa(m, local), r"implementation='sdpa'\) is .*\.local"),
    "the same numbers": (lambda m: set_sdpa(m, counting), r"test_foreign_attention\.counting"),
    "ms-swift's": (
        lambda m: set_sdpa(m, functools.partial(over_ranks, sdpa_attention_forward, dist_attn=object())),
        r"test_foreign_attention\.over_ranks",
    ),
    "a partial of transformers' own": (
        lambda m: set_sdpa(m, functools.partial(sdpa_attention_forward, scaling=0.1)), "sdpa_attention_forward",
    ),
    "an object without a hash": (lambda m: registered(m, Scaled(0.1)), r"test_foreign_attention\.Scaled"),
    "another eager function": (
        lambda m: eager_replaced(m, eager),
        r"test_foreign_attention\.eager, where .*modeling_llama\.eager_attention_forward",
    ),
}  # fmt: skip


@pytest.mark.fast(3)
@pytest.mark.parametrize(
    ("case", "order"),
    thinned(
        itertools.product(CASES, ["before", "after", "after a step"]),
        lambda case, order: (
            order != "after a step" or case in ("by name", "no mask function", "in sdpa's place")
        ),
    ),
)
def test_is_refused_by_name(case, order):
    """A function is asked for where the model is patched and in each of its forwards: it may be
    replaced at any time."""
    change, message = CASES[case]
    model, batch = build("llama", torch.float64), make_batch("left-padded", length=2 * WINDOW + 3)
    stock = copy.deepcopy(model)
    if order == "before":
        change(model)
        with pytest.raises(UnsupportedModelError, match=message):
            streambp.patch(model, CONFIG)
        assert not streambp.model.installed_patch.is_patched(model)
        return
    streambp.patch(model, CONFIG)
    if order == "after a step":
        expected = gradients(stock, **batch)[1]
        assert worst_error(gradients(model, **batch)[1], expected) <= 1e-10
    change(model)
    with pytest.raises(UnsupportedModelError, match=message):
        model(**batch, use_cache=False)


def test_a_layer_called_by_itself():
    model = streambp.patch(build("llama", torch.float64), CONFIG)
    set_sdpa(model, counting)
    x = torch.randn(2, 11, 32, dtype=torch.float64)
    rotary = model.model.rotary_emb(x, torch.arange(11)[None])
    with pytest.raises(UnsupportedModelError, match="counting"):
        model.model.layers[0](x, position_embeddings=rotary)


def in_disguise(function):
    """A function that seems to be written in the modeling file, as after an edit of its source."""
    return types.FunctionType(
        function.__code__,
        {**globals(), "__name__": modeling_llama.__name__},
        None,
        function.__defaults__,
    )


def without_gradient(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    return sdpa_attention_forward(
        module, query, key.detach(), value, attention_mask, scaling=scaling
    )


def failing(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    raise ValueError("wants more tokens")


OTHER_FUNCTIONS = (
    "LlamaDecoderLayer .*LlamaAttention with attn_implementation='eager'.* computes other values "
    "unpatched"
)


@pytest.mark.parametrize(("function", "message"), [
    (eager, OTHER_FUNCTIONS),
    (without_gradient, OTHER_FUNCTIONS),
    (failing, r"fails to compute them unpatched \(ValueError: wants more tokens\)"),
])  # fmt: skip
def test_is_refused_by_what_it_computes(function, message):
    model = build("llama", torch.float64)
    eager_replaced(model, in_disguise(function))
    streambp.patch(model, CONFIG)
    with pytest.raises(UnsupportedModelError, match=message):
        model(**make_batch("plain"), use_cache=False)


def test_torchs_attention_replaced(monkeypatch):
    real = torch.nn.functional.scaled_dot_product_attention
    softer = lambda q, *args, **kwargs: real(q * 0.5, *args, **kwargs)  # noqa: E731
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", softer)
    model = streambp.patch(build("qwen3", torch.float64), CONFIG)
    with pytest.raises(
        UnsupportedModelError, match="computes other values unpatched than streamed"
    ):
        model(**make_batch("plain"), use_cache=False)


@pytest.mark.parametrize("differs", [False, True])
def test_torchs_attention_replaced_between_steps(monkeypatch, differs):
    """A layer that was tried under torch's own is tried again; one that computes the same is
    streamed."""
    real = torch.nn.functional.scaled_dot_product_attention
    softer = lambda q, *args, **kwargs: real(q * (0.5 if differs else 1.0), *args, **kwargs)  # noqa: E731
    model = streambp.patch(build("qwen3", torch.float64), CONFIG)
    expected = gradients(model, **make_batch("plain"))[1]
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", softer)
    if differs:
        with pytest.raises(
            UnsupportedModelError, match="computes other values unpatched than streamed"
        ):
            model(**make_batch("plain"), use_cache=False)
    else:
        assert worst_error(gradients(model, **make_batch("plain"))[1], expected) == 0.0


def test_mutant_torchs_attention_is_not_asked_for_again(monkeypatch):
    monkeypatch.setattr(entry, "attention_key", lambda: None)
    with pytest.raises(pytest.fail.Exception):
        test_torchs_attention_replaced_between_steps(monkeypatch, True)


def test_mutant_the_layer_is_compared_with_itself(monkeypatch):
    """Without the comparison another model is trained, silently."""
    monkeypatch.setattr(own_run.UnpatchedRun, "agrees", lambda self, streamed: True)
    model = build("llama", torch.float64)
    eager_replaced(model, in_disguise(eager))
    expected = gradients(model, **make_batch("plain"))[1]
    streambp.patch(model, CONFIG)
    assert worst_error(gradients(model, **make_batch("plain"))[1], expected) > 0.1
    with pytest.raises(pytest.fail.Exception):
        test_is_refused_by_what_it_computes(eager, OTHER_FUNCTIONS)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "implementation", ["sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention"]
)
def test_transformers_own_are_known(implementation, family):
    (attention,) = {
        type(m): m for m in third_party.distinct_attentions(build(family).model.layers)
    }.values()
    assert third_party.foreign_function(attention, implementation) is None


def hub_kernel(**also):
    """`flash_attn_forward` as a module of the hub's defines it."""
    names = {"__name__": "flash_kernels", **also}
    exec("def flash_attn_forward(module, query, key, value, attention_mask, **kwargs): ...", names)
    return names["flash_attn_forward"]


@pytest.mark.parametrize(("name", "function", "is_known"), [
    ("kernels-community/metal-flash", hub_kernel(supports_flash_attn=True), True),
    ("kernels-community/metal-flash", hub_kernel(), False),
    ("custom", hub_kernel(supports_flash_attn=True), False),
    ("kernels-community/other:flash", local, False),
])  # fmt: skip
def test_kernels_of_the_hub(name, function, is_known):
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, sdpa_mask)
    (attention, *_) = third_party.distinct_attentions(build("llama").model.layers)
    assert (third_party.foreign_function(attention, name) is None) == is_known


@pytest.mark.parametrize(
    ("home", "ranks", "is_known"),
    [("verl.models", 1, True), ("verl.models", 2, False), ("axolotl", 1, False)],
)
def test_what_transformers_flash_attention_calls(home, ranks, is_known, monkeypatch):
    """verl replaces it always, ring attention only where sequences are split."""
    names = {"__name__": home, third_party.VERLS_SIZE: lambda: ranks}
    exec("def split(*args, **kwargs): ...", names)
    flash = ALL_ATTENTION_FUNCTIONS["flash_attention_2"]
    monkeypatch.setitem(flash.__globals__, "_flash_attention_forward", names["split"])
    (attention, *_) = third_party.distinct_attentions(build("llama").model.layers)
    foreign_name = third_party.foreign_function(attention, "flash_attention_2")
    assert (foreign_name is None) == is_known
    assert is_known or f"calls {home}.split" in foreign_name


@pytest.mark.parametrize(
    ("home", "implementation"),
    [
        ("swift.sequence_parallel.ulysses", "sdpa"), ("swift.sequence_parallel.ulysses", "flash_attention_2"),
        ("ring_flash_attn.adapters.hf_adapter", "flash_attention_2"), ("accelerate.utils.sequence_parallel", "sdpa"),
    ],
)  # fmt: skip
def test_who_splits_sequences_elsewhere_is_named(home, implementation):
    """ms-swift's partial, axolotl's ring, and what accelerate will register, by where their
    functions are written."""
    names = {"__name__": home}
    exec("def attend(module, query, key, value, attention_mask, **kwargs): ...", names)
    split_attention = (
        functools.partial(names["attend"], dist_attn=object())
        if home.startswith("swift")
        else names["attend"]
    )
    ALL_ATTENTION_FUNCTIONS[implementation] = split_attention
    (attention, *_) = third_party.distinct_attentions(build("llama").model.layers)
    assert f"is {home}.attend" in third_party.foreign_function(attention, implementation)


@pytest.mark.parametrize(("mask", "is_known"), [(sdpa_mask, True), (windowed_mask, False)])
def test_transformers_decorators_are_looked_into(mask, is_known):
    """transformers 5.17 has such a decorator around `sdpa_mask`."""
    AttentionMaskInterface.register("sdpa", deprecate_kwarg("old", version="99.0.0")(mask))
    model = build("llama")
    if is_known:
        assert streambp.patch(model) is model
        return
    with pytest.raises(streambp.StreamBPError, match="windowed_mask"):
        streambp.patch(model)
