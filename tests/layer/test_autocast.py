"""Autocast in backward: restored for what is computed again, off for gradients. [Note: autocast]

covers: attention/attend.py, attention/kernels.py, head/blocks.py, head/log_probs.py,
  head/one_pass.py, layer/recompute.py
"""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch
from torch import nn

import streambp
from streambp.accumulate import GradientSum
from streambp.attention import attend, interface, kernels
from streambp.config import StreamConfig
from streambp.head import blocks
from streambp.head.log_probs import BlockwiseLogProbs, make_inputs
from streambp.head.one_pass import OnePassNLL, PendingGradients
from streambp.layer import recompute
from tests import zoo
from tests.distributed.one_rank import split_over_one_rank, with_shifted_labels
from tests.families import LENGTH, build, make_batch
from tests.layer.test_weight_sums import Casts, linears
from tests.oracle import assert_as_precise, relative_l2
from tests.seeds import seeded

SAVES = [(), ("attn_out", "kv"), ("*",)]


def in_float32(module):
    """Give a module a forward of its own that autocast leaves alone."""
    class_forward = module.forward

    def forward(*args, **kwargs):
        with torch.autocast("cpu", enabled=False):
            args = [
                x.float() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
                for x in args
            ]
            return class_forward(
                *args, **{k: x.float() if k == "hidden_states" else x for k, x in kwargs.items()}
            )

    module.forward = forward


def bf16():
    return torch.autocast("cpu", torch.bfloat16)


def gradients_of(model, loss_of, inside=False, autocast=bf16):
    """Of one step under autocast, its backward called inside of it or, as torch recommends,
    outside."""
    model.zero_grad(set_to_none=True)
    with autocast():
        loss = loss_of(model)
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def labelled(batch):
    return lambda model: model(**batch, use_cache=False).loss


def of_hidden_states(batch):
    """A loss without a head, so that a model of float32 regions alone has nothing that autocast
    rounds."""
    batch = {
        name: tensor for name, tensor in batch.items() if name not in ("labels", "shift_labels")
    }
    weight = torch.randn(2, LENGTH, 32, generator=seeded(5))
    return lambda model: (model.model(**batch, use_cache=False).last_hidden_state * weight).sum()


def error_of_a_float32_layer(split=False, saves=()):
    """Of a layer whose parts are float32 regions, against the unpatched model without autocast."""
    model, batch = build("qwen3"), with_shifted_labels(make_batch("plain"))
    for layer in model.model.layers:
        in_float32(layer.mlp)
        in_float32(layer.self_attn)
    loss_of = of_hidden_states(batch)
    expected = gradients_of(model, loss_of, autocast=contextlib.nullcontext)
    unpatched = gradients_of(model, loss_of)
    assert relative_l2(unpatched, expected) == 0.0
    streambp.patch(model, StreamConfig(chunk_size=5, saves=saves))
    if split:
        with pytest.MonkeyPatch.context() as patch:
            split_over_one_rank(patch)
            our_gradients = gradients_of(model, loss_of)
            assert relative_l2(gradients_of(model, loss_of, inside=True), our_gradients) == 0.0
    else:
        our_gradients = gradients_of(model, loss_of)
        assert relative_l2(gradients_of(model, loss_of, inside=True), our_gradients) == 0.0
    return relative_l2(our_gradients, expected)


@pytest.mark.fast(3)
@pytest.mark.parametrize("saves", SAVES)
@pytest.mark.parametrize("split", [False, True])
def test_a_float32_region_is_differentiated_in_float32(split, saves):
    assert error_of_a_float32_layer(split, saves) <= 1e-6


@pytest.mark.parametrize("split", [False, True])
def test_without_autocast_off_it_is_not(split, monkeypatch):
    """The mutant: the recomputation's autocast is around the whole backward pass."""
    monkeypatch.setattr(recompute.Autocast, "disable", recompute.Autocast.restore)
    assert error_of_a_float32_layer(split) > 1e-4


@pytest.mark.parametrize("split", [False, True])
def test_without_a_context_around_the_pass_the_program_decides(split, monkeypatch):
    """The mutant: autocast is off in backward only where the program calls backward outside of
    it."""
    monkeypatch.setattr(recompute.Autocast, "disable", lambda self: contextlib.nullcontext())
    with pytest.raises(AssertionError):
        error_of_a_float32_layer(split)


@pytest.mark.full
def test_a_float32_mlp_is_as_precise_as_in_the_unpatched_model():
    assert_as_precise(map(errors_with_a_float32_mlp, itertools.count()))


def errors_with_a_float32_mlp(seed):
    model, batch = (
        build("qwen3", seed=seed, hidden_size=64),
        make_batch("plain", length=96, seed=seed),
    )
    for layer in model.model.layers:
        in_float32(layer.mlp)
    truth = gradients_of(model, labelled(batch), autocast=contextlib.nullcontext)
    stock = gradients_of(model, labelled(batch))
    ours = gradients_of(streambp.patch(model, StreamConfig(chunk_size=11)), labelled(batch))
    return relative_l2(ours, truth), relative_l2(stock, truth)


@pytest.mark.fast(3)
@pytest.mark.parametrize(
    ("name", "saves"),
    [
        pytest.param(name, saves, marks=() if (number + s) % len(SAVES) == 0 else pytest.mark.full)
        for number, name in enumerate(["qwen3", "gemma2", "qwen3_moe", "packed", "split", "lazy"])
        for s, saves in enumerate(SAVES)
    ],
)
def test_backward_inside_of_autocast_gives_the_same_gradients(name, saves, monkeypatch):
    """Fused attention and plain products (softcap, a dense mask), experts, the head's passes,
    halves of a shard."""
    batch = make_batch("packed" if name == "packed" else "plain")
    loss_of = labelled(with_shifted_labels(batch) if name == "split" else batch)
    model = zoo.build(name).float() if name in ("gemma2", "qwen3_moe") else build("qwen3")
    streambp.patch(model, StreamConfig(chunk_size=5, saves=saves, lazy_logits=name == "lazy"))
    if name == "split":
        split_over_one_rank(monkeypatch)
    if name == "lazy":
        ids = batch["input_ids"]

        def loss_of(model):
            logits = model(input_ids=ids, use_cache=False).logits.float()
            return (
                -logits.log_softmax(-1).gather(-1, ids[..., None]).mean()
                + logits.softmax(-1).square().mean()
            )

    outside, inside = (gradients_of(model, loss_of, inside) for inside in (False, True))
    assert outside.keys() == inside.keys()
    different = [
        name for name, gradient in outside.items() if not torch.equal(gradient, inside[name])
    ]
    assert not different


def scores_in_autocast(monkeypatch):
    """Whether autocast is on where plain products compute scores, in forward and again in
    backward."""
    autocast_flags, real = [], kernels.MathKernel._scores
    monkeypatch.setattr(
        kernels.MathKernel,
        "_scores",
        lambda *args: autocast_flags.append(torch.is_autocast_enabled("cpu")) or real(*args),
    )
    model = streambp.patch(build("qwen3", attention_dropout=0.1), StreamConfig(chunk_size=5))
    in_float32(model.model.layers[0].self_attn)
    gradients_of(model, labelled(make_batch("plain")), inside=True)
    return autocast_flags


def test_no_kernel_of_attention_runs_in_autocast(monkeypatch):
    """Attention computes scores outside of autocast, in forward and in backward."""
    assert set(scores_in_autocast(monkeypatch)) == {False}


def test_kernels_in_autocast_are_seen(monkeypatch):
    """The mutant of the one above."""
    monkeypatch.setattr(interface, "without_autocast", lambda device: contextlib.nullcontext())
    assert True in scores_in_autocast(monkeypatch)


@pytest.mark.full
def test_windows_under_autocast_are_as_precise_as_unpatched():
    """Their edges are attended by plain products, beside fused kernels that are handed the
    logsumexp of both."""
    with attended_logsumexps() as dtypes:
        assert_as_precise(map(errors_with_windows, itertools.count()))
    assert dtypes == {torch.float32}


def errors_with_windows(seed):
    model, batch = build("gemma3", seed=seed), make_batch("plain", seed=seed)
    truth = gradients_of(model, labelled(batch), autocast=contextlib.nullcontext)
    stock = gradients_of(model, labelled(batch))
    ours = gradients_of(
        streambp.patch(model, StreamConfig(chunk_size=5, saves=())), labelled(batch)
    )
    return relative_l2(ours, truth), relative_l2(stock, truth)


@contextlib.contextmanager
def attended_logsumexps():
    """The dtypes of what attention leaves behind."""
    dtypes, real = set(), attend.MergedOutput.result

    def result(self):
        attended = real(self)
        dtypes.add(attended.lse.dtype)
        return attended

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attend.MergedOutput, "result", result)
        yield dtypes


@pytest.mark.parametrize("one_pass", [False, True])
def test_a_head_in_float32_is_differentiated_there(one_pass):
    """Also where its gradients are taken in forward, or a program calls backward under autocast."""
    generator = seeded(3)
    hidden, weight = (torch.randn(n, 16, generator=generator) for n in (30, 53))
    labels = torch.randint(0, 53, (30,), generator=generator)
    runs = []
    for context in (contextlib.nullcontext, bf16):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
        with context():
            inputs = make_inputs(leaves[0], labels, blocks.Projection(), None, -100)
            inputs.in_float32 = True
            if one_pass:
                loss = OnePassNLL.apply(
                    inputs, PendingGradients(), torch.tensor(1.0), *leaves, None
                )
            else:
                loss = BlockwiseLogProbs.apply(inputs, ("entropy",), *leaves, None)[0].sum()
            runs.append(torch.autograd.grad(loss, leaves))
    assert all(map(torch.equal, *runs))


def casts_of_a_backward():
    """Of up_proj's and gate_proj's weights in one backward pass; a hook keeps up_proj from adding
    up its own gradient."""
    model = streambp.patch(build("qwen3", num_hidden_layers=1), StreamConfig(chunk_size=5))
    mlp = model.model.layers[0].mlp
    mlp.up_proj.register_forward_hook(lambda *_: None)
    batch = make_batch("plain")
    with bf16():
        model(**batch, use_cache=False).loss.backward()  # traces are over
        loss = model(**batch, use_cache=False).loss
    with Casts() as casts:
        loss.backward()
    assert len({m.weight.shape for m in linears(mlp)}) == 2  # gate_proj and up_proj have one
    return casts.counts[tuple(mlp.up_proj.weight.shape)]


def test_autocast_keeps_its_copies_of_weights_over_the_chunks():
    assert casts_of_a_backward() == 2


def test_it_does_not_without_a_context_around_the_chunks(monkeypatch):
    monkeypatch.setattr(recompute.Autocast, "disable", lambda self: contextlib.nullcontext())
    assert casts_of_a_backward() > 2


def test_copies_of_a_weight_in_two_dtypes_are_kept_apart():
    """As of a Linear that a layer calls again under an autocast of its own."""
    sums, weight = GradientSum(1, 2), nn.Parameter(torch.randn(3, 3))
    for dtype in (torch.bfloat16, torch.float16, torch.bfloat16):
        assert torch.equal(sums.cast(weight, dtype), weight.to(dtype))
