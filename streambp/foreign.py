"""Find functions that other code puts in place of a module's forward or of torch's functions.

The head's lazy tensors (`lazy/lazy_hidden.py`) work in forwards that compute a loss with torch's
operations, like transformers' forwards. A fused loss of another library passes the hidden states to
an autograd.Function or a kernel, which need real tensors. Nothing is therefore deferred inside a
forward that another library wrote. Such a forward may be on the class or on the instance, set
before or after `patch`. A function's globals show its module; `__module__` does not, since
`functools.wraps` copies it from the wrapped function.

A program may replace a torch function by a wrapper (a z-loss around `F.cross_entropy`, a counter).
When the wrapper calls torch's function, torch looks up the name for `__torch_function__` and passes
the wrapper. Code that calls the wrapper then applies it twice. The function is therefore found by
its caller: by the code of the frame that called `handle_torch_function`. For a call from C, it is
found by the wrapper's name in `torch.Tensor`. Functions are stored by name when streambp is
imported. A function that was wrapped before is rebuilt from its code. streambp's own arithmetic on
logits uses `torch_own` and `nn_own`, which no program replaces.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from types import (
    BuiltinFunctionType,
    FunctionType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    WrapperDescriptorType,
)
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import TensorBase, _nn, _VariableFunctions
from torch.overrides import handle_torch_function
from transformers import PreTrainedModel

from streambp.errors import StreamBPError
from streambp.instance_forward import InstanceForward, UnboundForward
from streambp.known_names import (
    COMPILED_CALL,
    COMPILED_FROM,
    COMPILED_MODULE_ATTRIBUTE,
    DEPRECATION_MODULE,
    FORWARDS_ARE_PLAIN,
    TRLS_FORWARD,
    TRLS_HEAD,
    TRLS_IN_FLOAT32,
    TRLS_OUTPUTS,
    TRLS_TEMPERATURE,
)

REGION_ATTRIBUTE = (
    "_streambp_region"  # attribute of a forward whose code `patch` compiles: the compiled code
)


def foreign_forward(
    module_class: type[nn.Module], forward: Callable[..., Any] | None = None
) -> str | None:
    """Return the full name of a function that another library (Liger, for example) has put in place
    of a module's forward; None if the module runs its own forward.

    Args:
        module_class: the module's class. The Python modules in which the class and its bases are
            defined do not count as another library. Thus a user's subclass of a transformers model
            runs its own forward.
        forward: the forward on the instance; None: the class's forward runs.
    """
    bases = module_class.__mro__
    modules_of_bases = {base.__module__ for base in bases}
    of_classes = (base.__dict__["forward"] for base in bases if "forward" in base.__dict__)
    for start in (forward, *of_classes):
        for function in wrapped_functions(start):
            if trls_head(function) is not None:
                # TRL's head calls the inner forward for the loss, unless set to compute its own
                continue
            home = home_of(function)
            if home not in modules_of_bases and home.partition(".")[0] not in FORWARDS_ARE_PLAIN:
                return full_name(function)
    return None


@functools.lru_cache
def foreign_of_class(module_class: Any, forwards: tuple[Any, ...]) -> str | None:
    """Return the full name of a function that another library has put in place of the forward of a
    class or its bases. Return None if the class runs its own forward.

    The result is cached. The current forwards are an argument, so that the cache is not used after
    one of them was replaced.

    Args:
        module_class: the class.
        forwards: the current forwards of the class and its bases.
    """
    return foreign_forward(module_class)


def wrapped_functions(forward: Any) -> Iterator[Any]:
    """Yield a forward, and then the functions inside of its decorators and partials, outermost
    first."""
    visited: set[int] = set()
    while forward is not None and id(forward) not in visited:
        visited.add(id(forward))
        if isinstance(forward, MethodType | staticmethod):
            forward = forward.__func__
        elif isinstance(forward, functools.partial):
            forward = forward.func
        elif isinstance(forward, InstanceForward):
            forward = forward.previous  # None continues with the class's forward
        elif isinstance(forward, UnboundForward):
            return  # streambp's own wrapper of this module
        else:
            yield forward
            trls = trls_head(forward)
            if trls is None:
                forward = getattr(forward, "__wrapped__", None)
            else:
                forward = trls[TRLS_FORWARD]


TRLS_SETTINGS = (TRLS_FORWARD, TRLS_TEMPERATURE, TRLS_IN_FLOAT32, TRLS_OUTPUTS)


def trls_head(function: Any) -> dict[str, Any] | None:
    """Return the closure variables of `function`, by name, if `function` is a forward that TRL's
    `add_fused_lm_head` has installed; None for any other function.

    The variables are TRL's arguments and the inner forward, which are not available otherwise.
    """
    code = getattr(function, "__code__", None)
    if code is None or code.co_name != TRLS_HEAD or not home_of(function).startswith("trl."):
        return None
    variables = dict(
        zip(code.co_freevars, (cell.cell_contents for cell in function.__closure__), strict=True)
    )
    if all(name in variables for name in TRLS_SETTINGS):
        return variables
    return None


def home_of(function: Any) -> str:
    """Return the name of the Python module in which a function was written; for another callable,
    the module of its class."""
    names = getattr(function, "__globals__", None)
    if names is None and not hasattr(function, "__code__"):
        names = getattr(type(function).__call__, "__globals__", None)
    home = (names or {}).get("__name__") or getattr(function, "__module__", None)
    return str(home)


def package_of(function: Any) -> str:
    """Return the top-level package that defines a callable, such as "peft". A functools.partial has
    the package of the function inside."""
    return home_of(_unwrap_partials(function)).partition(".")[0]


def full_name(function: Any) -> str:
    """Return a callable's qualified name with its module, for messages. A functools.partial has the
    name of the function inside."""
    function = _unwrap_partials(function)
    return f"{home_of(function)}.{name_of(function)}"


def _unwrap_partials(function: Any) -> Any:
    """Return the function inside of nested `functools.partial` objects."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def strip_deprecation(function: Any) -> Any:
    """Return the function inside of transformers' deprecation decorators, which release 5.17 puts
    around `sdpa_mask`. A function without these decorators is returned unchanged."""
    while home_of(function) == DEPRECATION_MODULE and hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def eager_forward(forward: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """Return the original of a forward that `torch.compile` made; other forwards are returned
    unchanged.

    The compiled forward is recognized by its globals, which are those of torch._dynamo. The
    attribute with the original is no proof: `functools.wraps` copies it to wrappers that are not
    compiled.
    """
    if isinstance(forward, MethodType) or not home_of(forward).startswith("torch._dynamo"):
        return forward
    return getattr(forward, COMPILED_FROM, forward)


def is_compiled(module: nn.Module) -> bool:
    """True if a module runs compiled, by `Module.compile` or `torch.compile` of the module or its
    forward."""
    attributes = vars(module)
    forward = attributes.get("forward")
    return (
        attributes.get(COMPILED_CALL) is not None
        or COMPILED_MODULE_ATTRIBUTE in module._modules
        or (forward is not None and eager_forward(forward) is not forward)
    )


def compiled_submodules(module: nn.Module) -> list[nn.Module]:
    """Return the compiled modules inside a module, without the module itself."""
    return [inner for inner in module.modules() if inner is not module and is_compiled(inner)]


def compiled_module_names(
    model: nn.Module, root: nn.Module | None, layers: list[nn.Module], ours: list[nn.Module]
) -> set[str] | None:
    """Return the names of the modules outside of the chunked layers that really run compiled code.
    The set is empty if such modules are compiled but run eagerly; None if no module outside of the
    layers is compiled.

    A compiled module runs eagerly if its forward, or that of a module inside, was replaced by
    `patch`. Compiled modules that exist only in a copy of the model, as accelerate's regional
    compilation makes, are left out, because the copy computes with the original modules. A compiled
    output projection is left out too, because only its weight is read.

    Args:
        model: the program's model.
        root: the module that was passed to `patch`; None: `model`.
        layers: the decoder layers that are computed chunk by chunk.
        ours: all modules whose forward `patch` has replaced.
    """
    root = model if root is None else root
    insides = set()
    for layer in layers:
        for module in layer.modules():
            if module is not layer:
                insides.add(id(module))
    heads = set()
    for m in root.modules():
        if isinstance(m, PreTrainedModel):
            heads.add(id(m.get_output_embeddings()))
    computing = set(map(id, root.modules())) - heads
    forwards = set(map(id, ours))
    any_compiled = False
    names = set()
    for name, module in (*model.named_modules(), *root.named_modules()):
        if not is_compiled(module) or id(module) in insides:
            continue
        any_compiled = True
        if id(module) in computing and not any(id(inner) in forwards for inner in module.modules()):
            names.add(name.replace(f"{COMPILED_MODULE_ATTRIBUTE}.", ""))
    return names if any_compiled else None


def has_compiled_parts(layer: nn.Module) -> bool:
    """True if compiled code runs inside a layer: compiled modules, or parts that `patch` has
    compiled for kernels="compiled"."""
    return any(
        module is not layer and (is_compiled(module) or is_region(module))
        for module in layer.modules()
    )


def is_region(module: nn.Module) -> bool:
    """True if a module's forward calls code that `patch` has compiled for kernels="compiled"
    (`model/compiled_regions.py`)."""
    forward = module.__dict__.get("forward")
    return getattr(getattr(forward, "__func__", forward), REGION_ATTRIBUTE, None) is not None


def name_of(function: Any) -> str:
    """Return the name with which a function was written, even if `functools.wraps` gave it another
    name; for another callable, its class's name."""
    code = getattr(function, "__code__", None)
    if code is not None:
        return str(code.co_name)
    return str(getattr(function, "__qualname__", type(function).__name__))


torch_own = _VariableFunctions  # torch's functions of C, which no program replaces
nn_own = _nn
C_FUNCTION_TYPES = (
    BuiltinFunctionType,
    MethodDescriptorType,
    WrapperDescriptorType,
    MethodWrapperType,
)
TORCH_MODULES = (torch.nn.functional, torch.functional, torch._tensor, torch.autograd)


# Torch's Python functions and methods that no program replaced, by module and name.
ORIGINAL_FUNCTIONS = {
    (home.__name__, value.__name__): value
    for home in TORCH_MODULES
    for value in (*vars(home).values(), *vars(Tensor).values())
    if isinstance(value, FunctionType)
    and value.__globals__ is vars(home)
    and not value.__code__.co_freevars
}
TENSOR_MODULE_GLOBALS = vars(torch._tensor)
TENSOR_METHODS = {
    name: value
    for name, value in vars(Tensor).items()
    if getattr(value, "__globals__", None) is TENSOR_MODULE_GLOBALS
}


def torch_function_of(func: Any) -> Any:
    """Return torch's own function for the argument `func` of `__torch_function__`. The two differ
    if a program has replaced a function of torch by a wrapper: torch then passes the wrapper.

    `__torch_function__` must call `torch_function_of` directly, because `torch_function_of`
    inspects the caller's frames.

    Args:
        func: the argument of `__torch_function__`.

    Raises:
        StreamBPError: `func` replaces several methods of `torch.Tensor`, and torch does not report
            which was called.
    """
    if isinstance(func, C_FUNCTION_TYPES):
        return func
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(
        "torch._dynamo"
    ):
        frame = frame.f_back  # the frame of `torch.compiler.disable`
    if frame.f_code is handle_torch_function.__code__ and frame.f_back is not None:
        code = frame.f_back.f_code
        names = frame.f_back.f_globals
        if getattr(func, "__code__", None) is code or func not in (
            names.get(code.co_name),
            vars(Tensor).get(code.co_name),
        ):
            return func  # an inner function, or a call in another function's name
        stored = ORIGINAL_FUNCTIONS.get((names["__name__"], code.co_name))
        # The function was wrapped before the import. Torch passes all arguments, so defaults are
        # not needed.
        return stored or FunctionType(code, names, code.co_name)
    stands_for = []
    for name, value in vars(Tensor).items():
        if value is func and hasattr(TensorBase, name):
            stands_for.append(name)
    if len(stands_for) > 1:
        raise StreamBPError(
            f"{getattr(func, '__qualname__', func)} replaces several methods of torch.Tensor "
            f"({', '.join(stands_for)}), and was called with logits that do not exist yet. Write a "
            "function for each method, or use StreamConfig(head=False)."
        )
    if stands_for:
        return getattr(TensorBase, stands_for[0])
    return func


def rule_name(func: Any) -> str:
    """Return the key under which the rule for a torch function is stored. A rule computes the
    function's result for a lazy tensor (one whose values are computed on use) without its values.

    Functions of other code, such as custom operators, get a key without a rule.
    """
    if isinstance(func, C_FUNCTION_TYPES) or any(
        getattr(func, "__globals__", None) is vars(home) for home in TORCH_MODULES
    ):
        return str(func.__name__)
    return f"{getattr(func, '__module__', None)}.{getattr(func, '__qualname__', func)}"


def tensor_method(name: str) -> Callable[..., Any] | None:
    """Return torch's own method `name` of `torch.Tensor`, even if a program has replaced the
    method; None if there is no such method."""
    own_method: Callable[..., Any] | None = TENSOR_METHODS.get(name) or getattr(
        TensorBase, name, None
    )
    return own_method
