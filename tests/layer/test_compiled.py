"""Modules inside of streamed layers that are compiled stay compiled, and layers stream.

covers: foreign.py, admission/rehearsal.py, layer/products.py
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch._dynamo.backends.registry import lookup_backend

import streambp
from streambp.admission import entry, trials
from streambp.config import StreamConfig
from tests.families import build, make_batch
from tests.oracle import gradients, worst_error
from tests.seeds import seeded

CHUNK, CHUNKS, LENGTH = 7, 4, 23  # the last chunk has two tokens
TOKEN_WISE = ("mlp", "input_layernorm", "post_attention_layernorm")
PASSES = 2  # forward and recomputation
GRAPHS = 8  # of one module's code: two lengths, with and without a graph, and torch's first parameters and ours
CONFIG = StreamConfig(chunk_size=CHUNK, saves=())


class Counted:
    """A backend that counts the graphs that it was given, and how often they ran."""

    def __init__(self, name):
        self.inner = lookup_backend(name)
        self.graphs = self.runs = 0

    def __call__(self, graph, examples):
        self.graphs += 1
        compiled = self.inner(graph, examples)

        def run(*args):
            self.runs += 1
            return compiled(*args)

        return run

    def compile(self, model, names=TOKEN_WISE, **options):
        for layer in model.model.layers:
            for name in names:
                getattr(layer, name).compile(backend=self, **options)


@pytest.fixture(autouse=True)
def _compiled_anew():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def steps_of(model, backend, when, config=CONFIG, steps=2, names=TOKEN_WISE, **options):
    """Gradients of each step against the unpatched model's, runs of compiled code in the last, and the model."""
    batch = make_batch("plain", LENGTH)
    _, expected = gradients(copy.deepcopy(model), **batch)
    if when == "before patch":
        backend.compile(model, names, **options)
    streambp.patch(model, config)
    if when == "after patch":
        backend.compile(model, names, **options)
    errors, runs = [], 0
    for step in range(steps + (when == "between steps")):
        if when == "between steps" and step == 1:
            backend.compile(model, names, **options)
        before = backend.runs
        _, found = gradients(model, **batch)
        errors.append(worst_error(found, expected))
        runs = backend.runs - before
    return errors, runs, model


WHEN = ("before patch", "after patch", "between steps")
BACKENDS = ("eager", "aot_eager", "inductor")


@pytest.mark.fast(
    "before patch-None-aot_eager", "after patch-None-eager", "between steps-True-eager", "before patch-False-eager"
)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dynamic", [None, True, False])
@pytest.mark.parametrize("when", WHEN)
def test_compiled_modules_stay_compiled_and_layers_stream(when, dynamic, backend):
    counted, model = Counted(backend), build("qwen3")
    errors, runs, model = steps_of(model, counted, when, dynamic=dynamic)
    assert max(errors) <= 1e-6
    assert "streams: 2 x" in str(streambp.describe(model))
    assert runs >= PASSES * CHUNKS * len(TOKEN_WISE) * len(model.model.layers)
    print(f"{when}, dynamic={dynamic}, {backend}: {counted.graphs} graphs, {runs} runs a step")
    assert counted.graphs <= GRAPHS * 2  # norms share their code


SAVES = [("attn_out", "kv"), ("*",), "auto"]


@pytest.mark.fast("auto-none", "saves0-cpu")
@pytest.mark.parametrize("offload", ["none", "cpu"])
@pytest.mark.parametrize("saves", SAVES)
def test_settings_with_compiled_modules(saves, offload):
    config = StreamConfig(chunk_size=CHUNK, saves=saves, offload=offload, unpatched_runs=False)
    counted = Counted("eager")
    errors, runs, _ = steps_of(build("qwen3"), counted, "before patch", config)
    assert max(errors) <= 1e-6
    assert runs > 0


def test_whole_attention_compiled_breaks_at_the_blocks():
    counted = Counted("eager")
    errors, runs, model = steps_of(build("qwen3"), counted, "before patch", names=("self_attn", *TOKEN_WISE))
    assert max(errors) <= 1e-6
    assert runs > PASSES * CHUNKS * (1 + len(TOKEN_WISE)) * len(model.model.layers)
    assert "streams: 2 x" in str(streambp.describe(model))


def test_a_submodule_that_torch_compile_wraps():
    counted, model = Counted("eager"), build("qwen3")
    _, expected = gradients(copy.deepcopy(model), **make_batch("plain", LENGTH))
    for layer in model.model.layers:
        layer.mlp = torch.compile(layer.mlp, backend=counted)
    streambp.patch(model, CONFIG)
    _, found = gradients(model, **make_batch("plain", LENGTH))
    assert worst_error({name.replace("._orig_mod", ""): grad for name, grad in found.items()}, expected) <= 1e-6
    assert counted.runs == PASSES * CHUNKS * len(model.model.layers)
    assert "streams: 2 x" in str(streambp.describe(model))


def test_describe_names_what_runs_compiled():
    model = build("qwen3")
    Counted("eager").compile(model, ("mlp",))
    streambp.patch(model, CONFIG)
    assert "mlp run compiled" in str(streambp.describe(model))


def test_mutant_trials_that_compile(monkeypatch):
    """Compiled for each of its few tokens, a trial takes graphs of the eight that torch allows."""
    seeded(3)
    monkeypatch.setattr(entry, "nothing_compiled", torch.enable_grad)
    monkeypatch.setattr(trials, "nothing_compiled", torch.enable_grad)
    counted = Counted("aot_eager")
    with torch._functorch.config.patch(donated_buffer=True):
        _, runs, model = steps_of(build("qwen3"), counted, "before patch", dynamic=True)
    everything = PASSES * CHUNKS * len(TOKEN_WISE) * len(model.model.layers)
    assert runs < everything or "streams: 2 x" not in str(streambp.describe(model)) or counted.graphs > GRAPHS * 2
