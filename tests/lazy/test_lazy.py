"""Losses that programs compute from logits, without the logits: the numbers are those of full
logits.

covers: lazy/backward.py, lazy/dispatch.py, lazy/expression.py, lazy/head.py, recurrent/documents.py
"""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from transformers.trainer_pt_utils import LabelSmoother

import streambp
from streambp.lazy import backward as sweep
from streambp.lazy import head as hub
from streambp.lazy.dispatch import LazyLogits
from streambp.lazy.expression import readings
from streambp.recurrent.documents import parameters_of
from tests import zoo
from tests.families import VOCABULARY, build, make_batch
from tests.head import test_log_probs
from tests.head.losses_on_logits import FRAMEWORKS, dpo, entropy_of, grpo, selected
from tests.oracle import MAX_FLOAT64_ERROR, worst_error

pytestmark = pytest.mark.usefixtures("float64_oracle")
BLOCKWISE = "no logits: computed blockwise for "
BUILDS = "builds the logits: the program uses "
IDS = make_batch("plain")["input_ids"]


def flat(logits, ids):
    return logits[:, :-1].reshape(-1, VOCABULARY), ids[:, 1:].flatten()


def two_losses(logits, ids):
    rows, labels = flat(logits, ids)
    return F.cross_entropy(rows, labels) * F.cross_entropy(rows / 2.0, labels.roll(1))


def written_whole(logits, ids):
    logits /= 0.5
    logits.clamp_(max=2.0)
    return F.cross_entropy(*flat(logits, ids))


def two_positions(logits, ids):
    """Each token's entropy against the next one's: two readings of the same logits."""
    p, q = logits[:, :-1].log_softmax(-1), logits[:, 1:].log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).mean()


def repeated(logits, ids):
    """Positions that are taken several times."""
    rows = logits[:, torch.tensor([3, 3, 5, 3])]
    return -selected(rows, ids[:, [1, 2, 3, 4]]).mean() + rows.logsumexp(-1).square().mean()


def first_of(logits, ids):
    rows = torch.take_along_dim(logits, torch.tensor([[[4], [2]], [[1], [1]]]), dim=1)
    return rows.log_softmax(-1)[..., :9].sum(-1).sum()


def constant(logits, ids):
    """Parts that were made without a gradient, used with one."""
    with torch.no_grad():
        p = logits[:, 2:].softmax(-1)
    return (
        -(p[:, :-1] * logits[:, 2:-1].log_softmax(-1)).sum(-1).mean()
        + (logits.detach() * logits).sum(-1).mean()
    )


def masked_vocabulary(logits, ids):
    allowed = torch.arange(VOCABULARY) > 10
    logits = torch.where(allowed, logits, -1e4).masked_fill((ids % 2 == 0)[..., None], 1.0)
    return F.nll_loss(
        logits.log_softmax(-1).view(-1, VOCABULARY), ids.flatten().clamp(min=11), ignore_index=20
    )


def indexed(logits, ids):
    rows, labels = flat(logits, ids)
    return -rows.log_softmax(-1)[torch.arange(labels.shape[0]), labels].mean()


def smoother(logits, ids):
    labels = ids.masked_fill(ids < 10, -100)
    smooth = LabelSmoother(0.1)
    # Older ones divide by the labels that there are, and have no say in it.
    count = (
        {"num_items_in_batch": torch.tensor(17)}
        if "num_items_in_batch" in parameters_of(smooth)
        else {}
    )
    return smooth({"logits": logits}, labels, shift_labels=True, **count)


OTHER_USES = {
    f.__name__: f
    for f in (
        two_losses, written_whole, two_positions, repeated, first_of, constant, masked_vocabulary, indexed, smoother,
    )
} | {
    "smoothed": lambda z, y: F.cross_entropy(*flat(z, y), label_smoothing=0.2, ignore_index=int(y[0, 1])),
    "smoothed of a function": lambda z, y: F.cross_entropy(flat(z, y)[0].tanh() * 2, flat(z, y)[1], label_smoothing=0.2),
    "a part of the vocabulary": lambda z, y: F.cross_entropy(z[..., :40].reshape(-1, 40), y.flatten().clamp(max=39)),
    "several entries": lambda z, y: z.log_softmax(-1).gather(-1, torch.stack([y, y.roll(1, 1), y], -1)).square().mean(),
    "the same token twice": lambda z, y: (selected(z, y) * selected(z, y.roll(1, 1))).mean(),
    "chosen tokens": lambda z, y: F.cross_entropy(z[y > 9], y[y > 9], reduction="sum"),
    "unbound": lambda z, y: sum(row.logsumexp(-1).sum() for row in torch.unbind(z, dim=1)),
    "best": lambda z, y: (z.max(-1).values - z.min(-1)[0] + z.amax(dim=-1)).mean(),
    "mean log-probabilities": lambda z, y: (z.log_softmax(-1).mean(-1) * -z.log_softmax(-1).sum(-1)).mean(),
    "all of them": lambda z, y: z.mean() + z.exp().sum() * 1e-3,
    "one sequence": lambda z, y: F.cross_entropy(z[:1].squeeze(0), y[0]),
    "by another name": lambda z, y: torch.nn.CrossEntropyLoss()(input=z.permute(0, 2, 1), target=y),
    "classes second, by log_softmax": lambda z, y: F.nll_loss(z.transpose(1, 2).log_softmax(1), y),
    "no token": lambda z, y: z.logsumexp(-1).sum() + selected(z[:, :0], y[:, :0]).sum(),
}  # fmt: skip


def step(model, loss, **arguments):
    model.zero_grad()
    value = loss(model(input_ids=IDS, use_cache=False, **arguments).logits, IDS.clone())
    value.backward()
    return value.detach(), {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


def lazy(model):
    return streambp.patch(model, streambp.StreamConfig(chunk_size=5, lazy_logits=True))


def check(
    loss, family="qwen3", expected=BLOCKWISE, make=lambda family: build(family, torch.float64)
):
    """Values and all gradients against full logits; what `describe` says."""
    model = make(family)
    expected_loss, reference = step(model, loss)
    found_loss, our_gradients = step(lazy(model), loss)
    assert abs(found_loss - expected_loss) <= 1e-12 * abs(expected_loss)
    assert worst_error(our_gradients, reference) <= MAX_FLOAT64_ERROR
    assert streambp.describe(model).head.startswith(expected)
    return model


@pytest.mark.fast(3)
@pytest.mark.parametrize(
    ("family", "name"),
    [
        pytest.param(
            family, name, marks=() if family == "qwen3" or number % 4 == 0 else pytest.mark.full
        )
        for family in ("qwen3", "gemma3")
        for number, name in enumerate(FRAMEWORKS)
    ],
)
def test_what_frameworks_compute(family, name):
    check(FRAMEWORKS[name], family)


@pytest.mark.fast(4)
@pytest.mark.parametrize("name", OTHER_USES)
def test_other_losses(name):
    check(OTHER_USES[name])


@pytest.mark.parametrize("family", ["cohere", "granite", "gemma2", "phi", "mixtral", "gpt2"])
def test_heads_with_scale_softcap_and_bias(family):
    torch.set_default_dtype(torch.float64)
    try:
        check(grpo, family, make=lambda name: zoo.build(name, torch.float64).train())
    finally:
        torch.set_default_dtype(torch.float32)


def test_describe_names_what_was_computed():
    model = check(FRAMEWORKS["dpo_by_log_softmax"])
    assert streambp.describe(model).head == BLOCKWISE + "log_softmax + gather"
    step(model, lambda z, y: torch.zeros((), dtype=z.dtype, requires_grad=True) * z.shape[1])
    assert streambp.describe(model).head == "no logits: none were used"


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


class FusedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z):
        ctx.shape = z.shape
        return z.cumsum(-1)[..., -1].sum()

    @staticmethod
    def backward(ctx, upstream):
        return upstream.expand(ctx.shape)


class Halved(torch.autograd.Function):
    """The same values, half the gradient."""

    @staticmethod
    def forward(ctx, z):
        return z.clone()

    @staticmethod
    def backward(ctx, upstream):
        return upstream * 0.5


class Detached(Halved):
    @staticmethod
    def forward(ctx, z):
        return z.detach()


class Part(torch.autograd.Function):
    """Values by rules, a gradient of its own."""

    @staticmethod
    def forward(ctx, z):
        return z[:, 2:] / 2.0

    @staticmethod
    def backward(ctx, upstream):
        return F.pad(upstream * 0.3, (0, 0, 2, 0))


def in_extension(z, y):
    """C++ that does not ask for rules."""
    with torch._C.DisableTorchFunctionSubclass():
        return z.logsumexp(-1).sum()


def hooked(z, y):
    z.register_hook(lambda gradient: gradient * 0.5)
    return dpo(z, y)


def filled(z, y):
    z[:, :, 7:9] = -9.0
    return F.cross_entropy(*flat(z, y.clamp(max=6)))


def filled_part(z, y):
    z = z[:, 3:]
    z[:, 0] = 0.0
    return F.cross_entropy(*flat(z, y[:, 3:]))


COMPLETE_TENSOR_USES = {
    "no rule": lambda z, y: z.cumsum(-1).square().mean(),
    "no rule, beside rules": lambda z, y: (
        dpo(z, y) + z[:, 3:5].cumsum(-1).square().mean() + entropy_of(z).mean()
    ),
    "another dimension": lambda z, y: z.softmax(1).square().sum() + z.sum(0).square().sum(),
    "a learnt temperature": lambda z, y: (
        (z * y.to(z.dtype).requires_grad_()[..., None]).logsumexp(-1).mean()
    ),
    "autograd.Function": lambda z, y: FusedLoss.apply(*flat(z, y)) + dpo(z, y),
    "autograd.Function that returns logits": lambda z, y: dpo(Halved.apply(z), y) + dpo(z, y),
    "autograd.Function that detaches": lambda z, y: dpo(Detached.apply(z), y),
    "autograd.Function that follows rules": lambda z, y: (
        Part.apply(z).log_softmax(-1)[..., 3].mean()
    ),
    "extension": in_extension,
    "checkpoint": lambda z, y: torch.utils.checkpoint.checkpoint(
        lambda z: z.cumsum(-1).mean(), z, use_reentrant=False
    ),
    "reentrant checkpoint": lambda z, y: torch.utils.checkpoint.checkpoint(
        lambda z: dpo(z, y), z, use_reentrant=True
    ),
    "a hook": hooked,
    "written": filled,
    "written in a part": filled_part,
    "class weights": lambda z, y: F.cross_entropy(
        *flat(z, y), weight=torch.linspace(0, 1, VOCABULARY).to(z)
    ),
    "numpy": lambda z, y: dpo(z, y) * float(z.detach().numpy().mean()),
    "a copy": lambda z, y: dpo(z, y) * copy.deepcopy(z.detach()).mean(),
    "pickled": lambda z, y: dpo(z, y) * pickle.loads(pickle.dumps(z.detach())).mean(),
    "to half precision": lambda z, y: (
        dpo(z, y) * (1 + z.to(torch.bfloat16).mean().double().detach() * 0)
    ),
}


@pytest.mark.fast(4)
@pytest.mark.parametrize("name", COMPLETE_TENSOR_USES)
def test_what_has_no_rule_builds_and_is_exact(name):
    check(COMPLETE_TENSOR_USES[name], expected=BUILDS)


@pytest.mark.parametrize("loss", [dpo, grpo])
def test_compiled_losses(loss):
    torch._dynamo.reset()
    check(torch.compile(loss, backend="eager"), expected="")


def step_is_refused(loss, says="lazy_logits=False"):
    """Whether a step raises a StreamBPError that says what to do."""
    try:
        step(lazy(build("qwen3", torch.float64)), loss)
    except streambp.StreamBPError as error:
        return says in str(error)
    return False


WRITES = {
    "through a part": lambda z, y: (z[:, 1:].mul_(0.5), dpo(z, y))[1],
    "before a part is used": lambda z, y: ((part := z[:, 1:]), z.mul_(0.5), dpo(part, y[:, 1:]))[2],
    "through detach": lambda z, y: (z.detach().mul_(0.5), dpo(z, y))[1],
    "through data": lambda z, y: (z.data.mul_(0.5), dpo(z, y))[1],
    "through a view": lambda z, y: (z.view(-1, VOCABULARY).neg_(), dpo(z, y))[1],
    "out": lambda z, y: torch.exp(z.detach().cumsum(-1), out=z),
}


@pytest.mark.parametrize("name", WRITES)
def test_writes_that_others_would_see_are_refused(name):
    assert step_is_refused(WRITES[name])


def changed_mask(z, y):
    """It changes before it is used, and is too large to be copied."""
    mask = y[..., None].expand_as(z) > torch.arange(z.shape[-1]) + 1
    rows = z.masked_fill(mask, -3.0)
    mask.fill_(False)
    return rows.logsumexp(-1).sum()


def test_what_was_given_must_stay():
    assert step_is_refused(changed_mask)


def weights_changed(
    change=lambda model: model.lm_head.weight.mul_(2.0), use=lambda logits: logits.logsumexp(-1)
):
    model = lazy(build("qwen3", torch.float64))
    logits = model(input_ids=IDS, use_cache=False).logits
    loss = logits.logsumexp(-1).mean()
    with torch.no_grad():
        change(model)
    try:
        loss.backward() if use is None else use(logits)
    except streambp.StreamBPError as error:
        return "optimizer.step" in str(error)
    return False


def data_of_the_norm(model):
    """As a weight average swaps weights for an evaluation."""
    model.model.norm.weight.data = model.model.norm.weight.data * 2.0


INPUT_CHANGES = {
    "counted": lambda model: model.lm_head.weight.mul_(2.0),
    "through data": lambda model: model.lm_head.weight.data.add_(1e-6),
    "other data": data_of_the_norm,
}


@pytest.mark.parametrize("change", INPUT_CHANGES)
def test_weights_that_changed_are_refused(change):
    assert weights_changed(INPUT_CHANGES[change])
    assert weights_changed(
        INPUT_CHANGES[change], lambda logits: (logits / 2.0).softmax(-1).square().sum(-1)
    )


def changed_before_backward():
    return weights_changed(INPUT_CHANGES["through data"], use=None)


def test_weights_that_changed_before_backward_are_refused():
    assert changed_before_backward()


def test_second_derivatives_are_refused():
    model = lazy(build("qwen3", torch.float64))
    loss = dpo(model(input_ids=IDS, use_cache=False).logits, IDS)
    with pytest.raises(streambp.StreamBPError, match="create_graph"):
        loss.backward(create_graph=True)
    # usable afterwards
    assert (
        worst_error(step(model, dpo)[1], step(streambp.unpatch(model), dpo)[1]) <= MAX_FLOAT64_ERROR
    )


def left_behind():
    """A backward that reaches one of two models, then one that reaches the other."""
    results = []
    for prepare in (lambda model: model, lazy):
        policy, reference = (prepare(build("qwen3", torch.float64, seed=seed)) for seed in (0, 1))
        z, r = (model(input_ids=IDS, use_cache=False).logits for model in (policy, reference))
        kl = (z.softmax(-1) * (z.log_softmax(-1) - r.log_softmax(-1))).sum(-1).mean()
        results.append({"policy": torch.autograd.grad(kl, policy.lm_head.weight)[0]})
        dpo(r, IDS).backward()
        results[-1] |= {name: parameter.grad for name, parameter in reference.named_parameters()}
    assert worst_error(results[1], results[0]) <= MAX_FLOAT64_ERROR


def test_gradients_of_a_backward_stay_in_it():
    left_behind()


def in_several_blocks(loss, monkeypatch):
    """A few rows at a time; some blocks hold none of what is asked for."""
    test_log_probs.small_blocks.__wrapped__(monkeypatch)
    for module in (sweep, hub):
        monkeypatch.setattr(module, "rows_per_block", lambda vocabulary: 3)
    check(loss)


@pytest.mark.parametrize("name", ["grpo", "dpo_with_metrics", "label_smoothing", "eaft"])
def test_several_blocks(name, monkeypatch):
    in_several_blocks(FRAMEWORKS[name], monkeypatch)


@pytest.mark.parametrize(
    "name",
    ["two_positions", "repeated", "chosen tokens", "several entries", "the same token twice"],
)
def test_several_blocks_of_other_losses(name, monkeypatch):
    in_several_blocks(OTHER_USES[name], monkeypatch)


def engine(name, forward):
    """An autograd.Function that an engine puts before a model's outputs, and how often its backward
    ran."""
    ran = []

    def backward(ctx, upstream):
        ran.append(None if upstream is None else upstream.shape)
        return upstream

    def plain(ctx, x):
        ctx.set_materialize_grads(False)
        return forward(x)

    members = {"forward": staticmethod(plain), "backward": staticmethod(backward)}
    return type(name, (torch.autograd.Function,), members), ran


class OutputBackwardHookManager:
    """As DeepSpeed's engine has one: its hook prepares a backward, and divides by the steps of
    accumulation."""

    def __init__(self, steps):
        self.shapes = []

        def hook(gradient):
            self.shapes.append(gradient.shape)
            return gradient / steps

        self.hook = hook


def hooked_by_an_engine():
    """Once for all results; and for the gradient of the logits themselves, if there is one."""
    manager = OutputBackwardHookManager(4)
    check(lambda z, y: (z.register_hook(manager.hook), grpo(z, y))[1])
    assert [len(shape) for shape in manager.shapes] == [3, 1]
    mixed = OutputBackwardHookManager(4)
    check(
        lambda z, y: (z.register_hook(mixed.hook), FusedSum.apply(z) + grpo(z, y))[1],
        expected=BUILDS,
    )


def test_an_engines_hook():
    hooked_by_an_engine()


def run_engines():
    """DDP's node runs once and sees no gradient of logits; DeepSpeed's is passed by, and hears that
    backward begins."""
    sink, ran = engine("_DDPSink", lambda x: x.clone())
    check(lambda z, y: grpo(sink.apply(z), y))
    pre_backward, passed = engine("PreBackwardFunctionForModule", lambda x: x.detach())
    heard = []

    def behind(z):
        logits = pre_backward.apply(z)
        if logits.grad_fn is not None:
            logits.grad_fn.module, logits.grad_fn.pre_backward_function = "model", heard.append
        return logits

    check(lambda z, y: grpo(behind(z), y))
    assert heard == ["model"]
    assert [shape for shape in ran if shape is None] == [None]
    assert not [shape for shape in passed if shape is None]


def test_nodes_that_engines_put_before_outputs():
    run_engines()


def test_a_tuple():
    model = build("qwen3", torch.float64)
    reference = step(model, dpo)
    lazy(model).zero_grad()
    (logits,) = model(input_ids=IDS, use_cache=False, return_dict=False)
    assert type(logits) is LazyLogits
    dpo(logits, IDS).backward()
    assert (
        worst_error({n: p.grad for n, p in model.named_parameters()}, reference[1])
        <= MAX_FLOAT64_ERROR
    )


@pytest.mark.parametrize(
    "loss",
    [
        FRAMEWORKS["dpo_with_metrics"],
        COMPLETE_TENSOR_USES["autograd.Function"],
        COMPLETE_TENSOR_USES["no rule, beside rules"],
    ],
)
def test_nothing_is_held_by_a_cycle(loss):
    """What a step took is free when the program lets go of it, without a collection of garbage."""
    model = lazy(build("qwen3", torch.float64))
    gc.collect()
    gc.disable()
    try:
        logits = model(input_ids=IDS, use_cache=False).logits
        head_ref = weakref.ref(readings(logits.node)[0].head)
        loss(logits, IDS).backward()
        del logits
        assert head_ref() is None
    finally:
        gc.enable()


def test_a_references_distribution():
    """KL to another model's logits, both lazy, and log-probabilities of the reference alone."""
    reference = build("qwen3", torch.float64, seed=1).eval()

    def loss(z, y):
        with torch.no_grad():
            theirs = reference(input_ids=y, use_cache=False).logits
        log_p, log_q = F.log_softmax(z, dim=-1), F.log_softmax(theirs, dim=-1)
        kl = F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1).mean()
        ratio = selected(z, y) - selected(theirs, y)
        return kl - ratio.mean() + F.kl_div(log_p, theirs.softmax(-1), reduction="batchmean")

    model = build("qwen3", torch.float64)
    expected, gradients = step(model, loss)
    lazy(reference)
    value, ours = step(lazy(model), loss)
    assert abs(value - expected) <= 1e-12 * abs(expected)
    assert worst_error(ours, gradients) <= MAX_FLOAT64_ERROR
    for streamed_model in (model, reference):
        assert streambp.describe(streamed_model).head.startswith(BLOCKWISE)


def test_when_logits_are_real():
    """With a cache, for one position, in evaluation that wants them; and without the setting."""
    model = lazy(build("qwen3", torch.float64))
    # training: no cache, whatever the config says
    assert type(model(input_ids=IDS).logits) is LazyLogits
    assert type(model(input_ids=IDS, logits_to_keep=1).logits) is torch.Tensor
    model.eval()
    with torch.no_grad():
        assert type(model(input_ids=IDS).logits) is torch.Tensor
        assert type(model(input_ids=IDS, use_cache=True).logits) is torch.Tensor
        assert type(model(input_ids=IDS, use_cache=False).logits) is LazyLogits
        assert model.generate(IDS[:, :4], max_new_tokens=3, do_sample=False).shape == (2, 7)
    for setting in ({"eval_logits": True, "lazy_logits": True}, {"head": False}, {}):
        other_model = streambp.patch(
            build("qwen3", torch.float64), streambp.StreamConfig(chunk_size=5, **setting)
        ).eval()
        assert type(other_model(input_ids=IDS, use_cache=False).logits) is torch.Tensor


def test_evaluation_of_what_a_trainer_does_with_logits():
    from accelerate import Accelerator
    from accelerate.utils import convert_to_fp32

    model = build("qwen3", torch.float64).eval()
    with torch.no_grad():
        expected = model(input_ids=IDS, use_cache=False).logits
        logits = lazy(model)(input_ids=IDS, use_cache=False).logits.detach()
        accelerator = Accelerator(cpu=True)
        padded = accelerator.pad_across_processes(logits, dim=1, pad_index=-100)
        assert torch.equal(padded.argmax(-1), expected.argmax(-1))
        gathered = accelerator.gather_for_metrics(padded).cpu().numpy()
        torch.testing.assert_close(gathered, expected.numpy(), rtol=1e-12, atol=1e-12)
        half_output = lazy(build("qwen3", torch.bfloat16))(input_ids=IDS, use_cache=False)
        assert type(convert_to_fp32(half_output).logits) is LazyLogits
        assert convert_to_fp32(half_output).logits.dtype == torch.float32


def test_adapters_on_the_head():
    """LoRA on the output projection builds; a norm that an adapter trains a copy of is computed
    where it stands."""
    peft = pytest.importorskip("peft", reason="peft is not installed")

    def make(targets, saved):
        config = peft.LoraConfig(
            r=4, target_modules=targets, modules_to_save=saved, init_lora_weights=False
        )
        model = peft.get_peft_model(build("qwen3", torch.float64), config).train()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "modules_to_save" in name:
                    parameter.mul_(1.5)
        return model

    def loss(model):
        def compute(z, y):
            with torch.no_grad(), model.disable_adapter():
                theirs = model(input_ids=y, use_cache=False).logits
            return (selected(z, y) - selected(theirs, y)).square().mean()

        return compute

    for targets, saved in ((["q_proj", "lm_head"], None), (["q_proj"], ["norm", "lm_head"])):
        model = make(targets, saved)
        expected, gradients = step(model, loss(model))
        value, ours = step(lazy(model), loss(model))
        assert abs(value - expected) <= 1e-12 * abs(expected)
        assert worst_error(ours, gradients) <= MAX_FLOAT64_ERROR
