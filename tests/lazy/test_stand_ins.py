"""What takes the place of a stand-in in a graph is right or raises: no path loses a gradient
without a word.

covers: lazy/lazy_hidden.py, lazy/base.py
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import streambp
from streambp.lazy import lazy_hidden
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


class LogZ(torch.autograd.Function):
    """Takes logits of any shape."""

    @staticmethod
    def forward(ctx, z):
        ctx.save_for_backward(z.softmax(-1))
        return z.logsumexp(-1)

    @staticmethod
    def backward(ctx, upstream):
        return upstream[..., None] * ctx.saved_tensors[0]


class Halved(torch.autograd.Function):
    """Halves a gradient, as for an auxiliary head; what it returns follows a rule."""

    @staticmethod
    def forward(ctx, z):
        return z * 1.0

    @staticmethod
    def backward(ctx, upstream):
        return upstream * 0.5


class HalvedRows(torch.autograd.Function):
    """The same of rows."""

    @staticmethod
    def forward(ctx, z):
        ctx.shape = z.shape
        return z.reshape(-1, z.shape[-1])

    @staticmethod
    def backward(ctx, upstream):
        return upstream.reshape(ctx.shape) * 0.5


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
    """An operation that does not ask for `__torch_function__`, as functions of C++ extensions do
    not."""
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


def focal(detach):
    def loss(z, y):
        p = detach(z).softmax(-1).gather(-1, y[..., None])[..., 0]
        return (
            (1 - p)
            * F.cross_entropy(z.view(-1, VOCABULARY), y.flatten(), reduction="none").view(p.shape)
        ).mean()

    return loss


CORRECT_USES = {
    "reentrant checkpoint": lambda z, y: checkpoint(cross_entropy, z, y, use_reentrant=True),
    "autograd.Function": fused,
    "autograd.Function of a part": lambda z, y: fused(z[:, 2:], y[:, 2:]) + cross_entropy(z, y),
    "autograd.Function in compiled code": torch.compile(fused, backend="eager"),
    "autograd.Function, twice": lambda z, y: (
        fused(z, y) * 0.5 + fused(z * 0.7, y) + fused(z[:, :5].tanh(), y[:, :5])
    ),
    "autograd.Function with another gradient": lambda z, y: (
        cross_entropy(Halved.apply(z), y) + cross_entropy(z, y)
    ),
    "autograd.Function with another gradient and shape": lambda z, y: F.cross_entropy(
        HalvedRows.apply(z), y.flatten()
    ),
    "custom operator": lambda z, y: (
        torch.ops.streambp_tests.log_z(z).sum() * 0.1 + cross_entropy(z, y)
    ),
    "checkpoint": lambda z, y: checkpoint(
        lambda z: (z * 0.5).sigmoid().mean(), z, use_reentrant=False
    ),
    "checkpoint around the loss": lambda z, y: checkpoint(cross_entropy, z, y, use_reentrant=False),
    "compiled": torch.compile(cross_entropy, backend="eager"),
    "compiled by autograd": torch.compile(
        lambda z, y: -(z * 0.5).log_softmax(-1)[..., 3].mean(), backend="aot_eager"
    ),
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
@pytest.mark.parametrize("name", CORRECT_USES)
def test_right(name):
    torch._dynamo.reset()
    (expected_loss, expected), (loss, our_gradients) = (
        gradients(m, **make_batch("plain")) for m in runs_of(CORRECT_USES[name])
    )
    assert abs(loss - expected_loss) <= 1e-12 * abs(expected_loss)
    assert worst_error(our_gradients, expected) <= 1e-10


RAISING_USES = {
    "autograd.Function after a hook": lambda z, y: (
        z.register_hook(torch.neg),
        LogZ.apply(z).sum(),
    )[1],
    "autograd.Function after a write": lambda z, y: (z.mul_(0.5), LogZ.apply(z).sum())[1],
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


def step_of_a_patched_model(
    loss, backward=lambda loss, model: loss.backward(), prepare=lambda model: None
):
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


@pytest.mark.parametrize("name", RAISING_USES)
def test_raises(name):
    assert raises(step_of_a_patched_model, RAISING_USES[name])


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

    hooked_first = RAISING_USES["autograd.Function after a hook"]
    assert raises(step_of_a_patched_model, hooked_first, some)
    assert raises(step_of_a_patched_model, hooked_first, head, untie)
    assert raises(
        step_of_a_patched_model,
        hooked_first,
        lambda loss, model: loss.backward(),
        freeze_all_but_the_head,
    )


def test_the_model_is_usable_after_the_error():
    (_, expected), _ = (gradients(m, **make_batch("plain")) for m in runs_of(cross_entropy))
    *_, model = runs_of(RAISING_USES["autograd.Function after a hook"])
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
    hook_calls = []

    def hook(model):
        model.get_submodule(where).register_full_backward_hook(lambda *_: hook_calls.append(where))

    stock, ours = runs_of(cross_entropy, hook)
    _, expected = gradients(stock, **make_batch("plain"))
    assert len(hook_calls) == 1
    _, our_gradients = gradients(ours, **make_batch("plain"))
    assert worst_error(our_gradients, expected) <= 1e-10
    assert len(hook_calls) == 2


@pytest.mark.parametrize("where", ["model.norm", "lm_head"])
@pytest.mark.parametrize(
    "change", [lambda x: x * 1.5 + 0.1, lambda x: x * 1.5], ids=["no rule", "rules"]
)
def test_forward_hooks_that_change_what_a_module_returns_run_once(where, change):
    runs = []
    for model in runs_of(cross_entropy):
        model.get_submodule(where).register_forward_hook(
            lambda module, args, output: change(output)
        )
        runs.append(gradients(model, **make_batch("plain")))
    (expected_loss, expected), (loss, ours) = runs
    assert abs(loss - expected_loss) <= 1e-12 * abs(expected_loss)
    assert worst_error(ours, expected) <= 1e-10


def used_after_an_update():
    """What a forward hook has kept of a call, used when the weights are others."""
    outputs = []
    *_, model = runs_of(cross_entropy)
    model.model.norm.register_forward_hook(lambda module, args, output: outputs.append(output))
    model(**make_batch("plain"), use_cache=False)
    with torch.no_grad():
        model.model.norm.weight.add_(1.0)
    return outputs[-1].abs().mean()


def test_what_a_hook_kept_is_refused_after_an_update():
    assert raises(used_after_an_update)


# -- autograd.Functions in the place of functions that have a rule


class Equal(torch.autograd.Function):
    """What a function of torch gives, by way of autograd.Function: what it is called with is
    unknown to rules."""

    @staticmethod
    def forward(ctx, function, kwargs, *args):
        ctx.function, ctx.kwargs, ctx.args = function, kwargs, args
        return function(*args, **kwargs)

    @staticmethod
    def backward(ctx, upstream):
        leaves = [
            a.detach().requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a
            for a in ctx.args
        ]
        needed_leaves = [
            leaf for leaf, need in zip(leaves, ctx.needs_input_grad[2:], strict=True) if need
        ]
        with torch.enable_grad():
            leaf_gradients = iter(
                torch.autograd.grad(ctx.function(*leaves, **ctx.kwargs), needed_leaves, upstream)
            )
        return (
            None,
            None,
            *(next(leaf_gradients) if need else None for need in ctx.needs_input_grad[2:]),
        )


OUTPUT_PLACES = {
    "F.linear": (F, "linear"), "F.cross_entropy": (F, "cross_entropy"), "torch.tanh": (torch, "tanh"),
    "Tensor.__truediv__": (torch.Tensor, "__truediv__"), "Tensor.__mul__": (torch.Tensor, "__mul__"),
    "Tensor.view": (torch.Tensor, "view"),
}  # fmt: skip


def of_rules(z, y):
    """Each function that has a rule, once."""
    scores = torch.tanh(z / 30.0) * 30.0
    return F.cross_entropy(scores[:, :-1].contiguous().view(-1, VOCABULARY), y[:, 1:].flatten())


def in_the_place_of(monkeypatch, owner, name, package=None):
    original = getattr(owner, name)

    def replacement(*args, **kwargs):
        # Of the head alone: streamed layers and hidden states compute as ever.
        head = any(isinstance(a, torch.Tensor) and VOCABULARY in a.shape for a in args)
        return Equal.apply(original, kwargs, *args) if head else original(*args, **kwargs)

    if package is not None:
        space = {"__name__": f"{package}.runtime.linear", "Equal": Equal, "own": original}
        exec("def replaced(*args, **kwargs):\n    return Equal.apply(own, kwargs, *args)", space)
        replacement = space["replaced"]
    monkeypatch.setattr(owner, name, replacement)


def check_unknown_functions(name, monkeypatch, package=None, loss=of_rules):
    (expected_loss, expected), _ = (gradients(m, **make_batch("plain")) for m in runs_of(loss))
    *_, ours = runs_of(loss)
    with monkeypatch.context() as within:
        in_the_place_of(within, *OUTPUT_PLACES[name], package)
        found_loss, our_gradients = gradients(ours, **make_batch("plain"))
        head = streambp.describe(ours).head
    assert abs(found_loss - expected_loss) <= 1e-12 * abs(expected_loss)
    assert worst_error(our_gradients, expected) <= 1e-10
    return head


@pytest.mark.parametrize("name", OUTPUT_PLACES)
def test_equal_functions_in_the_place_of_those_with_a_rule(name, monkeypatch):
    assert check_unknown_functions(name, monkeypatch).startswith("builds the logits")


def test_deepspeeds_linear_keeps_the_loss_blockwise(monkeypatch):
    """It stands there for good in a process that has made a ZeRO-3 engine."""
    head_text = check_unknown_functions("F.linear", monkeypatch, "deepspeed", cross_entropy)
    assert head_text == "blockwise loss, no logits"
    head_text = check_unknown_functions("F.linear", monkeypatch, "somebody", cross_entropy)
    assert head_text.startswith("builds the logits")


@pytest.mark.parametrize("name", ["F.linear", "Tensor.__truediv__"])
def test_mutant_a_gradient_that_ends_at_its_place(name, monkeypatch):
    monkeypatch.setattr(
        lazy_hidden.LazyHidden, "receive_gradient", classmethod(lambda cls, ctx, gradient: None)
    )
    with pytest.raises(AssertionError):
        check_unknown_functions(name, monkeypatch)


def test_mutant_a_function_that_rules_pass_by(monkeypatch):
    monkeypatch.setattr(lazy_hidden.LazyHidden, "has_own_node", lambda self: True)
    with pytest.raises(AssertionError):
        test_right("autograd.Function with another gradient")


@pytest.mark.parametrize(
    "name", ["autograd.Function after a hook", "autograd.Function after a write"]
)
def test_mutant_a_write_that_nobody_notes(name, monkeypatch):
    monkeypatch.setattr(lazy_hidden.LazyHidden, "invalidate_node", lambda self, why: None)
    with pytest.raises(AssertionError):
        test_raises(name)
