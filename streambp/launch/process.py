"""Patching the models of a program that does not know of it, and keeping account of them."""

from __future__ import annotations

import atexit
import dataclasses
import os
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from streambp.config import StreamConfig
from streambp.errors import UnsupportedModelError
from streambp.launch.groups import keep_groups
from streambp.launch.logs import StreamCallback
from streambp.launch.report import Account, Model, leave, say, table
from streambp.model.describe import describe
from streambp.model.fused_head import add_head
from streambp.model.patching import is_patched, streamed_head
from streambp.planner.auto import patch
from streambp.reporting import reason, told


class Launched:
    """The models of one process.

    Args:
        config: how they stream.
    """

    def __init__(self, config: StreamConfig) -> None:
        self.config = config
        self._seen: weakref.WeakKeyDictionary[nn.Module, Model] = weakref.WeakKeyDictionary()
        self._ours: weakref.WeakKeyDictionary[nn.Module, StreamConfig] = weakref.WeakKeyDictionary()
        self._models: list[Model] = []
        self._busy = self._left = False
        atexit.register(self.tell, at_end=True)

    def __reduce__(self) -> tuple[type[Launched], tuple[StreamConfig]]:
        """Sweeps send a Trainer to other processes, which keep accounts of their own."""
        return Launched, (self.config,)

    def trainer_made(self, trainer: Any) -> None:
        """Patch the model of an HF Trainer that has just been made, and see to those that come later."""
        self.streams(trainer.model, self.for_trainer(trainer))
        trainer.add_callback(Watcher(self, trainer))
        StreamCallback.add_to(trainer)
        keep_groups(trainer)

    def for_trainer(self, trainer: Any) -> StreamConfig:
        """With logits in evaluation where the trainer hands them to functions of its user's. Arguments that say how to
        stream, as our own trainers' do, come before what the program was launched with."""
        own = getattr(trainer.args, "stream_config", None)
        config = self.config if own is None else own()
        wanted = trainer.compute_metrics is not None or trainer.preprocess_logits_for_metrics is not None
        return dataclasses.replace(config, eval_logits=True) if wanted and config.head else config

    def head_wanted(self, theirs: Callable[..., None], model: nn.Module, *args: Any, **kwargs: Any) -> None:
        """Where TRL gives a model its fused head (`theirs`): ours, where the model streams and has one."""
        causal = streamed_head(model) if self.streams(model) and self.config.head else None
        if causal is None:
            theirs(model, *args, **kwargs)
            return
        add_head(causal, *args, **kwargs)

    def training(self, model: nn.Module) -> None:
        """`train()` was called on a model."""
        if not self._busy and not self._knows(model) and not is_patched(model) and self.streams(model):
            model.register_forward_hook(Watcher(self), with_kwargs=False)

    def streams(self, model: nn.Module, config: StreamConfig | None = None) -> bool:
        """Patch a model, unless it is patched already with settings of its user's; False if it cannot be.

        Args:
            config: None: as it is patched already, or as the program was launched.

        Raises:
            ConfigError: the settings do not fit the model.
        """
        if is_patched(model):
            ours = next((part for part in model.modules() if part in self._ours), None)
            if ours is None or config is None or self._ours[ours] == config:
                self._note(model if ours is None else ours)
                return True
            model = ours
        elif model in self._seen:
            return False
        config = self.config if config is None else config
        try:
            self._busy = True  # `train()` on copies that `patch` makes means nothing
            try:
                patch(model, config)
            finally:
                self._busy = False
        except UnsupportedModelError as error:
            self._seen[model] = Model(type(model).__name__, left=str(error))
            self._models.append(self._seen[model])
            say(f"{type(model).__name__} is left as it was: {error}")
            self.account()
            return False
        self._ours[model] = config
        self._note(model)
        return True

    def _note(self, model: nn.Module) -> None:
        """Take a patched model into the account, once; a part of one that is there counts with it."""
        if self._knows(model):
            return
        self._seen[model] = Model(type(model).__name__)
        self._models.append(self._seen[model])
        self.account()

    def _knows(self, model: nn.Module) -> bool:
        return any(part is model for seen in self._seen for part in seen.modules())

    def account(self) -> Account:
        """What was done so far, left for the command that started the program; models that are gone as last seen.
        [Note: reports]"""
        try:
            for model, known in list(self._seen.items()):
                if known.left is None and is_patched(model):
                    known.description = told(
                        lambda it: str(describe(it)), model, otherwise=lambda why: f"could not be told ({why})"
                    )
            here = torch.accelerator.current_accelerator()
            device: Any = None if here is None else torch.get_device_module(here)
            used = hasattr(device, "max_memory_allocated") and device.is_initialized()
            peak = int(device.max_memory_allocated()) if used else None
            account = Account(os.getpid(), os.environ.get("RANK"), str([*sys.argv, ""][0]), self._models, peak)
            self._left = leave(account)
            return account
        except Exception as error:
            return Account(os.getpid(), None, reason(error), self._models)

    def tell(self, at_end: bool = False) -> None:
        """Say what is known now: which layers stream, and what became of the head.

        at_end: of the process. The last account is said here if no command waits for it.
        """
        account = self.account()
        if at_end and (self._left or not account.models):
            return
        if os.environ.get("RANK", "0") == "0":  # the other ranks of a machine would say the same
            say(told(table, [account], otherwise=lambda why: f"what this process did could not be told ({why})"))


class Watcher(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """Sees to models that a Trainer gets after its `__init__`, and tells after its first step.

    A forward hook as well, of a model whose loop is the program's own (trainer: None): tells after its first forward in
    training. A copy of the model has a copy of it, which has told.
    """

    def __init__(self, launched: Launched, trainer: Any = None) -> None:
        self.launched = launched
        self.trainer = trainer
        self.told = False

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """`model_init` makes the model anew; other libraries make a reference after or outside of `Trainer.__init__`."""
        self.launched.streams(self.trainer.model, self.launched.for_trainer(self.trainer))
        reference = getattr(self.trainer, "ref_model", None)
        if isinstance(reference, nn.Module):
            self.launched.streams(reference)

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Tells what streams, after the first step alone."""
        if not self.told:
            self.told = True
            self.launched.tell()

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """The process may be ended by others before it ends by itself."""
        self.launched.account()

    @torch.compiler.disable
    def __call__(self, model: nn.Module, inputs: Any, output: Any) -> None:
        if model.training:
            self.on_step_end()
