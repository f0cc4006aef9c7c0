"""What takes the place of a stand-in in a graph is right or raises: no path loses a gradient without a word.

covers: lazy/deferred.py, lazy/standin.py
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import streambp
from tests.families import VOCABULARY, build, make_batch
from tests.oracle import gradients, worst_error

pytestmark = pytest.mark.usefixtures("float64_oracle")


def cross_entropy(z, y):
    return F.cross_entropy(z.reshape(-1, VOCABULARY), y.flatten())


class FusedLoss(torch.autograd.Function):
    """A loss that takes logits and computes its gradient by itself."""

    @staticmethod
    def forward(ctx, z, y):
        ctx.save_for_backward(z.softmax(-1), y)
        return F.cross_entropy(z.detach(), y, reduction="sum")

    @staticmethod
    def backward(ctx, upstream):
        p, y = ctx.saved_tensors
        return upstream * (p - F.one_hot(y, p.shape[-1])), None


def fused(z, y):
    return FusedLoss.apply(z.reshape(-1, VOCABULARY), y.flatten())


@torch.library.custom_op("streambp_tests::log_z", mutates_args=())
def log_z(x: torch.Tensor) -> torch.Tensor:
    return x.logsumexp(-1)


log_z.register_autograd(
    lambda ctx, upstream: upstream[..., None] * ctx.saved_tensors[0].softmax(-1),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def as_an_extension(z, y):
    """An operation that does not ask for `__torch_function__`, as functions of C++ extensions do not."""
    with torch._C.DisableTorchFunctionSubclass():
        return z.logsumexp(-1).sum()


def writing(write):
    def loss(z, y):
        write(z)
        return cross_entropy(z, y)

    return loss


def masked_without_grad(z, y):
    with torch.no_grad():
        z[..., 5] = -3.0
    return cross_entropy(z, y)


def sliced_without_grad(z, y):
    with torch.no_grad():
        part = z[:, 4:9]
    return cross_entropy(z, y) * cross_entropy(part, y[:, 4:9])


def looked_at_without_grad(z, y):
    with torch.no_grad():
        best = z.transpose(0, 1).argmax(-1)
    return cross_entropy(z, y) * (1.0 + best.double().mean())


def hooked(z, y):
    z.register_hook(lambda gradient: gradient * 0.5)
    return cross_entropy(z, y)


def hooked_slice(z, y):
    part = z[:, 3:]
    part.register_hook(lambda gradient: gradient * 0.5)
    return cross_entropy(part, y[:, 3:]) + cross_entropy(z, y)


def focal(look):
    def loss(z, y):
        p = look(z).softmax(-1).gather(-1, y[..., None])[..., 0]
        return ((1 - p) * F.cross_entropy(z.view(-1, VOCABULARY), y.flatten(), reduction="none").view(p.shape)).mean()

    return loss


RIGHT = {
    "custom operator": lambda z, y: torch.ops.streambp_tests.log_z(z).sum() * 0.1 + cross_entropy(z, y),
    "checkpoint": lambda z, y: checkpoint(lambda z: (z * 0.5).sigmoid().mean(), z, use_reentrant=False),
    "checkpoint around the loss": lambda z, y: checkpoint(cross_entropy, z, y, use_reentrant=False),
    "compiled": torch.compile(cross_entropy, backend="eager"),
    "compiled by autograd": torch.compile(lambda z, y: -(z * 0.5).log_softmax(-1)[..., 3].mean(), backend="aot_eager"),
    "weights from detach": focal(lambda z: z.detach()),
    "weights from data": focal(lambda z: z.data),
    "a hook on the logits": hooked,
    "a hook on a part of the logits": hooked_slice,
    "written without grad": masked_without_grad,
    "sliced without grad": sliced_without_grad,
    "looked at without grad": looked_at_without_grad,
}


def runs_of(loss, prepare=lambda model: None):
    """Loss and gradients of an unpatched and of a patched model."""
    for patched in (False, True):
        model = build("gemma3", torch.float64)
        model.loss_function = lambda logits, labels, *_, **__: loss(logits, labels)
        prepare(model)
        if patched:
            streambp.patch(model, streambp.StreamConfig(chunk_size=5))
        yield model


@pytest.mark.fast(3)
@pytest.mark.parametrize("name", RIGHT)
def test_right(name):
    torch._dynamo.reset()
    (expected_loss, expected), (loss, found) = (gradients(m, **make_batch("plain")) for m in runs_of(RIGHT[name]))
    assert abs(loss - expected_loss) <= 1e-12 * abs(expected_loss)
    assert worst_error(found, expected) <= 1e-10


RAISES = {
    "autograd.Function": fused,
    "autograd.Function of a part": lambda z, y: fused(z[:, 2:], y[:, 2:]) + cross_entropy(z, y),
    "autograd.Function in compiled code": torch.compile(fused, backend="eager"),
    "reentrant checkpoint": lambda z, y: checkpoint(cross_entropy, z, y, use_reentrant=True),
    "extension": as_an_extension,
    "functional transform": lambda z, y: torch.func.vmap(torch.sum)(z).sum(),
    "written through detach": writing(lambda z: z.detach().mul_(0.5)),
    "written through data": writing(lambda z: z.data.mul_(0.5)),
    "written through a view": writing(lambda z: z.transpose(0, 1)[3].mul_(0.5)),
    "written through a view of a part": writing(lambda z: z[:, 3:].detach()[0].zero_()),
    "hooked after a part was taken": lambda z, y: (
        part := z[:, 2:],
        z.register_hook(torch.neg),
        cross_entropy(part, y[:, 2:]),
    )[2],
    "a part that was taken before a write": lambda z, y: (z[:, 2:], z.mul_(0.5))[0].sigmoid().sum(),
}


def step_of_a_patched_model(loss, backward=lambda loss, model: loss.backward(), prepare=lambda model: None):
    torch._dynamo.reset()
    *_, model = runs_of(loss, prepare)
    backward(model(**make_batch("plain"), use_cache=False).loss, model)
    return model


def raises(step, *args):
    """Whether it raises a StreamBPError that says what to do."""
    try:
        step(*args)
    except streambp.StreamBPError as error:
        return "StreamConfig(head=False)" in str(error)
    return False


@pytest.mark.parametrize("name", RAISES)
def test_raises(name):
    assert raises(step_of_a_patched_model, RAISES[name])


def test_no_path_to_a_parameter_leads_past_the_error():
    def some(loss, model):
        torch.autograd.grad(loss, [model.model.layers[0].mlp.up_proj.weight], allow_unused=True)

    def head(loss, model):
        loss.backward(inputs=[model.lm_head.weight])

    def untie(model):
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())

    def freeze_all_but_the_head(model):
        untie(model)
        model.model.requires_grad_(False)

    assert raises(step_of_a_patched_model, fused, some)
    assert raises(step_of_a_patched_model, fused, head, untie)
    assert raises(step_of_a_patched_model, fused, lambda loss, model: loss.backward(), freeze_all_but_the_head)


def test_the_model_is_usable_after_the_error():
    (_, expected), _ = (gradients(m, **make_batch("plain")) for m in runs_of(cross_entropy))
    *_, model = runs_of(fused)
    assert raises(lambda: model(**make_batch("plain"), use_cache=False).loss.backward())
    model.loss_function = lambda logits, labels, *_, **__: cross_entropy(logits, labels)
    assert worst_error(gradients(model, **make_batch("plain"))[1], expected) <= 1e-10


def test_logits_that_are_built_take_a_fused_loss():
    stock, _ = runs_of(fused)
    _, expected = gradients(stock, **make_batch("plain"))
    streambp.patch(stock, streambp.StreamConfig(chunk_size=5, head=False))
    assert worst_error(gradients(stock, **make_batch("plain"))[1], expected) <= 1e-10


@pytest.mark.parametrize("where", ["model.norm", "lm_head"])
def test_backward_hooks_on_the_modules_around_a_stand_in(where):
    """torch puts an autograd.Function of its own around such a module."""
    seen = []

    def hook(model):
        model.get_submodule(where).register_full_backward_hook(lambda *_: seen.append(where))

    stock, ours = runs_of(cross_entropy, hook)
    _, expected = gradients(stock, **make_batch("plain"))
    assert len(seen) == 1
    _, found = gradients(ours, **make_batch("plain"))
    assert worst_error(found, expected) <= 1e-10
    assert len(seen) == 2


@pytest.mark.parametrize("where", ["model.norm", "lm_head"])
@pytest.mark.parametrize("change", [lambda x: x * 1.5 + 0.1, lambda x: x * 1.5], ids=["no rule", "rules"])
def test_forward_hooks_that_change_what_a_module_returns_run_once(where, change):
    found = []
    for model in runs_of(cross_entropy):
        model.get_submodule(where).register_forward_hook(lambda module, given, output: change(output))
        found.append(gradients(model, **make_batch("plain")))
    (expected_loss, expected), (loss, ours) = found
    assert abs(loss - expected_loss) <= 1e-12 * abs(expected_loss)
    assert worst_error(ours, expected) <= 1e-10


def used_after_an_update():
    """What a forward hook has kept of a call, used when the weights are others."""
    kept = []
    *_, model = runs_of(cross_entropy)
    model.model.norm.register_forward_hook(lambda module, given, output: kept.append(output))
    model(**make_batch("plain"), use_cache=False)
    with torch.no_grad():
        model.model.norm.weight.add_(1.0)
    return kept[-1].abs().mean()


def test_what_a_hook_kept_is_refused_after_an_update():
    assert raises(used_after_an_update)
