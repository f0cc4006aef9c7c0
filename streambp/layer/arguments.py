"""A layer call's arguments: which tokens each part belongs to, and which parts want a gradient.

Tensors among the arguments that require a gradient (per-layer inputs, keys and values
that an earlier layer shares) are inputs of the layer's autograd Function, like hidden_states. Here only detached aliases
are kept, in place of which every chunk gets leaves of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from streambp.cache import ChunkCache
from streambp.cache_arguments import without_caches
from streambp.chunks import Chunk, Forks
from streambp.errors import BackwardError, StreamBPError, UnsupportedModelError
from streambp.known_names import DOCUMENT_ENDS, DOCUMENT_IDS, PICKED, TOKEN_DIMS
from streambp.nested import Slot, rebuilt
from streambp.recurrent.documents import Documents, PackedRows


@dataclasses.dataclass
class Differentiable:
    """A differentiable argument: the tensor without its history, and the dimension of its tokens (None: it has none)."""

    tensor: Tensor
    dim: int | None


Seen = list[tuple[str, Tensor, int]]  # arguments of any shape by name, with their versions; inference tensors have none


def refuse_written(seen: Seen) -> None:
    """Raise BackwardError if one of them, such as the batch, was written to since."""
    for name, tensor, version in seen:
        if tensor._version != version:
            raise BackwardError(
                f"{name} [{', '.join(map(str, tensor.shape))}], an argument of a streamed layer, was changed in place "
                "between forward and backward, so recomputing the layer would give the gradient of another batch. Call "
                "backward before, or work on a copy (tensor.clone())."
            )


class Arguments:
    """The arguments of one call, by name and without hidden_states and caches.

    Args:
        forward: the layer class's forward.
        position_cache: the argument of a cache that the layer asks for positions: a `ChunkCache`; empty: it asks none.
        packed_rows: the documents that its mixers are called for one by one. [Note: segments]
        state: what else of the layer decides whether its chunks compute what the whole does. [Note: fingerprint]
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        layer: nn.Module,
        args: Any,
        kwargs: Any,
        position_cache: str = "",
        packed_rows: PackedRows | None = None,
        state: tuple[Any, ...] = (),
    ) -> None:
        self.packed_rows = packed_rows
        self.forks: Forks = ()  # of a tree of rows, where the layer keeps states
        self.tells = False
        self.named = _bind(forward, layer, args, kwargs)
        first = "hidden_states" if "hidden_states" in self.named else next(iter(self.named))  # recurrent_gemma: activations
        given: Tensor = self.named.pop(first)
        if not isinstance(given, Tensor):
            raise UnsupportedModelError(
                f"The forward of {type(layer).__name__} takes hidden states as *{first}, without a name. Give it the "
                "original's signature (functools.wraps), or replace `forward` on the layer itself."
            )
        self.token_shape = given.shape[-1:] if given.dim() < 4 else _token_shape(given, self.named.get("position_ids"))
        self.folds = len(self.token_shape) > 1  # of M residual streams behind the tokens, h is all M * h here
        self.hidden_states = given.flatten(-2) if self.folds else given  # [..., B, T, h]
        self.length = self.hidden_states.shape[-2]
        self.position_cache = position_cache
        # What the layer is called with, whatever the batch: calls of one kind stream alike.
        self.kind: frozenset[tuple[str, Any]]
        self.inputs: list[Tensor] = []  # as the caller gave them, with their history; taken by the Function
        self.differentiable: list[Differentiable] = []
        # Mappings that the layer reads and writes, as given: what it adds to a chunk's copy is an output of the layer.
        self.mappings: dict[str, Any] = {}
        self.seen: Seen = []
        kinds: list[tuple[str, Any]] = []
        for name, value in self.named.items():
            if isinstance(value, Tensor):
                value = self.named[name] = self._detach(name, value)
            elif type(value) is tuple and set(map(type, value)) == {Tensor}:  # cosines and sines
                value = self.named[name] = tuple(map(functools.partial(self._detach, name), value))
            elif isinstance(value, tuple | list):
                value = self.named[name] = rebuilt(value, functools.partial(self._detach, name))
            elif value is not None and isinstance(value, Mapping):
                self.mappings[name] = value
                value = self.named[name] = rebuilt(value, functools.partial(self._detach, name))
            tensor = self.differentiable[value.number].tensor if isinstance(value, Slot) else value
            if isinstance(tensor, Tensor):
                kinds.append((name, (tensor.dim(), tensor.dtype)))
            elif value is not None:
                kinds.append((name, value if isinstance(value, bool) else type(value)))
        kinds += [(first, (given.dim(), len(self.token_shape))), ("a graph", torch.is_grad_enabled())]
        self.kind = frozenset((*kinds, ("packed rows", packed_rows is not None), ("state", state)))
        self._parts: dict[Chunk, dict[str, Any]] = {}  # what all passes over a chunk are called with
        self._documents: Documents | None = None

    def tell(self, documents: Documents) -> None:
        """The layer's kernels are told of the documents of packed rows, which the call did not."""
        self.named.update(documents.arguments)
        self.kind |= {("told", tuple(documents.arguments))}
        self._documents, self.tells = documents, True

    def renamed(self, state: tuple[Any, ...]) -> None:
        """Make the call one of a layer of another state."""
        self.kind = frozenset({*(pair for pair in self.kind if pair[0] != "state"), ("state", state)})

    def as_given(self, hidden_states: Tensor) -> Tensor:
        """[..., T, h] -> [..., T, *token_shape], what the layer takes and returns."""
        return hidden_states.unflatten(-1, self.token_shape) if self.folds else hidden_states

    @property
    def documents(self) -> Documents | None:
        """The documents of packed rows, if kernels are told of them; reads cu_seq_lens_q, which waits for the device."""
        if self._documents is None:
            ids, ends = self.named.get(DOCUMENT_IDS), self.named.get(DOCUMENT_ENDS)
            self._documents = None if ids is None and ends is None else Documents(ids, ends)
        return self._documents

    def _detach(self, name: str, tensor: Tensor) -> Tensor | Slot:
        if not torch.is_grad_enabled():
            return tensor
        if not tensor.is_inference():
            self.seen.append((name, tensor, tensor._version))
        if not tensor.requires_grad or name == "attention_mask":
            return tensor  # a mask that wants a gradient is refused where it is read
        self.inputs.append(tensor)
        self.differentiable.append(Differentiable(tensor.detach(), TOKEN_DIMS.get(name)))
        self._check_length(name, tensor)
        return Slot(len(self.inputs) - 1)

    def leaves(self, chunk: Chunk, wanted: list[bool]) -> list[Tensor]:
        """The differentiable arguments of this chunk [..., C, ...], as leaves; all of a tensor that has no tokens.
        Those that are wanted require a gradient."""
        return [
            (d.tensor if d.dim is None else chunk.part(d.tensor, d.dim)).detach().requires_grad_(needs)
            for d, needs in zip(self.differentiable, wanted, strict=True)
        ]

    def _part(self, chunk: Chunk, leaves: list[Tensor], name: str, tensor: Any) -> Any:
        if isinstance(tensor, Slot):
            return leaves[tensor.number]
        dim = -2 if name == PICKED else TOKEN_DIMS.get(name)
        if dim is None and name.endswith("mask") and tensor.dim() == 2 and tensor.shape[-1] == self.length:
            dim = -1  # of padding [B, T]
        if dim is None:
            return tensor
        if tensor.shape[dim] != self.length:
            self._check_length(name, tensor)
        cut = chunk.part(tensor, dim)
        # Later keys are picked where there were too few to pick from, and are masked: any key that is there will do.
        return cut.clamp(max=chunk.stop - 1) if name == PICKED else cut

    def cut(self, chunk: Chunk, leaves: list[Tensor] | None = None) -> dict[str, Any]:
        """What the layer's forward is called with for this chunk, by name; of tokens [..., T, ...] it gets [..., C, ...].

        Args:
            leaves: the chunk's differentiable arguments, from `leaves`; None: the same values, without a gradient.

        Raises:
            StreamBPError: an argument has other positions than the sequence.
        """
        if leaves is None:
            leaves = self.leaves(chunk, [False] * len(self.differentiable)) if self.differentiable else []
        named = self._parts.get(chunk)
        if named is None:
            named = self._parts[chunk] = {}
            for name, value in self.named.items():
                if isinstance(value, Tensor):
                    named[name] = self._part(chunk, leaves, name, value)
                elif type(value) is tuple and set(map(type, value)) == {Tensor}:
                    named[name] = tuple(map(functools.partial(self._part, chunk, leaves, name), value))
                elif isinstance(value, tuple):
                    if _is_constant(value):
                        named[name] = rebuilt(value, functools.partial(self._part, chunk, leaves, name))
                elif not isinstance(value, Slot | list | Mapping):
                    named[name] = value
        named = dict(named)
        if len(named) < len(self.named):
            for name in self.named.keys() - named.keys():
                named[name] = rebuilt(self.named[name], functools.partial(self._part, chunk, leaves, name))
        if self.position_cache:
            named[self.position_cache] = ChunkCache(chunk.start)
        return named

    @contextlib.contextmanager
    def replaced(self, changes: dict[str, Any], packed_rows: PackedRows | None = None) -> Iterator[None]:
        """Within, the call has other arguments by these names, and other documents; None: a row is one."""
        before = self.named, self._parts, self._documents, self.packed_rows
        self.named, self._parts, self._documents = {**self.named, **changes}, {}, None
        self.packed_rows = packed_rows
        try:
            yield
        finally:
            self.named, self._parts, self._documents, self.packed_rows = before

    def _check_length(self, name: str, tensor: Tensor) -> None:
        dim = TOKEN_DIMS.get(name)
        if dim is not None and tensor.shape[dim] != self.length:
            raise StreamBPError(
                f"{name} has {tensor.shape[dim]} positions, the sequence has {self.length}. They must be the same."
            )


def _token_shape(hidden_states: Tensor, position_ids: Any) -> torch.Size:
    """The shape of one token's hidden states: (h,), in [B, T, h] and in [M, B, T, h] (Gemma 3n's streams); (M, h) in
    [B, T, M, h] (hyper-connections), which the number of positions tells. Where that is M as well, it is a kind of call of
    its own, of which the probe finds that the layer cannot be cut along its streams."""
    behind = (
        hidden_states.dim() == 4
        and isinstance(position_ids, Tensor)
        and hidden_states.shape[1] == position_ids.shape[-1] != hidden_states.shape[2]
    )
    return hidden_states.shape[2:] if behind else hidden_states.shape[-1:]


def _bind(forward: Callable[..., Any], layer: nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
    """The call's arguments by name, without a cache."""
    signature, rest = _signature(forward)
    named = signature.bind(layer, *args, **kwargs).arguments
    del named[next(iter(named))]
    if rest is not None:
        named.update(named.pop(rest, {}))
    named = without_caches(named)
    if "use_cache" in named:
        named["use_cache"] = False
    return named


@functools.lru_cache
def _signature(forward: Callable[..., Any]) -> tuple[inspect.Signature, str | None]:
    """Of a class's forward, and the name of the mapping that takes what it has no parameter for."""
    signature = inspect.signature(forward)
    rest = (p.name for p in signature.parameters.values() if p.kind is inspect.Parameter.VAR_KEYWORD)
    return signature, next(rest, None)


def _is_constant(value: Any) -> bool:
    """Whether every pass over a chunk may be handed the same part of it: it wants no gradient, and no pass adds to it."""
    if isinstance(value, tuple):
        return all(map(_is_constant, value))
    return not isinstance(value, Slot | list | Mapping)
