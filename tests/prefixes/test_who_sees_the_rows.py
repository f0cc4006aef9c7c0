"""Hooks, forwards and modules that others put inside a backbone see the batch's rows, not a packed
row of their prefixes.

Each program acts at positions that the short trial of sharing does not reach, or keeps for its loss
what the trial cannot see. Loss and gradients are compared with the unpatched model's in float64.

covers: admission/third_party.py, prefixes/calls.py
"""

from __future__ import annotations

import functools
import re
import types

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

import streambp
from streambp.model import padding
from streambp.prefixes import calls
from streambp.prefixes.admission import PackedRowTrials
from streambp.prefixes.tree import find_tree
from tests import families
from tests.oracle import MAX_FLOAT64_ERROR, worst_error
from tests.prefixes.batches import counted, make_batch
from tests.prefixes.test_calls import tokens_or_reason

PROMPT_POSITIONS = slice(43, 47)  # of rows of 49 tokens; the trial's packed row has 40


@pytest.fixture(autouse=True)
def float64_everywhere(float64_oracle, monkeypatch):
    torch.set_default_dtype(torch.float64)
    monkeypatch.setattr(calls, "find_tree", functools.partial(find_tree, min_prefix=8))
    yield
    torch.set_default_dtype(torch.float32)


def steered(x):
    x = x.clone()
    x[:, PROMPT_POSITIONS] += 1
    return x


def forward_hook(module, _, output):
    return (steered(output[0]), *output[1:]) if isinstance(output, tuple) else steered(output)


def forward_pre_hook(module, args):
    return (steered(args[0]), *args[1:])


def backward_after(module, grads, _):
    return tuple(None if grad is None else steered(grad) for grad in grads)


class Steering(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return steered(self.inner(x))


def replace_forward(module):
    own_forward = module.forward
    module.forward = lambda x: steered(own_forward(x))


def everywhere(model):
    def hook(module, _, output):
        return steered(output) if module is model.model.norm else None

    return nn.modules.module.register_module_forward_hook(hook)


PROGRAMS = {
    "a layer": lambda m: m.model.layers[1].register_forward_hook(forward_hook),
    "before a layer": lambda m: m.model.layers[1].register_forward_pre_hook(forward_pre_hook),
    "embeddings": lambda m: m.model.embed_tokens.register_forward_hook(forward_hook),
    "attention": lambda m: m.model.layers[0].self_attn.register_forward_hook(forward_hook),
    "a projection": lambda m: m.model.layers[0].self_attn.o_proj.register_forward_pre_hook(
        forward_pre_hook
    ),
    "an MLP": lambda m: m.model.layers[0].mlp.register_forward_hook(forward_hook),
    "an MLP's gradient": lambda m: m.model.layers[0].mlp.register_full_backward_hook(
        backward_after
    ),
    "the final norm": lambda m: m.model.norm.register_forward_hook(forward_hook),
    "all modules": everywhere,
    "a forward": lambda m: replace_forward(m.model.layers[0].mlp),
    "a module": lambda m: setattr(m.model.layers[0], "mlp", Steering(m.model.layers[0].mlp)),
}
REASON_MLP_GRADIENT = (
    "an MLP's gradient"  # such a layer runs whole, which keeps its rows apart by itself
)


def collecting(model, outputs, module):
    """An auxiliary loss of what a hook collects."""
    return module.register_forward_hook(lambda _, __, output: outputs.append(output))


def step(model, batch, outputs=()):
    model.zero_grad(set_to_none=True)
    loss = model(**batch, use_cache=False).loss
    for x in outputs:
        loss = loss + x.pow(2).mean()
    loss.backward()
    if outputs:
        outputs.clear()
    return loss.detach(), {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


def pair(chunk_size=1000):
    config = streambp.StreamConfig(chunk_size=chunk_size, rows="packed")
    return families.build("llama", torch.float64), streambp.patch(
        families.build("llama", torch.float64), config
    )


def batches():
    return [make_batch("plain", seed, prompt=40) for seed in (1, 2)]


def check(program, first, chunk_size=1000):
    """Steps with a program on it; one before it is set, if it is not the first thing. A layer that
    is cut runs whole where its inner hooks look at positions, so that one chunk shows what sharing
    alone does."""
    (stock, ours), handles = pair(chunk_size), []
    if not first:
        step(ours, batches()[0])
        assert tokens_or_reason(ours) == counted(batches()[0])
    try:
        handles = [program(model) for model in (stock, ours)] if program is not everywhere else []
        for batch in batches():
            steps = []
            for model in (stock, ours):
                handle = everywhere(model) if program is everywhere else None
                steps.append(step(model, batch))
                if handle is not None:
                    handle.remove()
            (expected_loss, expected), (loss, gradients) = steps
            assert abs(loss - expected_loss) <= 1e-12 * abs(expected_loss)
            assert worst_error(gradients, expected) <= MAX_FLOAT64_ERROR
            assert isinstance(tokens_or_reason(ours), str)
    finally:
        for handle in handles:
            if handle is not None:
                handle.remove()
    return tokens_or_reason(ours)


@pytest.mark.fast(
    "embeddings-True",
    "a projection-True",
    "the final norm-False",
    "a forward-False",
    "a module-True",
)
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_at_positions(program, first):
    why = check(PROGRAMS[program], first)
    assert re.search("would see another row than the batch's", why), why


@pytest.mark.full
@pytest.mark.parametrize("program", sorted(PROGRAMS.keys() - {REASON_MLP_GRADIENT}))
def test_programs_at_positions_in_chunks(program):
    check(PROGRAMS[program], first=True, chunk_size=7)


@pytest.mark.full
@pytest.mark.parametrize(
    "where",
    [
        "model.norm",
        pytest.param("model.embed_tokens", marks=pytest.mark.full),
        pytest.param("model.layers.1", marks=pytest.mark.full),
        "model.layers.0.mlp",
    ],
)
def test_what_a_hook_collects_joins_the_loss(where):
    stock, ours = pair()
    gradients_by_model = []
    for model in (stock, ours):
        outputs = []
        collecting(model, outputs, model.get_submodule(where))
        gradients_by_model.append([])
        for batch in batches():
            outputs.clear()  # of a first call's trials
            model.zero_grad(set_to_none=True)
            loss = model(**batch, use_cache=False).loss
            loss = loss + outputs[-1].pow(2).mean()
            loss.backward()
            gradients_by_model[-1].append(
                {name: p.grad.clone() for name, p in model.named_parameters()}
            )
    assert all(
        worst_error(ours, stock) <= MAX_FLOAT64_ERROR
        for stock, ours in zip(*gradients_by_model, strict=True)
    )
    assert "would see another row" in tokens_or_reason(ours)


def test_a_backbones_forward_that_stood_there_before():
    def replace(model):
        own_forward = model.model.forward

        def forward(input_ids, **kwargs):
            ids = input_ids.clone()
            ids[:, PROMPT_POSITIONS] = (ids[:, PROMPT_POSITIONS] + 1) % 50
            return own_forward(input_ids=ids, **kwargs)

        model.model.forward = functools.wraps(own_forward)(forward)
        return model

    stock, ours = (replace(families.build("llama", torch.float64)) for _ in range(2))
    streambp.patch(ours, streambp.StreamConfig(chunk_size=1000, rows="packed"))
    (_, expected), (_, our_gradients) = (step(model, batches()[0]) for model in (stock, ours))
    assert worst_error(our_gradients, expected) <= MAX_FLOAT64_ERROR
    assert "would see another row" in tokens_or_reason(ours)


class Mixing(nn.Linear):
    def forward(self, x):
        return super().forward(x + x.mean(1, keepdim=True))


class WithLossOfStates(LlamaForCausalLM):
    def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
        hidden = self.model(
            input_ids=input_ids, attention_mask=attention_mask, **kwargs
        ).last_hidden_state
        logits = self.lm_head(hidden)
        loss = self.loss_function(logits, labels, self.config.vocab_size)
        return CausalLMOutputWithPast(loss=loss + hidden.pow(2).mean(), logits=logits)


def mixed(module, _, output):
    states = getattr(output, "last_hidden_state", output)
    states = states + states.mean(1, keepdim=True)
    return (
        BaseModelOutputWithPast(last_hidden_state=states)
        if hasattr(output, "last_hidden_state")
        else states
    )


def own_loss(logits, labels, vocab_size, **_):
    scored = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    return scored + logits.logsumexp(-1).pow(2).mean()


def scaled_by_all(real):
    return lambda logits, *args, **kwargs: (
        real(logits, *args, **kwargs) * logits.detach().logsumexp(-1).mean()
    )


READERS = {  # of padding's values, between the backbone and the loss
    "a hook on the backbone": lambda m: m.model.register_forward_hook(mixed),
    "a hook on the head": lambda m: m.lm_head.register_forward_hook(mixed),
    "a head": lambda m: setattr(m.lm_head, "__class__", Mixing),
    "a model's forward": lambda m: setattr(m, "__class__", WithLossOfStates),
    "a loss": lambda m: setattr(m, "loss_function", own_loss),
    "cross_entropy": lambda m: None,
}


@pytest.mark.parametrize("reader", READERS)
def test_who_reads_padding_behind_the_backbone_gets_rows(reader, monkeypatch):
    """With the default. With rows="packed", as asked for, padding's values are another token's."""
    if reader == "cross_entropy":
        monkeypatch.setattr(
            nn.functional, "cross_entropy", scaled_by_all(nn.functional.cross_entropy)
        )
    batch = make_batch("padded", prompt=40)
    stock, ours = (families.build("llama", torch.float64) for _ in range(2))
    for model in (stock, ours):
        READERS[reader](model)
    streambp.patch(ours, streambp.StreamConfig(chunk_size=7, rows="auto"))
    (expected_loss, expected), (loss, our_gradients) = step(stock, batch), step(ours, batch)
    assert abs(loss - expected_loss) <= 1e-12 * abs(expected_loss)
    assert worst_error(our_gradients, expected) <= MAX_FLOAT64_ERROR
    assert "may read them" in tokens_or_reason(ours)


def test_who_stands_around_the_model_sees_no_padding():
    """Its hooks, and a forward in front of streambp's."""
    ours, batch = families.build("llama", torch.float64), make_batch("padded", prompt=40)
    streambp.patch(ours, streambp.StreamConfig(chunk_size=7, rows="auto"))
    ours.register_forward_hook(lambda _, __, ___: None)
    inner = ours.forward
    ours.forward = functools.wraps(inner)(lambda **kwargs: inner(**kwargs))
    step(ours, batch)
    assert tokens_or_reason(ours) == counted(batch)


@pytest.mark.parametrize("mode", ["plain", "padded"])
def test_who_reads_padding_is_asked_where_there_is_some(mode, monkeypatch):
    """It takes a walk through all modules beside the backbone, of which a model of images has
    hundreds."""
    calls_seen, reads = [], padding.third_party_reads_rows
    monkeypatch.setattr(
        padding, "third_party_reads_rows", lambda *args: calls_seen.append(args) or reads(*args)
    )
    ours = families.build("llama", torch.float64)
    streambp.patch(ours, streambp.StreamConfig(chunk_size=7, rows="auto"))
    step(ours, make_batch(mode, prompt=40))
    assert bool(calls_seen) == (mode == "padded")


def test_labels_of_padding_at_some_tokens_compute_rows():
    """With logits_to_keep labels are fewer than tokens."""
    batch = make_batch("padded", prompt=40)
    batch |= {"labels": batch["input_ids"][:, -9:], "logits_to_keep": 9}
    stock, ours = (families.build("llama", torch.float64) for _ in range(2))
    streambp.patch(ours, streambp.StreamConfig(chunk_size=7, rows="auto"))
    assert worst_error(step(ours, batch)[1], step(stock, batch)[1]) <= MAX_FLOAT64_ERROR
    assert "predicts a label" in tokens_or_reason(ours)


def engines_hook(module, args):
    return None


ENGINES_HOOK = types.FunctionType(
    engines_hook.__code__, {"__name__": "deepspeed.runtime.engine"}, "engines_hook"
)


def test_known_hooks_share():
    """transformers' for inputs that want a gradient, and engines'; hooks on the backbone itself see
    the rows' output."""
    (_, ours), batch = pair(), batches()[0]
    ours.enable_input_require_grads()
    ours.model.layers[0].register_forward_pre_hook(ENGINES_HOOK)
    shapes = []
    ours.model.register_forward_hook(
        lambda _, __, output: shapes.append(output.last_hidden_state.shape)
    )
    ours.lm_head.register_forward_hook(lambda _, __, ___: None)
    step(ours, batch)
    assert tokens_or_reason(ours) == counted(batch)
    assert shapes == [(*batch["input_ids"].shape, 32)]


def test_no_hook_sees_a_trial_of_sharing(monkeypatch):
    (_, ours), shapes, trials = pair(), [], []
    monkeypatch.setattr(PackedRowTrials, "_try", lambda *_: trials.append(1))
    ours.model.embed_tokens.register_forward_hook(
        lambda _, __, output: shapes.append(tuple(output.shape[:2]))
    )
    batch = batches()[0]
    step(ours, batch)
    assert shapes == [tuple(batch["input_ids"].shape)]
    assert not trials


def test_other_ranks_learn_that_hooks_keep_the_rows(monkeypatch):
    """A trial gathers the weights of all ranks: one whose hooks want the rows says so before any,
    and tries nothing."""
    (_, ours), batch, trials, replies = pair(), batches()[0], [], []
    real_try = PackedRowTrials._try
    monkeypatch.setattr(PackedRowTrials, "_try", lambda *args: trials.append(1) or real_try(*args))
    monkeypatch.setattr(calls, "ranks_must_agree", lambda _: True)
    monkeypatch.setattr(
        calls,
        "gather_numbers",
        lambda _, mine, device: replies.append(mine) or [mine, [1, True]],
    )
    ours.model.embed_tokens.register_forward_hook(forward_hook)
    step(ours, batch)
    assert not trials
    assert replies == [[0, False]]
    assert "would see another row" in tokens_or_reason(ours)


@pytest.mark.fast("embeddings", "a module")
@pytest.mark.parametrize("program", [name for name in PROGRAMS if name != REASON_MLP_GRADIENT])
def test_mutants_are_found(program, monkeypatch):
    """Sharing in spite of what others have put there."""
    monkeypatch.setattr(calls, "why_rows", lambda _: None)
    with pytest.raises(AssertionError):
        check(PROGRAMS[program], first=True)


def test_the_backbones_forward_has_a_mutant(monkeypatch):
    monkeypatch.setattr(calls, "why_rows", lambda _: None)
    with pytest.raises(AssertionError):
        test_a_backbones_forward_that_stood_there_before()
