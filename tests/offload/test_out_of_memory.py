"""Whoever says that the device is full, saves are let go of and the chunk is computed again. [Note:
once for each chunk]

covers: device.py, head/one_pass.py, head/recipe.py, layer/function.py, layer/oom.py,
model/unpatched.py
"""

from __future__ import annotations

import contextlib
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import streambp
from streambp import device
from streambp.attention.kv import KVBuffer
from streambp.attention.spans import Block, BlockKind
from streambp.chunks import Chunk
from streambp.device import is_out_of_memory, make_room
from streambp.head import log_probs, one_pass
from streambp.layer import function as layer_function
from streambp.model import unpatched
from streambp.offload.costs import UnpatchedChoice
from tests.families import LENGTH, build
from tests.offload.runs import assert_same
from tests.offload.test_limits import Device, Pair, stepped

KINDS = {
    "torch": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "cublas": RuntimeError(
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
    ),
    "cudnn": RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    "driver": torch.AcceleratorError("CUDA error: out of memory"),
    "triton": RuntimeError("Triton Error [CUDA]: out of memory"),
    "pluggable": MemoryError("std::bad_alloc: out_of_memory: RMM failure"),
}
OTHER_ERRORS = (
    RuntimeError("the data set's cache is out of memory"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("NCCL error: unhandled cuda error, Cuda failure 2 'out of memory'"),
    ValueError("CUDA out of memory"),
    RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"),
)


def anew(kind):
    """The same error without a traceback."""
    return type(KINDS[kind])(*KINDS[kind].args)


@pytest.mark.parametrize("kind", KINDS)
def test_who_says_so(kind):
    assert is_out_of_memory(anew(kind))


@pytest.mark.parametrize("error", OTHER_ERRORS, ids=str)
def test_what_is_something_else(error):
    assert not is_out_of_memory(error)


def step_without(pair, at, kind):
    """A step in which one operation finds no memory; None: it raised."""
    pair.forget()
    try:
        return pair.step(Device(fails_at=at, error=anew(kind)))
    except device.MEMORY_ERRORS as error:
        if not is_out_of_memory(error):
            raise
        return None


def errors_at(pair, kind, positions, stride=None):
    """Steps in which one operation fails: bit for bit, or an error, and the next one exact; places
    where one raised."""
    expected, _ = pair.reference()
    pair.step(full_device := Device())
    operations = [
        1 + (2 * number + 1) * full_device.operations // (2 * positions)
        for number in range(positions)
    ]
    raised = []
    for at in range(1, full_device.operations, stride) if stride else operations:
        step = step_without(pair, at, kind)
        raised += [at] if step is None else []
        for result in (step, pair.step(Device())):
            assert_same(expected if result is None else result, expected)
    return raised


@pytest.mark.fast("triton")
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_let_go_of_and_computed_again(kind):
    assert len(errors_at(Pair(5).warmed(), kind, 3)) <= 1  # the embedding's


@pytest.mark.full
@pytest.mark.parametrize("chunk_size", [12, LENGTH])
@pytest.mark.parametrize("kind", KINDS)
def test_at_every_29th_operation(kind, chunk_size):
    pair = Pair(chunk_size).warmed()
    # The embedding and the rotary embedding, 72 operations before the first layer, have no retry.
    assert len(errors_at(pair, kind, 0, stride=29)) <= 3


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_as_unpatched(kind, monkeypatch):
    """Its forward is streamed instead, its backward raises; the next step is exact."""
    monkeypatch.setattr(unpatched, "MAX_SHARE_OF_FREE_MEMORY", 0.25)
    pair = Pair(LENGTH, attention_dropout=0.0).warmed()
    streamed, _ = pair.reference()
    expected = stepped(build("qwen3", num_hidden_layers=2), Device())
    pair.step(full_device := Device())
    assert isinstance(pair.chooser.latest, UnpatchedChoice)
    raised = 0
    for at in range(1, full_device.operations, 29):
        step = step_without(pair, at, kind)
        raised += step is None
        pair.forget()
        for result in [pair.step(Device()), *([] if step is None else [step])]:
            assert any(are_equal(result, reference) for reference in (expected, streamed)), at
    assert 0 < raised < full_device.operations // 29


def are_equal(actual, expected):
    return actual[1].keys() == expected[1].keys() and all(
        torch.equal(actual[1][n], g) for n, g in expected[1].items()
    )


class FailsFirst:
    """A function that finds no memory the first time."""

    def __init__(self, real):
        self.real, self.calls = real, 0

    def __call__(self, *args):
        self.calls += 1
        if self.calls == 1:
            raise torch.OutOfMemoryError("no memory left, says a test")
        return self.real(*args)


@pytest.mark.full
def test_the_heads_gradient_takes_the_place_of_saves(monkeypatch):
    """Its sum is in float32, and needs another tensor in the weight's dtype."""
    models = [build("qwen3", num_hidden_layers=2).bfloat16() for _ in range(2)]
    pair = Pair(5, models=models).warmed()
    expected, _ = pair.reference()
    monkeypatch.setattr(log_probs, "_output_buffer", FailsFirst(log_probs._output_buffer))
    assert_same(pair.step(Device()), expected)
    assert log_probs._output_buffer.calls > 1
    assert streambp.last_step(pair.model).let_go == "the loss ran out of memory"
    pair.forget()
    assert_same(pair.step(Device()), expected)


def test_a_head_that_does_not_ask_for_saves_is_seen(monkeypatch):
    monkeypatch.setattr(
        one_pass, "run_outside_with_retry", lambda device, drop_saves, compute, where: compute()
    )
    with pytest.raises(torch.OutOfMemoryError):
        test_the_heads_gradient_takes_the_place_of_saves(monkeypatch)


@pytest.mark.full
def test_errors_that_only_torch_knows_are_seen(monkeypatch):
    """As it was: the step fails, although saves are there to be let go of."""
    for module in (streambp.layer.oom, streambp.layer.function):
        monkeypatch.setattr(
            module, "is_out_of_memory", lambda error: isinstance(error, torch.OutOfMemoryError)
        )
    with pytest.raises(AssertionError):
        test_it_is_let_go_of_and_computed_again("triton")


class Inside(torch.autograd.Function):
    """Its backward differentiates a graph of its own that fails, makes room, and tells what is left
    of that graph."""

    @staticmethod
    def forward(ctx, x, leftovers):
        ctx.leftovers = leftovers
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        def fail():
            with torch.enable_grad():
                x = torch.ones(8, requires_grad=True)
                graph_object = GraphObject()
                ctx.object_ref = weakref.ref(graph_object)
                side = Waits.apply(x, graph_object)  # in the queue while the other branch fails
                first = Fails.apply(x)
                torch.autograd.grad((first + side).sum(), x)

        with contextlib.suppress(RuntimeError):
            fail()
        make_room(torch.device("cpu"), True)
        ctx.leftovers.append(ctx.object_ref() is not None)
        return grad, None


class GraphObject:
    """What a graph keeps."""


class Waits(torch.autograd.Function):
    """Its node keeps an object."""

    @staticmethod
    def forward(ctx, x, graph_object):
        ctx.graph_object = graph_object
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Fails(torch.autograd.Function):
    """Its backward has no memory."""

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        raise torch.OutOfMemoryError("no memory left, says a test")


def left_behind():
    leftovers = []
    Inside.apply(torch.ones(1, requires_grad=True), leftovers).backward()
    return leftovers


def test_a_failed_backward_leaves_nothing_in_autograds_queue(monkeypatch):
    assert left_behind() == [False]
    monkeypatch.setattr(torch.autograd, "grad", DifferentiatesOnce(torch.autograd.grad))
    assert left_behind() == [True]  # without make_room's


class DifferentiatesOnce:
    """Differentiates the first time alone."""

    def __init__(self, real):
        self.real, self.calls = real, 0

    def __call__(self, *args):
        self.calls += 1
        return self.real(*args) if self.calls == 1 else None


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_gradients_of_keys_are_added_once_wherever_an_attempt_ends(at):
    """Of the additions of two blocks' dK and dV one fails, before it has written anything; the
    chunk is done again."""
    k, v, dk, dv = torch.randn(4, 2, 6, 3, 4).unbind()  # [B, T, H_kv, D] each
    blocks = [Block(BlockKind.CAUSAL, 0, 2, 0, 3, 0, 3), Block(BlockKind.CAUSAL, 0, 2, 3, 6, 0, 6)]

    class Fails(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.aten.add_.Tensor:
                self.count += 1
                if self.count == at:
                    raise torch.OutOfMemoryError
            return function(*args, **(kwargs or {}))

    def attempt(layer_state):
        for block, *_ in layer_state.visit(blocks, gradients=True):
            layer_state.add(block, *(x[:, block.k0 : block.k1].transpose(1, 2) for x in (dk, dv)))

    reference, layer_state = KVBuffer(k, v), KVBuffer(k, v)
    attempt(reference)
    layer_state.begin_backward(is_retry=False)
    with Fails(), pytest.raises(torch.OutOfMemoryError):
        attempt(layer_state)
    layer_state.begin_backward(is_retry=True)
    attempt(layer_state)
    assert torch.equal(layer_state.dk, reference.dk)
    assert torch.equal(layer_state.dv, reference.dv)


class LoadThatFreesSaves:
    """Saved tensors of a call, of which the first load frees attention's output to make room."""

    moves = True

    def __init__(self):
        self.names = ["x", "attn_out.0"]
        self.brought_reads = None

    def reads(self, index):
        return [(name, index) for name in self.names]

    def load(self, reads, _):
        self.names.remove("attn_out.0")

    def bring(self, chunk, reads):
        self.brought_reads = reads
        raise InterruptedError  # the rest of backward is not of this test


def test_a_load_that_frees_saved_tensors_is_followed_by_fewer_reads():
    saved = LoadThatFreesSaves()
    call = SimpleNamespace(
        saved=saved,
        attempt=lambda function: function(False),
        layer_state=SimpleNamespace(kind=SimpleNamespace(states=SimpleNamespace(carries=False))),
    )
    with pytest.raises(InterruptedError):
        layer_function._chunk_backward(call, Chunk(0, 0, 5), None, False)
    assert saved.brought_reads == [("x", 0)]
