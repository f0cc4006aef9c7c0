"""Patch the models of a program whose code is unchanged, and record which models were patched."""

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
from streambp.launch.report import ModelRecord, ProcessRecord, say, table, write_record
from streambp.model.describe import describe
from streambp.model.fused_head import add_head
from streambp.model.installed_patch import is_patched, streamed_head
from streambp.model.trainer_logs import StreamCallback
from streambp.planner.auto import patch
from streambp.reporting import reason, report_safely


class LaunchedProcess:
    """Patches the models of one process under `streambp launch`, and records for a report which
    models were patched.

    Args:
        config: settings for all models that the process patches.
    """

    def __init__(self, config: StreamConfig) -> None:
        self.config = config
        self._records: weakref.WeakKeyDictionary[nn.Module, ModelRecord] = (
            weakref.WeakKeyDictionary()
        )
        self._ours: weakref.WeakKeyDictionary[nn.Module, StreamConfig] = weakref.WeakKeyDictionary()
        self._models: list[ModelRecord] = []
        self._busy = self._has_left = False
        atexit.register(self.print_report, at_end=True)

    def __reduce__(self) -> tuple[type[LaunchedProcess], tuple[StreamConfig]]:
        """Return (class, arguments) for pickle: the copy has the same config and no records of
        models.

        Hyperparameter sweeps send a Trainer to other processes, which record their own results.
        """
        return LaunchedProcess, (self.config,)

    def patch_trainer(self, trainer: Any) -> None:
        """Patch the model of an HF Trainer, at the end of the Trainer's `__init__`. Add two
        callbacks: `LaunchCallback` patches models that are created later and prints the report, and
        `StreamCallback` logs tokens and memory. Trainers of TRL that generate completions are
        changed by `keep_groups`."""
        self.patch_model(trainer.model, self.trainer_config(trainer))
        trainer.add_callback(LaunchCallback(self, trainer))
        StreamCallback.add_to(trainer)
        keep_groups(trainer)

    def trainer_config(self, trainer: Any) -> StreamConfig:
        """Return the `StreamConfig` for a trainer's model.

        The field eval_logits is True if the trainer has `compute_metrics` or
        `preprocess_logits_for_metrics`, which read logits. The `stream_*` arguments of streambp's
        own trainers take precedence over the settings of `streambp launch`.
        """
        trainers_config = getattr(trainer.args, "stream_config", None)
        config = self.config if trainers_config is None else trainers_config()
        reads_logits = (
            trainer.compute_metrics is not None or trainer.preprocess_logits_for_metrics is not None
        )
        if reads_logits and config.head:
            return dataclasses.replace(config, eval_logits=True)
        return config

    def add_head(
        self, theirs: Callable[..., None], model: nn.Module, *args: Any, **kwargs: Any
    ) -> None:
        """Add a fused head (which computes the loss without all logits in memory) to a model, in
        place of TRL's `add_fused_lm_head`. The head is streambp's if the model can be patched and
        the setting `head` is True. Otherwise TRL's function is called.

        Args:
            theirs: TRL's function.
            model: the model.
            args: further arguments of TRL's function.
            kwargs: keyword arguments of TRL's function.
        """
        if self.patch_model(model) and self.config.head:
            causal = streamed_head(model)
        else:
            causal = None
        if causal is None:
            theirs(model, *args, **kwargs)
            return
        add_head(causal, *args, **kwargs)

    def training(self, model: nn.Module) -> None:
        """Patch a model that is about to be trained, because its `train()` was called. Do nothing
        if the model is patched already, or if this object tried to patch the model or a module that
        contains the model."""
        if (
            not self._busy
            and not self._knows(model)
            and not is_patched(model)
            and self.patch_model(model)
        ):
            model.register_forward_hook(LaunchCallback(self), with_kwargs=False)

    def patch_model(self, model: nn.Module, config: StreamConfig | None = None) -> bool:
        """Patch a model, unless the user's own code has patched the model already. An earlier patch
        by this object is replaced if its settings differ. Return True if the model is patched
        afterwards, and False if streambp does not support the model.

        Args:
            model: the model of a trainer or of a training loop.
            config: settings; None: those of the model's existing patch, or of `streambp launch`.

        Raises:
            ConfigError: the settings do not fit the model.
        """
        if is_patched(model):
            patched = next((part for part in model.modules() if part in self._ours), None)
            if patched is None or config is None or self._ours[patched] == config:
                self._record_model(model if patched is None else patched)
                return True
            model = patched
        elif model in self._records:
            return False
        config = self.config if config is None else config
        try:
            self._busy = True  # `patch` makes copies whose `train()` must be ignored
            try:
                patch(model, config)
            finally:
                self._busy = False
        except UnsupportedModelError as error:
            self._records[model] = ModelRecord(type(model).__name__, left=str(error))
            self._models.append(self._records[model])
            say(f"{type(model).__name__} is left as it was: {error}")
            self.process_record()
            return False
        self._ours[model] = config
        self._record_model(model)
        return True

    def _record_model(self, model: nn.Module) -> None:
        """Add a patched model to the records for the report, unless the model, or a module that
        contains the model, has a record."""
        if self._knows(model):
            return
        self._records[model] = ModelRecord(type(model).__name__)
        self._models.append(self._records[model])
        self.process_record()

    def _knows(self, model: nn.Module) -> bool:
        """True if this object has a record of the model, or of a module that contains the model."""
        return any(part is model for recorded in self._records for part in recorded.modules())

    def process_record(self) -> ProcessRecord:
        """Return the record of this process and its patched models. The record is also written to a
        file, from which the `streambp launch` command prints its report.

        Each call describes the models anew; a model that the program has deleted keeps the
        description from the call before.
        """
        try:
            for model, record in list(self._records.items()):
                if record.left is None and is_patched(model):
                    record.description = report_safely(
                        lambda patched_model: str(describe(patched_model)),
                        model,
                        otherwise=lambda why: f"could not be told ({why})",
                    )
            accelerator = torch.accelerator.current_accelerator()
            device: Any
            if accelerator is None:
                device = None
            else:
                device = torch.get_device_module(accelerator)
            has_peak = hasattr(device, "max_memory_allocated") and device.is_initialized()
            peak = int(device.max_memory_allocated()) if has_peak else None
            account = ProcessRecord(
                os.getpid(), os.environ.get("RANK"), str([*sys.argv, ""][0]), self._models, peak
            )
            self._has_left = write_record(account)
            return account
        except Exception as error:
            return ProcessRecord(os.getpid(), None, reason(error), self._models)

    def print_report(self, at_end: bool = False) -> None:
        """Print a report on the models of this process: which layers are computed chunk by chunk,
        and how the loss is computed. Only rank 0 prints.

        Args:
            at_end: True at process exit: print only if this process patched or recorded a model,
                and if no `streambp launch` command reads the report. False: print always.
        """
        account = self.process_record()
        if at_end and (self._has_left or not account.models):
            return
        if os.environ.get("RANK", "0") == "0":  # other ranks would print the same
            say(
                report_safely(
                    table,
                    [account],
                    otherwise=lambda why: f"what this process did could not be told ({why})",
                )
            )


class LaunchCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """Trainer callback that patches models created after `Trainer.__init__`, and prints one report
    after the first step.

    A model in a program's own training loop has this object as a forward hook instead. The report
    is then printed after the first forward in training mode. Copies of the model copy the hook with
    its state, so the report is not printed again.

    Args:
        launched: patches models, and prints the report.
        trainer: the trainer; None: the object is a forward hook.
    """

    def __init__(self, launched: LaunchedProcess, trainer: Any = None) -> None:
        self.launched = launched
        self.trainer = trainer
        self.has_reported = False

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Patch models that were created after `Trainer.__init__`: the model that `model_init` has
        created for the trainer, and the reference model (`ref_model`) of TRL's trainers."""
        self.launched.patch_model(self.trainer.model, self.launched.trainer_config(self.trainer))
        reference = getattr(self.trainer, "ref_model", None)
        if isinstance(reference, nn.Module):
            self.launched.patch_model(reference)

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Print the report on the models that this process has patched, after the first training
        step. Later calls print nothing."""
        if not self.has_reported:
            self.has_reported = True
            self.launched.print_report()

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Write the record of this process and its patched models to a file at the end of training,
        for the report of the `streambp launch` command. The record is also written at the process's
        normal exit, but the process may be killed before."""
        self.launched.process_record()

    @torch.compiler.disable
    def __call__(self, model: nn.Module, inputs: Any, output: Any) -> None:
        """Print the report on the models that this process has patched, after the first forward in
        training mode. Called as a forward hook of the model."""
        if model.training:
            self.on_step_end()
