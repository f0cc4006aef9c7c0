"""The argument of a layer that takes a cache, whatever its name is.

covers: cache_arguments.py, source.py
"""

from __future__ import annotations
import __future__

import ast
import copy
import functools
import inspect
import textwrap
from collections.abc import Mapping

import pytest
import torch
from torch import nn
from transformers import DynamicCache
from transformers.cache_utils import Cache

import streambp
from streambp import cache_arguments
from streambp.admission import stacks
from streambp.cache_arguments import cache_parameters, is_cache, without_caches
from streambp.model.state import has_cache
from streambp.recurrent import segments
from streambp.source import undecorate, with_globals
from tests import zoo
from tests.families import make_batch
from tests.oracle import MAX_FLOAT64_ERROR, gradients, worst_error
from tests.versions import needs_indexers, needs_states

NAMES = ("past_key_values", "past_key_value", "layer_past", "cache_params", "cache")
NEW_ARGUMENT_NAME = "what_came_before"
# One of each carrier: a convolution beside attention, Mamba 2, Mamba, a delta rule, attention over
# what a cache returns, positions asked of a cache, an indexer.
FAMILIES = {
    "lfm2": (needs_states,),
    "bamba": (needs_states,),
    "mamba2": (needs_states,),
    "qwen3_next": (needs_states,),
    "falcon": (),
    "llama4_text": (),
    "glm_moe_dsa": (needs_indexers,),
}
ANNOTATION_KINDS = ("as a class", "as text", "not at all", "as something else")
FAST_CASES = {
    ("lfm2", "as a class"), ("qwen3_next", "as text"), ("bamba", "not at all"), ("falcon", "as something else"),
    ("llama4_text", "not at all"), ("glm_moe_dsa", "as a class"),
}  # fmt: skip
CASES = [
    pytest.param(
        name, says, marks=[*marks, *([] if (name, says) in FAST_CASES else [pytest.mark.full])]
    )
    for name, marks in FAMILIES.items()
    for says in ANNOTATION_KINDS
]


@pytest.fixture
def float64(float64_oracle):
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def renaming(function):
    """A decorator as transformers has from 5.24 on: who calls by an older name gets what the new
    one takes."""

    @functools.wraps(function)
    def forward(*args, **kwargs):
        return function(
            *args,
            **{
                NEW_ARGUMENT_NAME if name in NAMES else name: value
                for name, value in kwargs.items()
            },
        )

    return forward


class Renames(ast.NodeTransformer):
    """Of a forward's source: a new name for caches, and what their annotation says."""

    def __init__(self, says):
        self.says = says

    def visit_FunctionDef(self, node):
        node.decorator_list = []
        return self.generic_visit(node)

    def visit_arg(self, node):
        if node.arg not in NAMES:
            return node
        new_annotations = {
            "not at all": None,
            "as something else": ast.parse("tuple | None", mode="eval").body,
        }
        return ast.arg(NEW_ARGUMENT_NAME, new_annotations.get(self.says, node.annotation))

    def visit_keyword(self, node):
        return ast.keyword(
            NEW_ARGUMENT_NAME if node.arg in NAMES else node.arg, self.visit(node.value)
        )

    def visit_Name(self, node):
        return ast.Name(NEW_ARGUMENT_NAME if node.id in NAMES else node.id, node.ctx)


def rename(monkeypatch, model, says):
    """Give the caches of all modules inside the model's layers another name, and another
    annotation."""
    layers = [layer for stack in stacks.find_stacks(model).stacks for layer in stack.layers]
    for kind in {type(module) for layer in layers for module in layer.modules()}:
        forward = undecorate(kind.forward)
        if not set(NAMES) & set(inspect.signature(forward).parameters):
            continue
        tree = Renames(says).visit(ast.parse(textwrap.dedent(inspect.getsource(forward))))
        flags = __future__.annotations.compiler_flag if says == "as text" else 0
        space = dict(forward.__globals__)
        exec(
            compile(ast.fix_missing_locations(tree), "renamed", "exec", flags, dont_inherit=True),
            space,
        )
        renamed_forward = space["forward"]
        renamed_forward.__qualname__ = forward.__qualname__
        assert NEW_ARGUMENT_NAME in inspect.signature(renamed_forward).parameters
        monkeypatch.setattr(kind, "forward", renaming(renamed_forward))


def check(name):
    stock, batch = zoo.build(name), make_batch("packed")
    ours = streambp.patch(
        copy.deepcopy(stock), streambp.StreamConfig(chunk_size=5, documents="as_given")
    )
    (expected_loss, expected), (loss, grads) = gradients(stock, **batch), gradients(ours, **batch)
    assert abs(loss - expected_loss) <= 1e-12
    assert worst_error(grads, expected) <= MAX_FLOAT64_ERROR
    assert {layer.path for layer in streambp.describe(ours).layers} == {"streams"}


@pytest.mark.fast(6)
@pytest.mark.parametrize(("name", "says"), CASES)
def test_layers_stream_whatever_their_caches_are_called(name, says, monkeypatch, float64):
    rename(monkeypatch, zoo.build(name), says)
    check(name)


@needs_states
@pytest.mark.parametrize("mutant", ["by name", "by annotation alone"])
def test_mutants_turn_it_red(mutant, monkeypatch, float64):
    rename(monkeypatch, zoo.build("bamba"), "as a class" if mutant == "by name" else "not at all")
    if mutant == "by name":
        by_name = lambda layer: tuple(  # noqa: E731
            name for name in stacks._variables_in_forward(layer) if name in NAMES
        )
        monkeypatch.setattr(stacks, "cache_arguments", by_name)
    else:
        monkeypatch.setattr(cache_arguments, "_called_as_caches", lambda code: frozenset())
        cache_parameters.cache_clear()
    with pytest.raises((AssertionError, streambp.StreamBPError)):
        check("bamba")


@pytest.mark.full
@needs_states
def test_packed_rows_of_mixers_whose_cache_has_any_name(monkeypatch, float64):
    """What stands in for a mixer's forward has no parameter that could be one of the mixer's."""
    mixers = {"real", "scans", "segments", "cache", "module"}
    stock, batch = zoo.build("lfm2"), make_batch("packed")
    kind = type(segments.mixers_of(stock.model.layers[0])[0])
    real = kind.forward

    def forward(self, *args, real=None, scans=None, segments=None, module=None, **kwargs):
        assert (real, scans, segments, module) == ("real", "scans", "segments", "module")
        return theirs(self, *args, **kwargs)

    theirs = real
    forward.__wrapped__ = real
    monkeypatch.setattr(kind, "forward", forward)
    layer = type(stock.model.layers[0])
    real_forward = layer.forward

    def calls(self, *args, **kwargs):
        mixer = next(iter(segments.mixers_of(self)), None)
        if mixer is None:
            return real_forward(self, *args, **kwargs)
        previous_forward = mixer.__dict__.get("forward")
        inner = mixer.forward
        mixer.forward = lambda *a, **k: inner(
            *a, **k, **{name: name for name in mixers - {"cache"}}
        )
        try:
            return real_forward(self, *args, **kwargs)
        finally:
            if previous_forward is None:
                del mixer.forward
            else:
                mixer.forward = previous_forward

    calls.__wrapped__ = real_forward
    monkeypatch.setattr(layer, "forward", calls)
    ours = streambp.patch(copy.deepcopy(stock), streambp.StreamConfig(chunk_size=5))
    assert gradients(ours, **batch)[0].isfinite()


class Remembers:
    """A cache of a program's own: no class of transformers', and no name that says so."""

    def update(self, key_states, value_states, layer):
        return key_states, value_states

    def get_seq_length(self):
        return 0


class Passes(nn.Module):
    """Hands on what it is given."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, hidden_states, **kwargs):
        return self.inner(hidden_states, **kwargs)


class Attends(nn.Module):
    def forward(self, hidden_states, store: Remembers | None = None, table: dict | None = None):
        if table is not None:
            table.update(one=1)
        return hidden_states if store is None else store.update(hidden_states, hidden_states, 0)[0]


class OuterModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attends()

    def forward(self, hidden_states, use_cache=False, store=None):
        return self.attention(hidden_states, store=store)


def test_what_takes_a_cache():
    def annotated(
        x,
        a: Cache | None = None,
        b: DynamicCache | None = None,
        c: int = 0,
        d: Mapping | None = None,
    ):
        return d.update(x) if d else a or b or c

    def called(x, a=None, b=None, *, c=None, **kwargs):
        kwargs.update(x=x)
        return c.update_conv_state(x, 0) if a is None else b

    def later(
        x,
        of_text: DynamicCache | None = None,
        of_nobody: NowhereToBeFoundCache | None = None,  # noqa: F821
    ):
        return x

    assert cache_parameters(annotated) == ("a", "b")
    assert cache_parameters(called) == ("c",)
    assert cache_parameters(later) == ("of_text", "of_nobody")
    assert cache_parameters(Attends.forward) == ("store",)
    assert cache_parameters(nn.Linear.forward) == cache_parameters(None) == ()
    assert cache_arguments.cache_arguments(OuterModel()) == ("store",)
    assert cache_arguments.cache_arguments(Passes(Attends())) == ("store",)
    assert cache_arguments.cache_arguments(Passes(nn.Linear(1, 1))) == ()


def test_what_is_a_cache():
    caches = (DynamicCache(), Remembers())
    no_caches = (
        None,
        {},
        [],
        torch.ones(1),
        (torch.ones(1), torch.ones(1)),
        True,
        "cache",
        nn.ModuleDict(),
    )
    assert all(map(is_cache, caches))
    assert not any(map(is_cache, no_caches))
    arguments = {"anything": caches[1], "mask": torch.ones(1), "flag": False}
    assert has_cache(arguments)
    assert without_caches(arguments) == {**arguments, "anything": None}
    assert not has_cache(
        {"cache": None, "past_key_values": None, "mask": torch.ones(1), "kept": {}}
    )
    assert has_cache({"past_key_values": ((torch.ones(1), torch.ones(1)),)})
    assert has_cache({"state": (torch.ones(1),)})


def test_a_forward_with_other_globals_keeps_its_decorators():
    def tripled(x, what_came_before=None):
        return factor(x), what_came_before  # noqa: F821

    decorated = renaming(renaming(tripled))
    copied = with_globals({"factor": lambda x: 3 * x}, decorated)
    assert copied(2, cache=5) == (6, 5)
    assert inspect.signature(copied) == inspect.signature(tripled)
    assert undecorate(decorated) is tripled
    with pytest.raises(NameError):
        decorated(2)
