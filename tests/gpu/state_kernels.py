"""The kernels of layers with states, with random inputs for each and the call that mixers make."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from paper_repro.rows import first_line
from streambp.chunks import Chunk
from streambp.recurrent.documents import Documents
from streambp.recurrent.scans import SelectiveScan
from streambp.recurrent.states import StateCache, StateKey
from tests.layer import reference_kernels

Function = Callable[..., Any]
Named = dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class Sizes:
    rows: int
    length: int
    heads: int
    size: int


TINY, FULL = Sizes(2, 40, 2, 8), Sizes(2, 1000, 4, 64)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel, and how mixers call it.

    modeling, name: what transformers calls it, in which model's module. package: whose it is.
    make: (sizes, generator) -> tensors [B, T, ...]; tensors without tokens; start state, all
        float32. wide: names of those that stay so.
    run: (function, tensors, start state, chunk, documents) -> output [B, C, ...], end state.
    document_form: "ids", "ends" or "" for no documents.
    """

    modeling: str
    name: str
    package: str
    make: Callable[[Sizes, torch.Generator], tuple[Named, Named, Tensor | None]]
    run: Callable[..., tuple[Tensor, Tensor]]
    wide: tuple[str, ...] = ()
    document_form: str = ""

    @property
    def function(self) -> Function:
        """The package's, behind transformers' wrapper; torch's where the package is absent."""
        module = importlib.import_module(
            f"transformers.models.{self.modeling}.modeling_{self.modeling}"
        )
        kernel: Function = getattr(module, self.name)
        return kernel

    @property
    def truth(self) -> Function:
        """transformers' own code, which cannot be told of documents."""
        function: Function = self.reference if self.document_form else inspect.unwrap(self.function)
        return function

    @property
    def reference(self) -> Function:
        """What the kernel computes, in torch."""
        kernel = reference_kernels.KERNELS[self.name][1]
        parameters = inspect.signature(kernel).parameters

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return kernel(
                *args, **{name: value for name, value in kwargs.items() if name in parameters}
            )

        wrapped.__signature__ = inspect.signature(inspect.unwrap(self.function))  # type: ignore[attr-defined]
        return wrapped


def random(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator)


def own_ids(documents: Documents, chunk: Chunk) -> Tensor:
    """[B, C], as a layer's arguments are cut."""
    assert documents.ids is not None
    return documents.ids[:, chunk.start : chunk.stop]


def make_convolution(
    sizes: Sizes, generator: torch.Generator
) -> tuple[Named, Named, Tensor | None]:
    width = sizes.heads * sizes.size
    tokens = {"x": random(generator, sizes.rows, sizes.length, width)}
    return (
        tokens,
        {"weight": random(generator, width, 4) / 2, "bias": random(generator, width)},
        None,
    )


def run_convolution(
    function: Function,
    tensors: Named,
    start: Tensor | None,
    chunk: Chunk,
    documents: Documents | None,
) -> tuple[Tensor, Tensor]:
    """Through the cache, as mixers do: it puts the tokens before in front, channels last."""
    key = StateKey("conv", 0, 0)
    cache = StateCache(chunk.start, {} if start is None else {key: start})
    joined = cache.update_conv_state(tensors["x"].mT, 0, conv_kernel_size=4)
    ids = {} if documents is None else {"seq_idx": own_ids(documents, chunk)}
    y = function(joined, tensors["weight"], tensors["bias"], activation="silu", **ids)
    return y[..., -(chunk.stop - chunk.start) :].mT, cache.end_states[key]


def make_delta_rule(
    sizes: Sizes, generator: torch.Generator, decays: int = 0
) -> tuple[Named, Named, Tensor | None]:
    shape = (sizes.rows, sizes.length, sizes.heads)
    tokens = {name: random(generator, *shape, sizes.size) for name in "qkv"}
    gates = random(generator, *shape, sizes.size) if decays else random(generator, *shape)
    tokens |= {
        "g": -torch.nn.functional.softplus(gates),
        "beta": random(generator, *shape).sigmoid(),
    }
    return (
        tokens,
        {},
        random(generator, sizes.rows, sizes.heads, sizes.size, sizes.size) / sizes.size**0.5,
    )


def run_delta_rule(
    function: Function,
    tensors: Named,
    start: Tensor | None,
    chunk: Chunk,
    documents: Documents | None,
) -> tuple[Tensor, Tensor]:
    ends = (
        {}
        if documents is None
        else {"cu_seqlens": documents.kernel_arguments(chunk)["cu_seq_lens_q"]}
    )
    result: tuple[Tensor, Tensor] = function(
        *(tensors[name] for name in "qkv"), g=tensors["g"], beta=tensors["beta"], initial_state=start,
        output_final_state=True, use_qk_l2norm_in_kernel=True, **ends,
    )  # fmt: skip
    return result


def make_scan(sizes: Sizes, generator: torch.Generator) -> tuple[Named, Named, Tensor | None]:
    shape = (sizes.rows, sizes.length)
    tokens = {
        "x": random(generator, *shape, sizes.heads, sizes.size), "dt": random(generator, *shape, sizes.heads) - 2.0,
        "B": random(generator, *shape, 1, sizes.size) / 4, "C": random(generator, *shape, 1, sizes.size) / 4,
    }  # fmt: skip
    weights = {name: random(generator, sizes.heads) for name in ("D", "dt_bias")}
    weights["A"] = -random(generator, sizes.heads).exp()
    return tokens, weights, random(generator, sizes.rows, sizes.heads, sizes.size, sizes.size)


def run_scan(
    function: Function,
    tensors: Named,
    start: Tensor | None,
    chunk: Chunk,
    documents: Documents | None,
) -> tuple[Tensor, Tensor]:
    ids = {} if documents is None else {"seq_idx": own_ids(documents, chunk)}
    result: tuple[Tensor, Tensor] = function(
        *(tensors[name] for name in ("x", "dt", "A", "B", "C")), chunk_size=128,
        D=tensors["D"], z=None, dt_bias=tensors["dt_bias"], dt_softplus=True, initial_states=start,
        return_final_states=True, **ids,
    )  # fmt: skip
    return result


def make_selective_scan(
    sizes: Sizes, generator: torch.Generator
) -> tuple[Named, Named, Tensor | None]:
    width, states = sizes.heads * sizes.size, 16
    shape = (sizes.rows, sizes.length)
    tokens = {"u": random(generator, *shape, width), "dt": random(generator, *shape, width) - 2.0}
    tokens |= {"z": random(generator, *shape, width)}
    tokens |= {name: random(generator, *shape, states) for name in "BC"}
    weights = {"A": -random(generator, width, states).exp(), "D": random(generator, width)}
    weights["delta_bias"] = random(generator, width)
    return tokens, weights, random(generator, sizes.rows, width, states)


def run_selective_scan(
    function: Function,
    tensors: Named,
    start: Tensor | None,
    chunk: Chunk,
    documents: Documents | None,
) -> tuple[Tensor, Tensor]:
    """With the tokens that write and read its states."""
    cache = StateCache(chunk.start, {} if start is None else {StateKey("recurrent", 0, 0): start})
    u, dt, b, c, z = (tensors[name].mT.contiguous() for name in ("u", "dt", "B", "C", "z"))
    y, end = SelectiveScan(function, cache, 0)(
        u, dt, tensors["A"], b, c, D=tensors["D"], z=z, delta_bias=tensors["delta_bias"], delta_softplus=True,
        return_last_state=True,
    )  # fmt: skip
    return y.mT, end


def fallbacks(module: str, kernels: tuple[str, ...]) -> list[str]:
    """Those of a modeling module's kernels that are torch's code, each with the reason."""
    reasons = []
    for kernel in kernels:
        if not is_from_its_package(getattr(sys.modules[module], kernel)):
            reasons.append(
                f"{kernel} is torch's: {absence_reason(reference_kernels.KERNELS[kernel][0])}"
            )
    return reasons


def is_from_its_package(function: Function) -> bool:
    """Whether transformers' wrapper calls another function than its own. It takes its own where an
    import fails."""
    while function is not None:
        called = inspect.getclosurevars(function).nonlocals.get("implementation")
        if called is not None:
            return called is not function.__wrapped__
        function = getattr(function, "__wrapped__", None)
    return False


def absence_reason(package: str) -> str:
    """Why a package is not taken."""
    if importlib.util.find_spec(package) is None:
        return f"there is no {package}"
    try:
        importlib.import_module(package)
    except Exception as error:
        return f"{package} cannot be imported, {type(error).__name__}: {first_line(error)}"
    return f"{package} has no such function"


CONVOLUTION = Kernel("lfm2", "causal_conv1d_fn", "causal_conv1d", make_convolution, run_convolution)
RULE = Kernel(
    "qwen3_next",
    "torch_chunk_gated_delta_rule",
    "fla",
    make_delta_rule,
    run_delta_rule,
    ("g", "start"),
)
SCAN = Kernel(
    "bamba", "mamba2_chunk_scan", "mamba_ssm", make_scan, run_scan, ("A", "D", "dt_bias", "start")
)
KERNELS = {
    "convolution": CONVOLUTION,
    "convolution documents": dataclasses.replace(CONVOLUTION, document_form="ids"),
    "delta rule": RULE,
    "delta rule documents": dataclasses.replace(RULE, document_form="ends"),
    "delta rule of channels": Kernel(
        "kimi_linear", "chunk_kimi_delta_attention", "fla", functools.partial(make_delta_rule, decays=1), run_delta_rule,
        ("g", "start"),
    ),
    "scan": SCAN,
    "scan documents": dataclasses.replace(SCAN, document_form="ids"),
    "selective scan": Kernel(
        "mamba", "mamba_selective_scan", "mamba_ssm", make_selective_scan, run_selective_scan,
        ("A", "D", "delta_bias", "start"),
    ),
}  # fmt: skip
