"""Numbers of each step in a Trainer's logs: console, history, and reporting integrations."""

from __future__ import annotations

import logging
import sys
from typing import Any

from transformers import TrainerCallback

from streambp.errors import StreamBPError
from streambp.model.last_step import last_step
from streambp.model.record import StepRecord

logger = logging.getLogger(__name__)
LOSS_KEY = "loss"  # present in training logs, absent from evaluation logs


class StreamCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """Trainer callback that adds numbers of the last step (`last_step(model)`) to the training
    logs.

    The added keys are `stream_tokens`, `stream_chunks`, `stream_chunk_size`, `stream_kept_gib`,
    `stream_free_gib`, `stream_peak_gib`, `stream_host_gib`, `stream_shared_tokens` and
    `stream_whole_layers`. A key is absent if its value is unknown. Three more keys cover the steps
    since the previous log. `stream_unpatched` is the fraction of micro-batches that ran unpatched.
    `stream_let_go` is the number of micro-batches that freed saved tensors. `stream_stall_s` is the
    time in seconds that compute waited for copies. Other log entries stay the same, and no
    exception is raised. Models that are not patched add nothing.

    Each Trainer that is made after `streambp.patch` has one, and a model that is patched later
    needs `StreamCallback.add_to(trainer)`. Passing an instance in `callbacks` changes nothing more.
    """

    def __init__(self) -> None:
        self._previous: StepRecord | None = None
        log_in_new_trainers()

    @classmethod
    def add_to(cls, trainer: Any) -> None:
        """Put a `StreamCallback` first among a Trainer's callbacks, before those that report logs.

        An existing `StreamCallback` is moved; otherwise a new one is added.
        """
        handler = getattr(trainer, "callback_handler", None)  # a mock trainer may have none
        if handler is not None:
            stream_callbacks = []
            for callback in handler.callbacks:
                if isinstance(callback, StreamCallback):
                    stream_callbacks.append(callback)
            other_callbacks = []
            for callback in handler.callbacks:
                if not isinstance(callback, StreamCallback):
                    other_callbacks.append(callback)
            handler.callbacks[:] = [*(stream_callbacks or [cls()]), *other_callbacks]

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Start counting steps anew, so that the logs count no step before this training."""
        self._previous = _last_step(kwargs.get("model"))

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        logs: Any = None,
        model: Any = None,
        **kwargs: Any,
    ) -> None:
        """Add the numbers of the last step to `logs`, and to the copy of `logs` in the Trainer's
        history."""
        try:
            if not isinstance(logs, dict) or LOSS_KEY not in logs:
                return
            record = _last_step(model)
            previous = self._previous
            if record is None or (previous is not None and record.number == previous.number):
                return
            self._previous = record
            counts = zip(_counts(record), _counts(previous), strict=True)
            steps, unpatched, short, stalls = (current - old_count for current, old_count in counts)
            values = {
                **record.numbers(),
                "stream_unpatched": unpatched / max(1.0, steps),
                "stream_let_go": short,
            }
            if record.host is not None:
                values["stream_stall_s"] = stalls
            history = state.log_history[-1] if state.log_history else {}
            holds_logs = all(history.get(name) == value for name, value in logs.items())
            for entry in (logs, history) if holds_logs else (logs,):
                entry.update({name: value for name, value in values.items() if name not in entry})
        except Exception:  # a report must not end training
            logger.warning(
                "The numbers of the last step could not be added to the logs.", exc_info=True
            )


class DefaultStreamCallback(StreamCallback):
    """The `StreamCallback` that each new Trainer adds by default.

    A Trainer warns if two of its callbacks have the same class. This subclass prevents the warning
    if a user passes a `StreamCallback` too.
    """


def log_in_new_trainers() -> None:
    """Add `DefaultStreamCallback` to transformers' default callbacks, so that every new Trainer
    logs the numbers of a patched model's steps.

    A Trainer calls its callbacks in order: the default callbacks, then those of wandb, trackio and
    TensorBoard, then the user's. Only a default callback can add numbers that all others report.
    """
    # Without the module no Trainer has been imported, and importing it takes a second.
    trainer = sys.modules.get("transformers.trainer")
    defaults = getattr(trainer, "DEFAULT_CALLBACKS", None)
    if isinstance(defaults, list) and DefaultStreamCallback not in defaults:
        defaults.append(DefaultStreamCallback)


def _last_step(model: Any) -> StepRecord | None:
    """Return the record of a model's last step; None if the model is None or not patched, or has
    run no step."""
    try:
        return None if model is None else last_step(model)
    except StreamBPError:
        return None


def _counts(record: StepRecord | None) -> tuple[float, float, float, float]:
    """Return four numbers of a record: all steps, unpatched steps, steps that freed saved tensors
    early, and the seconds for which compute waited for copies. `on_log` logs their growth since the
    previous log."""
    if record is None:
        return 0.0, 0.0, 0.0, 0.0
    stalls = 0.0 if record.host is None else record.host.stalls
    return float(record.number), float(record.unpatched_steps), float(record.short_steps), stalls
