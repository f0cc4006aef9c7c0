"""What programs do to logits beside reading them gives what it gives with real ones: copies,
aliases, writes, rounding.

covers: lazy/dispatch.py, lazy/token_rules.py
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import streambp
from streambp.lazy.dispatch import LazyLogits
from tests.families import VOCABULARY, build, make_batch
from tests.oracle import MAX_FLOAT64_ERROR, worst_error
from tests.seeds import seeded

IDS = make_batch("plain")["input_ids"]


def cross_entropy(rows, ids):
    return F.cross_entropy(rows.reshape(-1, VOCABULARY), ids.flatten())


def scaled_without_grad(logits, ids):
    """torch keeps a tensor's place in the graph when it is written to under no_grad."""
    with torch.no_grad():
        logits.div_(2.0)
    return cross_entropy(logits, ids)


def masked_without_grad(logits, ids):
    with torch.no_grad():
        logits.masked_fill_(torch.arange(VOCABULARY) > 40, -1e4)
    return logits.logsumexp(-1).mean()


def contiguous_part(logits, ids):
    """Of one row, the part is contiguous already, and shares the logits' memory."""
    logits = logits[:1]
    part = logits[:, :-1].contiguous()
    part.div_(2.0)
    return cross_entropy(part, ids[:1, 1:])


def copied_part(logits, ids):
    part = logits[:, :-1].contiguous()
    part.div_(2.0)
    return cross_entropy(part, ids[:, 1:]) + logits.logsumexp(-1).mean()


def counted(logits, ids):
    """True + True is True; 1.0 + 1.0 is 2.0."""
    sign_count = (logits > 0).float() + (logits > -1).float()
    return (
        cross_entropy(logits, ids)
        * sign_count.sum(-1).mean().double()
        * (1 - (logits > 0).float()).mean()
    )


def a_constant_object(logits, ids):
    with torch.no_grad():
        teacher = logits[...]
    return (teacher.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()


def by_numpy(logits, ids):
    return cross_entropy(logits[:, np.array([0, 0, 1, 3])], ids[:, [1, 1, 2, 4]])


def by_tuple(logits, ids):
    return cross_entropy(logits[:, (0, 0, 1, 3)], ids[:, [1, 1, 2, 4]])


def rectified(logits, ids):
    F.relu(logits, inplace=True)
    return cross_entropy(logits, ids)


def added_to_a_constant(logits, ids):
    constant = logits.detach().clone()
    constant += logits
    return cross_entropy(constant, ids)


def named_arguments(logits, ids):
    return (
        cross_entropy(torch.reshape(logits, shape=(-1, VOCABULARY)), ids)
        + torch.permute(logits, dims=(1, 0, 2)).mean()
    )


class Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.exp().mean()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * x.exp() / x.numel()


def classes_second(logits, ids):
    return Mean.apply(logits.transpose(1, 2))


def masks_that_are_used_again(logits, ids):
    """One for each token, one for each class, a number; torch counts the first write to each, and
    not the second."""
    total = 0.0
    for mask in (torch.zeros(*ids.shape, 1), torch.zeros(VOCABULARY), torch.zeros(())):
        for step in range(2):
            mask += torch.rand(mask.shape, generator=seeded(step))
            total = total + (logits + mask).square().logsumexp(-1).mean()
            mask.data.fill_(5.0)
            mask.numpy().fill(3.0)
    return total


def looked_at_in_inference_mode(logits, ids):
    """Metrics before the loss; what they leave behind is added to by the loss, and read by the next
    one."""
    with torch.inference_mode():
        mean = float(logits[:1].logsumexp(-1).mean() + logits[1:].log_softmax(-1).mean(-1).sum())
    return (cross_entropy(logits, ids) + logits.logsumexp(-1).mean()) * mean


def taught_in_inference_mode(logits, ids):
    with torch.inference_mode():
        best = logits.argmax(-1)
        p = (logits * 2.0).softmax(-1)
    return F.kl_div(logits.log_softmax(-1), p.clone(), reduction="batchmean") + cross_entropy(
        logits, best.clone()
    )


def with_its_gradient(logits, ids):
    logits.retain_grad()
    loss = cross_entropy(logits[:, :-1], ids[:, 1:])
    (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True)
    return loss * gradient.square().sum()


def one_token(logits, ids):
    row = logits[0, -1]
    best = (
        row.max(-1).values
        + row.logsumexp(-1)
        + row.log_softmax(-1).sum(0)
        + row.topk(3).values.sum()
        + row[row.argmax(-1)]
    )
    return (
        best
        + F.cross_entropy(row, ids[0, 0])
        + row.log_softmax(-1).gather(0, ids[0, :1])[0]
        + row.square().mean(-1)
    )


def part_hooked_beside_the_whole(logits, ids):
    """The hook is the part's alone."""
    full_loss = cross_entropy(logits, ids)
    part = logits[:, 2:]
    part.register_hook(lambda gradient: gradient * 0.5)
    return full_loss + cross_entropy(part, ids[:, 2:])


def hooked_after_a_metric(logits, ids):
    best = logits.detach().argmax(-1), logits.float() > 0
    logits.register_hook(lambda gradient: gradient * 0.5)
    return cross_entropy(logits, ids) * (best[0] == ids).double().mean()


PROGRAMS = (
    scaled_without_grad, masked_without_grad, contiguous_part, copied_part, counted, a_constant_object, by_numpy, by_tuple,
    rectified, added_to_a_constant, named_arguments, classes_second, masks_that_are_used_again, looked_at_in_inference_mode,
    taught_in_inference_mode, one_token, with_its_gradient, part_hooked_beside_the_whole, hooked_after_a_metric,
)  # fmt: skip


def gradients_of(loss, lazy, dtype=torch.float64):
    model = streambp.patch(
        build("qwen3", dtype), streambp.StreamConfig(chunk_size=5, lazy_logits=lazy)
    )
    logits = model(input_ids=IDS, use_cache=False).logits
    assert isinstance(logits, LazyLogits) == lazy
    value = loss(logits, IDS)
    value.backward()
    return value.detach(), {
        name: p.grad for name, p in model.named_parameters() if p.grad is not None
    }


@pytest.mark.fast(3)
@pytest.mark.usefixtures("float64_oracle")
@pytest.mark.parametrize("loss", PROGRAMS, ids=lambda loss: loss.__name__)
def test_programs(loss):
    (value, our_gradients), (expected_value, expected) = (
        gradients_of(loss, True),
        gradients_of(loss, False),
    )
    assert abs(value - expected_value) <= 1e-12 * abs(expected_value)
    assert our_gradients.keys() == expected.keys()
    assert worst_error(our_gradients, expected) <= MAX_FLOAT64_ERROR


def test_writes_to_a_shared_part_are_refused():
    """In torch the whole is changed as well; computed anew where it is used, it would not be."""

    def shared(logits, ids):
        part = logits[:1][:, :-1].contiguous()
        part.div_(2.0)
        return cross_entropy(part, ids[:1, 1:]) + logits.logsumexp(-1).sum()

    with pytest.raises(streambp.StreamBPError, match="changed in place"):
        gradients_of(shared, True)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2.0)

    @staticmethod
    def backward(ctx, upstream):
        return upstream * 2.0


def written_by_a_function(logits, ids):
    return cross_entropy(Doubled.apply(logits), ids)


def written_by_a_function_on_the_way(logits, ids):
    rows = logits * 1.0
    Doubled.apply(rows)
    return cross_entropy(rows, ids)


def hooked_afterwards(logits, ids):
    loss = cross_entropy(logits, ids)
    logits.register_hook(lambda gradient: gradient * 2.0)
    return loss


def gradient_asked_for_afterwards(logits, ids):
    loss = cross_entropy(logits, ids)
    logits.retain_grad()
    return loss


def hooked_after(make):
    """What `make` makes of logits is taken before the hook, and the loss computed after it."""

    def program(logits, ids):
        rows = make(logits)
        logits.register_hook(lambda gradient: gradient * 2.0)
        return rows.square().mean()

    program.__name__ = "hooked_after_" + make.__name__
    return program


def a_part(logits):
    return logits[:, :-1]


def a_quotient(logits):
    return logits / 2.0


def rows_of_each(logits):
    return next(iter(logits)).log_softmax(-1)


def an_operation_without_a_rule(logits):
    return logits.cumsum(-1)


def asked_for(logits, ids):
    loss = cross_entropy(logits, ids)
    (gradient,) = torch.autograd.grad(loss, [logits], retain_graph=True, allow_unused=True)
    return loss * (0.0 if gradient is None else gradient.square().sum())


def hooked_before_a_function(logits, ids):
    logits.register_hook(lambda gradient: gradient * 2.0)
    return Mean.apply(logits)


def hooked_after_a_function(logits, ids):
    loss = Mean.apply(logits)
    logits.register_hook(lambda gradient: gradient * 2.0)
    return loss


def another_shape(logits, ids):
    return cross_entropy(logits[:1].squeeze_(0), ids[:1])


REFUSED_OPERATIONS = {
    written_by_a_function: "marks them dirty",
    written_by_a_function_on_the_way: "marks them dirty",
    hooked_afterwards: "register_hook comes after",
    gradient_asked_for_afterwards: "retain_grad comes after",
    **{
        hooked_after(make): "register_hook comes after"
        for make in (a_part, a_quotient, rows_of_each, an_operation_without_a_rule)
    },
    asked_for: "grad comes after",
    hooked_before_a_function: "a hook (register_hook) was put on the logits",
    hooked_after_a_function: "a hook (register_hook) was put on the logits",
    another_shape: "squeeze_ changes the shape",
}


def program_is_refused(program):
    try:
        gradients_of(program, True)
    except streambp.StreamBPError as error:
        return REFUSED_OPERATIONS[program] in str(error)
    return False


@pytest.mark.fast(3)
@pytest.mark.parametrize("program", REFUSED_OPERATIONS, ids=lambda program: program.__name__)
def test_what_would_be_lost_without_a_word_is_refused(program):
    assert program_is_refused(program)
    assert gradients_of(program, False)[0].isfinite()


def test_values_are_compared_as_they_are_rounded():
    """The largest logit in half precision is no larger than itself."""
    model = streambp.patch(
        build("qwen3", torch.bfloat16), streambp.StreamConfig(chunk_size=5, lazy_logits=True)
    )
    with torch.no_grad():
        x = model(input_ids=IDS, use_cache=False).logits / 0.7
        assert isinstance(x, LazyLogits)
        assert bool(((x == x.max(-1, keepdim=True).values).sum(-1) >= 1).all())
        best = x.masked_fill(x < x.topk(1).values, float("-inf")).logsumexp(-1)
    assert bool(best.isfinite().all())


def test_results_are_written_where_they_are_asked_for():
    model = streambp.patch(
        build("qwen3", torch.float64), streambp.StreamConfig(chunk_size=5, lazy_logits=True)
    )
    with torch.no_grad():
        x = model(input_ids=IDS, use_cache=False).logits
        real = x.clone().cpu() + 0.0
        half_logits, lse = (
            torch.full(x.shape, 7.0, dtype=torch.float64),
            torch.full(x.shape[:2], 7.0, dtype=torch.float64),
        )
        torch.div(x, 2.0, out=half_logits)
        torch.logsumexp(x, -1, out=lse)
        assert torch.allclose(half_logits, real.div(2.0), rtol=1e-12)
        assert torch.allclose(lse, real.logsumexp(-1), rtol=1e-12)


def test_detached_logits_as_a_leaf():
    model = streambp.patch(
        build("qwen3", torch.float64), streambp.StreamConfig(chunk_size=5, lazy_logits=True)
    )
    leaf = model(input_ids=IDS, use_cache=False).logits.detach()
    leaf_logits = leaf.requires_grad_()
    cross_entropy(leaf, IDS).backward()
    real = leaf_logits.detach().clone().requires_grad_()
    cross_entropy(real, IDS).backward()
    assert torch.equal(leaf_logits.grad, real.grad)
    assert bool((real.grad != 0).any())


@pytest.mark.parametrize("loss", [F.nll_loss, F.cross_entropy])
def test_losses_have_autocasts_dtype(loss):
    model = streambp.patch(
        build("qwen3", torch.bfloat16), streambp.StreamConfig(chunk_size=5, lazy_logits=True)
    )
    with torch.autocast("cpu", torch.bfloat16):
        rows = model(input_ids=IDS, use_cache=False).logits.view(-1, VOCABULARY)
        assert rows.dtype == torch.bfloat16
        value = loss(rows, IDS.flatten())
        assert value.dtype == loss(rows.detach().cumsum(-1), IDS.flatten()).dtype == torch.float32


@pytest.mark.parametrize("arguments", [{"reduction": "average"}, {"label_smoothing": 1.5}])
def test_arguments_that_torch_refuses_are_refused(arguments):
    model = streambp.patch(
        build("qwen3", torch.float64), streambp.StreamConfig(chunk_size=5, lazy_logits=True)
    )
    logits = model(input_ids=IDS, use_cache=False).logits
    with pytest.raises((ValueError, RuntimeError), match=r"average|label_smoothing"):
        F.cross_entropy(logits.view(-1, VOCABULARY), IDS.flatten(), **arguments)


def test_a_label_beyond_the_vocabulary_is_an_error():
    model = streambp.patch(
        build("qwen3", torch.float64), streambp.StreamConfig(chunk_size=5, lazy_logits=True)
    )
    logits = model(input_ids=IDS, use_cache=False).logits
    with pytest.raises((IndexError, streambp.StreamBPError)):
        logits[torch.tensor([0]), torch.tensor([1]), torch.tensor([VOCABULARY])]
