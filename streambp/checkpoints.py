"""torch's checkpoint, left in order if the checkpointed function raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import checkpoint


def checkpoint_function(
    function: Callable[..., Any], *args: Any, early_stop: bool = True, **kwargs: Any
) -> Any:
    """Call a function under torch's checkpoint, and return its result. Backward recomputes the
    function.

    An exception of the function is raised only after checkpoint has ended. Before torch 2.13, an
    exception in checkpoint left checkpoint's hooks active in this thread while the traceback
    existed. A notebook keeps the traceback in `sys.last_traceback`. Later forwards of any model
    then saved their tensors through these hooks, and their backward recomputed the function that
    had failed.

    Args:
        function: the function to run and to recompute.
        args: positional arguments of the function.
        early_stop: True to end a recomputation at the last tensor that backward needs.
        kwargs: keyword arguments of the function.

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
    """Callable around a function for torch's checkpoint. If the function raises in the first call
    (the forward), the exception is stored in `error`, and the call returns None. Later calls
    (recomputations in backward) raise as usual.

    Args:
        function: the function to call.

    Attributes:
        error: the exception of the first call; None: the first call did not raise.
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
