"""What is wrong with states in chunks, done on purpose: each turns a test red, and most of it the probe sees by itself."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import streambp
from streambp.layer import arguments, call, function, scans, states
from streambp.layer.states import Key, StateCache
from tests import zoo
from tests.families import make_batch
from tests.layer.test_states import check_exact, check_padded, patched
from tests.oracle import gradients


def oracle(name="qwen3_next"):
    return lambda: check_exact(name, 23, [5])


def detached_end(self, recurrent_states, layer_idx, state_idx=0, **_):
    self.after[Key("recurrent", layer_idx, state_idx)] = recurrent_states.detach().requires_grad_()
    return recurrent_states


def leaves_without_gradient(found):
    return {key: state.detach() for key, state in found.items()}


class ConstantSteps:
    """The step and the decay of the tokens that write, without their history."""

    @staticmethod
    def written(start, raw, a, bias, softplus, dtype, parts, real=scans._written):
        return real(start, raw, a.detach(), None if bias is None else bias.detach(), softplus, dtype, parts)


def states_of_the_chunk_before(self, chunk, again=False, real=call.Kept.states):
    return real(self, self.plan[chunk.index - 1] if chunk.index > 1 else chunk, again=True)


def whole_masks(self, chunk, leaves=None, real=arguments.Arguments.cut):
    named = real(self, chunk, leaves)
    return {**named, **{n: self.named[n][:, : chunk.stop - chunk.start] for n in named if n == "attention_mask"}}


MUTANTS = {
    "end state without its gradient": (StateCache, "update_recurrent_state", detached_end, oracle()),
    "start states without their gradient": (function, "leaves_of", leaves_without_gradient, oracle("bamba")),
    "states of another chunk": (call.Kept, "states", states_of_the_chunk_before, oracle("bamba")),
    "written by constant steps": (scans, "_written", ConstantSteps.written, oracle("jamba")),
    "read without a gradient": (
        scans.EndState, "backward", staticmethod(lambda ctx, grad: (None, *[torch.zeros_like(grad)] * ctx.parts)),
        oracle("jamba"),
    ),
    "the first tokens' padding for every chunk": (arguments.Arguments, "cut", whole_masks, lambda: check_padded("bamba")),
}  # fmt: skip


@pytest.fixture(autouse=True)
def float64_everywhere(float64_oracle):
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_turns_a_test_red(name, monkeypatch):
    owner, attribute, mutant, check = MUTANTS[name]
    check()
    monkeypatch.setattr(function, "can_stream", lambda call: True)
    monkeypatch.setattr(owner, attribute, mutant)
    with pytest.raises(AssertionError):
        check()


def test_the_probe_sees_a_state_without_its_gradient(monkeypatch):
    """Outputs are right all the same: it is the gradient that tells."""
    monkeypatch.setattr(StateCache, "update_recurrent_state", detached_end)
    model = patched(zoo.build("qwen3_next"), chunk_size=5)
    gradients(model, **make_batch("plain"))
    assert "mixes tokens" in str(streambp.describe(model))


def test_chunks_of_one_token_would_not_run(monkeypatch):
    monkeypatch.setattr(call, "LEAST_TOKENS", 1)
    monkeypatch.setattr(function, "can_stream", lambda call: True)
    with pytest.raises((RuntimeError, AssertionError)):
        check_exact("bamba", 11, [5])


def test_a_cache_is_in_no_cycle():
    """Caching `layers` on it would tie the chunk's graph to the garbage collector."""
    cache = StateCache(0, {Key("conv", 1, 0): torch.randn(2, 3)})
    assert cache.layers[1].conv_states.keys() == {0}
    assert cache.layers[0].recurrent_states == {}
    seen = weakref.ref(cache)
    gc.disable()
    try:
        del cache
        assert seen() is None
    finally:
        gc.enable()


def test_what_is_kept_of_a_convolution_is_its_last_inputs_alone():
    """A view would keep the whole chunk's input alive."""
    cache = StateCache(0, {})
    x = torch.randn(2, 64, 6).mT  # [B, D, C], channels last
    assert cache.update_conv_state(x, 0, conv_kernel_size=4) is x
    state = cache.after[Key("conv", 0, 0)]
    assert torch.equal(state, x[..., -4:])
    assert state.untyped_storage().nbytes() == state.nbytes
    following = StateCache(64, cache.after)
    joined = following.update_conv_state(x, 0, conv_kernel_size=4)
    assert torch.equal(joined, torch.cat((state, x), -1))
    assert joined.mT.is_contiguous()  # as convolution kernels want it
    assert following.before[Key("conv", 0, 0)] is state
    assert states.leaves_of({Key("conv", 0, 0): torch.ones(2, dtype=torch.long)})[Key("conv", 0, 0)].requires_grad is False
