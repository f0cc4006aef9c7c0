"""What a module's forward is below its decorators.

covers: source.py
"""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import streambp
from streambp.source import written_forward
from tests import zoo
from tests.families import make_batch
from tests.oracle import gradients, worst_error
from tests.versions import needs_states


def silent(function):
    """As transformers 5.15 decorates its mixers: nothing says what is wrapped."""

    def wrapped(self, *args, **kwargs):
        return function(self, *args, **kwargs)

    return wrapped


def telling(function):
    @functools.wraps(function)
    def wrapped(self, *args, **kwargs):
        return function(self, *args, **kwargs)

    return wrapped


def of_two(function):
    def unchanged(self, x):
        return x

    def wrapped(self, x):
        return function(self, x) if self.training else unchanged(self, x)

    return wrapped


def forward(self, x):
    return x


@pytest.mark.parametrize(
    ("decorated", "is_found"),
    [
        (forward, True),
        (silent(forward), True),
        (telling(forward), True),
        (silent(telling(silent(forward))), True),
        (of_two(forward), False),  # which of them is the forward it does not tell
    ],
    ids=["plain", "silent", "telling", "nested", "of two"],
)
def test_the_function_below_decorators(decorated, is_found):
    module = type("Module", (nn.Module,), {"forward": decorated})()
    assert (written_forward(module) is forward) == is_found


@needs_states
@pytest.mark.parametrize("name", ["lfm2", "jamba"])
def test_decorated_mixers_stream(name, monkeypatch, float64_oracle):
    """One that hands its states on, and one whose scan is given them under its global name."""
    torch.set_default_dtype(torch.float64)
    try:
        ours = zoo.build(name)
        mixer = next(
            type(m)
            for m in ours.modules()
            if type(m).__name__ in ("Lfm2ShortConv", "JambaMambaMixer")
        )
        _, expected = gradients(ours, **make_batch("plain"))
        monkeypatch.setattr(mixer, "forward", silent(mixer.forward))
        streambp.patch(ours, streambp.StreamConfig(chunk_size=5))
        assert worst_error(gradients(ours, **make_batch("plain"))[1], expected) <= 1e-10
    finally:
        torch.set_default_dtype(torch.float32)
    assert {layer.path for layer in streambp.describe(ours).layers} == {"streams"}
