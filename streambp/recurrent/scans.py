"""Add a start state to recurrences whose function accepts none.

Some mixers read a state from their cache only during decoding, or store the state on the module.
Such a mixer gets a replacement for the function of its recurrence during one forward. Other code is
unchanged.

    a selective scan (Mamba 1)     the mixer's own code, with `SelectiveScan` as the scan's global
    linear attention (MiniMax)     the mixer's own code, with `TorchWithState` as the name `torch`
    gated linear unit (Griffin)    its convolution and its scan are replaced on the instance

Mamba 1's selective scan, kernel and reference alike, takes no start state and has no gradient for
its end state. Additional tokens provide both:

    s_t = exp(dt_t A) s_(t-1) + dt_t B_t u_t,   y_t = C_t s_t

Tokens in front of the chunk write the start state, one token for each of its N components n. Such a
token has the n-th unit vector as B and a small step as dt. Its u is the remaining part of the
state, divided by that step and by the decay of the tokens that follow. Tokens behind the chunk read
the end state: their step is 0 and C is the n-th unit vector. Step and decay stay in the graph, so
the gradients of A and of dt's bias from the written tokens cancel. The end state's value is the
scan's own, in float32; its gradient goes to the reading tokens.

A kernel takes half precision and computes in float32. Written and read values therefore have two
parts each; the second part is the rounding error of the first. The model's own code in transformers
rounds steps and gradients between operations, so nothing cancels. This code gets float32 inputs, at
little cost beside the float32 states of all tokens that the code makes anyway.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor, nn

from streambp.chunks import Chunk
from streambp.known_names import CALLED_KERNEL, LINEAR_CACHE, OWN_SCAN, SELECTIVE_SCAN
from streambp.recurrent.documents import Documents, parameters_of, wrap_kernel
from streambp.recurrent.states import StateCache, StateKey
from streambp.source import with_globals, written_forward

WRITE_STEP = 2.0**-8  # step of a token that writes
MAX_WRITE_DECAY = 4.0  # maximal decay exponent of the value that the first writing token stores
ZERO_STEP_LOGIT = -1e4  # step of zero as a value before softplus
READ_GATE = 64.0  # silu(64) = 64, and dividing by a power of two rounds nothing


def scans_of(layer: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return pairs (module, name) for the modules inside a layer whose recurrence takes no start
    state. The module's forward calls the recurrence through the attribute or global `name`.
    `use_start_states` replaces this function, so that the recurrence starts from the state at a
    chunk's start."""
    scans = []
    for module in layer.modules():
        forward = written_forward(module)
        names = forward.__code__.co_names if hasattr(forward, "__code__") else ()
        scan = None
        for name in names:
            if parameters_of(forward.__globals__.get(name)) >= SELECTIVE_SCAN:
                scan = name
                break
        if scan is not None:
            scans.append((module, scan))
        elif LINEAR_CACHE in names:
            scans.append((module, "torch"))
        elif OWN_SCAN in names:
            scans.append((module, OWN_SCAN))
            parent = next(part for part in layer.modules() if module in part.children())
            for child in parent.children():
                if isinstance(child, nn.Conv1d):
                    scans.append((child, "forward"))
    return scans


def is_torch_code(function: Any) -> bool:
    """True if the function is transformers' own torch code, which transformers uses if no kernel
    package is installed. Such code takes no document boundaries, and rounds half-precision inputs
    between its operations."""
    if isinstance(function, nn.Module):
        function = function.forward
    function = getattr(function, "__func__", function)
    if not inspect.isfunction(function):
        return False
    called = inspect.getclosurevars(function).nonlocals.get(CALLED_KERNEL)
    return called is not None and called is getattr(function, "__wrapped__", None)


class ReplacedFunctions:
    """Context manager that replaces functions on module instances while it is open: forwards, or
    functions that forwards call. Exit restores the original functions.

    This is a class and no generator function: the frame of a generator would keep the layer's
    tensors in a reference cycle after an exception.

    Args:
        attributes: list of (module, attribute name, replacement).
    """

    def __init__(self, attributes: list[tuple[nn.Module, str, Callable[..., Any]]]) -> None:
        self._attributes = attributes
        self._originals: list[Any] = []

    def __enter__(self) -> None:
        self._originals = [module.__dict__.get(name) for module, name, _ in self._attributes]
        for module, name, function in self._attributes:
            module.__dict__[name] = function

    def __exit__(self, *_: object) -> None:
        for (module, name, _function), previous in zip(
            self._attributes, self._originals, strict=True
        ):
            if previous is None:
                del module.__dict__[name]
            else:  # set by another library
                module.__dict__[name] = previous


DocumentReaders = tuple[list[tuple[nn.Module, str]], Documents, Chunk]


def use_start_states(
    mixers: list[tuple[nn.Module, str]],
    cache: StateCache | None,
    reading: DocumentReaders | None = None,
) -> ReplacedFunctions:
    """Return a context manager in which these modules start their recurrence from the chunk's start
    states. Outside of it, the recurrence of these modules accepts no start state.

    Args:
        mixers: pairs of a module and the name of the function to replace, from `scans_of`.
        cache: contains the chunk's start states; None: nothing is replaced.
        reading: tuple of the functions that accept document boundaries (from `document_readers`),
            the boundaries, and the chunk; None: no boundaries are passed.
    """
    if cache is None:
        return ReplacedFunctions([])
    replacements: list[tuple[nn.Module, str, Callable[..., Any]]] = []
    stand_ins: dict[nn.Module, dict[str, Any]] = {}  # replacements of globals, by name
    for module, name in mixers:
        layer: Any = getattr(module, "layer_idx", None)
        if isinstance(module, nn.Conv1d):
            replacements.append((module, "forward", functools.partial(_convolve, module, cache)))
        elif name == OWN_SCAN:
            replacements.append(
                (module, name, functools.partial(_scan, getattr(module, name), cache))
            )
        elif name == "torch":
            stand_in = TorchWithState(cache.start_states.get(StateKey("linear", layer, 0)))
            stand_ins.setdefault(module, {})[name] = stand_in
        else:
            scan = written_forward(module).__globals__[name]
            stand_ins.setdefault(module, {})[name] = SelectiveScan(scan, cache, layer)
    if reading is not None:
        functions, documents, chunk = reading
        for module, name in functions:
            function = written_forward(module).__globals__[name]
            stand_ins.setdefault(module, {})[name] = wrap_kernel(function, documents, chunk)
    # The mixer's own code, with replacements for these global names.
    for module, names in stand_ins.items():
        space = {**written_forward(module).__globals__, **names}
        copied = with_globals(space, type(module).forward)
        replacements.append((module, "forward", types.MethodType(copied, module)))
    return ReplacedFunctions(replacements)


def _scan(
    real: Callable[..., Any],
    cache: StateCache,
    /,
    *args: Any,
    recurrent_states: Any = None,
    **kwargs: Any,
) -> Any:
    """Run RecurrentGemma's `_rnn_scan` from the cache's start state, and return the scan's results.
    The end state is stored in the cache instead of on the module.

    Args:
        real: the module's own `_rnn_scan`.
        cache: contains the chunk's start state and receives its end state.
        args: positional arguments of the scan.
        recurrent_states: the module's stored state, which is not used.
        kwargs: further keyword arguments of the scan.
    """
    key = StateKey("recurrent", 0, 0)
    hidden_states, cache.end_states[key] = real(
        *args, recurrent_states=cache.start_states.get(key), **kwargs
    )
    return hidden_states, None  # The module would store a returned state together with its graph.


def _convolve(conv: nn.Conv1d, cache: StateCache, x: Tensor) -> Tensor:
    """Return the output [B, D, C] of the causal convolution `conv` for a chunk x [B, D, C]. The
    last inputs before the chunk, from the cache, replace the zero padding. The chunk's last inputs
    are stored in the cache as its end state."""
    inputs_before = conv.kernel_size[0] - 1
    joined = cache.update_conv_state(x, 0, conv_kernel_size=inputs_before)  # [B, D, k - 1 + C]
    # [B, D, k - 1 + C]
    y = F.conv1d(F.pad(joined, (inputs_before, 0)), conv.weight, conv.bias, groups=conv.groups)
    return y[..., -x.shape[-1] :]


@dataclasses.dataclass
class TorchWithState:
    """Replacement for the global name `torch` in the forward of a linear-attention module, which
    creates its start state by `torch.zeros`. Every call of `zeros` with the state's shape returns
    `_state` [...], the state at which the chunk starts. `_state` is None if the chunk starts from
    zeros. All other calls and attributes are torch's."""

    _state: Tensor | None

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def zeros(self, *size: Any, **kwargs: Any) -> Tensor:
        """Return the chunk's start state [...] if it has the requested shape; otherwise torch's
        zeros."""
        if self._state is not None and tuple(size) == tuple(self._state.shape):
            return self._state
        return torch.zeros(*size, **kwargs)


class SelectiveScan:
    """Mamba 1's selective scan with a start state and a differentiable end state, which the
    original scan lacks. Additional tokens in front of the chunk write the start state, and
    additional tokens behind the chunk read the end state.

    Args:
        scan: the original scan: (u [B, D, T], dt [B, D, T], A [D, N], B [B, N, T], C [B, N, T],
            ...) -> y [B, D, T], end state [B, D, N]. N is the number of state components of each
            channel.
        cache: contains the chunk's start state.
        layer: the module's layer_idx, the layer's index in the cache. A module with several heads
            calls the scan once for each head, in order.
    """

    def __init__(self, scan: Callable[..., Any], cache: StateCache, layer: Any) -> None:
        self._scan = scan
        self._start = cache.start_states.get(StateKey("recurrent", layer, 0))
        self._calls = 0

    def __call__(self, u: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the scan from the start state in the cache. Takes the original scan's arguments, with
        inputs u [B, D, C], and returns the original's results."""
        if u.dtype.itemsize >= 4 or not is_torch_code(self._scan):
            return self._start_and_end(u, *args, **kwargs)
        wide: list[Any] = [_to_float32(x) for x in args]
        wide_kwargs: dict[str, Any] = {name: _to_float32(x) for name, x in kwargs.items()}
        with torch.autocast(u.device.type, enabled=False):
            return self._start_and_end(u.float(), *wide, **wide_kwargs)

    def _start_and_end(
        self,
        u: Tensor,
        dt: Tensor,
        A: Tensor,  # noqa: N803 - the scan's own names
        B: Tensor,  # noqa: N803
        C: Tensor,  # noqa: N803
        D: Tensor | None = None,  # noqa: N803
        z: Tensor | None = None,
        delta_bias: Tensor | None = None,
        delta_softplus: bool = False,
        return_last_state: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Run the original scan, with its own arguments, from the start state in the cache. Return
        y [B, D, C] of the chunk's C tokens, and with `return_last_state` the end state [B, D, N].

        The original scan takes no start state, and gives its end state no gradient. Tokens added
        before the chunk therefore write the start state. If gradients are enabled, tokens added
        behind the chunk read the end state. The end state's gradient in backward goes to the
        outputs of these tokens.

        Args:
            u: the inputs, [B, D, C].
            dt: the step sizes, [B, D, C].
            A, B, C, D: the parameters of the state-space model, as in the original scan.
            z: the gate, [B, D, C]; None: no gate.
            delta_bias: [D], added to dt; None: no bias.
            delta_softplus: True to apply softplus to dt.
            return_last_state: True to return the end state, too.
            kwargs: further arguments of the original scan.
        """
        start = self._start
        if start is not None and start.dim() == 4:  # [B, heads, D, N]
            start = start[:, self._calls]
        self._calls += 1
        parts = 1 if u.dtype.itemsize >= 4 else 2
        length = u.shape[-1]
        size = A.shape[-1]
        reads = parts * size if return_last_state and torch.is_grad_enabled() else 0
        writes = 0 if start is None else parts * size
        step = _write_step(A, parts * size, delta_bias, delta_softplus, dt)
        u_front = u[..., :0]
        if start is not None:
            u_front = _write_inputs(start, step, A, delta_bias, delta_softplus, u.dtype, parts)
        unit = torch.eye(size, dtype=B.dtype, device=B.device).repeat(1, parts)
        unit = unit.expand(B.shape[0], -1, -1)  # [B, N, parts * N]
        no_step = ZERO_STEP_LOGIT if delta_softplus else 0.0
        u = torch.cat((u_front, u, _fill(u, 0.0, reads)), -1)
        if no_step or delta_bias is None:
            read_steps = _fill(dt, no_step, reads)
        else:
            read_steps = (
                (-delta_bias).detach().to(dt.dtype)[None, :, None].expand(dt.shape[0], -1, reads)
            )
        dt = torch.cat((step[None, :, None].expand(u.shape[0], -1, writes), dt, read_steps), -1)
        B = torch.cat((unit[..., :writes], B, _fill(B, 0.0, reads)), -1)  # noqa: N806
        C = torch.cat((_fill(C, 0.0, writes), C, unit[..., :reads].to(C.dtype)), -1)  # noqa: N806
        if z is not None:
            z = torch.cat((_fill(z, 0.0, writes), z, _fill(z, READ_GATE, reads)), -1)
        results = self._scan(
            u, dt, A, B, C, D=D, z=z, delta_bias=delta_bias, delta_softplus=delta_softplus,
            return_last_state=return_last_state, **kwargs,
        )  # fmt: skip
        if not return_last_state:
            return results[..., writes : writes + length]
        y, end = results
        if reads:
            readers = y[..., writes + length :] / (1.0 if z is None else READ_GATE)
            end = EndState.apply(end.detach(), *readers.split(size, -1))
        return y[..., writes : writes + length], end


def _to_float32(x: Any) -> Any:
    """Return `x` in float32 if `x` is a tensor [...]; return any other value unchanged."""
    return x.float() if isinstance(x, Tensor) else x


def _fill(like: Tensor, value: float, tokens: int) -> Tensor:
    """Return a tensor [..., tokens] filled with `value`, with the dtype, the device and the other
    dimensions of `like` [..., T]. The tensor is an input of the scan for the additional tokens of
    `SelectiveScan`."""
    return like.new_full((*like.shape[:-1], tokens), value)


def _write_step(
    A: Tensor,  # noqa: N803
    tokens: int,
    bias: Tensor | None,
    softplus: bool,
    dt: Tensor,
) -> Tensor:
    """Return the step dt [D] of the additional tokens with which `SelectiveScan` writes the start
    state in front of a chunk. The scan has yet to apply bias and softplus to this step.

    A written value decays until the chunk begins, so the inputs of these tokens are enlarged by the
    inverse factor. A larger A gives a smaller step, so that the inverse factor is at most
    exp(MAX_WRITE_DECAY) and does not overflow.

    Args:
        A: the scan's A, [D, N].
        tokens: number of tokens that write.
        bias: the scan's delta_bias [D].
        softplus: the scan's delta_softplus.
        dt: the scan's dt, for its dtype.
    """
    wide = torch.promote_types(dt.dtype, torch.float32)
    largest = A.detach().to(wide).abs().amax(-1)  # [D]
    step = (MAX_WRITE_DECAY / (largest * max(1, tokens - 1))).clamp(max=WRITE_STEP)
    if softplus:
        step = torch.log(torch.expm1(step))
    if bias is not None:
        step = step - bias.detach().to(wide)
    return step.to(dt.dtype)


def _write_inputs(
    start: Tensor,
    raw: Tensor,
    A: Tensor,  # noqa: N803
    bias: Tensor | None,
    softplus: bool,
    dtype: torch.dtype,
    parts: int,
) -> Tensor:
    """Return the inputs u [B, D, parts * N] of the additional tokens with which `SelectiveScan`
    writes the start state in front of a chunk. Each token writes one of the N columns of the state.

    The scan multiplies u by the step, and the written value decays until the chunk begins. u is
    therefore the column divided by both factors.

    Args:
        start: the start state [B, D, N].
        raw: step dt [D] of these tokens, to which the scan will apply bias and softplus.
        A: the scan's A, [D, N].
        bias: the scan's delta_bias [D].
        softplus: the scan's delta_softplus.
        dtype: dtype of u.
        parts: tokens for each of the N columns. 1: one token writes the column; 2: a second
            token writes the rounding error of the first, because `dtype` has half precision.
    """
    wide = torch.promote_types(dtype, torch.float32)
    start, A = start.to(wide), A.to(wide)  # noqa: N806
    step = raw.to(wide)
    if bias is not None:
        step = step + bias.to(wide)
    if softplus:
        step = F.softplus(step)
    step = step[:, None]  # [D, 1]
    size = A.shape[-1]
    inputs = []
    remainder = start
    for part in range(parts):
        # [N]
        follow = torch.arange(
            parts * size - 1 - part * size, (parts - 1 - part) * size - 1, -1, device=A.device
        )
        # [D, N]: the fraction of a token's u that remains behind the last writing token
        reach = step * torch.exp(step * A * follow)
        u = (remainder / reach).to(dtype)
        inputs.append(u)
        remainder = (remainder - u.to(wide) * reach).detach()
    return torch.cat(inputs, -1)


class EndState(torch.autograd.Function):
    """Autograd Function that makes a scan's end state [B, D, N] differentiable. The scan's own
    backward ignores the end state's gradient.

    `SelectiveScan` adds tokens behind the chunk whose outputs are the columns of the end state. The
    scan's backward does use the gradients of outputs. Backward of this function therefore returns
    the end state's gradient as gradients of these outputs."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, *readers: Tensor) -> Tensor:
        """Return a view of the end state `value`, whose gradient backward sends to `readers`.

        Args:
            value: [B, D, N], the end state that the scan has returned, detached.
            readers: outputs [B, D, N] of the tokens that `SelectiveScan` adds behind the chunk to
                read the end state: one tensor in float32, two in half precision. The second tensor
                gets the rounding error of the first one's gradient. The tensors' values are not
                used.
        """
        ctx.dtype = readers[0].dtype
        ctx.parts = len(readers)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return None for `value`, and a gradient [B, D, N] for each of the `readers`. The first
        reader gets `grad` rounded to the reader's dtype, and the second gets the rounding error."""
        gradients = []
        remainder = grad
        for _ in range(ctx.parts):
            part = remainder.to(ctx.dtype)
            gradients.append(part)
            remainder = remainder - part.to(remainder.dtype)
        return None, *gradients
