"""Recurrences and convolutions in chunks: states that pass from one to the next.

covers: layer/call.py, layer/saved_tensors.py, recurrent/scans.py
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import itertools
import types
import weakref

import pytest
import torch

import streambp
from streambp.layer import call
from streambp.layer import saved_tensors as kept
from streambp.recurrent import scans
from tests import zoo
from tests.families import make_batch
from tests.gpu import state_rows
from tests.oracle import assert_as_precise, gradients, relative_l2, worst_error
from tests.packed import packed_batch
from tests.tiers import thinned
from tests.versions import needs_states

pytestmark = needs_states

# One of each mechanism: gated delta rule, convolution alone, Mamba 2, selective scan, linear
# attention, attention beside a convolution and beside a state-space model, a unit that keeps its
# states on itself, states as an argument.
KINDS = (
    "qwen3_next",
    "lfm2",
    "bamba",
    "jamba",
    "minimax",
    "zaya",
    "falcon_h1",
    "recurrent_gemma",
    "xlstm",
)
OTHER_FAMILIES = tuple(
    name
    for name in (
        "bailing_hybrid", "falcon_mamba", "granitemoehybrid", "kimi_linear", "lfm2_moe", "lfm3", "mamba", "mamba2",
        "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "zamba", "zamba2",
    )
    if name in zoo.NAMES
)  # fmt: skip


@pytest.fixture
def float64_states(float64_oracle):
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def patched(stock, **settings):
    return streambp.patch(copy.deepcopy(stock), streambp.StreamConfig(**settings))


def check_exact(name, length, chunk_sizes, **settings):
    built = zoo.build(name)
    stock, batch = copy.deepcopy(built), make_batch("plain", length=length)
    expected_loss, expected = gradients(stock, **batch)
    for chunk_size in chunk_sizes:
        ours = patched(built, chunk_size=chunk_size, **settings)
        loss, our_gradients = gradients(ours, **batch)
        assert {layer.path for layer in streambp.describe(ours).layers} == {"streams"}
        assert abs(loss - expected_loss) <= 1e-12 * abs(expected_loss)
        assert worst_error(our_gradients, expected) <= 1e-10


def check_padded(name):
    built = zoo.build(name)
    stock, batch = copy.deepcopy(built), make_batch("left-padded")
    _, expected = gradients(stock, **batch)
    assert worst_error(gradients(patched(built, chunk_size=5), **batch)[1], expected) <= 1e-10


@pytest.mark.fast("lfm2")
@pytest.mark.parametrize("name", ["lfm2", "bamba", "mamba"])
def test_chunks_of_a_few_tokens(name, float64_states):
    """None has a single token: mixers would take kernels for decoding, which have no backward."""
    check_exact(name, 11, [1, 2, 3, 5, 10])


@pytest.mark.parametrize("name", KINDS)
def test_a_single_token(name, float64_states):
    """It has no label, and nothing to cut."""
    stock = zoo.build(name)
    ours = patched(stock, chunk_size=1)
    ids = make_batch("plain", length=1)["input_ids"]
    expected, logits = (model(ids, use_cache=False).logits for model in (stock, ours))
    assert torch.allclose(logits, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "length"),
    [*itertools.product(KINDS, [2, 3, 9, 11]), *itertools.product(OTHER_FAMILIES, [9])],
)
def test_every_family_on_few_tokens(name, length, float64_states):
    check_exact(name, length, [1, 2, 3, 4])


@pytest.mark.parametrize("name", ["jamba"])
def test_over_several_blocks_of_the_kernels(name, float64_states):
    check_exact(name, 201, [50])


@pytest.mark.full
@pytest.mark.parametrize("name", KINDS + OTHER_FAMILIES)
def test_every_family_over_several_blocks_of_the_kernels(name, float64_states):
    check_exact(name, 201, [7, 50, 64])


def check_memory(name):
    """Some mixers hand their cache a view: the last of all blocks' or tokens' states."""
    states = []
    real = kept.SavedForBackward.keep_states
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            kept.SavedForBackward,
            "keep_states",
            lambda *args: states.extend(args[2].values()) or real(*args),
        )
        gradients(patched(zoo.build(name), chunk_size=5), **make_batch("plain"))
    assert states
    assert all(state.untyped_storage().nbytes() == state.nbytes for state in states)


@pytest.mark.fast(3)
@pytest.mark.parametrize(
    "name",
    thinned(
        KINDS, lambda name: name in ("qwen3_next", "falcon_h1", "zaya", "recurrent_gemma", "xlstm")
    ),
)
def test_what_is_kept_has_memory_of_its_own(name, float64_states):
    check_memory(name)


def test_another_librarys_forward_comes_back():
    ours = patched(zoo.build("jamba", dtype=torch.float32), chunk_size=5)
    mixer = next(module for module in ours.modules() if "Mixer" in type(module).__name__)
    theirs = types.MethodType(type(mixer).forward, mixer)
    mixer.forward = theirs
    gradients(ours, **make_batch("plain"))
    assert mixer.__dict__["forward"] is theirs


@pytest.mark.fast("lfm2")
@pytest.mark.parametrize("name", ["falcon_h1", "lfm2"])
def test_offloading_changes_no_bit(name):
    stock = zoo.build(name, dtype=torch.float32)
    batch = make_batch("left-padded")
    for saves in ((), ("attn_out", "kv")):
        _, expected = gradients(patched(stock, chunk_size=5, saves=saves), **batch)
        for settings in ({"offload": "cpu"}, {"offload": "cpu", "gpu_memory": 1}):
            _, our_gradients = gradients(
                patched(stock, chunk_size=5, saves=saves, **settings), **batch
            )
            assert all(torch.equal(our_gradients[name], expected[name]) for name in expected)


def test_without_a_graph_and_generation():
    stock = zoo.build("qwen3_next", dtype=torch.float32).eval()
    ours = patched(stock, chunk_size=5)
    batch = make_batch("left-padded")
    with torch.no_grad():
        losses = [model(**batch, use_cache=False).loss for model in (stock, ours)]
    assert abs(losses[0] - losses[1]) <= 1e-5
    prompt = make_batch("plain")["input_ids"]
    expected, computed = (
        model.generate(prompt, max_new_tokens=6, do_sample=False) for model in (stock, ours)
    )
    assert torch.equal(expected, computed)


@pytest.mark.parametrize("name", ["lfm2", "qwen3_next", "bamba"])
def test_packed_documents_without_kernels_are_what_they_are_unpatched(name, float64_states):
    """The same error; of older versions of transformers the same mixed documents. In that call
    alone."""
    stock = zoo.build(name)
    ours = patched(copy.deepcopy(stock), chunk_size=5)
    batch = packed_batch([[0, 5, 6, 15, 23]])
    expected, message = {}, None
    try:
        expected = gradients(stock, **batch)[1]
    except ValueError as error:
        message = str(error)
    if message is None:
        assert worst_error(gradients(ours, **batch)[1], expected) <= 1e-10
    else:
        with pytest.raises(ValueError, match="packed sequences") as error_info:
            gradients(ours, **batch)
        assert str(error_info.value) == message
        assert "checkpoints: 1" in str(streambp.describe(ours))
    gradients(ours, **make_batch("plain"))
    assert "checkpoints" not in str(streambp.describe(ours))


@pytest.mark.parametrize("name", ["lfm2", "jamba"])
def test_a_chunk_ends_with_its_backward(name):
    """Without the garbage collector: nothing that a chunk's graph holds outlives its step in a
    cycle."""
    ours = patched(zoo.build(name, dtype=torch.float32), chunk_size=5)
    references: list[weakref.ref] = []
    real = streambp.recurrent.states.StateCache.__init__

    def remember(self, *args, **kwargs):
        real(self, *args, **kwargs)
        references.append(weakref.ref(self))

    gc.collect()
    gc.disable()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(streambp.recurrent.states.StateCache, "__init__", remember)
            gradients(ours, **make_batch("plain"))
        assert references
        assert not [cache for cache in references if cache() is not None]
    finally:
        gc.enable()


def test_an_exception_inside_a_scan_leaves_no_forward_behind():
    ours = patched(zoo.build("jamba", dtype=torch.float32), chunk_size=5)
    batch = make_batch("plain")
    expected = gradients(ours, **batch)[1]

    def fail(*args, **kwargs):
        raise FloatingPointError("a test wants it")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scans.SelectiveScan, "__call__", fail)
        with pytest.raises(FloatingPointError):
            gradients(ours, **batch)
    mixers = [module for module in ours.modules() if "Mixer" in type(module).__name__]
    assert mixers
    assert not any("forward" in module.__dict__ for module in mixers)
    our_gradients = gradients(ours, **batch)[1]
    assert all(torch.equal(our_gradients[name], expected[name]) for name in expected)


SLOW_FAMILIES = ("bamba", "lfm2", "qwen3_next", "zaya")


def errors_in_half_precision(name, autocast):
    """Ours in 9 chunks and the unpatched model's, against a float32 oracle."""
    for seed in itertools.count():
        oracle = zoo.build(name, dtype=torch.float32, seed=seed)
        # the weights of the model in half precision
        oracle = oracle if autocast else oracle.bfloat16().float()
        batch = make_batch("plain", length=72, seed=seed)
        truth = gradients(copy.deepcopy(oracle), **batch)[1]
        stock = oracle if autocast else oracle.to(torch.bfloat16)
        ours = patched(copy.deepcopy(stock), chunk_size=8)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            both_gradients = [gradients(model, **batch)[1] for model in (ours, stock)]
        yield tuple(relative_l2(computed, truth) for computed in both_gradients)
        assert {layer.path for layer in streambp.describe(ours).layers} == {"streams"}


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "autocast"),
    [
        ("jamba", False),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in [
                *((n, False) for n in SLOW_FAMILIES),
                *((n, True) for n in ("jamba", *SLOW_FAMILIES)),
            ]
        ),
    ],
)
def test_half_precision_is_no_worse_than_unpatched(name, autocast):
    assert_as_precise(errors_in_half_precision(name, autocast))


def test_torchs_own_selective_scan_is_no_further_off_in_chunks_of_a_few_tokens():
    """Each gradient: half precision between its operations would not let those of written states
    cancel."""
    kernel, sizes = state_rows.KERNELS["selective scan"], state_rows.TINY
    from_nothing = dataclasses.replace(kernel, make=lambda *args: (*kernel.make(*args)[:2], None))
    ours = state_rows.errors(from_nothing, kernel.function, sizes, "cpu", chunk_size=5)
    unpatched = state_rows.errors(from_nothing, kernel.truth, sizes, "cpu", chunk_size=sizes.length)
    for (chunks, _), (_, one_chunk) in itertools.islice(zip(ours, unpatched, strict=False), 2):
        assert not [name for name, error in chunks.items() if error > 1.05 * one_chunk[name]]


@pytest.mark.full
def test_kernels_selective_scan_is_as_precise_in_chunks():
    kernel, sizes = state_rows.KERNELS["selective scan"], state_rows.Sizes(2, 200, 2, 8)
    pairs = state_rows.errors(kernel, kernel.reference, sizes, "cpu", chunk_size=60)
    assert_as_precise(tuple(map(state_rows.mean, pair)) for pair in pairs)


@pytest.mark.full
def test_automatic_chunks_are_whole_blocks_of_the_kernels():
    """Mamba 2's kernels take 256 positions at a time, those of the delta rules 64."""
    stock = zoo.build("lfm2", dtype=torch.float32, max_position_embeddings=20_000)
    sizes = []
    real = call.LayerCall._make_saves

    def keep(self):
        sizes.append((self.layer_state.kind.states.carries, self.plan.size))
        return real(self)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(call.LayerCall, "_make_saves", keep)
        ids = make_batch("plain", length=17_000, rows=1)["input_ids"]
        patched(stock)(ids, labels=ids, use_cache=False)
    assert sizes == [(True, 2048), (False, 2048)]


@pytest.mark.fast(3)
@pytest.mark.parametrize(
    ("name", "trained"),
    [
        ("qwen3_next", "mlp"), ("bamba", "out_proj"), ("falcon_h1", "q_proj"), ("lfm2", "feed_forward"),
        ("mamba", "mixer.D"), ("mamba", "A_log"), ("jamba", "dt_proj"), ("zaya", "o_proj"), ("qwen3_next", "conv1d"),
    ],
)  # fmt: skip
def test_a_layer_of_which_a_part_is_trained(name, trained, float64_states):
    """As adapters do: no gradient may pass through the states that a chunk ends with, or it may,
    but not in the first."""
    stock = zoo.build(name)
    for parameter_name, parameter in stock.named_parameters():
        parameter.requires_grad_(trained in parameter_name and "layers.0" in parameter_name)
    assert any(parameter.requires_grad for parameter in stock.parameters())
    ours = patched(copy.deepcopy(stock), chunk_size=5)
    batch = make_batch("left-padded")
    assert worst_error(gradients(ours, **batch)[1], gradients(stock, **batch)[1]) <= 1e-10
    assert {layer.path for layer in streambp.describe(ours).layers} == {"streams"}


@pytest.mark.parametrize("largest", [6.5, 8.0])
def test_decays_that_are_large(largest, float64_states):
    """What is written is divided by its decay, whose inverse must not overflow."""
    stock = zoo.build("mamba", state_size=16).float()
    with torch.no_grad():
        for layer in stock.backbone.layers:
            layer.mixer.A_log[:, 0] = largest
    ours = patched(stock, chunk_size=8)
    (_, expected), (_, our_gradients) = (
        gradients(model, **make_batch("plain")) for model in (stock, ours)
    )
    assert all(gradient.isfinite().all() for gradient in our_gradients.values())
    assert relative_l2(our_gradients, expected) <= 1e-4
    assert {layer.path for layer in streambp.describe(ours).layers} == {"streams"}
