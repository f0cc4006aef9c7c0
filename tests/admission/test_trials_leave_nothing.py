"""What modules keep of a first batch is of the batch: no trial leaves anything, in whatever way a
module keeps it.

covers: admission/snapshot.py, admission/kept_values.py, admission/tables.py, admission/values.py, admission/generators.py,
admission/probe.py, admission/first_call.py
"""

from __future__ import annotations

import array
import builtins
import collections
import contextlib
import copy
import functools
import itertools
import os
import queue
import types

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import streambp
from streambp.admission import entry, kept_values, snapshot
from streambp.admission.snapshot import Snapshot, StateRestorer
from streambp.errors import BackwardError, UnsupportedModelError
from streambp.known_names import PYTEST
from streambp.planner import estimate, skeleton
from tests.families import build, make_batch
from tests.oracle import MAX_FLOAT64_ERROR, worst_error
from tests.tiers import thinned

LENGTH = 16  # three chunks of 5, and one of a single token
CONFIG = streambp.StreamConfig(chunk_size=5)
GLOBAL = {"scale": None}
REBOUND_GLOBAL = None


pytestmark = pytest.mark.usefixtures("float64_everywhere")


def size_of(x: Tensor) -> Tensor:
    return x.detach().abs().mean()


class Scaled(nn.Module):
    """An MLP times a number that its first batch gives; how the number is kept, subclasses say."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.start()

    def start(self):
        pass

    def forward(self, x):
        return self.inner(x) * self.scale_of(x)


class IsNone(Scaled):
    def start(self):
        self.scale = None

    def scale_of(self, x):
        if self.scale is None:
            self.scale = size_of(x)
        return self.scale


class Missing(Scaled):
    def scale_of(self, x):
        if not hasattr(self, "scale"):
            self.scale = size_of(x)
        return self.scale


class InPlace(Scaled):
    def start(self):
        self.scale = torch.zeros(())

    def scale_of(self, x):
        if self.scale == 0:
            self.scale.copy_(size_of(x))
        return self.scale


class ThroughData(InPlace):
    """No version counter moves."""

    def scale_of(self, x):
        if self.scale == 0:
            self.scale.data.copy_(size_of(x))
        return self.scale


class Float(Scaled):
    def start(self):
        self.scale = -1.0

    def scale_of(self, x):
        if self.scale < 0:
            self.scale = float(size_of(x))
        return self.scale


class Word(Scaled):
    def start(self):
        self.state, self.scale = "new", torch.ones(())

    def scale_of(self, x):
        if self.state == "new":
            self.state, self.scale = "ready", size_of(x)
        return self.scale


class InList(Scaled):
    def start(self):
        self.store = []

    def scale_of(self, x):
        if not self.store:
            self.store.append(size_of(x))
        return self.store[0]


class InDict(Scaled):
    """Beside a counter and a record of lengths."""

    def start(self):
        self.store = {}

    def scale_of(self, x):
        self.store.setdefault("scale", size_of(x))
        self.store["calls"] = self.store.get("calls", 0) + 1
        self.store[x.shape[1]] = True
        return self.store["scale"]


class InSet(Scaled):
    def start(self):
        self.store = set()

    def scale_of(self, x):
        if not self.store:
            self.store.add(float(size_of(x)))
        return next(iter(self.store))


class InDeque(InList):
    def start(self):
        self.store = collections.deque(maxlen=1)


class InObject(Scaled):
    def start(self):
        self.holder = types.SimpleNamespace(inner=Holder())

    def scale_of(self, x):
        if self.holder.inner.scale is None:
            self.holder.inner.scale = size_of(x)
        return self.holder.inner.scale


class Holder:
    __slots__ = ("scale",)

    def __init__(self):
        self.scale = None


class InModule(Scaled):
    """That no named_modules finds."""

    def start(self):
        self.parts = [nn.Sequential(nn.Identity())]

    def scale_of(self, x):
        part = self.parts[0][0]
        if not hasattr(part, "scale"):
            part.scale = size_of(x)
        return part.scale


class OnClass(Scaled):
    scale = None

    def start(self):
        OnClass.scale = None

    def scale_of(self, x):
        if type(self).scale is None:
            type(self).scale = size_of(x)
        return type(self).scale


class Closure(Scaled):
    def start(self):
        scale = None

        def scale_of(x):
            nonlocal scale
            if scale is None:
                scale = size_of(x)
            return scale

        self.scale_of = scale_of


class OfFunction(Scaled):
    def start(self):
        def scale_of(x):
            if not hasattr(scale_of, "scale"):
                scale_of.scale = size_of(x)
            return scale_of.scale

        self.scale_of = scale_of


class OfDefault(Scaled):
    def start(self):
        def scale_of(x, store={}):  # noqa: B006 - which is what is tried
            return store.setdefault("scale", size_of(x))

        scale_of.__defaults__[0].clear()
        self.scale_of = scale_of


class InGlobal(Scaled):
    def start(self):
        GLOBAL["scale"] = None

    def scale_of(self, x):
        if GLOBAL["scale"] is None:
            GLOBAL["scale"] = size_of(x)
        return GLOBAL["scale"]


class AsGlobal(Scaled):
    def start(self):
        global REBOUND_GLOBAL
        REBOUND_GLOBAL = None

    def scale_of(self, x):
        global REBOUND_GLOBAL
        if REBOUND_GLOBAL is None:
            REBOUND_GLOBAL = size_of(x)
        return REBOUND_GLOBAL


class Registered(Scaled):
    def scale_of(self, x):
        if "scale" not in self._buffers:
            self.register_buffer("scale", size_of(x), persistent=False)
        return self.scale


class FrozenParameter(Scaled):
    def start(self):
        self.scale, self.ready = nn.Parameter(torch.ones(32), requires_grad=False), False

    def scale_of(self, x):
        if not self.ready:
            self.scale.data.copy_(x.detach().abs().mean((0, 1)))
            self.ready = True
        return self.scale


class InConfig(Scaled):
    def start(self):
        self.inner.config.first_scale = None

    def scale_of(self, x):
        config = self.inner.config
        if config.first_scale is None:
            config.first_scale = float(size_of(x))
        return config.first_scale


class InArray(Scaled):
    def start(self):
        self.scale = np.zeros(1)

    def scale_of(self, x):
        if self.scale[0] == 0:
            self.scale[0] = float(size_of(x))
        return float(self.scale[0])


class InTraining(Scaled):
    def start(self):
        self.scale = None

    def scale_of(self, x):
        if self.training and self.scale is None:
            self.scale = size_of(x)
        return 1.0 if self.scale is None else self.scale


class InEnvironment(Scaled):
    def start(self):
        os.environ.pop("STREAMBP_TEST_SCALE", None)

    def scale_of(self, x):
        return float(os.environ.setdefault("STREAMBP_TEST_SCALE", repr(float(size_of(x)))))


class OnLibrary(Scaled):
    """In a module of Python's own."""

    def start(self):
        vars(builtins).pop("_scale_of_a_test", None)

    def scale_of(self, x):
        if not hasattr(builtins, "_scale_of_a_test"):
            builtins._scale_of_a_test = size_of(x)
        return builtins._scale_of_a_test


class InQueue(Scaled):
    def start(self):
        self.store = queue.Queue()

    def scale_of(self, x):
        if self.store.empty():
            self.store.put(size_of(x))
        return self.store.queue[0]


class InPythonArray(Scaled):
    def start(self):
        self.store = array.array("d", [0.0])

    def scale_of(self, x):
        if self.store[0] == 0:
            self.store[0] = float(size_of(x))
        return self.store[0]


class InBytes(Scaled):
    def start(self):
        self.store = bytearray(8)

    def scale_of(self, x):
        if not any(self.store):
            self.store[:] = np.float64(float(size_of(x))).tobytes()
        return float(np.frombuffer(bytes(self.store), np.float64)[0])


class Resized(Scaled):
    def start(self):
        self.store = torch.zeros(0)

    def scale_of(self, x):
        if self.store.numel() == 0:
            self.store.resize_(1).fill_(float(size_of(x)))
        return self.store[0]


class DataReplaced(Resized):
    def scale_of(self, x):
        if self.store.numel() == 0:
            self.store.data = size_of(x).reshape(1)
        return self.store[0]


class InCache(Scaled):
    """Of calls without arguments, with a bound to their number and without."""

    max_entries = None

    def start(self):
        self.last = None

        @functools.lru_cache(self.max_entries)
        def scale_of():
            return float(size_of(self.last))

        self.cached = scale_of

    def scale_of(self, x):
        self.last = x.detach()
        return self.cached()


class InBoundedCache(InCache):
    max_entries = 4


class AsParameter(Scaled):
    """A trained one, made in the first call."""

    def scale_of(self, x):
        if "scale" not in self._parameters:
            self.scale = nn.Parameter(size_of(x))
        return self.scale


class AsModule(Scaled):
    """A trained one, made in the first call."""

    def scale_of(self, x):
        if "gate" not in self._modules:
            self.gate = nn.Linear(1, 1, bias=False)
            self.gate.weight.data.fill_(float(size_of(x)))
        return self.gate.weight[0, 0]


class InParameterList(Scaled):
    def start(self):
        self.store = nn.ParameterList()

    def scale_of(self, x):
        if not len(self.store):
            self.store.append(nn.Parameter(size_of(x)))
        return self.store[0]


class AsClass(Scaled):
    """The first call makes the module one of another class."""

    def scale_of(self, x):
        self.scale, self.__class__ = size_of(x), Ready
        return self.scale


class Ready(AsClass):
    def scale_of(self, x):
        return self.scale


class HookOnce(Scaled):
    """A hook of the first call takes itself away."""

    def start(self):
        def hook(module, args):
            module.scale = size_of(args[0])
            self.handle.remove()

        self.handle = self.register_forward_pre_hook(hook)

    def scale_of(self, x):
        return self.scale


class OfStaticMethod(Scaled):
    def start(self):
        vars(OfStaticMethod.static_scale).pop("scale", None)

    @staticmethod
    def static_scale(x):
        if not hasattr(OfStaticMethod.static_scale, "scale"):
            OfStaticMethod.static_scale.scale = size_of(x)
        return OfStaticMethod.static_scale.scale

    def scale_of(self, x):
        return OfStaticMethod.static_scale(x)


class InConfigsDict(Scaled):
    def start(self):
        self.inner.config.extra = {"scale": None}

    def scale_of(self, x):
        extra = self.inner.config.extra
        if extra["scale"] is None:
            extra["scale"] = float(size_of(x))
        return extra["scale"]


class InGenerator(Scaled):
    def start(self):
        def scales():
            scale = size_of((yield))
            while True:
                yield scale

        self.store = scales()
        next(self.store)

    def scale_of(self, x):
        return self.store.send(x)


class ByCounter(Scaled):
    def start(self):
        self.calls = itertools.count()

    def scale_of(self, x):
        if next(self.calls) == 0:
            self.scale = size_of(x)
        return self.scale


def by_hook(layer):
    store = {}

    def scale(module, args, output):
        return output * store.setdefault("scale", size_of(output))

    layer.mlp.register_forward_hook(scale)


def by_forward(layer):
    real, store = layer.mlp.forward, []

    def forward(x):
        if not store:
            store.append(size_of(x))
        return real(x) * store[0]

    layer.mlp.forward = forward


def around_mlp(layer, kind):
    layer.mlp = kind(layer.mlp)


NAMED_CASES = (
    "attribute that is None", "missing attribute", "tensor", "tensor through data", "float", "string flag", "list", "dict",
    "set", "deque", "object", "hidden module", "class", "closure", "function", "default", "global dict", "global", "buffer",
    "parameter", "config", "array", "in training alone", "environment", "library", "queue", "Python's array", "bytes",
    "resized tensor", "replaced data", "cache", "bounded cache", "new parameter", "new module", "parameter list",
    "new class", "hook of one call", "static method", "dict of a config", "generator", "counter",
)  # fmt: skip
KINDS = (
    IsNone, Missing, InPlace, ThroughData, Float, Word, InList, InDict, InSet, InDeque, InObject, InModule, OnClass,
    Closure, OfFunction, OfDefault, InGlobal, AsGlobal, Registered, FrozenParameter, InConfig, InArray, InTraining,
    InEnvironment, OnLibrary, InQueue, InPythonArray, InBytes, Resized, DataReplaced, InCache, InBoundedCache,
    AsParameter, AsModule, InParameterList, AsClass, HookOnce, OfStaticMethod, InConfigsDict, InGenerator, ByCounter,
)  # fmt: skip
STORE_CLASSES = {
    name: functools.partial(around_mlp, kind=kind)
    for name, kind in zip(NAMED_CASES, KINDS, strict=True)
}
STORE_CLASSES |= {"hook": by_hook, "forward": by_forward}
BATCHES = {seed: make_batch("plain", LENGTH, seed) for seed in range(1, 4)}
SITUATIONS = {
    "first call": ((True, BATCHES[1]), (True, BATCHES[2])),
    "new kind": ((True, BATCHES[1]), (True, make_batch("packed", LENGTH, 4)), (True, BATCHES[3])),
    "evaluation first": ((False, BATCHES[1]), (True, BATCHES[2]), (False, BATCHES[2])),
}
FAST_CASES = ("missing attribute", "dict", "class", "closure", "hook", "new parameter", "generator")
# Chunks would leave another length or tensor; iterators cannot be put back.
UNCHUNKED_CASES = ("dict", "cache", "bounded cache", "generator", "counter")


def make_model(change):
    model = build("llama", torch.float64)
    for layer in model.model.layers:
        change(layer)
    return model


def results(model, calls):
    """Gradients and losses, of one call after the other."""
    tensors = {}
    for number, (trains, batch) in enumerate(calls):
        model.zero_grad(set_to_none=True)
        model.train(trains)
        with torch.set_grad_enabled(trains):
            loss = model(**batch, use_cache=False).loss
        if trains:
            loss.backward()
        tensors[f"{number} loss"] = loss.detach()
        tensors |= {
            f"{number} {name}": p.grad for name, p in model.named_parameters() if p.grad is not None
        }
    return tensors


@pytest.mark.fast(3)
@pytest.mark.parametrize(
    ("way", "case"),
    thinned(
        [(way, case) for way in STORE_CLASSES for case in SITUATIONS],
        lambda way, case: (
            way in FAST_CASES and (case == "first call" or way == "missing attribute")
        ),
    ),
)
def test_a_value_of_the_first_batch(way, case):
    """Exact from the first step on, and streamed once the value is there."""
    calls = SITUATIONS[case]
    expected = results(make_model(STORE_CLASSES[way]), calls)
    ours = streambp.patch(make_model(STORE_CLASSES[way]), CONFIG)
    assert worst_error(results(ours, calls), expected) <= MAX_FLOAT64_ERROR
    expected_path = "checkpoints" if way in UNCHUNKED_CASES else "streams"
    assert {layer.path for layer in streambp.describe(ours).layers} == {expected_path}


def test_the_first_call_runs_whole_by_name():
    ours = streambp.patch(make_model(STORE_CLASSES["missing attribute"]), CONFIG)
    results(ours, SITUATIONS["first call"][:1])
    (reason,) = {layer.reason for layer in streambp.describe(ours).layers}
    assert reason == "its forward initialises itself at its first call (mlp.scale)"


class Running(Scaled):
    """Each call changes what the next one computes."""

    def start(self):
        self.store = {"scale": torch.ones(())}

    def scale_of(self, x):
        scale = self.store["scale"]
        self.store["scale"] = 0.9 * scale + 0.1 * size_of(x)
        return scale


class Counting(Scaled):
    def start(self):
        self.scale = 0

    def scale_of(self, x):
        self.scale += 1
        return self.scale


class Once(Scaled):
    """Its first call is another one."""

    def start(self):
        self.scale = "new"

    def scale_of(self, x):
        factor, self.scale = 0.5 if self.scale == "new" else 1.0, "ready"
        return factor


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", [Running, Counting, Once])
def test_a_running_value_is_refused_and_nothing_stays(kind, dtype):
    model = make_model(functools.partial(around_mlp, kind=kind)).to(dtype)
    values_before = [
        repr(vars(layer.mlp).get("scale", getattr(layer.mlp, "store", None)))
        for layer in model.model.layers
    ]
    streambp.patch(model, CONFIG)
    with pytest.raises(
        UnsupportedModelError,
        match=r"returns different values for the same tokens.*mlp\.(scale|store)",
    ):
        model(**BATCHES[1], use_cache=False)
    streambp.unpatch(model)
    assert values_before == [
        repr(vars(layer.mlp).get("scale", getattr(layer.mlp, "store", None)))
        for layer in model.model.layers
    ]


class Recording(nn.Module):
    """Keeps what it is given, a record of all calls and one of the last."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.records = inner, []
        self.large = torch.zeros(16, 16)  # more than is copied beforehand here

    def forward(self, x):
        self.records.append(tuple(x.shape))
        self.large.view(-1)[: x.shape[1]].add_(1)
        return self.inner(x)


@pytest.mark.full
def test_a_recorder_sees_the_batch_alone(monkeypatch):
    """At a first step, and at a first evaluation after steps."""
    monkeypatch.setattr(snapshot, "MAX_COPIED_ELEMENTS", 64)
    check_recorder(LENGTH)


def check_recorder(chunk_size):
    stock, ours = (make_model(functools.partial(around_mlp, kind=Recording)) for _ in range(2))
    streambp.patch(ours, streambp.StreamConfig(chunk_size=chunk_size))
    calls = SITUATIONS["evaluation first"][::-1]
    expected = results(stock, calls)
    assert worst_error(results(ours, calls), expected) <= MAX_FLOAT64_ERROR
    tokens = [sum(shape[1] for shape in layer.mlp.records) for layer in ours.model.layers]
    assert tokens == [sum(shape[1] for shape in layer.mlp.records) for layer in stock.model.layers]
    for our_layer, stock_layer in zip(ours.model.layers, stock.model.layers, strict=True):
        assert int(our_layer.mlp.large.sum()) == int(stock_layer.mlp.large.sum())


@pytest.mark.fast(3)
@pytest.mark.parametrize("way", ["class", "closure", "global dict"])
def test_a_count_without_data_leaves_nothing(way):
    """The planner runs a copy, which has the classes and functions of the model."""
    OnClass.scale = GLOBAL["scale"] = None
    model = make_model(STORE_CLASSES[way])
    estimate(model, LENGTH, chunk_size=5)
    assert OnClass.scale is None
    assert GLOBAL["scale"] is None
    expected = results(make_model(STORE_CLASSES[way]), SITUATIONS["first call"])
    assert worst_error(results(model, SITUATIONS["first call"]), expected) <= MAX_FLOAT64_ERROR


def kept_of(model):
    return {name: dict(vars(module)) for name, module in model.named_modules()}


def test_everything_is_put_back():
    """The same objects in the same order, the same values, and the same versions."""
    model = make_model(STORE_CLASSES["closure"])
    layer, mlp = model.model.layers[0], model.model.layers[0].mlp
    mlp.table = collections.OrderedDict(a=1, b=2)
    mlp.counts = collections.defaultdict(list, x=[1])
    mlp.some, mlp.numbers, mlp.queue = (
        torch.arange(4.0),
        {1, 2},
        collections.deque([1, 2], maxlen=2),
    )
    mlp.holder, mlp.array, mlp.view = Holder(), np.arange(3), torch.zeros(1).expand(4)
    hook = mlp.register_forward_hook(lambda *_: None)
    contents_before, version, expected = kept_of(layer), mlp.some._version, torch.arange(4.0)
    with StateRestorer(layer, {}):
        mlp.table.move_to_end("a")
        mlp.counts["x"].append(2)
        mlp.counts["y"].append(3)
        mlp.some += 1
        mlp.numbers.add(3)
        mlp.queue.append(3)
        mlp.holder.scale, mlp.array[0], mlp.new = 5, 7, nn.Linear(2, 2)
        mlp.register_buffer("come", torch.ones(2))
        mlp.added = nn.Parameter(torch.ones(2))
        hook.remove()
        mlp.register_forward_hook(lambda *_: None)
        del mlp.view
        mlp(torch.ones(1, 2, 32))
    contents_after = kept_of(layer)
    assert contents_after.keys() == contents_before.keys()
    for name, content in contents_before.items():
        assert all(contents_after[name][key] is value for key, value in content.items())
        assert contents_after[name].keys() == content.keys()
    assert list(mlp.table) == ["a", "b"]
    assert dict(mlp.counts) == {"x": [1]}
    assert torch.equal(mlp.some, expected)
    assert mlp.some._version == version
    assert (mlp.numbers, list(mlp.queue), mlp.holder.scale, mlp.array[0]) == (
        {1, 2},
        [1, 2],
        None,
        0,
    )
    assert list(mlp._forward_hooks) == [hook.id]
    assert not hasattr(mlp, "added")
    assert "come" not in mlp._buffers
    assert mlp.scale_of.__closure__[0].cell_contents is None


NUMBER_ITERATOR = itertools.count()


class Numbered(nn.Module):
    """Takes its number from a global iterator when it is made, and writes to a file."""

    def __init__(self, inner, file):
        super().__init__()
        self.inner, self.file, self.number = inner, file, next(NUMBER_ITERATOR)

    def forward(self, x):
        self.file.write(f"{self.number}\n")
        return self.inner(x)


def test_files_and_the_iterators_of_a_constructor_leave_layers_streaming(tmp_path):
    with open(tmp_path / "log", "w", encoding="utf-8") as file:
        ours = streambp.patch(
            make_model(functools.partial(around_mlp, kind=lambda m: Numbered(m, file)))
        )
        results(ours, SITUATIONS["first call"][:1])
    assert {layer.path for layer in streambp.describe(ours).layers} == {"streams"}


class Run:
    """A program's loop, of which a method is a hook in each layer."""

    def __init__(self):
        self.batches = itertools.cycle([1.0, 2.0])
        self.factors = itertools.repeat(0.5)

    def train(self):
        return next(self.batches)

    def scale(self, module, args, output):
        return output * self.factor()

    def factor(self):
        return next(self.factors)

    def scan(self, module, args, output):
        if not output.isfinite().all():
            raise ValueError("not finite")

    def check(self, module, args, output):
        REWRITTEN.session.config  # noqa: B018


# What pytest makes of an `assert`: a global that leads to its session, where iterators wait.
REWRITTEN = types.ModuleType("_pytest.assertion.rewrite")
REWRITTEN.session = types.SimpleNamespace(config=functools.partial(next, iter([1])))


@pytest.mark.parametrize(("method", "path"), [("scan", "streams"), ("scale", "checkpoints")])
def test_iterators_of_a_hooks_object_count_where_the_hook_reads_them(method, path, monkeypatch):
    """Those that other methods advance are of no test. What is untestable is found out once."""
    run, looked, real = Run(), [], entry.why_untestable
    monkeypatch.setattr(entry, "why_untestable", lambda call: (looked.append(1), real(call))[1])

    def change(layer):
        layer.mlp.register_forward_hook(getattr(run, method))

    ours = streambp.patch(make_model(change), streambp.StreamConfig(chunk_size=16))
    assert (
        worst_error(
            results(ours, SITUATIONS["first call"]),
            results(make_model(change), SITUATIONS["first call"]),
        )
        <= MAX_FLOAT64_ERROR
    )
    layers = streambp.describe(ours).layers
    assert {layer.path for layer in layers} == {path}
    assert len(looked) == len(layers)
    if path == "checkpoints":
        assert "factors" in layers[0].reason
        assert "batches" not in layers[0].reason


def test_an_assert_in_a_hook_leaves_layers_streaming():
    """Nobody's forward advances the iterators of the session that runs the test."""
    model = make_model(lambda layer: layer.mlp.register_forward_hook(Run().check))
    ours = streambp.patch(model, CONFIG)
    results(ours, SITUATIONS["first call"][:1])
    assert {layer.path for layer in streambp.describe(ours).layers} == {"streams"}


def test_parameters_without_shapes_are_refused():
    model = make_model(lambda layer: setattr(layer, "mlp", nn.LazyLinear(32)))
    with pytest.raises(UnsupportedModelError, match=r"Call the model on one batch"):
        streambp.patch(model)
    calls = SITUATIONS["first call"]
    results(model, calls)
    stock = copy.deepcopy(model)
    ours = streambp.patch(model, CONFIG)
    assert worst_error(results(ours, calls), results(stock, calls)) <= MAX_FLOAT64_ERROR


@pytest.mark.fast(3)
@pytest.mark.parametrize(
    ("mutant", "test"),
    [
        ("refill", lambda: test_a_value_of_the_first_batch("missing attribute", "first call")),
        ("functions", lambda: test_a_value_of_the_first_batch("closure", "first call")),
        ("classes", lambda: test_a_value_of_the_first_batch("class", "first call")),
        ("rewind", test_the_first_call_runs_whole_by_name),
        ("kept values", lambda: test_a_value_of_the_first_batch("new module", "first call")),
        ("iterators", lambda: test_a_value_of_the_first_batch("generator", "first call")),
        ("asserts", test_an_assert_in_a_hook_leaves_layers_streaming),
        ("types", lambda: test_a_value_of_the_first_batch("new class", "first call")),
        ("records", lambda: check_recorder(LENGTH)),
        ("planner", lambda: test_a_count_without_data_leaves_nothing("class")),
        (
            "again",
            lambda: test_a_running_value_is_refused_and_nothing_stays(Running, torch.float64),
        ),
    ],
)
def test_mutants_turn_these_red(mutant, test, monkeypatch):
    if mutant == "refill":
        monkeypatch.setattr(Snapshot, "restore", lambda *_, **__: None)
    elif mutant == "functions":
        monkeypatch.setattr(Snapshot, "_follow_function", lambda *_: None)
    elif mutant == "classes":
        monkeypatch.setattr(Snapshot, "_read_class", lambda *_: None)
    elif mutant == "rewind":
        monkeypatch.setattr(StateRestorer, "rewind", lambda *_: None)
    elif mutant == "kept values":
        untouched = contextlib.nullcontext(types.SimpleNamespace(rewind=lambda: None))
        monkeypatch.setattr(kept_values, "trial_context", lambda _: untouched)
    elif mutant == "iterators":
        monkeypatch.setattr("streambp.admission.entry.why_untestable", lambda _: None)
    elif mutant == "asserts":
        monkeypatch.setattr(snapshot, "KNOWN_MODULES", snapshot.KNOWN_MODULES - {PYTEST})
    elif mutant == "records":
        monkeypatch.setattr(Snapshot, "restore", lambda *_, **__: None)
        undone = contextlib.nullcontext()
        monkeypatch.setattr(kept_values, "undo_changes", lambda *_, **__: undone)
    elif mutant == "types":
        monkeypatch.setattr(snapshot, "TYPE", snapshot.TYPE._replace(refill=lambda *_: None))
    elif mutant == "planner":
        monkeypatch.setattr(skeleton, "restore_module_state", lambda *_: contextlib.nullcontext())
    else:
        monkeypatch.setattr("streambp.admission.probe.find_values_set_once", lambda *_: [])
    with pytest.raises((AssertionError, AttributeError, BackwardError, pytest.fail.Exception)):
        test()
