"""Replace functions of recurrent and convolutional layers by the allocations of their kernels, on
tensors without data.

transformers' layers call globals of their modeling module, or attributes of the layers. These
functions are kernels of an installed package, or else transformers' own plain torch. Plain torch
allocates differently and loops over blocks of tokens in Python. While a step is run on tensors
without data, to count its memory and FLOPs, replacements make the kernels' allocations
(`delta_rules`, `state_spaces`). The functions are recognized by their parameters, not by a model's
name.

Before transformers 5.15 most plain torch code is inside the layers' own methods and not a function.
The count then uses that code, and `assumed_kernels` reports it; such layers run unchunked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from torch import nn

from streambp.device import has_data
from streambp.known_names import (
    CONVOLUTION_STATE,
    KERNEL_IMPORTS,
    PLANNED_CONVOLUTION,
    PLANNED_DELTA_RULE,
    PLANNED_MAMBA1,
    PLANNED_MAMBA2,
    PLANNED_SCAN,
    SELECTIVE_SCAN,
)
from streambp.planner.delta_rules import causal_conv, delta_rule
from streambp.planner.state_spaces import fused_mamba, fused_mamba2, mamba2_scan, selective_scan

Mixers = Literal["kernels", "torch", "installed"]
MIXER_CHOICES: tuple[Mixers, ...] = ("kernels", "torch", "installed")


@dataclasses.dataclass(frozen=True)
class MixerKernel:
    """Description of a function in transformers' recurrent or convolutional layers, and of a
    package's kernel for this function (fla's, for example). Used to count the kernel's memory on
    tensors without data.

    Attributes:
        parameters: names of parameters; a function in a modeling file with all of these is
            recognized as this function.
        package: name of the package with the kernel, such as "fla".
        allocate: function that allocates the kernel's tensors and computes nothing.
        arguments: names of the function's arguments that `allocate` takes, in order.
        asks_for_end: name of the argument that requests the end state as a second result; "": the
            function has no such argument.
        absent: names of parameters; a function with any of these is not recognized.
    """

    parameters: frozenset[str]
    package: str
    allocate: Callable[..., Any]
    arguments: tuple[str, ...]
    asks_for_end: str = ""
    absent: frozenset[str] = frozenset()


MIXER_KERNELS = (
    MixerKernel(
        PLANNED_CONVOLUTION, "causal_conv1d", causal_conv, ("hidden_states", "weight", "bias"),
        absent=frozenset({CONVOLUTION_STATE}),
    ),
    MixerKernel(
        PLANNED_DELTA_RULE, "fla", delta_rule,
        ("query", "key", "value", "g", "beta", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel"),
    ),
    MixerKernel(
        SELECTIVE_SCAN, "mamba_ssm", selective_scan,
        ("hidden_states", "dt", "A", "B", "C", "D", "z", "delta_bias"), "return_last_state",
    ),
    MixerKernel(
        PLANNED_MAMBA1, "mamba_ssm", fused_mamba,
        ("xz", "conv1d_weight", "conv1d_bias", "x_proj_weight", "delta_proj_weight", "out_proj_weight", "out_proj_bias",
         "A", "D", "delta_bias", "dt_rms_weight"),
    ),
    MixerKernel(
        PLANNED_SCAN, "mamba_ssm", mamba2_scan,
        ("hidden_states", "dt", "A", "B", "C", "D", "dt_bias", "initial_states", "chunk_size"), "return_final_states",
    ),
    MixerKernel(
        PLANNED_MAMBA2, "mamba_ssm", fused_mamba2,
        ("zxbcdt", "conv1d_weight", "conv1d_bias", "dt_bias", "A", "D", "rmsnorm_weight", "outproj_weight",
         "outproj_bias", "headdim", "ngroups", "chunk_size"),
    ),
)  # fmt: skip


def stand_in(
    function: Any, kernel: MixerKernel, signature: inspect.Signature, /, *args: Any, **kwargs: Any
) -> Any:
    """Call a function of a transformers modeling file, and return its result. If the first argument
    is a meta or fake tensor, do not call the function. Instead, allocate the tensors that a
    package's kernel would allocate, to count their memory, and return tensors without values.

    A model with data that trains at the same time uses the same function, and is not affected.

    Args:
        function: the modeling file's function, in whose place this function is called.
        kernel: the kernel, and the function that makes its allocations.
        signature: the function's signature.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
    """
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    arguments = bound.arguments
    if has_data(next(iter(arguments.values()))):
        return function(*args, **kwargs)
    results = kernel.allocate(*(arguments[name] for name in kernel.arguments))
    if kernel.asks_for_end and not arguments[kernel.asks_for_end]:
        return results[0]
    return results


def _plain_function(function: Any) -> Callable[..., Any]:
    """Return the Python function whose parameter names decide if a package has a kernel for
    `function`. This is `function` itself, or the forward if `function` is a module of the `kernels`
    package."""
    plain: Callable[..., Any]
    if isinstance(function, nn.Module):
        plain = function.forward
    else:
        plain = function
    return plain


def mixers_of(model: nn.Module) -> list[tuple[dict[str, Any], str, MixerKernel]]:
    """Return the functions of a model's recurrent and convolutional layers for which a package has
    kernels, as tuples (namespace, name, kernel).

    The namespace is a dict: the globals of a modeling file, or a module's attributes. `name` is the
    function's key in this dict.
    """
    mixers = []
    for space in (*globals_of(model), *(vars(module) for module in model.modules())):
        for name, value in space.items():
            if isinstance(value, type) or not callable(value):
                continue
            try:
                parameters = set(inspect.signature(_plain_function(value)).parameters)
            except (TypeError, ValueError):
                continue
            for kernel in MIXER_KERNELS:
                if kernel.parameters <= parameters and not kernel.absent & parameters:
                    mixers.append((space, name, kernel))
                    break
    return mixers


def globals_of(model: nn.Module) -> list[dict[str, Any]]:
    """Return the namespaces (`__globals__`) of the files that define the forwards of a model's
    modules. Functions in these namespaces are replaced while memory and FLOPs are counted on
    tensors without data.

    Several classes of one file share a namespace, which is returned once. Namespaces of torch
    itself are left out.
    """
    spaces: dict[int, dict[str, Any]] = {}
    for module_type in {type(module) for module in model.modules()}:
        space = getattr(inspect.unwrap(module_type.forward), "__globals__", {})
        if space.get("__name__", "").partition(".")[0] != "torch":
            spaces[id(space)] = space
    return list(spaces.values())


def uncountable_packages(model: nn.Module) -> list[str]:
    """Return the names of packages with kernels that a model's modeling files use, but whose memory
    and FLOPs the planner cannot count. The planner counts transformers' plain torch code in their
    place."""
    counted_packages = {kernel.package for _, _, kernel in mixers_of(model)}
    imported = set()
    for space in globals_of(model):
        for name, package in KERNEL_IMPORTS.items():
            if name in space:
                imported.add(package)
    return sorted(imported - counted_packages)


@contextlib.contextmanager
def replaced_functions(functions: Sequence[tuple[dict[str, Any], str, Any]]) -> Iterator[None]:
    """Context manager that replaces functions in namespaces (a modeling file's globals or a
    module's attributes), and restores the originals at the end.

    Args:
        functions: (namespace, name, replacement) of each function: the namespace as a dict, the
            function's key in the dict, and the new function.
    """
    originals = [(space, name, space[name]) for space, name, _ in functions]
    try:
        for space, name, stand_in in functions:
            space[name] = stand_in
        yield
    finally:
        for space, name, function in originals:
            space[name] = function


def replace_mixers(model: nn.Module, mixers: Mixers) -> contextlib.AbstractContextManager[None]:
    """Return a context manager for a step on meta or fake tensors whose memory is counted. Inside,
    functions of recurrent and convolutional layers only allocate the tensors that a package's
    kernels would allocate, and compute nothing.

    Args:
        model: the model, on meta or fake tensors.
        mixers: the packages whose kernels are assumed: all ("kernels"), those that can be imported
            ("installed"), or none ("torch"). Functions of other packages are not replaced.
    """
    replacements = []
    for space, name, kernel in mixers_of(model):
        if is_counted(kernel.package, mixers):
            plain = _plain_function(space[name])
            replacement = functools.partial(stand_in, space[name], kernel, inspect.signature(plain))
            replacements.append((space, name, functools.update_wrapper(replacement, plain)))
    return replaced_functions(replacements)


def is_counted(package: str, mixers: Mixers) -> bool:
    """True if a model's memory and FLOPs are predicted for this package's kernels in recurrent and
    convolutional layers. False: they are predicted for transformers' plain torch code.

    Args:
        package: the package, such as "fla".
        mixers: the packages whose kernels are assumed. All packages ("kernels"), packages that can
            be imported ("installed") or none ("torch").
    """
    return mixers == "kernels" or (mixers == "installed" and is_installed(package))


def is_installed(package: str) -> bool:
    """True if a package of kernels, for example "fla", can be imported. If it cannot, transformers
    uses plain torch."""
    try:
        importlib.import_module(package)
    except Exception:  # kernels built for another torch fail in many ways
        return False
    return True


def assumed_kernels(model: nn.Module, mixers: Mixers) -> str:
    """Return a note for a plan of a model with recurrent or convolutional layers; "" for other
    models. The note names the packages whose kernels the plan assumes, and the packages in whose
    place the plan assumes plain torch code.

    Args:
        model: the model.
        mixers: the packages whose kernels were assumed: all ("kernels"), those that can be imported
            ("installed"), or none ("torch").
    """
    packages = dict.fromkeys(kernel.package for _, _, kernel in mixers_of(model))
    stand = []
    for package in packages:
        if is_counted(package, mixers):
            stand.append(package)
    plain = [
        *(package for package in packages if package not in stand),
        *uncountable_packages(model),
    ]
    if stand:
        parts = [f"kernels of {', '.join(stand)}"]
    else:
        parts = []
    parts += (
        [f"transformers' plain torch where {', '.join(plain)} would have kernels"] if plain else []
    )
    return " and ".join(parts)
