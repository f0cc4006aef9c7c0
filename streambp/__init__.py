"""Train HuggingFace models on sequences many times longer than gradient checkpointing allows, with
exact gradients.

    import streambp
    streambp.patch(model)

Names and subpackages (`streambp.verify`, `streambp.losses`, ...) are imported on first access,
because torch and transformers take seconds to import.
"""

import importlib
import importlib.util
import logging
from typing import TYPE_CHECKING, Any

from streambp.libraries import refuse_other_distribution, warn_of_untested

if TYPE_CHECKING:
    from streambp.config import StreamConfig
    from streambp.errors import StreamBPError
    from streambp.model.describe import describe
    from streambp.model.last_step import last_step
    from streambp.model.mxfp4_loading import keep_mxfp4
    from streambp.model.patching import unpatch
    from streambp.model.warm_up import warm_up
    from streambp.planner.auto import patch

__version__ = "0.1.0"
__all__ = [
    "StreamBPError",
    "StreamConfig",
    "describe",
    "keep_mxfp4",
    "last_step",
    "patch",
    "unpatch",
    "warm_up",
]

NAME_MODULES = {
    "StreamBPError": "errors",
    "StreamConfig": "config",
    "describe": "model.describe",
    "keep_mxfp4": "model.mxfp4_loading",
    "last_step": "model.last_step",
    "patch": "planner.auto",
    "unpatch": "model.patching",
    "warm_up": "model.warm_up",
}


def __getattr__(name: str) -> Any:
    """Import a name of `__all__`, or a module of the package, on first access, and return it.

    Raises:
        AttributeError: `name` is neither.
    """
    if name in NAME_MODULES:
        return getattr(importlib.import_module(f"{__name__}.{NAME_MODULES[name]}"), name)
    if name.startswith("_") or importlib.util.find_spec(f"{__name__}.{name}") is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    """List the names that `dir(streambp)` and completion in a notebook show, including names that
    are not imported yet."""
    return sorted({*globals(), *__all__, "head", "integrations", "losses", "planner", "verify"})


# a program that reads the log sets a handler and the level INFO
logging.getLogger(__name__).addHandler(logging.NullHandler())
refuse_other_distribution()
warn_of_untested("torch", "transformers")
