"""torch's checkpoint, left in order if the checkpointed function raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import checkpoint


def checkpoint_function(
    function: Callable[..., Any], *args: Any, early_stop: bool = True, **kwargs: Any
) -> Any:
    """Return function(*args, **kwargs), which torch's checkpoint recomputes in backward.

    Before torch 2.13, an exception in `function` left checkpoint's hooks on the stack of the thread
    for as long as anything referred to the traceback, as `sys.last_traceback` does in a notebook.
    Later forwards of any model then saved their tensors through these hooks, and their backward
    recomputed the function that had failed. So no exception passes through checkpoint here.

    Args:
        function: the function to run and to recompute.
        args: its arguments.
        early_stop: True to end a recomputation at the last tensor that backward needs.
        kwargs: its keyword arguments.

    Raises:
        Exception: the exception of `function`, after checkpoint has removed its hooks.
    """
    checkpointed = _ErrorHolder(function)
    result = checkpoint(checkpointed, *args, use_reentrant=False, early_stop=early_stop, **kwargs)
    error = checkpointed.error
    if error is None:
        return result
    # The traceback refers to both, and would keep itself alive.
    checkpointed.error = None
    try:
        raise error
    finally:
        del error


class _ErrorHolder:
    """Function whose first call holds an exception in place of raising it.

    Args:
        function: the function to call.

    Attributes:
        error: the exception of the first call.
        is_recomputation: True once the first call has begun.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.error: BaseException | None = None
        self.is_recomputation = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_recomputation:
            return self._function(*args, **kwargs)
        self.is_recomputation = True
        try:
            return self._function(*args, **kwargs)
        except BaseException as error:
            self.error = error
            return None
