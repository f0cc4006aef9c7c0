"""Other ways to train on long sequences, which `verify` compares with streaming on one model.

Each method but "unpatched" gets a copy of the model's modules that shares all parameters and
buffers with the model. The model itself is not changed, and a copy costs no memory.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from streambp.device import is_accelerator
from streambp.errors import ConfigError, StreamBPError, UnsupportedModelError
from streambp.fields import short_repr
from streambp.known_names import LIGER as LIGER_PACKAGE
from streambp.known_names import LIGER_OTHER_PARTS
from streambp.libraries import require_library
from streambp.model.fused_layers import NoKernelsError, install_kernels

UNPATCHED = "unpatched"
CHECKPOINTING = "checkpointing"
TRL = "trl"
LIGER = "liger"
METHODS = (UNPATCHED, CHECKPOINTING, TRL, LIGER)
METHOD_TEXTS = {
    UNPATCHED: "unpatched",
    CHECKPOINTING: "checkpointing",
    TRL: "checkpointing, TRL's head",
    LIGER: "checkpointing, Liger's kernels",
}
LAYER_KERNELS = (*LIGER_OTHER_PARTS, "rms_norm", "layer_norm", "swiglu", "geglu")
LIGER_HEAD_OPTION = "fused_linear_cross_entropy"
CHECKPOINTING_ATTRIBUTE = (
    "gradient_checkpointing"  # transformers' attribute of modules that checkpoint
)

Forward = Callable[..., Any]
Method: TypeAlias = str | Callable[[Any], Forward]


def name_of(method: Method) -> str:
    """Return the text that names a method in a table. A method is a way to train, for example with
    gradient checkpointing, that `verify` compares with streambp.

    Args:
        method: a name in `METHODS`, such as "trl", or a function that returns a model's forward for
            this way to train. A name has a fixed text, such as "checkpointing, TRL's head". The
            text for a function is its own name or its class's.
    """
    if isinstance(method, str):
        return METHOD_TEXTS[method]
    return getattr(method, "__name__", type(method).__name__)


def check_methods(methods: Sequence[Method]) -> None:
    """Raise an error if a name of a method is unknown or occurs twice. A method is a way to train
    that `verify` compares with streambp.

    Args:
        methods: names such as "checkpointing" or "trl" (`METHODS`), or functions, which are not
            checked.

    Raises:
        ConfigError: a name is unknown, or occurs twice.
    """
    names = [method for method in methods if isinstance(method, str)]
    for name in names:
        if name not in METHODS:
            raise ConfigError(
                f"against names {short_repr(name)}; it must be among {', '.join(METHODS)}. Several "
                "names are separated by commas."
            )
    if len(set(names)) < len(names):
        raise ConfigError(f"against is {', '.join(names)}. Name each method once.")


def check_libraries(methods: Sequence[Method], device: torch.device) -> None:
    """Check that the libraries of the methods are installed, and that their kernels support the
    device. Methods are ways to train, which `verify` compares with streambp.

    Args:
        methods: names of `METHODS`, or functions, which are not checked.
        device: the model's device.

    Raises:
        MissingLibraryError: a method's library is not installed.
        StreamBPError: a library is too old, or its kernels need a GPU.
    """
    if TRL in methods:
        _trl_patch()
    if LIGER in methods:
        _liger_patch()
        if not is_accelerator(device):
            raise StreamBPError(
                f"Liger's kernels need a GPU, and this model is on {device.type}. Leave "
                f"{LIGER} out, or move the model to a GPU."
            )


@contextlib.contextmanager
def prepare_method(model: nn.Module, method: Method) -> Iterator[Forward]:
    """Context manager that prepares a model for a method and yields the method's forward, a
    function of the model's arguments. A method is a way to train ("checkpointing" or "trl", for
    example), which `verify` compares with streambp.

    The method changes a copy of the modules with the same parameters and buffers. The method
    "unpatched" needs no copy: the yielded forward is the model itself.

    Args:
        model: the unpatched model, in eval mode. A backward after the yielded forward adds to
            `.grad` of the model's parameters.
        method: a name in `METHODS`, or a function that gets the copy and returns its forward.

    Raises:
        StreamBPError: the method, or its library, does not support this model.
    """
    if method == UNPATCHED:
        yield model
        return
    copied_model: Any = _shared_copy(model)
    if not isinstance(method, str):
        yield method(copied_model)
        return
    forward: Forward = copied_model
    if method == TRL:
        forward = _add_trls_head(copied_model)
    if method == LIGER:
        _add_ligers_kernels(copied_model)
    _checkpoint(copied_model)
    yield forward


def _shared_copy(model: nn.Module) -> nn.Module:
    """Return a copy of a model's modules that shares the parameters and buffers. Methods (ways to
    train) change the copy, so that the model's own modules stay as they are."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        memo[id(tensor)] = tensor
    return copy.deepcopy(model, memo)


def _checkpoint(model: Any) -> None:
    """Enable transformers' gradient checkpointing on a model, as `gradient_checkpointing=True` does
    in training.

    Checkpointing requires training mode, which is set only on modules with the attribute
    `gradient_checkpointing`. Dropout in these modules is set to 0, so that results are comparable
    with those of other methods, which run in eval mode.
    """
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise UnsupportedModelError(
            f"{type(model).__name__} supports no gradient checkpointing in transformers. Pass "
            f"{UNPATCHED} instead."
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # its name changes in transformers 6
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for module in model.modules():
        if not hasattr(module, CHECKPOINTING_ATTRIBUTE):
            continue
        module.training = True
        for field, value in vars(module).items():
            if isinstance(value, float) and "drop" in field:
                setattr(module, field, 0.0)


def _trl_patch() -> Callable[[Any], None]:
    """Return a function that changes a model in the way of TRL's trainers: it adds TRL's chunked
    head (logits and loss in chunks) and selective activation checkpointing."""
    with require_library("trl"):
        importlib.import_module("trl")
    try:
        from trl.models import enable_selective_activation_checkpointing
        from trl.trainer.utils import add_fused_lm_head
    except ImportError as error:
        raise StreamBPError(
            f"This trl has no chunked head or no selective checkpointing ({error}). Install it: "
            "pip install 'trl>=1.16'."
        ) from error

    def add(model: Any) -> None:
        """Add to a model TRL's chunked head (logits and loss in chunks), and selective activation
        checkpointing."""
        add_fused_lm_head(model)
        enable_selective_activation_checkpointing(model)

    return add


def _add_trls_head(model: Any) -> Forward:
    """Add to a model TRL's chunked head (logits and loss in chunks), and selective activation
    checkpointing. Return the model's forward, which then uses both."""
    _trl_patch()(model)
    return functools.partial(model, fused_lm_head=True)


def _liger_patch() -> Callable[..., None]:
    """Return Liger's function that replaces parts of a model instance by Liger's kernels.

    Raises:
        MissingLibraryError: Liger is not installed.
    """
    with require_library(LIGER_PACKAGE):
        package = importlib.import_module(f"{LIGER_PACKAGE}.transformers")
    apply: Callable[..., None] = package._apply_liger_kernel_to_instance
    return apply


def _add_ligers_kernels(model: nn.Module) -> None:
    """Replace a model's norms, MLPs and loss (fused linear cross-entropy) by Liger's kernels.

    The model keeps its own rotary embedding, because Liger would replace the rotary embedding of
    all models in the process, also of those that are compared with this model.
    """
    apply = _liger_patch()
    try:
        install_kernels(model)
    except NoKernelsError as error:
        raise UnsupportedModelError(
            f"{error.fault}. Leave {LIGER} out of the methods to compare with."
        ) from error
    parts = dict.fromkeys(LAYER_KERNELS, False)
    parts[LIGER_HEAD_OPTION] = True
    apply(model=model, **parts)
