"""Whether a module's forward is its class's own or was written by another library.

[Note: foreign forwards] The head's stand-ins (`lazy/deferred.py`) are made for forwards that compute a loss with torch's
operations, as transformers' do. A fused loss of another library hands the hidden states to an autograd.Function instead,
or to a kernel, which need real ones. So nothing is deferred below a forward that another library wrote: whoever has put it
there, on the class or on the instance, before `patch` or after it. A function's globals tell where it was written;
`__module__` does not, since `functools.wraps` copies it from what is wrapped.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from streambp.instance_forward import InstanceForward, Unbound
from streambp.known_names import (
    COMPILED,
    COMPILED_CALL,
    COMPILED_FROM,
    DEPRECATION,
    FORWARDS_ARE_PLAIN,
    TRLS_FORWARD,
    TRLS_HEAD,
    TRLS_IN_FLOAT32,
    TRLS_OUTPUTS,
    TRLS_TEMPERATURE,
)

REGION = "_streambp_region"  # of a forward whose code `patch` compiles: what does


def foreign_forward(module_class: type[nn.Module], forward: Callable[..., Any] | None = None) -> str | None:
    """The full name of a function of another library that runs when a module is called; None if there is none.

    Args:
        module_class: the module's class. A user's own subclass of a transformers model is not another library: all
            modules that define one of its bases are its own.
        forward: what stands in for the class's forward on the instance, if anything does.
    """
    bases = module_class.__mro__
    own = {base.__module__ for base in bases}
    of_classes = (base.__dict__["forward"] for base in bases if "forward" in base.__dict__)
    for start in (forward, *of_classes):
        for function in wrapped_functions(start):
            if trls_head(function) is not None:
                continue  # it asks the forward below for the loss, unless it is told to compute its own
            home = home_of(function)
            if home not in own and home.partition(".")[0] not in FORWARDS_ARE_PLAIN:
                return full_name(function)
    return None


@functools.lru_cache
def foreign_of_class(module_class: Any, forwards: tuple[Any, ...]) -> str | None:
    """`foreign_forward`, asked once as long as a class and its bases have these forwards."""
    return foreign_forward(module_class)


def wrapped_functions(forward: Any) -> Iterator[Any]:
    """A forward and the functions that it tells to wrap, outermost first."""
    seen: set[int] = set()
    while forward is not None and id(forward) not in seen:
        seen.add(id(forward))
        if isinstance(forward, MethodType):
            forward = forward.__func__
        elif isinstance(forward, functools.partial):
            forward = forward.func
        elif isinstance(forward, InstanceForward):
            forward = forward.previous  # without one, the class's
        elif isinstance(forward, Unbound):
            return  # ours, of the module at hand
        else:
            yield forward
            trls = trls_head(forward)
            forward = getattr(forward, "__wrapped__", None) if trls is None else trls[TRLS_FORWARD]


TRLS_SETTINGS = (TRLS_FORWARD, TRLS_TEMPERATURE, TRLS_IN_FLOAT32, TRLS_OUTPUTS)


def trls_head(function: Any) -> dict[str, Any] | None:
    """What TRL's `add_fused_lm_head` was called with and the forward it stands in front of, if `function` is what it
    made; there is no other way to learn them."""
    code = getattr(function, "__code__", None)
    if code is None or code.co_name != TRLS_HEAD or not home_of(function).startswith("trl."):
        return None
    found = dict(zip(code.co_freevars, (cell.cell_contents for cell in function.__closure__), strict=True))
    return found if all(name in found for name in TRLS_SETTINGS) else None


def home_of(function: Any) -> str:
    """The module whose source has the function; for another callable, its class's."""
    names = getattr(function, "__globals__", None)
    if names is None and not hasattr(function, "__code__"):
        names = getattr(type(function).__call__, "__globals__", None)
    home = (names or {}).get("__name__") or getattr(function, "__module__", None)
    return str(home)


def package_of(function: Any) -> str:
    """The library or program that wrote a callable, such as "peft"; of a partial, of what it calls."""
    return home_of(_called(function)).partition(".")[0]


def full_name(function: Any) -> str:
    """A callable with its module, as messages name it; of a partial, what it calls."""
    function = _called(function)
    return f"{home_of(function)}.{name_of(function)}"


def _called(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def undecorated(function: Any) -> Any:
    """The function inside of transformers' decorators that warn of deprecated arguments (5.17: around `sdpa_mask`)."""
    while home_of(function) == DEPRECATION and hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def eager(forward: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """What `torch.compile` was given, if it made this function: streamed layers stay eager. `functools.wraps` copies the
    attribute that tells it, the function's globals it does not."""
    if isinstance(forward, MethodType) or not home_of(forward).startswith("torch._dynamo"):
        return forward
    return getattr(forward, COMPILED_FROM, forward)


def is_compiled(module: nn.Module) -> bool:
    """Whether `Module.compile` or `torch.compile` compiles the module, or its forward."""
    own = vars(module)
    forward = own.get("forward")
    return (
        own.get(COMPILED_CALL) is not None
        or COMPILED in module._modules
        or (forward is not None and eager(forward) is not forward)
    )


def compiled_inside(module: nn.Module) -> list[nn.Module]:
    """The modules in it that are compiled."""
    return [inner for inner in module.modules() if inner is not module and is_compiled(inner)]


def compiled_around(
    model: nn.Module, root: nn.Module | None, layers: list[nn.Module], ours: list[nn.Module]
) -> set[str] | None:
    """Names of modules outside of streamed layers whose compiled code runs; None: no module there is compiled.

    What is compiled with a module of `ours` in it runs eagerly. So do modules that a copy of the model has got since, as
    accelerate's regional compilation makes one: it computes with the modules that were patched. The head's blocks read
    its weight alone.

    Args:
        model: what the program holds. root: what was given to `patch`. ours: modules with another forward of ours.
    """
    root = model if root is None else root
    insides = {id(module) for layer in layers for module in layer.modules() if module is not layer}
    heads = {id(m.get_output_embeddings()) for m in root.modules() if isinstance(m, PreTrainedModel)}
    computing, forwards = {id(module) for module in root.modules()} - heads, set(map(id, ours))
    around, apart = False, set()
    for name, module in (*model.named_modules(), *root.named_modules()):
        if not is_compiled(module) or id(module) in insides:
            continue
        around = True
        if id(module) in computing and not any(id(inner) in forwards for inner in module.modules()):
            apart.add(name.replace(f"{COMPILED}.", ""))
    return apart if around else None


def has_compiled_parts(layer: nn.Module) -> bool:
    """Whether compiled code computes something in it: modules that are compiled, or regions that `patch` has put there."""
    return any(module is not layer and (is_compiled(module) or is_region(module)) for module in layer.modules())


def is_region(module: nn.Module) -> bool:
    """Whether the module's own forward calls code that `patch` compiles (`model/compiled_regions.py`)."""
    forward = module.__dict__.get("forward")
    return getattr(getattr(forward, "__func__", forward), REGION, None) is not None


def name_of(function: Any) -> str:
    """A function's own name, where `functools.wraps` has copied another's; for another callable, its class's."""
    code = getattr(function, "__code__", None)
    return str(code.co_name if code is not None else getattr(function, "__qualname__", type(function).__name__))
