"""Compile parts of a model's layers with torch, for `kernels="compiled"`; the forwards are set on
module instances.

A region is code of a layer that treats all tokens alike and contains no Linear. Examples are a
norm, the activation and product of a gated MLP, and the rotation. Linears stay outside, because a
streamed layer replaces their forward in each pass, saves their outputs and accumulates their weight
gradients. A region computes the class's own code.

Before a region is set, plain torch checks two properties by value: a norm treats tokens alike, and
an MLP is down(act(gate) * up). A module that fails the check (dropout in between, groups of
features) retains its own forward. Trial runs of a layer use the uncompiled code of a region, like
all compiled code (`admission/rehearsal.py`).

A region is compiled for tokens [n, h] with dynamic n, so chunks, rows and sequences of any length
share one graph. Torch compiles further graphs for a row's first chunk (offset 0) in a layer's first
norm, and for a single row in the rotation. A single token would need another graph too; the class's
own code computes it instead. Each pass has its own graphs: forward, the refill (whose weights
belong to one chunk) and recomputation. A region's code object is a copy for this model alone. Torch
counts graphs for each code object, and silently runs the code eagerly after the eighth.
"""

from __future__ import annotations

import inspect
import re
import shutil
import time
import types
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend
from torch.utils._triton import has_triton

from streambp.admission.stacks import find_stacks
from streambp.device import has_data
from streambp.foreign import REGION_ATTRIBUTE, compiled_submodules, is_compiled
from streambp.known_names import (
    ACCELERATE_HOOK,
    FUSED_MLP,
    GATED_MLP,
    MODULE_TABLES,
    ROTARY,
    ROTARY_PARAMETERS,
)
from streambp.model.fused_layers import (
    TEST_SIZE,
    AttributeChange,
    InstalledKernels,
    RotationGlobals,
    compilers_marks,
    rotation_globals,
)
from streambp.source import with_globals

BACKEND = "inductor"
C_COMPILERS = ("cc", "gcc", "clang", "g++", "clang++", "cl")  # inductor's code needs one of these
MAX_GRAPHS = 64  # limit for a region before torch runs it eagerly; torch's default is 8
NORM_CLASS_PART = "Norm"  # part of the class names of norms
EXPERT_INDEX = re.compile(r"\.\d+")  # index of an expert: all experts share one role
TENSOR_TYPES = (Tensor, nn.Parameter)
PARAMETERS, _, MODULES = MODULE_TABLES


class RegionCompiler:
    """Compiles the norms, MLP activations and rotary embeddings of one model with torch.compile.
    Counts the compiled graphs and the seconds of compilation for `streambp.describe`.

    Attributes:
        graphs: number of compiled graphs by role. A role is the name of a module in its layer, such
            as "input_layernorm". All experts of an MLP share a role.
        seconds: time that compilation took.
        compiled_functions: compiled functions by (function, role).
    """

    def __init__(self) -> None:
        self.graphs: Counter[str] = Counter()
        self.seconds = 0.0
        self.compiled_functions: dict[Any, Callable[..., Any]] = {}

    def __reduce__(self) -> Any:
        return (
            RegionCompiler,
            (),
        )  # compiled code stays in its process, shared by all copies of the model

    def __deepcopy__(self, memo: Any) -> RegionCompiler:
        return self

    def compile_function(self, function: Any, role: str) -> Callable[..., Any]:
        """Return the function compiled with torch.compile. The result is cached, so that all
        modules with the same function and role share it.

        Args:
            function: the function to compile.
            role: name of the module in its layer, such as "input_layernorm".
        """
        if (function, role) not in self.compiled_functions:
            code = function.__code__.replace(co_name=function.__name__)
            copied = types.FunctionType(
                code, function.__globals__, function.__name__, None, function.__closure__
            )
            copied.__defaults__ = function.__defaults__
            copied.__kwdefaults__ = function.__kwdefaults__
            limits: dict[str, Any] = {}
            if "recompile_limit" in inspect.signature(torch.compile).parameters:  # not in 2.11
                limits["recompile_limit"] = MAX_GRAPHS

            def backend(graph: Any, examples: Any, **options: Any) -> Any:
                self.graphs[role] += 1
                start = time.monotonic()
                compiled = lookup_backend(BACKEND)(graph, examples, **options)
                self.seconds += time.monotonic() - start
                return compiled

            self.compiled_functions[function, role] = torch.compile(
                copied, backend=backend, **limits
            )
        return self.compiled_functions[function, role]


class CompiledRegion:
    """Forward of a module in which one part is compiled, for example an MLP's activation. The
    forward of the module's class runs for calls that the compiled part does not support.

    Args:
        run: `compute_norm` or `compute_mlp`: computes the module's forward with the compiled part,
            or returns NotImplemented.
        compiled: the compiled part. `compute_norm` calls it with (module, tokens [n, h], ...), and
            `compute_mlp` with (activation, outputs of the MLP's first Linears [n, m], ...).
    """

    __name__ = "forward"  # pickle stores a bound method as the module's attribute of this name

    def __init__(self, run: Callable[..., Any], compiled: Callable[..., Any]) -> None:
        self.run = run
        self._streambp_region = self.compiled = compiled

    def __call__(self, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the forward of the module's class, computed by the compiled function.
        Calls that this function does not support, for example with keyword arguments, run the
        forward of the class itself."""
        result = NotImplemented if kwargs else self.run(self.compiled, module, *args)
        return type(module).forward(module, *args, **kwargs) if result is NotImplemented else result


def compute_norm(compiled: Callable[..., Tensor], module: nn.Module, *tensors: Any) -> Any:
    """Compute a norm with its compiled function, and return the result [..., h].

    Return NotImplemented for calls that the compiled function does not support: rows of one token,
    and arguments that are not tensors of equal shape. The module's own forward then runs.

    Args:
        compiled: compiled function of (module, x [n, h], ...).
        module: the norm.
        tensors: x [..., h]; for gated norms also the gates [..., h].
    """
    shapes_are_equal = bool(tensors) and all(
        can_compute(x) and x.shape == tensors[0].shape for x in tensors
    )
    if not shapes_are_equal or not _has_several_tokens(tensors[0]):
        return NotImplemented
    return compiled(module, *(flatten_tokens(x) for x in tensors)).view(tensors[0].shape)


def compute_mlp(compiled: Callable[..., Tensor], module: nn.Module, *args: Any) -> Any:
    """Compute a gated MLP, down(act(gate(x)) * up(x)), whose activation and product are compiled;
    the Linears are not. Return the result [..., h].

    Return NotImplemented for calls that the compiled function does not support: rows of one token,
    and arguments other than one tensor x. The module's own forward then runs.

    Args:
        compiled: compiled function of (activation, gate [n, m], up [n, m]), or of (activation, gate
            and up in one tensor [n, 2 m]).
        module: the MLP.
        args: x [..., h].
    """
    if len(args) != 1 or not can_compute(args[0]) or not _has_several_tokens(args[0]):
        return NotImplemented
    (x,) = args
    *entries, down, act = (getattr(module, name) for name in mlp_attribute_names(module))
    middle = compiled(act, *(flatten_tokens(entry(x)) for entry in entries))
    return down(middle.view(*x.shape[:-1], middle.shape[-1]))


def gate_product(act: Callable[[Tensor], Tensor], *products: Tensor) -> Tensor:
    """Return act(gate) * up [n, m], the part of a gated MLP that is compiled.

    Args:
        act: the activation.
        products: gate and up, [n, m] each, or one tensor [n, 2 m] with gate before up.
    """
    gate, up = products if len(products) > 1 else products[0].chunk(2, -1)
    return act(gate) * up


def mlp_attribute_names(module: nn.Module) -> tuple[str, ...]:
    """Return the attribute names of a gated MLP's Linears, and then of its activation, such as
    ("gate_proj", "up_proj", "down_proj", "act_fn"). Return () for other modules."""
    return next(
        (names for names in (GATED_MLP, FUSED_MLP) if all(hasattr(module, name) for name in names)),
        (),
    )


class CompiledRotationGlobals(RotationGlobals):
    """Dict of global variables for a copy of an attention module's forward. The globals are those
    of the modeling file, with a compiled function in place of `apply_rotary_pos_emb`."""

    home = REGION_ATTRIBUTE

    def apply_rotary(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """Return q and k with rotary embeddings applied, by the compiled function.

        The modeling file's own function runs instead for rows of one token and for calls with
        further arguments, which the compiled function does not support. If another library has
        replaced the modeling file's function since `patch`, the replacement runs.

        Args:
            q: [B, H, T, D].
            k: [B, H_kv, T, D].
            cos: [B, T, D].
            sin: [B, T, D].
            args, kwargs: further arguments of the modeling file's function.
        """
        current = self.around[ROTARY]
        four = (q, k, cos, sin)
        if (
            current is not self.modeling_function
            or args
            or kwargs
            or not all(map(can_compute, four))
            or q.shape[-2] == 1
        ):
            return current(*four, *args, **kwargs)
        # slices of a row
        tables = (x.clone() if x.nbytes < x.untyped_storage().nbytes() else x for x in (cos, sin))
        return self.fused(*(_mark_dynamic_length(x, 0, x.dim() - 2) for x in (q, k, *tables)))


def can_compute(x: Any) -> bool:
    """True if compiled code can compute x [...]: x is a plain tensor with data, and the program
    itself is not tracing with torch.compile. Otherwise the module's own forward runs."""
    return type(x) in TENSOR_TYPES and has_data(x) and not torch.compiler.is_compiling()


def flatten_tokens(x: Tensor) -> Tensor:
    """Return x [..., h] as [n, h], with n marked as a dynamic size for torch.compile. All n then
    share one graph."""
    return _mark_dynamic_length(x.reshape(-1, x.shape[-1]), 0)


def _has_several_tokens(x: Tensor) -> bool:
    """True if x [n, h] or [B, T, ..., h] has more than one token in each row. A single token would
    need another compiled graph, so the module's own forward runs instead."""
    return x.dim() > 1 and x.shape[min(1, x.dim() - 2)] > 1


def _mark_dynamic_length(x: Tensor, *dims: int) -> Tensor:
    for dim in dims:
        torch._dynamo.maybe_mark_dynamic(x, dim)  # type: ignore[no-untyped-call]
    return x


def compile_regions(model: nn.Module) -> InstalledKernels:
    """Set forwards with compiled parts on the norms, gated MLPs and attention modules of a model's
    layers.

    torch.compile compiles the whole norm, the activation and product of an MLP, and the rotary
    embedding of queries and keys. Linears stay uncompiled.

    Args:
        model: a transformers model, or a module that contains one; changed in place.

    Returns:
        A record of the changed modules, whose `uninstall` restores their forwards. If no module was
            changed, the record has the reason.
    """
    device = next((p.device.type for p in model.parameters() if p.device.type != "cpu"), "cpu")
    if (why := why_no_compiler(device)) is not None:
        return InstalledKernels(why_own=why)
    compiler = RegionCompiler()
    changes: list[AttributeChange] = []
    skipped_classes: set[str] = set()
    passes_by_class: dict[Any, bool] = {}
    for layer in (layer for stack in find_stacks(model).stacks for layer in stack.layers):
        for name, module in layer.named_modules():
            part = _compilable_part(module)
            attributes = module.__dict__
            kind = type(module)
            # not the model's own code
            has_other_forward = (
                ACCELERATE_HOOK in attributes or "forward" in attributes or is_compiled(module)
            )
            if part is None or module is layer or has_other_forward or compiled_submodules(module):
                continue
            key = (kind, type(getattr(module, "act_fn", None)))
            if key not in passes_by_class:
                passes_by_class[key] = part == "rotation" or treats_tokens_alike(module)
            if not passes_by_class[key]:
                skipped_classes.add(kind.__name__)
                continue
            region: Any
            role = EXPERT_INDEX.sub(".*", name)
            if part == "MLP":
                region = CompiledRegion(compute_mlp, compiler.compile_function(gate_product, role))
            elif part == "norm":
                region = CompiledRegion(compute_norm, compiler.compile_function(kind.forward, role))
            else:  # the class's forward, with a compiled rotation among its globals
                space: Any = rotation_globals(module)
                namespace = CompiledRotationGlobals(
                    space, compiler.compile_function(space[ROTARY], role), ""
                )
                region = with_globals(namespace, kind.forward)
                setattr(region, REGION_ATTRIBUTE, namespace.fused)
            forward = types.MethodType(region, module)
            module.__dict__["forward"] = forward
            changes.append(AttributeChange(module, "forward", None, forward, False))
    why = None if changes else "no module of its layers is known to treat tokens alike"
    marks = tuple((change.module, compilers_marks(change.module)) for change in changes)
    return InstalledKernels(tuple(changes), tuple(sorted(skipped_classes)), why, compiler, marks)


def why_no_compiler(device: str) -> str | None:
    """Return the reason why torch.compile cannot compile for this type of device; None if it
    can."""
    if not any(map(shutil.which, C_COMPILERS)):
        return "torch.compile needs a C compiler, and there is none on this machine"
    if device != "cpu" and not has_triton():
        return "torch.compile needs Triton, which does not run on this platform"
    return None


def _compilable_part(module: nn.Module) -> Literal["MLP", "norm", "rotation"] | None:
    """Return which part of a module can be compiled, judged by its structure and names: the whole
    norm, an MLP's activation, or an attention's rotary embedding. None for other modules."""
    if mlp_attribute_names(module):
        return "MLP"
    kind = type(module)
    if (
        NORM_CLASS_PART in kind.__name__
        and not [*module.children()]
        and isinstance(kind.forward, types.FunctionType)
    ):
        return None if kind.__module__.startswith("torch.") else "norm"
    space = rotation_globals(module)
    is_rotary = (
        space is not None
        and tuple(inspect.signature(space[ROTARY]).parameters)[:4] == ROTARY_PARAMETERS
    )
    return "rotation" if is_rotary else None


def treats_tokens_alike(module: nn.Module) -> bool:
    """True if a norm computes each token without the other tokens, or if an MLP computes
    down(act(gate) * up). The function tests this by value, on random numbers on the host.
    `compile_regions` compiles only such modules."""
    generator = torch.Generator().manual_seed(0)

    def some(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cpu")

    entry_inputs: dict[nn.Module, Tensor] = {}
    entry_outputs: dict[nn.Module, Tensor] = {}

    def note(entry: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        entry_inputs[entry] = inputs[0]
        return entry_outputs[entry]

    twin = object.__new__(type(module))
    twin.__dict__.update(module.__dict__)
    names = mlp_attribute_names(module)
    try:
        with torch.no_grad():
            if names:
                x = some(2, 3, TEST_SIZE)  # [B, T, h]
                parts = [some(2, 3, TEST_SIZE) for _ in names[:-2]]  # [B, T, m], of one product 2 m
                entries = {name: nn.Identity() for name in names[:-2]}  # replace the Linears
                entry_outputs.update(zip(entries.values(), parts, strict=True))
                for entry in entry_outputs:
                    entry.register_forward_hook(note)
                twin.__dict__[MODULES] = {
                    **module.__dict__[MODULES],
                    **entries,
                    names[-2]: nn.Identity(),
                }
                act = getattr(module, names[-1])
                class_output = type(module).forward(twin, x)
                return all(entry_inputs.get(entry) is x for entry in entry_outputs) and torch.equal(
                    class_output, gate_product(act, *parts)
                )
            parameters = {
                name: None if p is None else some(TEST_SIZE)
                for name, p in module.__dict__[PARAMETERS].items()
            }
            twin.__dict__[PARAMETERS] = parameters
            tensors = [
                some(2, 3, TEST_SIZE) for _ in inspect.signature(type(module).forward).parameters
            ][1:]
            joint = type(module).forward(twin, *tensors)
            single = type(module).forward(twin, *(x[:, 1] for x in tensors))
            return joint.shape == tensors[0].shape and torch.equal(joint[:, 1], single)
    except Exception:  # the forward needs other arguments or sizes
        return False
