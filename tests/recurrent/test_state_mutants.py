"""What is wrong with states in chunks, done on purpose: each turns a test red, and most of it the
probe sees by itself.

covers: layer/arguments.py, layer/call.py, layer/chunk_states.py, layer/function.py,
  recurrent/documents.py, recurrent/scans.py, recurrent/states.py
"""

from __future__ import annotations

import functools
import gc
import weakref

import pytest
import torch

import streambp
from streambp.admission import entry
from streambp.admission.probe import Verdict
from streambp.errors import BackwardError
from streambp.layer import arguments, call, chunk_states, function
from streambp.recurrent import carriers, documents, scans, states
from streambp.recurrent.states import StateCache, StateKey
from tests import zoo
from tests.families import make_batch
from tests.oracle import gradients
from tests.recurrent.test_documents import build, check_packed, packed
from tests.recurrent.test_states import check_exact, check_memory, check_padded, patched
from tests.versions import needs_states

pytestmark = needs_states


@functools.cache
def oracle(name="qwen3_next"):
    return lambda: check_exact(name, 23, [5])


def detached_end(self, recurrent_states, layer_idx, state_idx=0, **_):
    self.end_states[StateKey("recurrent", layer_idx, state_idx)] = (
        recurrent_states.detach().requires_grad_()
    )
    return recurrent_states


def leaves_without_gradient(start_states):
    return {key: state.detach() for key, state in start_states.items()}


class ConstantSteps:
    """The step and the decay of the tokens that write, without their history."""

    @staticmethod
    def constant_decays(start, raw, a, bias, softplus, dtype, parts, real=scans._write_inputs):
        return real(
            start, raw, a.detach(), None if bias is None else bias.detach(), softplus, dtype, parts
        )


def states_of_the_chunk_before(self, real=call.SavedForBackward.states):
    """Of the chunk that was read before this one."""
    states = real(self)
    previous_states = vars(self).get("read_before", states)
    self.read_before = states
    return previous_states or states


def whole_masks(self, chunk, leaves=None, real=arguments.Arguments.slice_chunk):
    slices = real(self, chunk, leaves)
    return {
        **slices,
        **{
            n: self.by_name[n][:, : chunk.stop - chunk.start]
            for n in slices
            if n == "attention_mask"
        },
    }


@functools.cache
def packed_oracle(name, **case):
    def check():
        with pytest.MonkeyPatch.context() as patch:
            check_packed(build(name, patch), packed(**case), [5])

    return check


def check_no_cycle():
    """Caching `layers` on the cache would tie the chunk's graph to the garbage collector."""
    cache = StateCache(0, {StateKey("conv", 1, 0): torch.randn(2, 3)})
    assert cache.layers[1].conv_states.keys() == {0}
    assert cache.layers[0].recurrent_states == {}
    reference = weakref.ref(cache)
    gc.disable()
    try:
        del cache
        assert reference() is None
    finally:
        gc.enable()


class LayersOnTheCache:
    """What `cache.layers` gives, kept on the cache and knowing it."""

    real = StateCache.layers

    def __init__(self, cache):
        cache.cyclic, self.cache = self, cache

    def __getitem__(self, layer):
        return LayersOnTheCache.real.fget(self.cache)[layer]


NO_UPSTREAM = property(lambda self: {}, lambda self, gradients: None)


def ids_of_the_whole_row(real, row_documents, chunk, *args, **kwargs):
    """seq_idx of the chunk, counted from the row's first document."""
    return real(
        *args, **{**kwargs, "seq_idx": row_documents.ids[:, chunk.start : chunk.stop].contiguous()}
    )


def ids_of_the_chunk(real, row_documents, chunk, x, *args, **kwargs):
    """All that its cache has put in front of the chunk, taken for its first token's document."""
    earlier_tokens = x.shape[-1] - (chunk.stop - chunk.start)
    ids = row_documents.ids[
        :, [chunk.start] * earlier_tokens + list(range(chunk.start, chunk.stop))
    ]
    return real(x, *args, **{**kwargs, "seq_idx": ids})


def state_of_one_document(real, row_documents, chunk, *args, **kwargs):
    out, end = real(*args, **kwargs)
    return out, end[-1:]


def end_of_the_first_document(
    real, row_documents, chunk, *args, tell=documents._tell_rule, **kwargs
):
    def first(*args, **kwargs):
        out, end = real(*args, **kwargs)
        return out, end[:1]

    return tell(first, row_documents, chunk, *args, **kwargs)


MUTANTS = {
    "end state without its gradient": (StateCache, "update_recurrent_state", detached_end, oracle()),
    "start states without their gradient": (function, "leaves_of", leaves_without_gradient, oracle("bamba")),
    "states of another chunk": (call.SavedForBackward, "states", states_of_the_chunk_before, oracle("bamba")),
    "written by constant steps": (scans, "_write_inputs", ConstantSteps.constant_decays,
        oracle("jamba")),
    "read without a gradient": (
        scans.EndState, "backward", staticmethod(lambda ctx, grad: (None, *[torch.zeros_like(grad)] * ctx.parts)),
        oracle("jamba"),
    ),
    "upstream of states dropped": (chunk_states.CrossChunkState, "upstream", NO_UPSTREAM, oracle()),
    "states not copied": (states, "copy_view", lambda state: state, lambda: check_memory("bamba")),
    "layers kept on the cache": (StateCache, "layers", property(LayersOnTheCache), check_no_cycle),
    "documents counted from the row's start": (
        documents, "_tell_scan", ids_of_the_whole_row, packed_oracle("bamba", ends=False)
    ),
    "tokens before a chunk in its first document": (
        documents, "_tell_convolution", ids_of_the_chunk, packed_oracle("lfm2", ends=False)
    ),
    "one start state for all documents": (documents, "_tell_rule", state_of_one_document, packed_oracle("qwen3_next")),
    "the first document's end state": (documents, "_tell_rule", end_of_the_first_document, packed_oracle("qwen3_next")),
    "start states where a document starts": (
        documents.Documents, "continues_document", lambda self, chunk: True, packed_oracle("qwen3_next")
    ),
    "the first tokens' padding for every chunk": (
        arguments.Arguments, "slice_chunk", whole_masks, lambda: check_padded("bamba")
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def float64_everywhere(float64_oracle):
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@functools.cache
def green(check):
    """Without a mutant; once for all mutants of a check."""
    check()


@pytest.mark.fast(9)
@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_turns_a_test_red(name, monkeypatch):
    owner, attribute, mutant, check = MUTANTS[name]
    green(check)
    monkeypatch.setattr(entry, "can_stream", lambda call: Verdict(True))
    monkeypatch.setattr(owner, attribute, mutant, raising=False)  # instances alone have some
    with pytest.raises((AssertionError, BackwardError)):  # the second: by the witness
        check()


def test_the_probe_sees_a_state_without_its_gradient(monkeypatch):
    """Outputs are right all the same: it is the gradient that tells."""
    monkeypatch.setattr(StateCache, "update_recurrent_state", detached_end)
    model = patched(zoo.build("qwen3_next"), chunk_size=5)
    gradients(model, **make_batch("plain"))
    assert "mixes tokens" in str(streambp.describe(model))


def test_chunks_of_one_token_would_not_run(monkeypatch):
    monkeypatch.setattr(carriers, "MIN_CHUNK_TOKENS", 1)
    monkeypatch.setattr(entry, "can_stream", lambda call: Verdict(True))
    with pytest.raises((RuntimeError, AssertionError)):
        check_exact("bamba", 11, [5])


def test_a_cache_is_in_no_cycle():
    check_no_cycle()


def test_what_is_kept_of_a_convolution_is_its_last_inputs_alone():
    """A view would keep the whole chunk's input alive."""
    cache = StateCache(0, {})
    x = torch.randn(2, 64, 6).mT  # [B, D, C], channels last
    assert cache.update_conv_state(x, 0, conv_kernel_size=4) is x
    state = cache.end_states[StateKey("conv", 0, 0)]
    assert torch.equal(state, x[..., -4:])
    assert state.untyped_storage().nbytes() == state.nbytes
    following = StateCache(64, cache.end_states)
    joined = following.update_conv_state(x, 0, conv_kernel_size=4)
    assert torch.equal(joined, torch.cat((state, x), -1))
    assert joined.mT.is_contiguous()  # as convolution kernels want it
    assert following.start_states[StateKey("conv", 0, 0)] is state
    assert (
        states.leaves_of({StateKey("conv", 0, 0): torch.ones(2, dtype=torch.long)})[
            StateKey("conv", 0, 0)
        ].requires_grad
        is False
    )
