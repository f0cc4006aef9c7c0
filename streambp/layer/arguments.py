"""Arguments of a layer call: the chunk's part of each argument, and the arguments that need a
gradient.

Tensors among the arguments that require a gradient are inputs of the layer's autograd Function,
like hidden_states. Examples are per-layer inputs, and keys and values that an earlier layer shares.
This module stores only detached aliases, from which every chunk gets its own leaves.
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
from streambp.cache_arguments import is_cache_class
from streambp.chunks import Chunk, Forks
from streambp.errors import BackwardError, StreamBPError, UnsupportedModelError
from streambp.known_names import DOCUMENT_ENDS, DOCUMENT_IDS, PICKED_KEYS_ARGUMENT, TOKEN_DIMS
from streambp.recurrent.documents import Documents, PackedRows
from streambp.tensors import TensorSlot, rebuild


@dataclasses.dataclass
class DifferentiableArgument:
    """An argument of a layer call that requires a gradient, beside hidden_states.

    Attributes:
        tensor: the argument, detached.
        dim: the dimension that counts tokens; None: no dimension does.
    """

    tensor: Tensor
    dim: int | None


Versions = list[
    tuple[str, Tensor, int]
]  # (name, argument of any shape, version), no inference tensors


def refuse_written(arguments: Versions) -> None:
    """Raise BackwardError if one of the arguments of a layer call was written to since forward, so
    that a recomputation would read other values.

    Args:
        arguments: a tuple for each argument: its name, its tensor [...], and the tensor's version
            counter in forward.
    """
    for name, tensor, version in arguments:
        if tensor._version != version:
            raise BackwardError(
                f"{name} [{', '.join(map(str, tensor.shape))}], an argument of a streamed layer, "
                "was changed in place between forward and backward, so recomputing the layer would "
                "give the gradient of another batch. Call backward before, or work on a copy "
                "(tensor.clone())."
            )


class Arguments:
    """The arguments of one call of a decoder layer, by name and without hidden_states. Caches are
    replaced by None, and use_cache by False.

    Args:
        forward: the layer class's forward.
        layer: the decoder layer.
        args: the call's positional arguments.
        kwargs: the call's keyword arguments.
        position_cache: name of the argument for a cache that the layer reads positions from; empty:
            no such argument.
        packed_rows: document boundaries of packed rows, if the modules with recurrent states run
            once for each document; None: they run once. [Note: segments]
        state: key of the layer's modules, hooks and requires_grad flags. The layer is tested again
            when this key changes, because the key is part of `kind`. [Note: fingerprint]

    Attributes:
        by_name: the arguments; a `TensorSlot` stands for a tensor that requires a gradient.
        hidden_states: the layer's input [..., B, T, h], until `LayerCall` deletes this attribute.
        length: T.
        folds: True if the layer's input was reshaped from M residual streams [B, T, M, h / M].
        kind: key under which the layer's test results are stored: names, types and dtypes of the
            arguments, and `state`.
        inputs: the caller's tensors that require a gradient, beside hidden_states.
        differentiable: the tensors in `inputs`, detached.
        mappings: dicts among the arguments, by name, to which the layer may add entries.
        versions: name, tensor [...] and version counter in forward, of each tensor.
        forks: pairs of positions (start, origin) in a packed row whose documents share a prefix:
            recurrent states at `start` continue from those at `origin`; (): none.
        tells: True if document boundaries were added that the caller did not pass.
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
        self.forks: Forks = ()  # for a tree of rows in a layer with states
        self.tells = False
        signature, var_keyword = _signature(forward)
        self.by_name = signature.bind(layer, *args, **kwargs).arguments
        del self.by_name[next(iter(self.by_name))]  # the layer itself
        if var_keyword is not None:
            self.by_name.update(self.by_name.pop(var_keyword, {}))
        for name, value in self.by_name.items():
            kind: Any = type(value)
            if value is not None and is_cache_class(kind):
                self.by_name[name] = None
        if "use_cache" in self.by_name:
            self.by_name["use_cache"] = False
        # recurrent_gemma: activations
        first = "hidden_states" if "hidden_states" in self.by_name else next(iter(self.by_name))
        layer_input: Tensor = self.by_name.pop(first)
        if not isinstance(layer_input, Tensor):
            raise UnsupportedModelError(
                f"The forward of {type(layer).__name__} takes hidden states as *{first}, without a "
                "name. Give it the original's signature (functools.wraps), or replace `forward` on "
                "the layer itself."
            )
        self.token_shape = (
            layer_input.shape[-1:]
            if layer_input.dim() < 4
            else _token_shape(layer_input, self.by_name.get("position_ids"))
        )
        self.folds = len(self.token_shape) > 1  # M residual streams are folded into h: M * h
        self.hidden_states = (
            layer_input.flatten(-2) if self.folds else layer_input
        )  # [..., B, T, h]
        self.length = self.hidden_states.shape[-2]
        self.position_cache = position_cache
        # The form of the arguments, independent of the batch: calls of one kind stream alike.
        self.kind: frozenset[tuple[str, Any]]
        self.inputs: list[Tensor] = []  # the caller's tensors with history, for the Function
        self.differentiable: list[DifferentiableArgument] = []
        # Mappings that the layer reads and writes. Entries added to a chunk's copy are outputs.
        self.mappings: dict[str, Any] = {}
        self.versions: Versions = []
        kinds: list[tuple[str, Any]] = []
        for name, value in self.by_name.items():
            if isinstance(value, Tensor):
                value = self.by_name[name] = self._detach(name, value)
            elif type(value) is tuple and set(map(type, value)) == {Tensor}:  # cosines and sines
                value = self.by_name[name] = tuple(
                    map(functools.partial(self._detach, name), value)
                )
            elif isinstance(value, tuple | list):
                value = self.by_name[name] = rebuild(value, functools.partial(self._detach, name))
            elif value is not None and isinstance(value, Mapping):
                self.mappings[name] = value
                value = self.by_name[name] = rebuild(value, functools.partial(self._detach, name))
            tensor = (
                self.differentiable[value.number].tensor if isinstance(value, TensorSlot) else value
            )
            if isinstance(tensor, Tensor):
                kinds.append((name, (tensor.dim(), tensor.dtype)))
            elif value is not None:
                kinds.append((name, value if isinstance(value, bool) else type(value)))
        kinds += [
            (first, (layer_input.dim(), len(self.token_shape))),
            ("a graph", torch.is_grad_enabled()),
        ]
        self.kind = frozenset((*kinds, ("packed rows", packed_rows is not None), ("state", state)))
        # All passes over a chunk share its arguments. A tuple's hash is faster than a Chunk's.
        self._parts: dict[tuple[int, int], dict[str, Any]] = {}
        self._documents: Documents | None = None

    @property
    def nbytes(self) -> int:
        """Return the bytes of the tensors among the arguments. Storage that several tensors share
        counts once. Inference tensors do not count, and the result is 0 in a call without
        gradients."""
        storages = {tensor.untyped_storage()._cdata: tensor for _, tensor, _ in self.versions}
        return sum(tensor.nbytes for tensor in storages.values())

    def add_documents(self, documents: Documents) -> None:
        """Add document boundaries to the layer's arguments, for a batch whose rows contain several
        documents each. The layer's attention and state kernels then keep the documents separate.
        Called if the caller passed no boundaries. Sets `tells`, and changes `kind`.

        Args:
            documents: the documents, and the arguments that mark their boundaries.
        """
        self.by_name.update(documents.arguments)
        self.kind |= {("told", tuple(documents.arguments))}
        self._documents, self.tells = documents, True

    def replace_state(self, state: tuple[Any, ...]) -> None:
        """Replace the part of `kind` that stands for the layer's modules, hooks and requires_grad
        flags. The layer's test results are stored by `kind`.

        Called after a run of the layer, because values that the layer's own forward changes are
        left out of this part from then on. The caller then stores the test's result under the new
        `kind`, where later calls find it.

        Args:
            state: the new key of modules, hooks and requires_grad flags.
        """
        self.kind = frozenset(
            {*(pair for pair in self.kind if pair[0] != "state"), ("state", state)}
        )

    def restore_shape(self, hidden_states: Tensor) -> Tensor:
        """Return hidden states [..., T, h] in the shape of the layer's input: [..., T, M, h / M]
        for a layer with M residual streams, unchanged for other layers."""
        return hidden_states.unflatten(-1, self.token_shape) if self.folds else hidden_states

    @property
    def documents(self) -> Documents | None:
        """Return the documents of packed rows if boundaries are among the arguments (`seq_idx` or
        `cu_seq_lens_q`), else None. `Packing` reads the documents, so that recurrent states start
        anew with each document. Reading the boundaries may synchronize with the device."""
        if self._documents is None:
            ids, ends = self.by_name.get(DOCUMENT_IDS), self.by_name.get(DOCUMENT_ENDS)
            self._documents = None if ids is None and ends is None else Documents(ids, ends)
        return self._documents

    def _detach(self, name: str, tensor: Tensor) -> Tensor | TensorSlot:
        if not torch.is_grad_enabled():
            return tensor
        if not tensor.is_inference():
            self.versions.append((name, tensor, tensor._version))
        if not tensor.requires_grad or name == "attention_mask":
            return tensor  # the reader of a mask refuses one with a gradient
        self.inputs.append(tensor)
        self.differentiable.append(DifferentiableArgument(tensor.detach(), TOKEN_DIMS.get(name)))
        self._check_length(name, tensor)
        return TensorSlot(len(self.inputs) - 1)

    def leaves(self, chunk: Chunk, flags: list[bool]) -> list[Tensor]:
        """Return new autograd leaves for this chunk, one for each argument that requires a
        gradient. A leaf is the argument's slice [..., C, ...], or the full tensor if no dimension
        counts tokens.

        Args:
            chunk: the chunk's range of positions.
            flags: one flag for each entry of `differentiable`: the leaf's requires_grad, True if
                backward needs the argument's gradient.
        """
        return [
            (d.tensor if d.dim is None else chunk.part(d.tensor, d.dim))
            .detach()
            .requires_grad_(needs)
            for d, needs in zip(self.differentiable, flags, strict=True)
        ]

    def _part(self, chunk: Chunk, leaves: list[Tensor], name: str, tensor: Any) -> Any:
        if isinstance(tensor, TensorSlot):
            return leaves[tensor.number]
        dim = -2 if name == PICKED_KEYS_ARGUMENT else TOKEN_DIMS.get(name)
        if (
            dim is None
            and name.endswith("mask")
            and tensor.dim() == 2
            and tensor.shape[-1] == self.length
        ):
            dim = -1  # padding [B, T]
        if dim is None:
            return tensor
        if tensor.shape[dim] != self.length:
            self._check_length(name, tensor)
        part = chunk.part(tensor, dim)
        # With too few keys, later keys are picked and masked: any existing key can replace them.
        return part.clamp(max=chunk.stop - 1) if name == PICKED_KEYS_ARGUMENT else part

    def slice_chunk(self, chunk: Chunk, leaves: list[Tensor] | None = None) -> dict[str, Any]:
        """Return the arguments of the layer's own forward for one chunk, by name. Tensors with a
        dimension of tokens [..., T, ...] are sliced to [..., C, ...].

        Args:
            chunk: the chunk's range of positions.
            leaves: this chunk's result of the method `leaves`; None: the same values without a
                gradient.

        Raises:
            StreamBPError: an argument's length differs from the sequence's.
        """
        if leaves is None:
            if self.differentiable:
                leaves = self.leaves(chunk, [False] * len(self.differentiable))
            else:
                leaves = []
        bounds = (chunk.start, chunk.stop)
        chunk_arguments = self._parts.get(bounds)
        if chunk_arguments is None:
            chunk_arguments = self._parts[bounds] = {}
            for name, value in self.by_name.items():
                if isinstance(value, Tensor):
                    chunk_arguments[name] = self._part(chunk, leaves, name, value)
                elif type(value) is tuple and set(map(type, value)) == {Tensor}:
                    chunk_arguments[name] = tuple(
                        map(functools.partial(self._part, chunk, leaves, name), value)
                    )
                elif isinstance(value, tuple):
                    if _is_constant(value):
                        chunk_arguments[name] = rebuild(
                            value, functools.partial(self._part, chunk, leaves, name)
                        )
                elif not isinstance(value, TensorSlot | list | Mapping):
                    chunk_arguments[name] = value
        chunk_arguments = dict(chunk_arguments)
        if len(chunk_arguments) < len(self.by_name):
            for name in self.by_name.keys() - chunk_arguments.keys():
                chunk_arguments[name] = rebuild(
                    self.by_name[name], functools.partial(self._part, chunk, leaves, name)
                )
        if self.position_cache:
            chunk_arguments[self.position_cache] = ChunkCache(chunk.start)
        return chunk_arguments

    @contextlib.contextmanager
    def replace(
        self, changes: dict[str, Any], packed_rows: PackedRows | None = None
    ) -> Iterator[None]:
        """Context manager in which some arguments, and the documents of packed rows, are replaced,
        for a test run of the layer.

        Args:
            changes: new values by argument name; other arguments stay.
            packed_rows: the documents during the context; None: each row is one document.
        """
        previous = self.by_name, self._parts, self._documents, self.packed_rows
        self.by_name, self._parts, self._documents = {**self.by_name, **changes}, {}, None
        self.packed_rows = packed_rows
        try:
            yield
        finally:
            self.by_name, self._parts, self._documents, self.packed_rows = previous

    def _check_length(self, name: str, tensor: Tensor) -> None:
        dim = TOKEN_DIMS.get(name)
        if dim is not None and tensor.shape[dim] != self.length:
            raise StreamBPError(
                f"{name} has {tensor.shape[dim]} positions, the sequence has {self.length}. They "
                "must be the same."
            )


def _token_shape(hidden_states: Tensor, position_ids: Any) -> torch.Size:
    """Return the shape of one token's hidden states: (h,) in [B, T, h] and in [M, B, T, h] (Gemma
    3n), and (M, h) in [B, T, M, h] (hyper-connections). M is the number of residual streams.

    [M, B, T, h] and [B, T, M, h] are distinguished by T, the number of positions. If T equals M,
    the result may be wrong. The layer's test run fails then, and the layer is not chunked.
    """
    behind = (
        hidden_states.dim() == 4
        and isinstance(position_ids, Tensor)
        and hidden_states.shape[1] == position_ids.shape[-1] != hidden_states.shape[2]
    )
    return hidden_states.shape[2:] if behind else hidden_states.shape[-1:]


@functools.lru_cache
def _signature(forward: Callable[..., Any]) -> tuple[inspect.Signature, str | None]:
    """Return the signature of a class's forward, and the name of its `**kwargs` parameter; None
    without one."""
    signature = inspect.signature(forward)
    var_keywords = (
        p.name for p in signature.parameters.values() if p.kind is inspect.Parameter.VAR_KEYWORD
    )
    return signature, next(var_keywords, None)


def _is_constant(value: Any) -> bool:
    """True if an argument's slice for a chunk may be made once and be used in forward and backward.
    False for an argument that requires a gradient, because each use gets a new leaf. False for
    lists and mappings, which the layer may modify; a tuple with one of these is False too."""
    if isinstance(value, tuple):
        return all(map(_is_constant, value))
    return not isinstance(value, TensorSlot | list | Mapping)
