"""State that a recomputation must share with the forward: parameters, autocast, training mode, and
disabled checkpointing.

[Note: autocast] A program's autocast applies to its model's computation only. `Autocast.disable`
therefore surrounds a layer's call, its tests and its backward pass, also if the program calls
backward inside its own autocast. `Autocast.restore` surrounds only the layer's own forward
(`LayerCall.run`), in forward and in recomputations. Tensors that streambp joins, sums and compares
keep their dtypes: a join of float16 raises under bfloat16's autocast. Gradients need no autocast:
autograd returns each gradient in its value's dtype, and autocast would round the factors of a
float32 region's gradients to half precision. The outer context keeps autocast's weight copies for
all chunks, because torch drops the copies at the end of the outermost autocast.

The backward of each chunk would call the hooks that DDP, ZeRO, FSDP or the user registered on the
parameters, once per chunk. The loop over chunks therefore differentiates with respect to shadows:
detached aliases that share the parameters' memory. Shadows are in the parameters' slots during the
loop. The layer's autograd Function returns the summed gradients, which calls each hook once. A
parameter in several slots (tied) has one shadow. Frozen parameters stay in their slots, because
quantized ones have attributes that a detached alias would lose.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import itertools
import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize

from streambp.errors import BackwardError, UnsupportedModelError
from streambp.fingerprint.snapshots import GET_VERSION, LayerSnapshot
from streambp.known_names import CHECKPOINTING_ATTRIBUTES
from streambp.tensors import restoring_iterator

NULL_CONTEXT: contextlib.AbstractContextManager[None] = contextlib.nullcontext()  # reusable


class Autocast(NamedTuple):
    """The settings of torch's autocast for one device and for the CPU, at the time of `capture`.
    [Note: autocast]

    Attributes:
        states: (device type, True if autocast is enabled, autocast's dtype) for each of the two
            device types; one entry if the device is the CPU.
        cache: True if autocast caches the copies of weights that it casts.
        on: True if autocast is enabled for one of the device types.
    """

    states: tuple[tuple[str, bool, torch.dtype], ...]
    cache: bool
    on: bool

    @classmethod
    def capture(cls, device: torch.device) -> Autocast:
        """Return the current state of autocast for this device and the CPU."""
        states, on = [], False
        for kind in ("cpu",) if device.type == "cpu" else (device.type, "cpu"):
            if torch.amp.is_autocast_available(kind):
                active = torch.is_autocast_enabled(kind)
                states.append((kind, active, torch.get_autocast_dtype(kind)))
                on |= active
        return cls(tuple(states), torch.is_autocast_cache_enabled(), on)

    def disable(self) -> contextlib.AbstractContextManager[None]:
        """Context manager in which autocast is disabled for the device and the CPU."""
        return self.restore(enabled=False)

    def restore(self, enabled: bool = True) -> contextlib.AbstractContextManager[None]:
        """Context manager in which autocast has the captured state.

        Args:
            enabled: True: as captured; False: autocast is disabled instead, whatever was captured.
        """
        for kind, active, _ in self.states:
            if active or torch.is_autocast_enabled(kind):
                return self._switch(enabled)
        return NULL_CONTEXT

    @contextlib.contextmanager
    def _switch(self, enabled: bool) -> Iterator[None]:
        cached = self.cache and torch.is_autocast_cache_enabled()  # a trial switches it off
        with contextlib.ExitStack() as stack:
            for kind, active, dtype in self.states:
                if active or torch.is_autocast_enabled(kind):
                    on = active and enabled
                    stack.enter_context(
                        torch.autocast(kind, dtype=dtype, enabled=on, cache_enabled=cached)
                    )
            yield


def check_mode(layer: nn.Module, training: bool) -> None:
    """Raise BackwardError if the layer is in train mode and was in eval mode in forward, or the
    reverse, because the recomputation would differ.

    Args:
        layer: the layer, with its mode in backward.
        training: `layer.training` in forward.
    """
    if layer.training != training:
        raise BackwardError(
            f"The layer was in {'train' if training else 'eval'} mode in forward and is in the "
            "other mode in backward, so its recomputation would differ. Call model.train() or "
            "model.eval() outside of a step."
        )


@contextlib.contextmanager
def disable_checkpointing(modules: list[nn.Module]) -> Iterator[None]:
    """Context manager that disables transformers' checkpointing and torch's `parametrize.cached()`
    while a layer runs in chunks.

    From transformers 5.23 on a layer's forward would wrap itself in a checkpoint. Parametrized
    weights from torch's cache have no graph, or a graph that does not end at the leaves of the
    recomputation. Recomputations need this context manager too, because TRL sets
    `gradient_checkpointing` again between forward and backward.

    Args:
        modules: the layer's modules that have a `gradient_checkpointing` flag. Flags that are True
            are False during the context.
    """
    flag = CHECKPOINTING_ATTRIBUTES[0]
    flagged = [module for module in modules if module.__dict__.get(flag)]
    restore = restoring_iterator(zip(map(vars, flagged), itertools.repeat(flag)))
    cached = parametrize._cache_enabled
    try:
        for module in flagged:
            module.gradient_checkpointing = False  # type: ignore[assignment]
        if cached:  # global for the process, so threads without a cache must not set it
            parametrize._cache_enabled = 0
        yield
    finally:
        if cached:
            parametrize._cache_enabled = cached
        collections.deque(restore, maxlen=0)  # one call in C, which Ctrl-C cannot end half-way


ParameterSlot = tuple[nn.Module, str]  # a place that holds a parameter: `module._parameters[name]`


def slots_of(module: nn.Module) -> list[tuple[str, ParameterSlot]]:
    """Return the slots of all parameters inside a module, as a list of pairs (full name of the
    parameter, slot). A slot is a pair (submodule, key in the submodule's dict `_parameters`). Slots
    that contain None are left out, and a tied parameter has several slots. `Parameters` reads and
    replaces parameters in their slots."""
    return [
        (f"{path}.{name}", (owner, name))
        for path, owner in module.named_modules()
        for name, parameter in owner._parameters.items()
        if parameter is not None
    ]


class Parameters:
    """The trainable parameters of a module, stored as slots: (submodule, name) for
    `submodule._parameters[name]`.

    A tied parameter has several slots. The parameters themselves are not stored, because DDP, ZeRO
    or FSDP may replace them between forward and backward.

    Args:
        module: the module.
        device: device on which the module computes. A trainable parameter on the meta device raises
            unless the module computes there as well.
        slots: the result of `slots_of(module)`; None: call `slots_of` here.

    Attributes:
        names: full names of the distinct parameters.
        groups: the list of slots of each distinct parameter, in the order of `names`.
        snapshot: snapshot of the module's structure, attributes and hooks; None: no snapshot was
            taken.
        trained: the requires_grad flags of all the module's parameters at the snapshot, one byte
            each.
    """

    snapshot: LayerSnapshot | None = None
    trained: bytes = b""

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        slots: list[tuple[str, ParameterSlot]] | None = None,
    ) -> None:
        groups: dict[int, list[ParameterSlot]] = {}
        self.names: list[str] = []
        self._identities: list[int] = []  # of each distinct parameter
        self._versions: list[int] = []
        self._first_slots: list[ParameterSlot] = []
        for path, slot in slots_of(module) if slots is None else slots:
            parameter = slot[0]._parameters[slot[1]]
            if isinstance(parameter, DTensor):  # frozen DTensors are refused as well
                raise UnsupportedModelError(
                    f"{path} is a DTensor while the layer computes, as under tensor or expert "
                    "parallelism. streambp streams plain parameters: use DDP, ZeRO or FSDP2 around "
                    "whole decoder layers."
                )
            if parameter is None or not parameter.requires_grad:
                continue
            if parameter.is_meta and device.type != "meta":
                raise UnsupportedModelError(
                    f"{path} is on the meta device while the layer computes on {device.type}, as "
                    "under device_map with weights offloaded to disk or CPU; its gradient would be "
                    "lost. Load the model without offloaded weights to train it."
                )
            if id(parameter) in groups:
                groups[id(parameter)].append(slot)
                continue
            self.names.append(path)
            self._identities.append(id(parameter))
            self._versions.append(parameter._version)
            self._first_slots.append(slot)
            groups[id(parameter)] = [slot]
        self.groups = list(groups.values())
        self._module = module

    def renew(self, snapshot: LayerSnapshot, trained: bytes) -> Parameters:
        """Return a copy for a new forward of the layer, with the current ids and version counters
        of the parameters. `check_unchanged` reads the ids and counters in backward.

        Args:
            snapshot: snapshot of the layer's modules, attributes and hooks at this forward.
            trained: the requires_grad flags of the layer's parameters at this forward, one byte
                each.
        """
        renewed = copy.copy(self)
        parameters = renewed.current()
        renewed._identities = list(map(id, parameters))
        renewed._versions = list(map(GET_VERSION, parameters))
        renewed.snapshot = snapshot
        renewed.trained = trained
        return renewed

    def current(self) -> list[Tensor]:
        """Return the present parameters [...] of the modules, each distinct parameter once, in the
        order of `names`. An engine or streambp may have replaced the parameters since the list of
        names was made."""
        parameters: list[Any] = [owner._parameters[name] for owner, name in self._first_slots]
        return parameters

    def check_unchanged(self, slots: list[tuple[str, ParameterSlot]] | None = None) -> None:
        """Raise BackwardError if a parameter was written to or replaced since forward, or if a
        parameter requires a gradient that required none in forward.

        Args:
            slots: the result of `slots_of(module)` now, whose requires_grad flags are checked;
                None: call `slots_of` here. []: the flags are known to be unchanged.
        """
        parameters = self.current()
        if (
            list(map(id, parameters)) != self._identities
            or list(map(GET_VERSION, parameters)) != self._versions
        ):
            known_as = zip(self.names, parameters, self._identities, self._versions, strict=True)
            for name, parameter, identity, version in known_as:
                if id(parameter) != identity:
                    raise BackwardError(
                        f"{name} is another tensor in backward than it was in forward, so "
                        "recomputing the layer would give the gradient of another model. "
                        "torch.func.functional_call replaces parameters during forward alone. "
                        "Load the values into the model's own parameters, or run the model "
                        "unpatched (streambp.unpatch(model))."
                    )
                if parameter._version != version:
                    raise BackwardError(
                        f"{name} was changed in place between forward and backward, so recomputing "
                        "the layer would give the gradient of another model. Call backward before "
                        "optimizer.step() or any other update."
                    )
        slots = slots_of(self._module) if slots is None else slots
        ids = set(self._identities) if slots else ()
        for _, (owner, name) in slots:
            current = owner._parameters[name]
            if current is not None and current.requires_grad and id(current) not in ids:
                raise BackwardError(
                    f"{type(owner).__name__}.{name} {list(current.shape)} wants a gradient in "
                    "backward "
                    "and wanted none in forward (another adapter is active?), so recomputing the "
                    "layer would give the gradient of another model. Call backward before "
                    "set_adapter or requires_grad_."
                )

    def shadow(
        self, change: Callable[[Tensor], Tensor] = Tensor.detach
    ) -> contextlib.AbstractContextManager[list[Tensor]]:
        """Context manager that replaces the parameters in their modules by detached aliases that
        require gradients. A chunk is differentiated for these aliases, so that no gradient is added
        to the parameters' `.grad`. The list of aliases [...] is yielded, in the order of `current`.

        Args:
            change: returns a parameter's replacement, without a graph; default: a detached alias.
        """
        return self.replace([change(parameter).requires_grad_() for parameter in self.current()])

    @contextlib.contextmanager
    def replace(self, replacements: list[Tensor]) -> Iterator[list[Tensor]]:
        """Context manager that replaces the parameters in their modules by other tensors [...], and
        yields these tensors. The end of the context puts the parameters back.

        Args:
            replacements: the tensors, in the order of `current`.
        """
        changes: list[tuple[dict[str, Any], str, Tensor]] = []
        originals: list[tuple[dict[str, Any], str, Tensor]] = []
        triples = zip(self.groups, replacements, self.current(), strict=True)
        for slots, replacement, parameter in triples:
            for owner, name in slots:
                changes.append((owner._parameters, name, replacement))
                originals.append((owner._parameters, name, parameter))
        restore = itertools.starmap(operator.setitem, originals)
        try:
            for table, name, replacement in changes:
                table[name] = replacement
            yield replacements
        finally:
            # One call in C, which Ctrl-C cannot end half-way: the model keeps its own parameters.
            collections.deque(restore, maxlen=0)
