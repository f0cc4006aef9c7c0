"""Modules inside of streamed layers that are compiled stay compiled, and layers stream.

covers: foreign.py, admission/rehearsal.py, admission/stacks.py, admission/third_party.py, layer/products.py
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch._dynamo.backends.registry import lookup_backend

import streambp
from streambp.admission import entry, third_party, trials
from streambp.config import StreamConfig
from streambp.errors import UnsupportedModelError
from tests.families import build, make_batch
from tests.oracle import gradients, worst_error
from tests.seeds import seeded
from tests.versions import needs_names_in_graphs

CHUNK, CHUNKS, LENGTH = 7, 4, 23  # the last chunk has two tokens
TOKEN_WISE = ("mlp", "input_layernorm", "post_attention_layernorm")
PASSES_PER_STEP = 2  # forward and recomputation
# of the keys and values: calls of a layer's first norm alone; the last chunk's need none
REFILLS = CHUNKS - 1
# graphs for two lengths: None makes a dynamic one at the second
LENGTHS = {None: 2, False: 2, True: 1}
# passes of their code: forward, the refill, whose weights are a chunk's own, and recomputation
NORMS, MLPS = (3, 2)
CONFIG = StreamConfig(chunk_size=CHUNK, saves=())
EAGER = "what is around them is eager, too"


class CountingBackend:
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


class GraphCounts:
    """Counts the graphs of norms, which share their code, and of MLPs apart."""

    def __init__(self, backend):
        self.norms, self.mlps = CountingBackend(backend), CountingBackend(backend)

    def compile(self, model, names=TOKEN_WISE, **options):
        self.norms.compile(model, [name for name in names if "norm" in name], **options)
        self.mlps.compile(model, [name for name in names if "norm" not in name], **options)

    @property
    def runs(self):
        return self.norms.runs + self.mlps.runs


@pytest.fixture(autouse=True)
def _compiled_anew():
    """A function of which torch would compile no more, and run the rest eagerly without a word,
    raises."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield
    torch._dynamo.reset()


def steps_of(model, backend, when, config=CONFIG, steps=2, names=TOKEN_WISE, **options):
    """Gradients of each step against the unpatched model's, runs of compiled code in the last, and
    the model."""
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
        runs_before = backend.runs
        _, computed = gradients(model, **batch)
        errors.append(worst_error(computed, expected))
        runs = backend.runs - runs_before
    return errors, runs, model


COMPILE_TIMES = ("before patch", "after patch", "between steps")
BACKENDS = ("eager", "aot_eager", "inductor")


@pytest.mark.fast("before patch-False-eager")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dynamic", [None, True, False])
@pytest.mark.parametrize("when", COMPILE_TIMES)
def test_compiled_modules_stay_compiled_and_layers_stream(when, dynamic, backend):
    """Every call of a chunk runs compiled code, with at most two graphs a pass, however many layers
    there are."""
    assert torch._functorch.config.donated_buffer  # as torch ships it
    counted, model = GraphCounts(backend), build("qwen3")
    errors, runs, model = steps_of(model, counted, when, dynamic=dynamic)
    assert max(errors) <= 1e-6
    assert "streams: 2 x" in str(streambp.describe(model))
    layers = len(model.model.layers)
    assert runs == (PASSES_PER_STEP * CHUNKS * len(TOKEN_WISE) + REFILLS) * layers
    graphs = counted.norms.graphs, counted.mlps.graphs
    print(
        f"{when}, dynamic={dynamic}, {backend}: {graphs} graphs of norms and MLPs, {runs} runs a "
        "step"
    )
    assert counted.norms.graphs <= NORMS * LENGTHS[dynamic]
    assert counted.mlps.graphs <= MLPS * LENGTHS[dynamic]


SAVES = [("attn_out", "kv"), ("*",), "auto"]


@pytest.mark.fast("auto-none", "saves0-cpu")
@pytest.mark.parametrize("offload", ["none", "cpu"])
@pytest.mark.parametrize("saves", SAVES)
def test_settings_with_compiled_modules(saves, offload):
    config = StreamConfig(chunk_size=CHUNK, saves=saves, offload=offload, unpatched_runs=False)
    counted = CountingBackend("eager")
    errors, runs, _ = steps_of(build("qwen3"), counted, "before patch", config)
    assert max(errors) <= 1e-6
    assert runs > 0


@pytest.mark.full
@needs_names_in_graphs
def test_whole_attention_compiled_breaks_at_the_blocks():
    counted = CountingBackend("eager")
    errors, runs, model = steps_of(
        build("qwen3"), counted, "before patch", names=("self_attn", *TOKEN_WISE)
    )
    assert max(errors) <= 1e-6
    assert runs > PASSES_PER_STEP * CHUNKS * (1 + len(TOKEN_WISE)) * len(model.model.layers)
    assert "streams: 2 x" in str(streambp.describe(model))


def test_compiled_attention_is_refused_where_the_compiler_fails(monkeypatch):
    """By name and in the first call; other modules may be compiled."""
    monkeypatch.setattr(third_party, "COMPILES_NAMES", False)
    model = build("qwen3")
    model.model.layers[0].mlp.compile(backend="eager")
    streambp.patch(model, CONFIG)
    gradients(model, **make_batch("plain", LENGTH))
    model = build("qwen3")
    model.model.layers[1].self_attn.compile(backend="eager")
    streambp.patch(model, CONFIG)
    with pytest.raises(
        UnsupportedModelError, match=r"Qwen3Attention in Qwen3DecoderLayer is compiled"
    ):
        gradients(model, **make_batch("plain", LENGTH))
    streambp.unpatch(model)
    gradients(model, **make_batch("plain", LENGTH))


@pytest.mark.full
def test_the_mutant_of_the_refusal_is_seen(monkeypatch):
    monkeypatch.setattr(entry, "refuse_compiled_attention", lambda layer: None)
    with pytest.raises((pytest.fail.Exception, RuntimeError)):
        test_compiled_attention_is_refused_where_the_compiler_fails(monkeypatch)


def test_a_submodule_that_torch_compile_wraps():
    counted, model = CountingBackend("eager"), build("qwen3")
    _, expected = gradients(copy.deepcopy(model), **make_batch("plain", LENGTH))
    for layer in model.model.layers:
        layer.mlp = torch.compile(layer.mlp, backend=counted)
    streambp.patch(model, CONFIG)
    _, our_gradients = gradients(model, **make_batch("plain", LENGTH))
    assert (
        worst_error(
            {name.replace("._orig_mod", ""): grad for name, grad in our_gradients.items()}, expected
        )
        <= 1e-6
    )
    assert counted.runs == PASSES_PER_STEP * CHUNKS * len(model.model.layers)
    assert "streams: 2 x" in str(streambp.describe(model))


@pytest.mark.parametrize("when", COMPILE_TIMES[:2])
def test_regional_compilation_by_accelerate(when):
    """It puts torch's wrapper around each layer: streamed layers stay eager, before `patch` and
    after."""
    regions = pytest.importorskip("accelerate.utils", reason="accelerate is not installed")
    counted, model = CountingBackend("eager"), build("qwen3")
    _, expected = gradients(copy.deepcopy(model), **make_batch("plain", LENGTH))
    if when == "before patch":
        model = streambp.patch(regions.compile_regions(model, backend=counted), CONFIG)
    else:
        model = regions.compile_regions(streambp.patch(model, CONFIG), backend=counted)
    _, our_gradients = gradients(model, **make_batch("plain", LENGTH))
    assert (
        worst_error(
            {name.replace("._orig_mod", ""): grad for name, grad in our_gradients.items()}, expected
        )
        <= 1e-6
    )
    # a patched model's copy computes with the original's modules
    assert (counted.runs > 0) == (when == "before patch")
    described = str(streambp.describe(model))
    assert "streams: 2 x" in described
    compiled_parts = (
        "model.embed_tokens, model.norm, model.rotary_emb run compiled"
        if when == "before patch"
        else EAGER
    )
    assert f"streamed layers stay eager under torch.compile; {compiled_parts}" in described


@pytest.mark.parametrize("when", COMPILE_TIMES[:2])
@pytest.mark.parametrize("how", ["torch.compile", "Module.compile"])
def test_a_whole_model_that_is_compiled_runs_eagerly_and_describe_says_so(how, when):
    counted, model = CountingBackend("eager"), build("llama", num_hidden_layers=1)

    def compiled(model):
        if how == "torch.compile":
            return torch.compile(model, backend=counted)
        model.compile(backend=counted)
        return model

    model = (
        streambp.patch(compiled(model), CONFIG)
        if when == "before patch"
        else compiled(streambp.patch(model, CONFIG))
    )
    gradients(model, **make_batch("plain", LENGTH))
    assert counted.runs == 0
    assert f"streamed layers stay eager under torch.compile; {EAGER}" in str(
        streambp.describe(model)
    )


def test_describe_names_what_runs_compiled():
    model = build("qwen3")
    CountingBackend("eager").compile(model, ("mlp",))
    streambp.patch(model, CONFIG)
    assert "mlp run compiled" in str(streambp.describe(model))


@pytest.mark.full
def test_mutant_trials_that_compile(monkeypatch):
    """Compiled for each of its few tokens, a trial takes graphs of the eight that torch allows."""
    seeded(3)
    monkeypatch.setattr(entry, "disable_compilation", torch.enable_grad)
    monkeypatch.setattr(trials, "disable_compilation", torch.enable_grad)
    counted = GraphCounts("aot_eager")
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=False):
        _, _, model = steps_of(build("qwen3"), counted, "before patch", dynamic=True)
    graphs = counted.norms.graphs > NORMS or counted.mlps.graphs > MLPS
    assert graphs or "streams: 2 x" not in str(streambp.describe(model))
