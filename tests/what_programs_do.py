"""What programs do to a model before, during and between steps, each tried against the unpatched
model in float64.

Every program runs twice, on an unpatched model and on one that it patches itself. Its outcome is
`exact` (all gradients within 1e-10, all layers stream), `exact, whole` (the same, but a layer runs
under a checkpoint), `raises NAME`, or `OUTCOME_WRONG`, which a crash counts as. The table in
docs/explanation/exactness.md lists them: `python scripts/exactness_table.py` writes it,
`tests/model/test_what_programs_do.py` compares.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import pickle
import random
import tempfile
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

import streambp
import streambp.head
from streambp.integrations import optimizer_in_backward
from streambp.layer import call
from streambp.model import compiled_regions
from tests import zoo
from tests.families import LENGTH, build, make_batch
from tests.oracle import MAX_FLOAT64_ERROR, worst_error
from tests.seeds import seed_others, seed_torch, seeded

CHUNK = 5
OUTCOME_WRONG = "WRONG"


class Trial:
    """One model that a program runs on: unpatched if `streamed` is False.

    extra: tensors that train beside the model's parameters, by name.
    """

    def __init__(self, streamed: bool, family: str = "llama", **overrides: Any) -> None:
        self.streamed = streamed
        self.model: Any = build(family, torch.float64, **overrides)
        self.batch = make_batch("plain")
        self.extra: dict[str, Tensor] = {}
        self.steps = 0

    def patch(self, **settings: Any) -> Any:
        if self.streamed:
            streambp.patch(self.model, streambp.StreamConfig(chunk_size=CHUNK, **settings))
        return self.model

    @property
    def layer(self) -> Any:
        """The decoder layer that programs change."""
        return next(m for name, m in self.model.named_modules() if name.endswith("layers.0"))

    def forward(self, length: int = LENGTH, **kwargs: Any) -> Tensor:
        """The loss of a batch of its own for each step."""
        batch = make_batch("plain", length, seed=self.steps + 1)
        self.steps += 1
        loss: Tensor = self.model(**batch, use_cache=False, **kwargs).loss
        return loss

    def step(self) -> None:
        self.clear()
        self.forward().backward()

    def clear(self) -> None:
        for tensor in self.trained().values():
            tensor.grad = None

    def trained(self) -> dict[str, Tensor]:
        return {**dict(self.model.named_parameters()), **self.extra}

    def gradients(self) -> dict[str, Tensor]:
        return {name: t.grad.clone() for name, t in self.trained().items() if t.grad is not None}


@dataclasses.dataclass(frozen=True)
class Program:
    """A program, when it does what, and what it runs on."""

    when: str
    action: str
    run: Callable[[Trial], None]
    family: str = "llama"
    overrides: tuple[tuple[str, Any], ...] = ()

    def trial(self, streamed: bool) -> Trial:
        seed_torch(0)
        trial = Trial(streamed, self.family, **dict(self.overrides))
        self.run(trial)
        return trial


PROGRAMS: list[Program] = []
Run = Callable[[Trial], None]


def program(
    when: str, action: str, family: str = "llama", **overrides: Any
) -> Callable[[Run], Run]:
    def add(run: Run) -> Run:
        PROGRAMS.append(Program(when, action, run, family, tuple(overrides.items())))
        return run

    return add


def outcome(program: Program) -> tuple[str, str]:
    """What becomes of a program, and the message where it raises."""
    try:
        expected = program.trial(streamed=False).gradients()
    except RuntimeError:
        expected = None  # torch raises: so must we
    try:
        ours = program.trial(streamed=True)
    except streambp.StreamBPError as error:
        also = ", as unpatched" if expected is None else ""
        return f"raises {type(error).__name__}{also}", str(error)
    except Exception as error:
        return f"{OUTCOME_WRONG} ({type(error).__name__})", str(error)
    grads = ours.gradients()
    if (
        expected is None
        or grads.keys() != expected.keys()
        or worst_error(grads, expected) > MAX_FLOAT64_ERROR
    ):
        return OUTCOME_WRONG, ""
    streams = all(layer.path == "streams" for layer in streambp.describe(ours.model).layers)
    return ("exact" if streams else "exact, whole"), ""


BEFORE_PATCH = "before patch"
AFTER_PATCH = "after patch"
BETWEEN_STEPS = "between two steps"
BETWEEN_FORWARD_AND_BACKWARD = "between forward and backward"
DURING_STEP = "during the step"


# Forwards of the layer and of modules inside.


def halved(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: forward(*args, **kwargs) * 0.5


@program(BEFORE_PATCH, "replaces `layer.forward` on the instance")
def _(t: Trial) -> None:
    t.layer.forward = halved(t.layer.forward)
    t.patch()
    t.step()


@program(AFTER_PATCH, "replaces `layer.forward` on the instance")
def _(t: Trial) -> None:
    t.patch()
    t.layer.forward = halved(t.layer.forward)
    t.step()


@program(BEFORE_PATCH, "replaces `layer.mlp.forward` on the instance")
def _(t: Trial) -> None:
    t.layer.mlp.forward = halved(t.layer.mlp.forward)
    t.patch()
    t.step()


@program(BETWEEN_STEPS, "replaces `layer.mlp.forward` on the instance")
def _(t: Trial) -> None:
    t.patch()
    t.step()
    t.layer.mlp.forward = halved(t.layer.mlp.forward)
    t.step()


@program(BETWEEN_FORWARD_AND_BACKWARD, "replaces `layer.mlp.forward` on the instance")
def _(t: Trial) -> None:
    t.patch()
    t.step()
    t.clear()
    loss = t.forward()
    t.layer.mlp.forward = halved(t.layer.mlp.forward)
    loss.backward()


@program(BETWEEN_STEPS, "replaces the forward of the layers' class by one without its signature")
def _(t: Trial) -> None:
    t.patch()
    t.step()
    kind = type(t.layer)
    forward = kind.forward
    try:
        kind.forward = lambda *args, **kwargs: forward(*args, **kwargs) * 0.5
        t.step()
    finally:
        kind.forward = forward


@program(BETWEEN_STEPS, "replaces an activation module by another")
def _(t: Trial) -> None:
    t.patch()
    t.step()
    t.layer.mlp.act_fn = nn.GELU()
    t.step()


@program(BETWEEN_FORWARD_AND_BACKWARD, "replaces an activation module by another")
def _(t: Trial) -> None:
    t.patch()
    t.step()
    t.clear()
    loss = t.forward()
    t.layer.mlp.act_fn = nn.GELU()
    loss.backward()


class Shifted(nn.Module):
    """Mixes tokens that are `by` apart."""

    def __init__(self, inner: nn.Module, by: int) -> None:
        super().__init__()
        self.inner, self.by = inner, by

    def forward(self, x: Tensor) -> Tensor:
        shifted = nn.functional.pad(x, (0, 0, self.by, 0))[:, : x.shape[1]]
        return self.inner(x + 0.5 * shifted)


@program(BEFORE_PATCH, "puts a module in a layer that mixes neighbouring tokens")
def _(t: Trial) -> None:
    t.layer.mlp = Shifted(t.layer.mlp, 1)
    t.patch()
    t.step()


@program(BEFORE_PATCH, "puts a module in a layer that mixes tokens 16 apart")
def _(t: Trial) -> None:
    t.layer.mlp = Shifted(t.layer.mlp, 16)
    t.patch()
    t.step()


@program(BETWEEN_STEPS, "puts a module in a layer that mixes neighbouring tokens")
def _(t: Trial) -> None:
    t.patch()
    t.step()
    t.layer.mlp = Shifted(t.layer.mlp, 1)
    t.step()


@program(BETWEEN_STEPS, "puts a module in a layer that works token by token")
def _(t: Trial) -> None:
    t.patch()
    t.step()
    t.layer.mlp = nn.Sequential(t.layer.mlp, nn.Tanh())
    t.step()


@program(BETWEEN_STEPS, "replaces a whole decoder layer by a copy that is not patched")
def _(t: Trial) -> None:
    plain = copy.deepcopy(t.layer)
    t.patch()
    t.step()
    t.model.model.layers[0] = plain
    t.step()


# Hooks.


@program(BEFORE_PATCH, "hooks a module inside: the hook only looks")
def _(t: Trial) -> None:
    t.layer.mlp.register_forward_hook(lambda m, args, out: float(out.detach().norm()) and None)
    t.patch()
    t.step()


@program(BEFORE_PATCH, "hooks a module inside: the hook scales the output")
def _(t: Trial) -> None:
    t.layer.mlp.register_forward_hook(lambda m, args, out: out * 0.5)
    t.patch()
    t.step()


@program(BETWEEN_STEPS, "hooks a module inside: the hook scales the output")
def _(t: Trial) -> None:
    t.patch()
    t.step()
    t.layer.mlp.register_forward_hook(lambda m, args, out: out * 0.5)
    t.step()


@program(BETWEEN_STEPS, "takes such a hook away, or puts another in its place")
def _(t: Trial) -> None:
    handle = t.layer.mlp.register_forward_hook(lambda m, args, out: out * 0.5)
    t.patch()
    t.step()
    handle.remove()
    t.layer.mlp.register_forward_hook(lambda m, args, out: out * 2)
    t.step()


@program(
    BETWEEN_FORWARD_AND_BACKWARD, "takes such a hook away (a `with` block around the forward alone)"
)
def _(t: Trial) -> None:
    t.patch()
    t.step()
    t.clear()
    handle = t.layer.mlp.register_forward_hook(lambda m, args, out: out * 0.5)
    loss = t.forward()
    handle.remove()
    loss.backward()


@program(BETWEEN_FORWARD_AND_BACKWARD, "adds such a hook")
def _(t: Trial) -> None:
    t.patch()
    t.step()
    t.clear()
    loss = t.forward()
    t.layer.mlp.register_forward_hook(lambda m, args, out: out * 0.5)
    loss.backward()


@program(BETWEEN_FORWARD_AND_BACKWARD, "changes a number that such a hook closes over")
def _(t: Trial) -> None:
    scale = 0.5

    def hook(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return out * scale

    t.layer.mlp.register_forward_hook(hook)
    t.patch()
    t.step()
    t.clear()
    loss = t.forward()
    scale = 2.0
    loss.backward()


PROGRAM_GLOBALS = {"scale": 1.0, "one": 0.0}  # a program's globals


@contextlib.contextmanager
def until_backward(
    t: Trial, forward: Callable[[Any, Tensor], Tensor], **numbers: float
) -> Iterator[Tensor]:
    """A loss, after a step, of a layer whose MLP computes that; within, the program's globals are
    others."""
    mlp = t.layer.mlp
    mlp.forward = lambda x: forward(lambda y: type(mlp).forward(mlp, y), x)
    t.patch()
    t.step()
    t.clear()
    loss = t.forward()
    PROGRAM_GLOBALS.update(numbers)
    try:
        yield loss
    finally:
        PROGRAM_GLOBALS.update(scale=1.0, one=0.0)


@program(BETWEEN_FORWARD_AND_BACKWARD, "changes a number in a global, which a module inside reads")
def _(t: Trial) -> None:
    with until_backward(t, lambda mlp, x: mlp(x) * PROGRAM_GLOBALS["scale"], scale=0.5) as loss:
        loss.backward()


@program(
    BETWEEN_FORWARD_AND_BACKWARD,
    "changes a number in a global, which a module inside adds to one token",
)
def _(t: Trial) -> None:
    def forward(mlp: Any, x: Tensor) -> Tensor:
        one_hot = torch.nn.functional.one_hot(torch.tensor(1), x.shape[1]).to(x)
        return mlp(x + PROGRAM_GLOBALS["one"] * one_hot[None, :, None])  # type: ignore[no-any-return]

    with until_backward(t, forward, one=0.5) as loss:
        loss.backward()


@program(
    BETWEEN_FORWARD_AND_BACKWARD,
    "replaces a function that a modeling file holds (`apply_rotary_pos_emb`), around the forward "
    "alone",
)
def _(t: Trial) -> None:
    t.patch()
    t.step()
    t.clear()
    real_rotary = modeling_llama.apply_rotary_pos_emb
    modeling_llama.apply_rotary_pos_emb = lambda *args, **kwargs: tuple(
        0.5 * x for x in real_rotary(*args, **kwargs)
    )
    try:
        loss = t.forward()
    finally:
        modeling_llama.apply_rotary_pos_emb = real_rotary
    loss.backward()


@program(BETWEEN_FORWARD_AND_BACKWARD, "makes a step of a fused optimizer, which marks no change")
def _(t: Trial) -> None:
    t.patch()
    optimizer = torch.optim.AdamW(t.model.parameters(), fused=True)
    t.step()
    t.forward().backward()
    loss = t.forward()
    optimizer.step()
    t.clear()
    loss.backward()


@program(BETWEEN_FORWARD_AND_BACKWARD, "writes to a parameter's `.data`")
def _(t: Trial) -> None:
    t.patch()
    t.step()
    t.clear()
    loss = t.forward()
    t.layer.mlp.down_proj.weight.data.mul_(1.01)
    loss.backward()


def steer(t: Trial) -> Any:
    t.extra["steer"] = torch.randn(32, dtype=torch.float64, generator=seeded(7)).requires_grad_()
    return lambda m, args, out: out + t.extra["steer"]


@program(BEFORE_PATCH, "trains a tensor through a hook inside, in layers that train")
def _(t: Trial) -> None:
    t.layer.mlp.register_forward_hook(steer(t))
    t.patch()
    t.step()


@program(
    BEFORE_PATCH, "trains a tensor through a hook inside, in a frozen model with a trained head"
)
def _(t: Trial) -> None:
    t.layer.mlp.register_forward_hook(steer(t))
    t.model.model.requires_grad_(False)
    t.patch()
    t.step()


@program(BETWEEN_FORWARD_AND_BACKWARD, "takes away a hook through which a tensor trains")
def _(t: Trial) -> None:
    t.patch()
    t.step()
    t.clear()
    handle = t.layer.mlp.register_forward_hook(steer(t))
    loss = t.forward()
    handle.remove()
    loss.backward()


def turn(t: Trial) -> Any:
    """As an intervention that begins as the identity."""
    t.extra["turn"] = torch.eye(32, dtype=torch.float64).requires_grad_()
    return t.layer.mlp.register_forward_hook(lambda m, args, out: out @ t.extra["turn"])


@program(
    BETWEEN_FORWARD_AND_BACKWARD,
    "takes away a hook through which a tensor trains, and which changes no value yet",
)
def _(t: Trial) -> None:
    t.patch()
    t.step()
    t.clear()
    handle = turn(t)
    loss = t.forward()
    handle.remove()
    loss.backward()


@program(
    BEFORE_PATCH,
    "trains a tensor through a hook inside, and takes the hook away between forward and backward",
)
def _(t: Trial) -> None:
    handle = turn(t)
    t.patch()
    loss = t.forward()
    handle.remove()
    loss.backward()


@program(BEFORE_PATCH, "adds a loss of outputs that a hook collects with their graph")
def _(t: Trial) -> None:
    outputs: list[Tensor] = []
    t.layer.mlp.register_forward_hook(lambda m, args, out: outputs.append(out))
    t.patch()
    with contextlib.suppress(streambp.errors.BackwardError):
        (
            t.forward() + outputs[-1].pow(2).mean()
        ).backward()  # the hook has seen the tokens of a trial as well
    outputs.clear()
    t.clear()
    (t.forward() + outputs[-1].pow(2).mean()).backward()


@program(BETWEEN_STEPS, "adds a loss of outputs that a hook collects with their graph")
def _(t: Trial) -> None:
    outputs: list[Tensor] = []
    on = False
    t.layer.mlp.register_forward_hook(lambda m, args, out: outputs.append(out) if on else None)
    t.patch()
    t.step()
    on = True
    t.clear()
    (t.forward() + outputs[-1].pow(2).mean()).backward()


@program(BEFORE_PATCH, "hooks a module inside: the hook changes tokens at absolute positions")
def _(t: Trial) -> None:
    def hook(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        out = out.clone()
        out[:, 15:18] += 1.0
        return out

    t.layer.mlp.register_forward_hook(hook)
    t.patch()
    t.step()


@program(
    BEFORE_PATCH,
    "shares prefixes, and hooks a module inside: the hook changes tokens at absolute positions",
)
def _(t: Trial) -> None:
    def hook(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        out = out.clone()
        out[:, 72:75] += 1.0
        return out

    t.model.model.embed_tokens.register_forward_hook(hook)
    t.patch(rows="packed")
    ids = torch.randint(3, 50, (3, 80), generator=seeded(1))
    ids[:, :70] = ids[0, :70]
    t.model(input_ids=ids, labels=ids, use_cache=False).loss.backward()


@program(BEFORE_PATCH, "hooks a module inside: the hook changes gradients at absolute positions")
def _(t: Trial) -> None:
    def hook(module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
        grad = grad_input[0].clone()
        grad[:, 15:18] *= 3.0
        return (grad,)

    t.layer.mlp.register_full_backward_hook(hook)
    t.patch()
    t.step()


@program(BEFORE_PATCH, "hooks a module inside: the hook applies a mask of the whole sequence")
def _(t: Trial) -> None:
    mask = torch.ones(1, 23, 1, dtype=torch.float64)
    mask[:, 16:] = 0.0
    t.layer.mlp.register_forward_hook(lambda m, args, out: out * mask[:, : out.shape[1]])
    t.patch()
    t.step()


@program(
    BETWEEN_STEPS, "passes longer sequences, to which a hook inside adds at absolute positions"
)
def _(t: Trial) -> None:
    def hook(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        out = out.clone()
        out[:, 25:28] += 1.0
        return out

    t.layer.mlp.register_forward_hook(hook)
    t.patch()
    t.forward(length=20).backward()
    t.clear()
    t.forward(length=31).backward()


@program(BETWEEN_FORWARD_AND_BACKWARD, "takes away a hook that writes to an output's `.data`")
def _(t: Trial) -> None:
    t.patch()
    t.step()
    t.clear()
    handle = t.layer.self_attn.o_proj.register_forward_hook(
        lambda m, args, out: [out.data.mul_(0.5), None][1]
    )
    loss = t.forward()
    handle.remove()
    loss.backward()


@program(
    BEFORE_PATCH, "hooks a module inside: the hook reverses the gradient where there is a graph"
)
def _(t: Trial) -> None:
    def hook(module: nn.Module, args: Any, out: Tensor) -> Tensor | None:
        return 2 * out.detach() - out if out.requires_grad else None

    t.layer.mlp.register_forward_hook(hook)
    t.patch()
    t.step()


@program(DURING_STEP, "hooks the layer itself: the hook changes the output")
def _(t: Trial) -> None:
    t.layer.register_forward_hook(lambda m, args, out: out * 0.5)
    t.patch()
    t.step()


@program(DURING_STEP, "hooks parameters: the hook changes the gradient")
def _(t: Trial) -> None:
    t.layer.mlp.up_proj.weight.register_hook(lambda grad: grad * 0.5)
    t.patch()
    t.step()


# What modules keep.


class Auxiliary(nn.Module):
    """Leaves a loss behind."""

    def __init__(self, inner: nn.Module, weight: float) -> None:
        super().__init__()
        self.inner, self.weight = inner, weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        self.aux_loss = self.weight * y.pow(2).mean() if self.weight else None
        return y


def auxiliary_step(t: Trial) -> None:
    t.clear()
    loss = t.forward()
    extra = t.layer.mlp.aux_loss
    (loss if extra is None else loss + extra).backward()


@program(BEFORE_PATCH, "keeps an auxiliary loss in an attribute")
def _(t: Trial) -> None:
    t.layer.mlp = Auxiliary(t.layer.mlp, 0.1)
    t.patch()
    auxiliary_step(t)
    auxiliary_step(t)


@program(BETWEEN_STEPS, "raises the weight of an auxiliary loss from 0")
def _(t: Trial) -> None:
    t.layer.mlp = Auxiliary(t.layer.mlp, 0.0)
    t.patch()
    auxiliary_step(t)
    t.layer.mlp.weight = 0.1
    auxiliary_step(t)


class Running(nn.Module):
    """Writes to a buffer, in train mode."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("mean", torch.zeros(32, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        self.mean.mul_(0.9).add_(y.detach().mean((0, 1)), alpha=0.1)
        return y - self.mean.detach().clone()


@program(BEFORE_PATCH, "has a module that writes to its buffer in forward")
def _(t: Trial) -> None:
    t.layer.mlp = Running(t.layer.mlp)
    t.patch()
    t.step()
    t.step()


class Noisy(nn.Module):
    """Draws from a generator of its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.generator = inner, seeded(3)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn(x.shape, dtype=x.dtype, generator=self.generator)
        return self.inner(x + 0.1 * noise)


class Calibrated(nn.Module):
    """Divides by a number that it takes from its first batch."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.scale: float | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = float(x.detach().abs().max())
        y: Tensor = self.inner(x / self.scale)
        return y


@program(BEFORE_PATCH, "has a module that takes a number from its first batch")
def _(t: Trial) -> None:
    t.layer.mlp = Calibrated(t.layer.mlp)
    t.patch()
    t.step()
    t.step()


@program(BEFORE_PATCH, "compiles a module inside (`torch.compile`)")
def _(t: Trial) -> None:
    t.layer.mlp.act_fn = torch.compile(t.layer.mlp.act_fn, backend="eager")
    t.patch()
    t.step()


class InPlace(nn.Module):
    """Writes to a Linear's output."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        y += 0.5 * torch.tanh(y.detach())
        return y


@program(BEFORE_PATCH, "writes to a Linear's output in place (as AdaLoRA does)")
def _(t: Trial) -> None:
    t.layer.mlp.up_proj = InPlace(t.layer.mlp.up_proj)
    t.layer.mlp.down_proj = InPlace(t.layer.mlp.down_proj)
    t.patch()
    t.step()


@program(
    BETWEEN_FORWARD_AND_BACKWARD,
    "notes on modules what no forward reads (a profiler's phase and handles)",
)
def _(t: Trial) -> None:
    for module in t.model.modules():
        module.__flops__ = 0
    t.patch()
    t.step()
    t.clear()
    loss = t.forward()
    for module in t.model.modules():
        module.__flops__, module.phase = 17, "backward"
    loss.backward()


@program(BEFORE_PATCH, "has a module that draws from a `torch.Generator` of its own")
def _(t: Trial) -> None:
    t.layer.mlp = Noisy(t.layer.mlp)
    t.patch()
    t.step()


class Skipping(nn.Module):
    """Stochastic depth, by Python's random numbers."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x * (0.5 + random.random()) if self.training else x)
        return y


@program(BEFORE_PATCH, "has a module that draws from Python's `random` (stochastic depth)")
def _(t: Trial) -> None:
    seed_others(4)
    t.layer.mlp = Skipping(t.layer.mlp)
    t.patch()
    t.step()
    t.step()


class DroppingRows(nn.Module):
    """Stochastic depth, by one of torch's random numbers for each row."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y * (torch.rand(x.shape[0], 1, 1) < 0.5) if self.training else y


@program(BEFORE_PATCH, "has a module that draws one of torch's random numbers for each row")
def _(t: Trial) -> None:
    seed_torch(4)
    t.layer.mlp = DroppingRows(t.layer.mlp)
    t.patch()
    for _ in range(4):
        t.step()


class Centred(nn.Module):
    """Takes the mean over all tokens off."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x - 0.5 * x.mean(-2, keepdim=True))
        return y


@program(BEFORE_PATCH, "replaces the final norm by a module that mixes tokens")
def _(t: Trial) -> None:
    t.model.model.norm = Centred(t.model.model.norm)
    t.patch()
    t.step()


@program(BETWEEN_STEPS, "replaces the final norm's forward by one that mixes tokens")
def _(t: Trial) -> None:
    t.patch()
    t.step()
    forward = t.model.model.norm.forward
    t.model.model.norm.forward = lambda x: forward(x - 0.5 * x.mean(-2, keepdim=True))
    t.step()


@program(BETWEEN_STEPS, "changes a number that a module inside reads (`self_attn.scaling`)")
def _(t: Trial) -> None:
    t.patch()
    t.step()
    t.layer.self_attn.scaling *= 2
    t.step()


@program(
    BETWEEN_FORWARD_AND_BACKWARD,
    "changes a number that a module inside reads (`self_attn.scaling`)",
)
def _(t: Trial) -> None:
    t.patch()
    t.step()
    t.clear()
    loss = t.forward()
    t.layer.self_attn.scaling *= 2
    loss.backward()


# Parameters, adapters, modes.


@program(BETWEEN_STEPS, "freezes parameters, or lets frozen ones train again")
def _(t: Trial) -> None:
    t.patch()
    t.step()
    t.layer.mlp.requires_grad_(False)
    t.step()
    t.layer.mlp.requires_grad_(True)
    t.layer.self_attn.k_proj.requires_grad_(False)
    t.step()


@program(BETWEEN_FORWARD_AND_BACKWARD, "lets a frozen parameter train")
def _(t: Trial) -> None:
    t.layer.mlp.requires_grad_(False)
    t.patch()
    t.clear()
    loss = t.forward()
    t.layer.mlp.requires_grad_(True)
    loss.backward()


@program(BETWEEN_FORWARD_AND_BACKWARD, "writes to a parameter")
def _(t: Trial) -> None:
    t.patch()
    t.clear()
    loss = t.forward()
    with torch.no_grad():
        t.layer.mlp.up_proj.weight.mul_(0.5)
    loss.backward()


@program(BETWEEN_FORWARD_AND_BACKWARD, "switches `train()` and `eval()`")
def _(t: Trial) -> None:
    t.patch()
    t.clear()
    loss = t.forward()
    t.model.eval()
    loss.backward()


def adapters(t: Trial, **settings: Any) -> None:
    import peft

    config = peft.LoraConfig(
        target_modules=["q_proj", "up_proj"], init_lora_weights=False, **settings
    )
    t.model = peft.get_peft_model(t.model, config)


@program(BEFORE_PATCH, "adds LoRA adapters")
def _(t: Trial) -> None:
    adapters(t)
    t.patch()
    t.step()


@program(AFTER_PATCH, "adds LoRA adapters")
def _(t: Trial) -> None:
    t.patch()
    t.step()
    adapters(t)
    t.step()


@program(BETWEEN_STEPS, "scales adapters (`rescale_adapter_scale` around whole steps)")
def _(t: Trial) -> None:
    from peft.helpers import rescale_adapter_scale

    adapters(t)
    t.patch()
    t.step()
    with rescale_adapter_scale(t.model, 0.1):
        t.step()


@program(
    BETWEEN_FORWARD_AND_BACKWARD,
    "scales adapters (`rescale_adapter_scale` around the forward alone)",
)
def _(t: Trial) -> None:
    from peft.helpers import rescale_adapter_scale

    adapters(t)
    t.patch()
    t.step()
    t.clear()
    with rescale_adapter_scale(t.model, 0.1):
        loss = t.forward()
    loss.backward()


@program(DURING_STEP, "computes reference logits without adapters (`disable_adapter`, no grad)")
def _(t: Trial) -> None:
    adapters(t)
    t.patch()
    t.step()
    t.clear()
    with torch.no_grad(), t.model.disable_adapter():
        t.forward()
    t.forward().backward()


@program(BETWEEN_STEPS, "switches adapters (`set_adapter`)")
def _(t: Trial) -> None:
    import peft

    adapters(t)
    t.model.add_adapter(
        "other", peft.LoraConfig(target_modules=["v_proj"], init_lora_weights=False)
    )
    t.patch()
    t.step()
    t.model.set_adapter("other")
    t.step()


@program(BETWEEN_FORWARD_AND_BACKWARD, "switches adapters (`set_adapter`)")
def _(t: Trial) -> None:
    import peft

    adapters(t)
    t.model.add_adapter(
        "other", peft.LoraConfig(target_modules=["v_proj"], init_lora_weights=False)
    )
    t.patch()
    t.step()
    t.clear()
    loss = t.forward()
    t.model.set_adapter("other")
    loss.backward()


@program(
    DURING_STEP, "passes `adapter_names` (a LoRA adapter for each row) in eval mode with gradients"
)
def _(t: Trial) -> None:
    import peft

    adapters(t)
    t.model.add_adapter(
        "other", peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    )
    for name, parameter in t.model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    t.model.eval()
    t.patch()
    t.clear()
    t.forward(adapter_names=["default", "other"]).backward()


@program(DURING_STEP, "activated LoRA (`alora_invocation_tokens`)")
def _(t: Trial) -> None:
    adapters(
        t,
        task_type="CAUSAL_LM",
        alora_invocation_tokens=[int(make_batch("plain")["input_ids"][0, 9])],
    )
    t.patch()
    t.step()


# Attention.


@contextlib.contextmanager
def attention_function(name: str, function: Callable[..., Any]) -> Iterator[None]:
    previous_function = ALL_ATTENTION_FUNCTIONS._global_mapping.get(name)
    AttentionInterface.register(name, function)
    try:
        yield
    finally:
        if previous_function is None:
            ALL_ATTENTION_FUNCTIONS._global_mapping.pop(name, None)
        else:
            AttentionInterface.register(name, previous_function)


def normed(module: nn.Module, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
    return sdpa_attention_forward(
        module, nn.functional.normalize(query, dim=-1), key, *args, **kwargs
    )


@program(BEFORE_PATCH, "registers an attention function by a new name and uses it")
def _(t: Trial) -> None:
    with attention_function("normed", normed):
        t.model.set_attn_implementation("normed")
        t.patch()
        t.step()


@program(BETWEEN_STEPS, "registers an attention function by a new name and uses it")
def _(t: Trial) -> None:
    with attention_function("normed", normed):
        t.patch()
        t.step()
        t.model.set_attn_implementation("normed")
        t.step()


@program(BEFORE_PATCH, 'replaces `ALL_ATTENTION_FUNCTIONS["sdpa"]`')
def _(t: Trial) -> None:
    with attention_function("sdpa", normed):
        t.patch()
        t.step()


@program(BETWEEN_STEPS, 'replaces `ALL_ATTENTION_FUNCTIONS["sdpa"]`')
def _(t: Trial) -> None:
    t.patch()
    t.step()
    with attention_function("sdpa", normed):
        t.step()


@program(BEFORE_PATCH, "replaces a modeling file's `eager_attention_forward`")
def _(t: Trial) -> None:
    real = modeling_llama.eager_attention_forward

    def eager(module: nn.Module, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        return real(module, nn.functional.normalize(query, dim=-1), *args, **kwargs)

    modeling_llama.eager_attention_forward = eager
    try:
        t.model.set_attn_implementation("eager")
        t.patch()
        t.step()
    finally:
        modeling_llama.eager_attention_forward = real


def by_hand(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: Any,
    attention_mask: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Of an attention, as research code writes it: its own scores, the model's mask."""
    # [B, H or H_kv, T, D]
    q, k, v = (
        project(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        for project in (self.q_proj, self.k_proj, self.v_proj)
    )
    q, k = modeling_llama.apply_rotary_pos_emb(q, k, *position_embeddings)
    k, v = (modeling_llama.repeat_kv(x, self.num_key_value_groups) for x in (k, v))
    scores = q @ k.mT * self.scaling - 0.1 * (q - k).square().mean(-1, keepdim=True)
    allowed = torch.ones_like(scores).tril().bool() if attention_mask is None else attention_mask
    scores = (
        scores.masked_fill(~allowed, -1e30) if allowed.dtype == torch.bool else scores + allowed
    )
    return self.o_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)), None


@program(
    BEFORE_PATCH, "replaces the forward of the attention's class by one that attends by itself"
)
def _(t: Trial) -> None:
    real = modeling_llama.LlamaAttention.forward
    modeling_llama.LlamaAttention.forward = by_hand
    try:
        t.patch()
        t.step()
        t.clear()
        t.forward(attention_mask=make_batch("left-padded")["attention_mask"]).backward()
    finally:
        modeling_llama.LlamaAttention.forward = real


@program(BETWEEN_STEPS, "switches between transformers' own attention implementations")
def _(t: Trial) -> None:
    t.patch()
    t.step()
    t.model.set_attn_implementation("eager")
    t.step()


# Functions of torch, and forwards that libraries bind.


@contextlib.contextmanager
def z_loss() -> Iterator[None]:
    """Within, a wrapper stands in the place of `F.cross_entropy`, and calls it."""
    real_loss = nn.functional.cross_entropy

    def around(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return real_loss(x, *args, **kwargs) + 0.1 * x.logsumexp(-1).pow(2).mean()

    nn.functional.cross_entropy = around  # type: ignore[assignment]
    try:
        yield
    finally:
        nn.functional.cross_entropy = real_loss


@program(BEFORE_PATCH, "wraps `F.cross_entropy` (a z-loss)")
def _(t: Trial) -> None:
    with z_loss():
        t.patch()
        t.step()


@program(BETWEEN_STEPS, "wraps `F.cross_entropy` (a z-loss)")
def _(t: Trial) -> None:
    t.patch()
    t.step()
    with z_loss():
        t.step()


@program(BETWEEN_STEPS, "wraps `F.log_softmax`, of which its own loss is made")
def _(t: Trial) -> None:
    t.patch(lazy_logits=True)
    t.step()
    real_log_softmax = nn.functional.log_softmax
    nn.functional.log_softmax = lambda *args, **kwargs: real_log_softmax(*args, **kwargs) * 1.5
    try:
        t.clear()
        logits = t.model(input_ids=t.batch["input_ids"], use_cache=False).logits
        nn.functional.log_softmax(logits, -1).square().mean().backward()
    finally:
        nn.functional.log_softmax = real_log_softmax


def padded_statistic(t: Trial, read: Callable[[Tensor], Tensor]) -> None:
    """Steps of a padded batch with labels, as `streambp launch` sets a model, and a statistic of
    all logits beside."""
    t.patch(lazy_logits=True)
    ids = t.batch["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, -LENGTH // 2 :] = 0
    labels = ids.masked_fill(mask == 0, -100)
    for _ in range(2):
        t.clear()
        output = t.model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False)
        (output.loss + read(output.logits)).backward()


@program(DURING_STEP, "takes the mean of squares of all lazy logits, padding included")
def _(t: Trial) -> None:
    padded_statistic(t, lambda logits: logits.float().square().mean())


@program(DURING_STEP, "takes the logsumexp of all lazy logits, padding included")
def _(t: Trial) -> None:
    padded_statistic(t, lambda logits: logits.logsumexp(-1).mean())


@program(DURING_STEP, "passes `position_ids` in floats with padding")
def _(t: Trial) -> None:
    t.patch()
    ids = t.batch["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, -LENGTH // 2 :] = 0
    positions = (mask.to(torch.float64).cumsum(-1) - 1).clamp(min=0)
    labels = ids.masked_fill(mask == 0, -100)
    t.clear()
    t.model(
        input_ids=ids, attention_mask=mask, position_ids=positions, labels=labels, use_cache=False
    ).loss.backward()


def accelerated(t: Trial, first: str) -> None:
    """A step of a model that accelerate has prepared for mixed precision and unwrapped, and a
    generation."""
    AcceleratorState._reset_state(True)  # others may have left its settings
    try:
        accelerator = Accelerator(mixed_precision="bf16", cpu=True)
        if first == "patch":
            t.patch()
        t.model = accelerator.prepare(t.model)
        if first == "prepare":
            t.patch()
        t.step()
        t.model = accelerator.unwrap_model(t.model, keep_fp32_wrapper=False)
        t.model.generate(t.batch["input_ids"][:1, :4], max_new_tokens=2, do_sample=False)
        t.step()
    finally:
        AcceleratorState._reset_state(True)


@program(
    BEFORE_PATCH,
    "has accelerate prepare the model, and unwrap it after a step (`keep_fp32_wrapper=False`)",
)
def _(t: Trial) -> None:
    accelerated(t, "prepare")


@program(
    AFTER_PATCH,
    "has accelerate prepare the model, and unwrap it after a step (`keep_fp32_wrapper=False`)",
)
def _(t: Trial) -> None:
    accelerated(t, "patch")


@program(
    BETWEEN_STEPS, "binds its own forward to the model (`types.MethodType(model.forward, model)`)"
)
def _(t: Trial) -> None:
    t.patch()
    t.step()
    t.model.forward = types.MethodType(t.model.forward, t.model) if t.streamed else t.model.forward
    t.step()


# Calls.


@program(DURING_STEP, "adds up gradients of several batches")
def _(t: Trial) -> None:
    t.patch()
    t.clear()
    t.forward().backward()
    t.forward().backward()


@program(DURING_STEP, "calls forward several times before one backward")
def _(t: Trial) -> None:
    t.patch()
    t.clear()
    (t.forward() + 2 * t.forward()).backward()


@program(DURING_STEP, "calls backward twice (`retain_graph=True`)")
def _(t: Trial) -> None:
    t.patch()
    t.clear()
    loss = t.forward()
    loss.backward(retain_graph=True)
    loss.backward()


@program(DURING_STEP, "asks for second derivatives (`create_graph=True`)")
def _(t: Trial) -> None:
    t.patch()
    t.clear()
    loss = t.forward()
    loss.backward(create_graph=True)


@program(DURING_STEP, "checkpoints the whole model (`torch.utils.checkpoint`)")
def _(t: Trial) -> None:
    t.patch()
    t.clear()
    batch = make_batch("plain")
    checkpoint(lambda: t.model(**batch, use_cache=False).loss, use_reentrant=False).backward()


@program(BETWEEN_STEPS, "copies the model (`copy.deepcopy`, `pickle`) and trains the copy")
def _(t: Trial) -> None:
    t.patch()
    t.step()
    t.model = pickle.loads(pickle.dumps(copy.deepcopy(t.model)))
    t.step()


@program(BEFORE_PATCH, "wraps the layers (`apply_activation_checkpointing`)")
def _(t: Trial) -> None:
    wrap(t)
    t.patch()
    t.step()


@program(AFTER_PATCH, "wraps the layers (`apply_activation_checkpointing`)")
def _(t: Trial) -> None:
    t.patch()
    wrap(t)
    t.step()


def wrap(t: Trial) -> None:
    layers = {id(layer) for layer in t.model.model.layers}
    apply_activation_checkpointing(
        t.model, checkpoint_wrapper_fn=checkpoint_wrapper, check_fn=lambda m: id(m) in layers
    )


@program(DURING_STEP, "trains two models of one config object in two threads")
def _(t: Trial) -> None:
    second_trial = Trial(t.streamed)
    second_trial.model = type(t.model)(t.model.config).to(torch.float64)
    second_trial.model.load_state_dict(t.model.state_dict())
    t.patch()
    second_trial.patch()
    threads = [
        threading.Thread(target=lambda trial=trial: [trial.step() for _ in range(4)])
        for trial in (t, second_trial)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    t.extra = {f"other.{name}": p for name, p in second_trial.model.named_parameters()}


# What forwards and hooks keep without a graph.


def recording(t: Trial, outputs: list[Any]) -> None:
    """What the last step left, as a gradient: it is compared with the unpatched model's."""
    t.layer.mlp.register_forward_hook(lambda m, args, out: outputs.append(out.detach()))


def told_as_gradients(t: Trial, outputs: list[Any]) -> None:
    t.extra["kept"] = torch.zeros(
        len(outputs), *outputs[-1].shape, requires_grad=True, dtype=torch.float64
    )
    t.extra["kept"].grad = torch.stack(outputs)


@program(BEFORE_PATCH, "records outputs of a module inside by a hook, without their graph")
def _(t: Trial) -> None:
    outputs: list[Any] = []
    recording(t, outputs)
    t.patch()
    t.step()
    told_as_gradients(t, outputs)


@program(BETWEEN_STEPS, "records outputs of a module inside by a hook, without their graph")
def _(t: Trial) -> None:
    outputs: list[Any] = []
    t.patch()
    t.step()
    recording(t, outputs)
    t.step()
    told_as_gradients(t, outputs)


@program(BEFORE_PATCH, "keeps a mean of its tokens in an attribute of a module inside")
def _(t: Trial) -> None:
    def hook(module: Any, args: Any, out: Tensor) -> None:
        module.mean = out.detach().mean((0, 1))

    t.layer.mlp.register_forward_hook(hook)
    t.patch()
    t.step()
    told_as_gradients(t, [t.layer.mlp.mean])


@program(BEFORE_PATCH, "replays routes of experts that a call without gradients has recorded")
def _(t: Trial) -> None:
    t.model = zoo.build("qwen3_moe")
    gate, outputs = t.layer.mlp.gate, {}

    def forward(hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        probs = torch.nn.functional.linear(flat, gate.weight).softmax(-1)
        top = probs.topk(2).indices
        if not torch.is_grad_enabled():
            outputs["top"] = top
        elif len(outputs["top"]) == len(flat):
            top = outputs["top"]
        return probs, probs.gather(-1, top), top

    gate.forward = forward
    t.patch()
    with torch.no_grad():
        t.forward()
    t.steps = 0
    t.step()


class FusedLoss(torch.autograd.Function):
    """The mean logsumexp, with a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits.softmax(-1))
        return logits.logsumexp(-1).mean()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Tensor:
        (p,) = ctx.saved_tensors
        return upstream * p / p[..., 0].numel()


@program(BEFORE_PATCH, "has an `autograd.Function` compute the model's loss from its logits")
def _(t: Trial) -> None:
    t.model.loss_function = lambda logits, *_, **__: FusedLoss.apply(logits)
    t.patch()
    t.step()


class Product(torch.autograd.Function):
    """What `F.linear` gives of rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, real_linear: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        product: Tensor = real_linear(x, weight)
        return product

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        return upstream @ weight, upstream.flatten(0, -2).mT @ x.flatten(0, -2), None


@program(
    BETWEEN_STEPS,
    "leaves an `autograd.Function` in the place of `F.linear`, as DeepSpeed's ZeRO-3 does",
)
def _(t: Trial) -> None:
    t.patch()
    t.step()
    linear = nn.functional.linear
    nn.functional.linear = lambda x, weight, bias=None: Product.apply(x, weight, linear)  # type: ignore[assignment]
    try:
        t.step()
    finally:
        nn.functional.linear = linear


@program(BETWEEN_STEPS, "patches the model anew with settings that are refused, and goes on")
def _(t: Trial) -> None:
    t.patch()
    t.step()
    if t.streamed:
        with contextlib.suppress(streambp.StreamBPError):
            streambp.patch(t.model, streambp.StreamConfig(saves=("no.such_linear",)))
    t.step()


@program(BETWEEN_STEPS, "copies the model out of a wrapper that was patched, and trains the copy")
def _(t: Trial) -> None:
    inner, t.model = t.model, nn.Sequential(t.model)
    t.patch()
    t.model = copy.deepcopy(inner)
    t.step()


class KeptElsewhere(nn.Module):
    """Multiplies by a number of its first batch, kept by a function that a class, a dict or an
    attribute is hidden in."""

    number: Tensor | None = None

    def __init__(self, inner: nn.Module, how: str) -> None:
        super().__init__()
        self.inner, self.how = inner, how
        self.store: dict[str, Tensor] = {}
        KeptElsewhere.number = None

    def forward(self, x: Tensor) -> Tensor:
        size = x.detach().abs().mean()
        if self.how == "dict":
            factor = self.store.setdefault("number", size)
        elif self.how == "class":
            KeptElsewhere.number = factor = (
                size if KeptElsewhere.number is None else KeptElsewhere.number
            )
        else:
            self.factor = factor = getattr(self, "factor", size)
        y: Tensor = self.inner(x) * factor
        return y


@program(BEFORE_PATCH, "has a module whose first batch sets an attribute that is not there before")
def _(t: Trial) -> None:
    first_batch(t, "attribute")


@program(BEFORE_PATCH, "has a module that keeps a number of its first batch in a dict")
def _(t: Trial) -> None:
    first_batch(t, "dict")


@program(BEFORE_PATCH, "has a module that keeps a number of its first batch in its class")
def _(t: Trial) -> None:
    first_batch(t, "class")


def first_batch(t: Trial, how: str) -> None:
    t.layer.mlp = KeptElsewhere(t.layer.mlp, how)
    t.patch()
    t.step()
    t.step()


class RunningScale(nn.Module):
    """Divides by a running mean, which each call moves."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.mean = inner, torch.ones(())

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().abs().mean()
        y: Tensor = self.inner(x / self.mean)
        return y


@program(BEFORE_PATCH, "has a module that keeps a running value in an attribute")
def _(t: Trial) -> None:
    t.layer.mlp = RunningScale(t.layer.mlp)
    t.patch()
    t.step()


@program(DURING_STEP, "calls the model with an empty batch, which raises, and goes on")
def _(t: Trial) -> None:
    t.patch()
    with contextlib.suppress(RuntimeError):
        t.model(input_ids=t.batch["input_ids"][:0], labels=t.batch["labels"][:0])
    t.step()


@program(BEFORE_PATCH, "has a layer that runs without gradients (`torch.no_grad`)")
def _(t: Trial) -> None:
    real = t.layer.forward

    def forward(hidden_states: Tensor, **kwargs: Any) -> Any:
        with torch.no_grad():
            return real(hidden_states, **kwargs)

    t.layer.forward = forward
    t.patch()
    t.step()


class OfOneLength(torch.autograd.Function):
    """A kernel whose backward takes no other length than a batch's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        if grad.shape[1] != LENGTH:
            raise ValueError(f"{LENGTH} tokens are needed")
        return grad


@program(BEFORE_PATCH, "has a module whose backward raises on a few tokens")
def _(t: Trial) -> None:
    real = t.layer.mlp.forward
    t.layer.mlp.forward = lambda x: OfOneLength.apply(real(x))
    t.patch()
    t.step()


DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}


@program(
    BEFORE_PATCH,
    "evaluates beyond the length of its dynamic RoPE, and trains on padded rows",
    max_position_embeddings=16,
    rope_parameters=DYNAMIC_ROPE,
)
def _(t: Trial) -> None:
    with torch.no_grad():
        t.model.eval()(make_batch("plain", 2 * LENGTH)["input_ids"])
    t.model.train()
    t.patch()
    t.clear()
    t.model(**make_batch("right-padded"), use_cache=False).loss.backward()


@program(DURING_STEP, "asks for a cache in a training step, and trains through it")
def _(t: Trial) -> None:
    t.patch()
    t.step()
    t.clear()
    ids = t.batch["input_ids"]
    first = t.model(ids[:, :9], use_cache=True)
    second = t.model(ids[:, 9:], past_key_values=first.past_key_values, use_cache=True)
    second.logits.square().mean().backward()


@program(DURING_STEP, "computes a loss of its own from logits of a call with labels")
def _(t: Trial) -> None:
    t.patch()
    t.clear()
    logits = t.model(**t.batch, use_cache=False).get("logits")[:, :-1]
    nn.functional.cross_entropy(logits.flatten(0, 1), t.batch["labels"][:, 1:].flatten()).backward()


@program(DURING_STEP, "runs the model on two batches of other shapes in one forward")
def _(t: Trial) -> None:
    t.patch()
    t.clear()
    (t.forward() + t.forward(LENGTH // 2)).backward()


# Steps without a label, calls that fail, and what a program sets before its first batch.


@program(DURING_STEP, "adds a step without a label, which is divided by a count of 0")
def _(t: Trial) -> None:
    t.patch()
    t.step()
    empty = {**t.batch, "labels": torch.full_like(t.batch["labels"], -100)}
    t.clear()
    for count in (0, torch.tensor(0)):
        t.model(**empty, use_cache=False, num_items_in_batch=count).loss.backward()
    t.forward().backward()


@program(BEFORE_PATCH, "has a module whose buffer is None until its first batch fills it")
def _(t: Trial) -> None:
    mlp = t.layer.mlp
    mlp.register_buffer("size", None)

    def forward(x: Tensor) -> Tensor:
        if mlp.size is None:
            mlp.size = x.detach().abs().mean()
        y: Tensor = type(mlp).forward(mlp, x) * mlp.size
        return y

    mlp.forward = forward
    t.patch()
    t.step()
    t.step()


@program(DURING_STEP, "passes embeddings of another dtype, which raises, and goes on")
def _(t: Trial) -> None:
    t.patch()
    embeddings = t.model.get_input_embeddings()(t.batch["input_ids"]).detach().half()
    for _ in range(4):
        with contextlib.suppress(RuntimeError):
            t.model(inputs_embeds=embeddings, labels=t.batch["labels"], use_cache=False)
    t.step()


@program(BEFORE_PATCH, "has a module that raises once, at its second call")
def _(t: Trial) -> None:
    mlp, calls = t.layer.mlp, io.BytesIO()

    def forward(x: Tensor) -> Tensor:
        calls.write(b".")
        if calls.tell() == 2:
            raise ValueError("once")
        y: Tensor = type(mlp).forward(mlp, x)
        return y

    mlp.forward = forward
    t.patch()
    for _ in range(3):
        with contextlib.suppress(ValueError):
            t.step()
    mlp.__dict__.pop("forward")
    t.step()


@program(BETWEEN_STEPS, "warms the model up for another kind of call")
def _(t: Trial) -> None:
    t.patch()
    t.step()
    if t.streamed:
        streambp.warm_up(t.model, **make_batch("packed"), use_cache=False)
    t.step()


@program(BETWEEN_STEPS, "asks for an optimizer in backward that cannot be made, and goes on")
def _(t: Trial) -> None:
    parameter_lists: list[Any] = []

    def make(parameters: Any) -> Any:
        parameter_lists.append(parameters)
        if len(parameter_lists) > 3:
            raise ValueError("no")
        return torch.optim.SGD(parameters, lr=0.1)

    t.patch()
    t.step()
    with contextlib.suppress(ValueError):
        optimizer_in_backward(t.model, make)
    t.step()


@program(DURING_STEP, "keeps attention's output and Linears' on the host")
def _(t: Trial) -> None:
    t.patch(saves=("attn_out", "mlp.gate_proj", "mlp.up_proj"), offload="cpu")
    t.step()
    t.step()


@program(BEFORE_PATCH, "adds LoRA adapters, one of them on the head")
def _(t: Trial) -> None:
    import peft

    config = peft.LoraConfig(target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    t.model = peft.get_peft_model(t.model, config)
    t.patch()
    t.step()


@program(BEFORE_PATCH, "adds prefix tuning, whose calls have a cache and run unpatched")
def _(t: Trial) -> None:
    import peft

    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    t.model = peft.get_peft_model(t.model, config).to(torch.float64)
    t.patch()
    t.clear()
    t.model(**t.batch).loss.backward()


@program(DURING_STEP, "packs rows whose `cu_seq_lens_q` end before the padding")
def _(t: Trial) -> None:
    t.patch()
    t.clear()
    ids, ends = t.batch["input_ids"][:1], torch.tensor([0, 9, LENGTH - 4], dtype=torch.int32)
    positions = torch.cat([torch.arange(length) for length in (9, LENGTH - 13, 4)])
    labels = ids.masked_fill(torch.arange(LENGTH) >= LENGTH - 4, -100)
    packed = {"input_ids": ids, "labels": labels, "position_ids": positions[None]}
    if t.streamed:  # sdpa reads positions alone
        packed |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
        packed |= {"max_length_q": LENGTH, "max_length_k": LENGTH}
    t.model(**packed, use_cache=False).loss.backward()


@program(BEFORE_PATCH, "uses one layer at two depths")
def _(t: Trial) -> None:
    t.model.model.layers[1] = t.model.model.layers[0]
    t.patch()
    t.step()
    t.step()


# Errors that name the argument, and what describe says.


@program(DURING_STEP, "passes a mask of three dimensions, [B, T, T]")
def _(t: Trial) -> None:
    t.patch()
    mask = torch.ones(len(t.batch["input_ids"]), LENGTH, LENGTH, dtype=torch.bool).tril()
    t.model(**t.batch, attention_mask=mask, use_cache=False)


@program(BETWEEN_STEPS, "passes labels of another shape to `token_log_probs`, and goes on")
def _(t: Trial) -> None:
    t.patch()
    t.step()
    if t.streamed:
        hidden, weight, message = torch.randn(2, LENGTH, 32), torch.randn(64, 32), ""
        try:
            streambp.head.token_log_probs(hidden, weight, t.batch["labels"][:, 1:])
        except streambp.StreamBPError as error:
            message = str(error)
        assert message.startswith("labels ")
    t.step()


@program(BETWEEN_STEPS, 'takes compiled norms off (`kernels="compiled"`), and patches anew')
def _(t: Trial) -> None:
    backend, compiled_regions.BACKEND = compiled_regions.BACKEND, "eager"  # without a compiler
    try:
        t.patch(kernels="compiled")
        t.step()
    finally:
        compiled_regions.BACKEND = backend
    if t.streamed:
        streambp.unpatch(t.model)
    t.patch()
    t.step()
    marks = [name for p in t.model.parameters() for name in vars(p) if "dynamo" in name]
    assert not marks


@program(DURING_STEP, "trains layers with states, whose last chunk is longer than asked for")
def _(t: Trial) -> None:
    t.model = zoo.build("lfm2", torch.float64)
    t.patch()
    t.clear()
    t.forward(5 * CHUNK + 1).backward()
    if t.streamed:
        text = str(streambp.describe(t.model))
        assert call.REASON_LONG_CHUNK_STATES.format(2) in text
        assert call.REASON_LONG_CHUNK_MASK not in text


@program(DURING_STEP, "calls a decoder layer from a module of its own")
def _(t: Trial) -> None:
    t.patch()
    x = torch.randn(2, LENGTH, 32, dtype=torch.float64, generator=seeded(3)).requires_grad_()
    t.extra["x"] = x
    embedded = t.model.model.rotary_emb(x, torch.arange(LENGTH)[None])
    for _ in range(2):
        t.clear()
        hidden = x
        for layer in t.model.model.layers:
            hidden = layer(hidden, position_embeddings=embedded)
        hidden.square().sum().backward()
    assert not t.streamed or "another module" in str(streambp.describe(t.model))


@program(BEFORE_PATCH, "keeps weights on the host in a group of one rank")
def _(t: Trial) -> None:
    t.model.model.requires_grad_(False)
    t.model.model.norm.weight.requires_grad_(True)
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        t.patch(weights="cpu")
        t.step()
        t.step()
    finally:
        torch.distributed.destroy_process_group()


@program(BETWEEN_STEPS, "evaluates for the first time, while a module notes its tokens in a list")
def _(t: Trial) -> None:
    mlp, tokens = t.layer.mlp, []

    def forward(x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            tokens.append(x.detach().sum((0, 1)))
        y: Tensor = type(mlp).forward(mlp, x)
        return y

    mlp.forward = forward
    t.patch()
    t.step()
    tokens.clear()
    with torch.no_grad():
        t.forward()
    told_as_gradients(t, [torch.stack(tokens).sum(0)])


@program(DURING_STEP, "packs rows of Qwen3.5 by positions [1, B, T], which mark no documents")
def _(t: Trial) -> None:
    t.model = zoo.build("qwen3_5_text", torch.float64)
    t.patch()
    t.clear()
    positions = torch.cat([torch.arange(9), torch.arange(LENGTH - 9)]).expand(1, 2, -1)
    t.model(**t.batch, position_ids=positions, use_cache=False).loss.backward()


@program(BEFORE_PATCH, "adds DoRA adapters, one of them on the head, under HF Trainer")
def _(t: Trial) -> None:
    import peft

    lora = {"target_modules": ["q_proj", "lm_head"], "init_lora_weights": False}
    t.model = peft.get_peft_model(t.model, peft.LoraConfig(use_dora=True, **lora))  # type: ignore[arg-type]
    t.patch()
    rows = [{name: x[0] for name, x in make_batch("plain", seed=seed).items()} for seed in range(4)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder, report_to=[], use_cpu=True, disable_tqdm=True, max_steps=2, optim="sgd",
            per_device_train_batch_size=2, save_strategy="no", max_grad_norm=0.0, seed=3,
        )  # fmt: skip
        transformers.Trainer(t.model, arguments, train_dataset=rows).train()
    t.step()


@program(BETWEEN_STEPS, "adds up gradients with those of a batch without a label, counted as 0")
def _(t: Trial) -> None:
    t.patch()
    t.step()
    empty = {**t.batch, "labels": torch.full_like(t.batch["labels"], -100)}
    t.clear()
    t.model(**empty, num_items_in_batch=torch.tensor(0), use_cache=False).loss.backward()
    t.forward().backward()
