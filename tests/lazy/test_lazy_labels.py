"""Logits beside the loss: what programs compute of the logits of a call with labels, without these.

covers: lazy/dispatch.py
"""

from __future__ import annotations

import pytest
import torch

import streambp
from streambp.errors import StreamBPError
from streambp.lazy.dispatch import LazyLogits
from tests import zoo
from tests.families import build
from tests.head.losses_on_logits import dpo, entropy_of
from tests.lazy.test_lazy import IDS, OutputBackwardHookManager, lazy
from tests.oracle import MAX_FLOAT64_ERROR, worst_error

pytestmark = pytest.mark.usefixtures("float64_oracle")
LOSS_TEXT_START = "blockwise loss, no logits; besides, "


def metrics(logits, ids):
    """As TRL 0.29 and ms-swift log them in SFT."""
    with torch.no_grad():
        entropy = entropy_of(logits)[:, 1:].mean()
        hits = (logits[..., :-1, :].contiguous().argmax(dim=-1) == ids[..., 1:]).double().mean()
    return torch.stack([entropy, hits])


def step(model, use=None, **arguments):
    """The loss (with a loss on the logits added, if `use` has a gradient), what `use` made, all
    gradients."""
    model.zero_grad()
    output = model(input_ids=IDS, labels=IDS, use_cache=False, **arguments)
    loss, logits = output[:2] if isinstance(output, tuple) else (output.loss, output.logits)
    added_loss = torch.zeros(()) if use is None else use(logits, IDS)
    (loss + added_loss if added_loss.requires_grad else loss).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), added_loss.detach(), gradients


def compare(use, **arguments):
    """Loss, what `use` made, and all gradients against full logits."""
    model = build("qwen3", torch.float64)
    expected = step(model, use, **arguments)
    our_step = step(lazy(model), use, **arguments)
    for ours, theirs in zip(our_step[:2], expected[:2], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)
    assert worst_error(our_step[2], expected[2]) <= MAX_FLOAT64_ERROR
    return model


@pytest.mark.parametrize("arguments", [{}, {"return_dict": False}])
@pytest.mark.parametrize(
    ("use", "head_text"),
    [
        (metrics, LOSS_TEXT_START + "no logits: computed blockwise for log_softmax + exp"),
        (dpo, LOSS_TEXT_START + "no logits: computed blockwise for gather, logsumexp"),
        (
            lambda z, y: z.cumsum(-1).square().mean(),
            LOSS_TEXT_START + "builds the logits: the program uses cumsum on them",
        ),
    ],
    ids=["metrics", "a loss", "no rule"],
)
def test_what_is_computed_of_logits_beside_the_loss(use, head_text, arguments):
    model = compare(use, **arguments)
    assert streambp.describe(model).head.startswith(head_text)


@pytest.mark.parametrize("family", ["gemma2", "cohere", "phi", "mixtral"])
def test_heads_with_scale_softcap_and_bias_and_other_parts_of_the_loss(family):
    torch.set_default_dtype(torch.float64)
    try:
        model = zoo.build(family, torch.float64).train()
        expected = step(model, dpo)
        our_step = step(lazy(model), dpo)
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(
        torch.stack(our_step[:2]), torch.stack(expected[:2]), rtol=1e-12, atol=0
    )
    assert worst_error(our_step[2], expected[2]) <= MAX_FLOAT64_ERROR


def test_logits_that_nobody_uses_change_nothing():
    """Bit by bit; and so does their use for metrics."""
    runs = []
    for setting, use in ((False, None), (True, None), (True, metrics)):
        config = streambp.StreamConfig(chunk_size=5, lazy_logits=setting)
        model = streambp.patch(build("qwen3", torch.float64), config)
        runs.append(step(model, use))
        if use is None:
            assert streambp.describe(model).head == "blockwise loss, no logits"
    (loss, _, gradients), *other_runs = runs
    for our_loss, _, ours in other_runs:
        assert torch.equal(our_loss, loss)
        assert all(torch.equal(ours[name], gradient) for name, gradient in gradients.items())


@pytest.mark.parametrize("hook", [lambda z: z.retain_grad(), lambda z: z.register_hook(torch.neg)])
def test_hooks_that_would_not_see_the_losss_gradient_are_refused(hook):
    output = lazy(build("qwen3", torch.float64))(input_ids=IDS, labels=IDS)
    with pytest.raises(
        StreamBPError, match="comes after a loss or a part was computed from these logits"
    ):
        hook(output.logits)


def hooked_late_by_an_engine(use, first_use=None):
    """An engine hooks logits of which a loss was made: it scales by a quarter what is made of them
    later, and no more."""
    model, manager = build("qwen3", torch.float64), OutputBackwardHookManager(4)
    (*_, expected) = step(
        model, lambda z, y: (first_use(z, y) if first_use else 0.0) + use(z, y) / 4
    )

    def hooked(z, y):
        first_value = first_use(z, y) if first_use else 0.0
        z.register_hook(manager.hook)
        return first_value + use(z, y)

    (*_, our_gradients) = step(lazy(model), hooked)
    assert worst_error(our_gradients, expected) <= MAX_FLOAT64_ERROR
    assert [len(shape) for shape in manager.shapes] == [1]
    assert streambp.describe(model).head.startswith(LOSS_TEXT_START + "no logits")


LATE_LABEL_USES = {
    "beside the model's loss": {"use": dpo},
    "beside the program's": {"use": dpo, "first_use": lambda z, y: z.logsumexp(-1).square().mean()},
}


@pytest.mark.parametrize("name", LATE_LABEL_USES)
def test_an_engines_hook_is_never_late(name):
    hooked_late_by_an_engine(**LATE_LABEL_USES[name])


def test_an_engines_hook_on_logits_whose_classes_come_first():
    """As a module around the model may return them."""
    model, manager = lazy(build("qwen3", torch.float64)), OutputBackwardHookManager(4)
    plain = build("qwen3", torch.float64)
    plain(input_ids=IDS, use_cache=False).logits.transpose(1, 2).log_softmax(1).square().mean().div(
        4
    ).backward()
    returned = model(input_ids=IDS, use_cache=False).logits.transpose(1, 2)
    returned.register_hook(manager.hook)
    returned.log_softmax(1).square().mean().backward()
    assert [len(shape) for shape in manager.shapes] == [1]
    our_gradients, expected = (
        {name: p.grad for name, p in trained_model.named_parameters()}
        for trained_model in (model, plain)
    )
    assert worst_error(our_gradients, expected) <= MAX_FLOAT64_ERROR


def labelled_output(model):
    return model(input_ids=IDS, labels=IDS)


def test_when_logits_are_beside_the_loss():
    """In evaluation as in training, and for a caller whose code names them. Real where the settings
    or a cache say so; not beside log-probabilities.
    """
    model = lazy(build("qwen3", torch.float64))
    scored = model(input_ids=IDS, labels=IDS, output_log_probs=True)
    assert scored.logits is None
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=IDS, labels=IDS).logits
        assert type(logits) is LazyLogits
        assert type(model(input_ids=IDS, labels=IDS, use_cache=True).logits) is torch.Tensor
        expected = build("qwen3", torch.float64).eval()(input_ids=IDS, labels=IDS).logits
        torch.testing.assert_close(
            torch.as_tensor(logits.numpy()), expected, rtol=1e-12, atol=1e-12
        )
    measured = streambp.patch(model, streambp.StreamConfig(eval_logits=True, lazy_logits=True))
    assert type(measured(input_ids=IDS, labels=IDS).logits) is torch.Tensor
    default = streambp.patch(model, streambp.StreamConfig())
    assert type(default(input_ids=IDS, labels=IDS).logits) is LazyLogits
    assert labelled_output(default).logits is None
