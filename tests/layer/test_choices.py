"""A router that ties to rounding decides nothing; a layer that computes something else is refused.
[Note: choices]

covers: admission/agreement.py, admission/own_run.py, admission/probe.py, layer/choices.py
"""

from __future__ import annotations

import contextlib

import pytest
import torch

import streambp
from scripts import mixture_table
from streambp.admission import own_run, probe
from streambp.admission.own_run import StreamingMismatchError
from streambp.attention.interface import THREAD_IMPLEMENTATIONS, THREAD_ROUTED_NAMES
from streambp.chunks import Chunk
from streambp.layer.choices import ReplayedChoices
from tests import zoo
from tests.families import make_batch
from tests.seeds import seeded

CHUNKS = streambp.StreamConfig(chunk_size=7, saves=(), rows="as_given")
FAMILIES = ("gpt_oss", "mixtral", "deepseek_v3")
PRECISIONS = ("weights", "autocast")


def mixture(family, precision="weights", attention="eager"):
    model = zoo.build(family, torch.float32, num_experts_per_tok=2)
    model.set_attn_implementation(attention)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                parameter.mul_(16)  # so that it matters to whom a token goes
            if ".self_attn." in name and parameter.dim() > 1:
                parameter.mul_(16)  # so that it matters what a token reads
            parameter.copy_(parameter.bfloat16())
    return model.bfloat16() if precision == "weights" else model


def is_streaming():
    """Not unpatched, nor in the run of a trial that is as unpatched."""
    return bool(THREAD_ROUTED_NAMES.get()) and not THREAD_IMPLEMENTATIONS.get()


def tied(monkeypatch):
    """The last expert that a token goes to and the next one are liked as much. A rounding decides
    who is first, which falls otherwise where the layer streams."""
    real = torch.topk

    def topk(x, k, *args, **kwargs):
        if k >= x.shape[-1]:
            return real(x, k, *args, **kwargs)
        last, following = real(x.detach(), k + 1).indices[..., k - 1 :].unbind(-1)
        first, second = (following, last) if is_streaming() else (last, following)
        best = x.gather(-1, last[..., None])
        second_best = best - torch.finfo(x.dtype).eps * best.detach().abs()
        x = x.scatter(-1, first[..., None], best).scatter(-1, second[..., None], second_best)
        return real(x, k, *args, **kwargs)

    monkeypatch.setattr(torch, "topk", topk)


def step(model, precision="weights", **batch):
    with (
        torch.autocast("cpu", torch.bfloat16)
        if precision == "autocast"
        else contextlib.nullcontext()
    ):
        loss = model(**(batch or make_batch("plain")), use_cache=False).loss
    loss.backward()
    assert all(
        parameter.grad.isfinite().all()
        for parameter in model.parameters()
        if parameter.grad is not None
    )


def paths(model):
    return {layer.path for layer in streambp.describe(model).layers}


@pytest.mark.fast(3)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_tie_in_the_router_refuses_nothing(family, precision, monkeypatch):
    model = mixture(family, precision)
    tied(monkeypatch)
    differing, note = [], ReplayedChoices._note
    monkeypatch.setattr(
        ReplayedChoices,
        "_note",
        lambda self, *args: (note(self, *args), differing.append(self.differing)),
    )
    step(streambp.patch(model, CHUNKS), precision)
    assert max(differing) >= 20  # of 24 tokens
    assert paths(model) == {"streams"}


@pytest.mark.parametrize("family", FAMILIES)
def test_mutant_a_tie_decides(family, monkeypatch):
    """Without choices that are handed out the same models are refused."""
    monkeypatch.setattr(
        ReplayedChoices,
        "__torch_function__",
        lambda self, func, types, args=(), kwargs=None: func(*args, **(kwargs or {})),
    )
    with pytest.raises(StreamingMismatchError):
        test_a_tie_in_the_router_refuses_nothing(family, "weights", monkeypatch)


def while_streaming(monkeypatch, model, ending, change):
    """While its layer streams, the forward of the first module whose path in the model, or whose
    class, ends so is `change` of it."""
    module_class = next(
        type(module)
        for path, module in model.named_modules()
        if path.endswith(f".{ending}") or type(module).__name__.lower().endswith(ending)
    )
    real = module_class.forward

    def forward(self, *args, **kwargs):
        return (
            change(real, self, *args, **kwargs) if is_streaming() else real(self, *args, **kwargs)
        )

    monkeypatch.setattr(module_class, "forward", forward)


def scaled_attention(monkeypatch, model):
    def scaled(real, self, *args, **kwargs):
        scaling, self.scaling = self.scaling, 2 * self.scaling
        try:
            return real(self, *args, **kwargs)
        finally:
            self.scaling = scaling

    while_streaming(monkeypatch, model, "attention", scaled)


def unrotated_attention(monkeypatch, model):
    def unrotated(real, self, *args, position_embeddings, **kwargs):
        cos, sin = position_embeddings
        return real(
            self, *args, position_embeddings=(torch.ones_like(cos), torch.zeros_like(sin)), **kwargs
        )

    while_streaming(monkeypatch, model, "attention", unrotated)


def experts_permuted(monkeypatch, model):
    while_streaming(
        monkeypatch,
        model,
        "experts",
        lambda real, self, x, index, weights: real(self, x, index.roll(1, 0) ^ 1, weights),
    )


def another_activation(monkeypatch, model):
    while_streaming(
        monkeypatch,
        model,
        "experts",
        lambda real, self, x, index, weights: real(self, x, index, weights).tanh(),
    )


def picked_weights_ignored(monkeypatch, model):
    while_streaming(
        monkeypatch,
        model,
        "experts",
        lambda real, self, x, index, w: real(self, x, index, torch.full_like(w, 1 / w.shape[-1])),
    )


def router_ignored(monkeypatch, model):
    while_streaming(monkeypatch, model, "topkrouter", lambda real, self, x: real(self, 0 * x))


def router_turned(monkeypatch, model):
    while_streaming(
        monkeypatch, model, "topkrouter", lambda real, self, x: real(self, x.roll(1, -1))
    )


OTHER_FAMILIES = (
    scaled_attention, unrotated_attention, experts_permuted, another_activation, picked_weights_ignored, router_ignored,
    router_turned,
)  # fmt: skip


@pytest.mark.fast(12)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mutant", OTHER_FAMILIES)
def test_what_computes_something_else_is_refused(mutant, family, precision, monkeypatch):
    """In half precision, and with a tie in every choice."""
    model = streambp.patch(mixture(family, precision), CHUNKS)
    tied(monkeypatch)
    mutant(monkeypatch, model)
    with pytest.raises(StreamingMismatchError):
        step(model, precision)


def chosen_elsewhere(monkeypatch, precision):
    """DeepSeek's router picks by scores and a bias that no weight has: here it picks otherwise
    while it streams."""
    model = streambp.patch(mixture("deepseek_v3", precision), CHUNKS)
    real = torch.topk

    def rolled_topk(x, *args, **kwargs):
        return real(x.roll(1, -1) if is_streaming() else x, *args, **kwargs)

    monkeypatch.setattr(torch, "topk", rolled_topk)
    step(model, precision)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_other_choices_alone_are_refused(precision, monkeypatch):
    with pytest.raises(StreamingMismatchError):
        chosen_elsewhere(monkeypatch, precision)


def test_mutant_scores_are_not_compared(monkeypatch):
    """The choices of the first run hide what the second would have chosen."""
    for module in (own_run, probe):
        monkeypatch.setattr(module, "router_scores_agree", lambda choices, dtype: True)
    chosen_elsewhere(monkeypatch, "weights")


CHOICE_FUNCTIONS = {
    "topk": lambda x: x.topk(2, sorted=False).indices,
    "topk of a dim": lambda x: torch.topk(x, k=2, dim=x.dim() - 1)[1],
    "sort": lambda x: torch.sort(x, descending=True)[1],
    "argsort": lambda x: x.argsort(-1),
    "argmax": lambda x: x.argmax(-1),
    "max": lambda x: x.max(-1).indices,
}


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("name", CHOICE_FUNCTIONS)
def test_later_runs_are_handed_the_choices_of_the_first(name, flat):
    rows, length = 2, 7
    logits, other_logits = torch.randn(2, rows, length, 6, generator=seeded())
    choices, choose = ReplayedChoices(), CHOICE_FUNCTIONS[name]

    def of(x, start, stop):
        with choices.replay(Chunk(0, start, stop), rows):
            part = x[:, start:stop]
            return (
                choose(part.flatten(0, 1)).unflatten(0, (rows, stop - start))
                if flat
                else choose(part)
            )

    first = of(logits, 0, length)
    assert torch.equal(first, choose(logits))
    assert choices.max_distance() == 0
    replayed = torch.cat([of(other_logits, 0, 4), of(other_logits, 4, length)], 1)
    assert torch.equal(replayed, first)
    assert choices.max_distance() > 0.5
    assert choices.differing > 0
    assert torch.equal(of(logits, 0, length), first)
    assert choices.max_distance() == choices.differing == 0


def test_values_are_those_of_the_choice():
    """Differentiable, too, and masked scores are compared where they are finite."""
    first, second = torch.randn(2, 1, 5, 6, generator=seeded())
    first[..., 2] = second[..., 2] = -torch.inf
    second.requires_grad_()
    choices, all_of_them = ReplayedChoices(), Chunk(0, 0, 5)
    with choices.replay(all_of_them, 1):
        indices = first.topk(3).indices
    with choices.replay(all_of_them, 1):
        result = second.topk(3)
    assert torch.equal(result.values, second.gather(-1, indices))
    (grad,) = torch.autograd.grad(result.values.sum(), second)
    assert torch.equal(grad, torch.zeros_like(grad).scatter(-1, indices, 1.0))
    assert 0 < choices.max_distance() < float("inf")


def test_choices_among_tokens_are_left_alone():
    """An expert that picks its tokens mixes them, which no chunk could."""
    choices, x = ReplayedChoices(), torch.randn(2, 5, 6, generator=seeded())
    for part in x:
        with choices.replay(Chunk(0, 0, 5), 1):
            assert torch.equal(part.topk(2, dim=0).indices, torch.topk(part, 2, 0)[1])
        assert choices.max_distance() == 0


@pytest.mark.full
@pytest.mark.parametrize("family", mixture_table.FAMILIES)
def test_random_mixtures_of_real_width_stream(family):
    """A few of those that scripts/mixture_table.py measures."""
    for seed in range(3):
        models = {}
        for precision in PRECISIONS:
            for attention in mixture_table.attentions_of(family):
                row = mixture_table.measure(family, seed, precision, attention, models)
                assert "refused" not in row, row
                assert row["whole"] == [], row
