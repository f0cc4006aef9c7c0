"""Places where a module may keep a value of its first batch, beside those of
test_trials_leave_nothing.py: parameters and buffers that were None, buffers that are deleted or out
of sight, attributes of tensors, files in memory, memory without Python objects, defaults of
functions.

covers: admission/snapshot.py, admission/tables.py, admission/values.py, layer/side_effects.py
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import io
import types

import numpy as np
import pytest
import torch
from torch import nn

import streambp
from streambp.admission import layer_checkpoint, snapshot, tables, values
from streambp.admission.snapshot import Snapshot, StateRestorer
from streambp.errors import StreamBPError
from streambp.layer import side_effects
from tests.admission.test_trials_leave_nothing import (
    CONFIG,
    SITUATIONS,
    Scaled,
    around_mlp,
    make_model,
    results,
    size_of,
)
from tests.oracle import MAX_FLOAT64_ERROR, worst_error
from tests.tiers import thinned

pytestmark = pytest.mark.usefixtures("float64_everywhere")


class NoBuffer(Scaled):
    def start(self):
        self.register_buffer("scale", None)

    def scale_of(self, x):
        if self.scale is None:
            self.scale = size_of(x)
        return self.scale


class NoParameter(Scaled):
    """A trained one, as a Linear's bias may be."""

    def start(self):
        self.register_parameter("scale", None)

    def scale_of(self, x):
        if self.scale is None:
            self.scale = nn.Parameter(size_of(x))
        return self.scale


class OtherParameter(Scaled):
    def start(self):
        self.scale = nn.Parameter(torch.zeros(1), requires_grad=False)

    def scale_of(self, x):
        if self.scale == 0:
            self.scale = nn.Parameter(size_of(x).reshape(1), requires_grad=False)
        return self.scale


class OnTensor(Scaled):
    def start(self):
        self.holder = torch.ones(())

    def scale_of(self, x):
        if not hasattr(self.holder, "scale"):
            self.holder.scale = size_of(x)
        return self.holder.scale


class OnWeight(OnTensor):
    def start(self):
        self.holder = self.inner.up_proj.weight


class InObjects(Scaled):
    def start(self):
        self.store = np.array([None])

    def scale_of(self, x):
        if self.store[0] is None:
            self.store[0] = size_of(x)
        return self.store[0]


class InFile(Scaled):
    """In memory."""

    def start(self):
        self.store = io.BytesIO()

    def scale_of(self, x):
        if not self.store.getvalue():
            torch.save(size_of(x), self.store)
        self.store.seek(0)
        return torch.load(self.store)


class InText(Scaled):
    def start(self):
        self.store = io.StringIO()

    def scale_of(self, x):
        if not self.store.tell():
            self.store.write(repr(float(size_of(x))))
        return float(self.store.getvalue())


class InMemory(Scaled):
    def start(self):
        self.store = memoryview(bytearray(8)).cast("d")

    def scale_of(self, x):
        if self.store[0] == 0:
            self.store[0] = float(size_of(x))
        return self.store[0]


class InC(Scaled):
    def start(self):
        self.store = ctypes.c_double(0)

    def scale_of(self, x):
        if self.store.value == 0:
            self.store.value = float(size_of(x))
        return self.store.value


class InDefaults(Scaled):
    def start(self):
        def scale_of(x, saved_scale=None):
            if saved_scale is None:
                saved_scale = size_of(x)
                scale_of.__defaults__ = (saved_scale,)
            return saved_scale

        self.scale_of = scale_of


class InHiddenBuffer(Scaled):
    """Of a module in a list, which no named_modules finds."""

    def start(self):
        self.store = [nn.Module()]
        self.store[0].register_buffer("scale", torch.zeros(()))

    def scale_of(self, x):
        if self.store[0].scale == 0:
            self.store[0].scale.copy_(size_of(x))
        return self.store[0].scale


class AsHiddenBuffer(InHiddenBuffer):
    def scale_of(self, x):
        if self.store[0].scale == 0:
            self.store[0].scale = size_of(x)
        return self.store[0].scale


class WithoutBuffer(Scaled):
    """A buffer says that the first call is to come; it is deleted there."""

    def start(self):
        self.register_buffer("first", torch.ones(()))

    def scale_of(self, x):
        if hasattr(self, "first"):
            del self.first
            self.scale = size_of(x)
        return self.scale


STORE_CLASSES = {
    "hidden buffer": InHiddenBuffer,
    "assigned hidden buffer": AsHiddenBuffer,
    "deleted buffer": WithoutBuffer,
    "buffer that is None": NoBuffer,
    "parameter that is None": NoParameter,
    "other parameter": OtherParameter,
    "attribute of a tensor": OnTensor,
    "attribute of a weight": OnWeight,
    "array of objects": InObjects,
    "file of bytes": InFile,
    "file of text": InText,
    "memory": InMemory,
    "number of C": InC,
    "other defaults": InDefaults,
}
FAST_CASES = ("buffer that is None", "parameter that is None")
# Layers that keep values on weights run whole.
UNCHUNKED_CASES = ("attribute of a weight",)


def check(way, case):
    """Exact from the first step on, and streamed once the value is there."""
    change, calls = functools.partial(around_mlp, kind=STORE_CLASSES[way]), SITUATIONS[case]
    expected = results(make_model(change), calls)
    ours = streambp.patch(make_model(change), CONFIG)
    assert worst_error(results(ours, calls), expected) <= MAX_FLOAT64_ERROR
    path = "checkpoints" if way in UNCHUNKED_CASES else "streams"
    assert {layer.path for layer in streambp.describe(ours).layers} == {path}


@pytest.mark.fast(2)
@pytest.mark.parametrize(
    ("way", "case"),
    thinned(
        [(way, case) for way in STORE_CLASSES for case in SITUATIONS],
        lambda way, case: way in FAST_CASES and case == "first call",
    ),
)
def test_a_value_of_the_first_batch(way, case):
    check(way, case)


def change_all(module):
    """Change what is restored: each place once."""
    module.scale, module.weight = nn.Parameter(torch.ones(2)), None
    module.mean = torch.ones(3)
    module.bias.note = 5.0
    module.objects[0] = "other"
    module.file.write(b"more")
    module.text.seek(1)
    module.view[0] = 3.0
    module.number.value = 4.0
    module.function.__defaults__ = (7,)


def function(x, pair=(1, 2)):
    return x


def test_everything_is_put_back():
    """The same objects, contents and positions, and no attribute more on a parameter."""
    module = nn.Linear(3, 3)
    module.register_parameter("scale", None)
    module.register_buffer("mean", None)
    module.objects = np.array([None, module])
    module.file, module.text = io.BytesIO(b"some"), io.StringIO("text")
    module.view, module.number = memoryview(bytearray(16)).cast("d"), ctypes.c_double(2.0)
    module.constant = memoryview(b"cannot be written")
    module.closed = io.BytesIO()
    module.closed.close()
    module.function = types.FunctionType(function.__code__, {"__name__": "a_program"})
    module.function.__defaults__ = (1, 2)
    weight, bias = module.weight, module.bias
    with StateRestorer(module, {}) as restored:
        change_all(module)
        names = restored.changes()
        restored.rewind()
        assert not restored.changes()
        change_all(module)
    assert {"scale", "mean", "weight", "bias.note", "function.__defaults__"} <= set(names)
    assert {"file", "text", "view", "number"} <= set(names)
    assert module.scale is None
    assert module.mean is None
    assert module.weight is weight
    assert not hasattr(bias, "note")
    assert list(module.objects) == [None, module]
    assert (module.file.getvalue(), module.file.tell()) == (b"some", 0)
    assert (module.text.getvalue(), module.text.tell()) == ("text", 0)
    assert (list(module.view), module.number.value) == ([0.0, 0.0], 2.0)
    assert module.function.__defaults__ == (1, 2)


def test_what_a_test_puts_in_the_place_of_a_parameter_stays():
    """Plain tensors, which a test differentiates, are no change of the module's."""
    module = nn.Linear(3, 3)
    with StateRestorer(module, {}) as restored:
        shadow = module._parameters["weight"] = module.weight.detach().requires_grad_()
        assert not restored.changes()
        restored.rewind()
        assert module._parameters["weight"] is shadow


def names_alone(patch):
    patch.setattr(tables, "is_replaced", lambda saved, current: False)
    patch.setattr(snapshot, "is_replaced", lambda saved, current: False)


def tensors_without_attributes(patch):
    patch.setattr(Snapshot, "_follow_attributes_of_tensor", lambda *_: None)


def arrays_of_numbers_alone(patch):
    real = Snapshot._follow_array
    patch.setattr(
        Snapshot,
        "_follow_array",
        lambda self, name, value: value.dtype == object or real(self, name, value),
    )


def no_memory(patch):
    patch.setattr(snapshot, "copy_memory", lambda value, limit: None)


def no_code(patch):
    patch.setattr(snapshot, "CODE", snapshot.CODE._replace(refill=lambda *_: None))


def buffers_outside_as_inside(patch):
    patch.setattr(snapshot, "BUFFER_TABLE", "")


def deleted_buffers_fail(patch):
    @contextlib.contextmanager
    def in_place(buffers, real=side_effects.replace_buffers):
        assert all(name in module._buffers for module, name in buffers)
        with real(buffers):
            yield

    patch.setattr(layer_checkpoint, "replace_buffers", in_place)


MUTANTS = {
    "hidden buffer": buffers_outside_as_inside,
    "deleted buffer": deleted_buffers_fail,
    "buffer that is None": names_alone,
    "parameter that is None": names_alone,
    "attribute of a tensor": tensors_without_attributes,
    "array of objects": arrays_of_numbers_alone,
    "file of bytes": no_memory,
    "memory": no_memory,
    "other defaults": no_code,
}


@pytest.mark.fast(3)
@pytest.mark.parametrize("way", MUTANTS)
def test_mutants_turn_these_red(way, monkeypatch):
    MUTANTS[way](monkeypatch)
    with pytest.raises((AssertionError, StreamBPError)):
        check(way, "first call")


def test_a_mutant_that_takes_a_tests_own_tensors_for_changes(monkeypatch):
    for home in (tables, snapshot):
        monkeypatch.setattr(home, "is_replaced", lambda saved, current: saved is not current)
    with pytest.raises(AssertionError):
        test_what_a_test_puts_in_the_place_of_a_parameter_stays()


def test_blocks_that_cannot_be_copied_are_left_alone():
    assert values.copy_memory(memoryview(b"constant"), 100) is None
    assert values.copy_memory(memoryview(bytearray(8)), 4) is None
    assert values.copy_memory(ctypes.py_object(3), 100) is None
    assert values.copy_memory(memoryview(bytearray(8))[::2], 100) is None
