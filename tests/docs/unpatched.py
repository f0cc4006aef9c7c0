"""Runs a program of a page, or an example, with streambp and without it, and keeps the gradients
that its optimizers were given.

In the run without streambp `patch` does nothing, a Stream trainer is TRL's own, and an optimizer in
backward is one hook a weight. Both runs are in float64, and with streambp in chunks of a few
tokens.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import io
import logging
import runpy
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

import streambp
import streambp.integrations
from tests.docs import stand_ins
from tests.docs.pages import ROOT
from tests.docs.runner import forget_engines
from tests.seeds import seed_others, seed_torch

CHUNK, LARGEST_CHUNK = 8, 256  # tokens
STREAM_TRAINERS = ("SFT", "DPO", "GRPO")
# a page's reward is 0 for a model of random weights, which learns nothing of it
REWARDS = ("boxed",)
REWARD = (
    "def {}(completions, **_):\n"
    "    return [float(len(set(text[0]['content']))) for text in completions]"
)
WITHOUT_DROPOUT = ("BartConfig",)  # streamed layers draw other random numbers
EXAMPLE_ARGUMENTS = MappingProxyType(
    {
        "encoder_decoder.py": ("--chunk-size", "3"),  # its decoder reads four tokens
        "qlora.py": ("--bits", "16"),
        "long_context_sft.py": ("--seq-len", "64", "--hidden-size", "64", "--skip-measurement"),
    }
)


@dataclasses.dataclass
class Run:
    """What a program did: the gradients of each optimizer step, the weights at its end, the loss
    that it left, and the lines that streambp logged. Keys name the step and the weight."""

    gradients: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    weights: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    loss: Tensor | None = None
    lines: list[str] = dataclasses.field(default_factory=list)


class Doubled(ast.NodeTransformer):
    """A program whose models are made in float64, and learn something, without dropout."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if node.name in REWARDS:
            return ast.parse(REWARD.format(node.name)).body[0]
        return self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if node.value == "float32":
            node.value = "float64"
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        node.attr = "float64" if node.attr == "float32" else node.attr
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name = getattr(node.func, "id", "")
        passed_names = {keyword.arg for keyword in node.keywords}
        if name in WITHOUT_DROPOUT and "dropout" not in passed_names:
            node.keywords.append(ast.keyword("dropout", ast.Constant(0.0)))
        if name.startswith("Stream") and name.endswith("Config"):
            node.keywords = [
                keyword for keyword in node.keywords if keyword.arg != "model_init_kwargs"
            ]
            value = ast.parse('{"dtype": "auto"}', mode="eval").body  # TRL knows no float64
            node.keywords.append(ast.keyword("model_init_kwargs", value))
        return node


def doubled(text: str, folder: Path | None = None) -> str:
    """Return a program in float64, that of a page with stand-ins of `folder`."""
    if folder is not None:
        text = stand_ins.python(text, folder)
    return ast.unparse(ast.fix_missing_locations(Doubled().visit(ast.parse(text))))


class Recorder(logging.Handler):
    """Keeps gradients of all optimizer steps, and lines of the logger `streambp`."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.optimizers: list[Optimizer] = []
        self.steps: dict[int, int] = {}
        self.gradients: list[tuple[int, Tensor, Tensor]] = []  # step, weight, its gradient

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def note(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Keep the gradients before a step of an optimizer."""
        if all(known_optimizer is not optimizer for known_optimizer in self.optimizers):
            self.optimizers.append(optimizer)
        step = self.steps[id(optimizer)] = self.steps.get(id(optimizer), 0) + 1
        for parameter in parameters_of(optimizer):
            if parameter.grad is not None:
                self.gradients.append((step, parameter, parameter.grad.detach().cpu().clone()))

    @contextlib.contextmanager
    def listens(self) -> Iterator[None]:
        """Context manager in which steps and lines are kept."""
        logger = logging.getLogger("streambp")
        previous_level = logger.level
        handle = register_optimizer_step_pre_hook(self.note)  # type: ignore[arg-type]
        logger.addHandler(self)
        logger.setLevel(logging.INFO)
        try:
            yield
        finally:
            handle.remove()
            logger.removeHandler(self)
            logger.setLevel(previous_level)

    def result(self, namespace: dict[str, Any]) -> Run:
        """Return what a program with this namespace did."""
        loss, model = namespace.get("loss"), namespace.get("model")
        model = getattr(namespace.get("trainer"), "model", model)
        names: dict[int, str] = {}
        weights: list[Tensor] = []
        for place, optimizer in enumerate(self.optimizers):
            for index, parameter in enumerate(parameters_of(optimizer)):
                names[id(parameter)] = f"weight {index} of optimizer {place}"
                weights.append(parameter)
        if isinstance(model, nn.Module):
            names |= {id(parameter): name for name, parameter in model.named_parameters()}
            weights += list(model.parameters())
        run = Run(lines=self.lines, loss=loss.detach() if isinstance(loss, Tensor) else None)
        for weight in weights:
            run.weights[names[id(weight)]] = weight.detach().cpu().clone()
            if weight.grad is not None:
                run.gradients[f"left, {names[id(weight)]}"] = weight.grad.detach().cpu().clone()
        for step, weight, gradient in self.gradients:
            run.gradients[f"step {step}, {names[id(weight)]}"] = gradient
        return run


def parameters_of(optimizer: Optimizer) -> list[Any]:
    """Return the parameters of an optimizer, in their order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def each_in_backward(
    model: nn.Module, make: Callable[[list[nn.Parameter]], Optimizer], on_host: bool = False
) -> None:
    """In place of `optimizer_in_backward`: each weight steps as torch's tutorial has it."""
    for weight in [p for p in model.parameters() if p.requires_grad]:
        optimizer = make([weight])

        def step(parameter: Tensor, optimizer: Optimizer = optimizer) -> None:
            optimizer.step()
            parameter.grad = None

        weight.register_post_accumulate_grad_hook(step)


def stock_config(kind: type) -> Callable[..., Any]:
    """A config of TRL's own that leaves out what a Stream trainer has beside."""
    return lambda **fields: kind(
        **{name: value for name, value in fields.items() if not name.startswith("stream_")}
    )


def leave_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take streambp out of the programs that run from now on."""
    import trl

    import streambp.integrations.trl as ours

    empty_step = types.SimpleNamespace(tokens=0, way="")
    monkeypatch.setattr(streambp, "patch", lambda model, *_, **__: model)
    monkeypatch.setattr(streambp, "unpatch", lambda model: model)
    monkeypatch.setattr(streambp, "describe", lambda model: "")
    monkeypatch.setattr(streambp, "last_step", lambda model: empty_step)
    monkeypatch.setattr(streambp.integrations, "optimizer_in_backward", each_in_backward, False)
    for name in STREAM_TRAINERS:
        monkeypatch.setattr(ours, f"Stream{name}Trainer", getattr(trl, f"{name}Trainer"))
        config = stock_config(getattr(trl, f"{name}Config"))
        monkeypatch.setattr(ours, f"Stream{name}Config", config)


def cut_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let programs run in chunks of a few tokens that leave their size to streambp, or give a large
    one."""
    import streambp.integrations.trl as ours

    real_patch = streambp.patch

    def patch(model: Any, config: Any = None, **fields: Any) -> Any:
        config = streambp.StreamConfig(**fields) if config is None else config
        if not isinstance(config.chunk_size, int) or config.chunk_size > LARGEST_CHUNK:
            config = dataclasses.replace(config, chunk_size=CHUNK)
        return real_patch(model, config)

    monkeypatch.setattr(streambp, "patch", patch)
    for name in STREAM_TRAINERS:
        real = getattr(ours, f"Stream{name}Config")
        monkeypatch.setattr(ours, f"Stream{name}Config", functools.partial(in_chunks, real))


def in_chunks(config: Callable[..., Any], **fields: Any) -> Any:
    """Return a config of a Stream trainer, with a chunk size if the program gives none."""
    if fields.get("stream_chunk_size", "auto") == "auto":
        fields["stream_chunk_size"] = str(CHUNK)
    return config(**fields)


def executed(
    path: Path,
    streamed: bool,
    change: Callable[[pytest.MonkeyPatch], None] | None = None,
    arguments: tuple[str, ...] = (),
    **namespace: Any,
) -> Run:
    """Run a program in float64 and return what it did.

    Args:
        path: its file.
        streamed: True with streambp, False without.
        change: spoils streambp, for a mutant.
        arguments: of its command line.
        namespace: names that it may use.
    """
    recorder = Recorder()
    previous_arguments, sys.argv = sys.argv, [str(path), *arguments]
    with pytest.MonkeyPatch.context() as changes, recorder.listens():
        (cut_shorter if streamed else leave_out)(changes)
        if change is not None:
            change(changes)
        changes.syspath_prepend(ROOT / "examples")
        seed_torch(0)
        seed_others(0)
        torch.set_default_dtype(torch.float64)
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                left = runpy.run_path(str(path), namespace, "__main__")
        finally:
            torch.set_default_dtype(torch.float32)
            sys.argv = previous_arguments
            forget_engines()
    return recorder.result(left)
