"""Shadows: stand-ins for a module's parameters while its chunks are differentiated.

[Note: shadows] Every chunk's nested backward would fire the hooks that DDP, ZeRO, FSDP or the user hung on the real
parameters, once per chunk. So the chunk loop differentiates with respect to detached aliases that share the parameters'
memory. They sit in the parameters' slots during the loop and the sums go out through the layer's autograd Function, which
fires each hook once. A parameter in several slots (tied) has one shadow; frozen parameters keep their place, because
quantised ones carry attributes that a detached alias would lose.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from streambp.accumulate import add_product
from streambp.errors import BackwardError, UnsupportedModelError
from streambp.fingerprint.looks import VERSION, Look

ParameterSlot = tuple[nn.Module, str]  # a place that holds a parameter: `module._parameters[name]`


def slots_of(module: nn.Module) -> list[tuple[str, ParameterSlot]]:
    """All slots of parameters inside a module that hold one, with their names."""
    return [
        (f"{path}.{name}", (owner, name))
        for path, owner in module.named_modules()
        for name, parameter in owner._parameters.items()
        if parameter is not None
    ]


class Parameters:
    """The trainable parameters of a module, by the slots they sit in.

    Slots are kept, never the parameters themselves: engines may swap those between forward and backward.

    Args:
        slots: `slots_of` the module, if known.

    look: what the module was made of; None: nobody has looked. trained: which of its parameters wanted a gradient then.
    """

    look: Look | None = None
    trained: bytes = b""

    def __init__(
        self, module: nn.Module, device: torch.device, slots: list[tuple[str, ParameterSlot]] | None = None
    ) -> None:
        groups: dict[int, list[ParameterSlot]] = {}
        self.names: list[str] = []
        self._identities: list[int] = []  # of each distinct parameter
        self._versions: list[int] = []
        for path, slot in slots_of(module) if slots is None else slots:
            parameter = slot[0]._parameters[slot[1]]
            if isinstance(parameter, DTensor):  # a frozen one computes with DTensors as well
                raise UnsupportedModelError(
                    f"{path} is a DTensor while the layer computes, as under tensor or expert parallelism. "
                    "streambp streams plain parameters: use DDP, ZeRO or FSDP2 around whole decoder layers."
                )
            if parameter is None or not parameter.requires_grad:
                continue
            if parameter.is_meta and device.type != "meta":
                raise UnsupportedModelError(
                    f"{path} is on the meta device while the layer computes on {device.type}, as under "
                    "device_map with weights offloaded to disk or CPU; its gradient would be lost. Load the model "
                    "without offloaded weights to train it."
                )
            if id(parameter) in groups:
                groups[id(parameter)].append(slot)
                continue
            self.names.append(path)
            self._identities.append(id(parameter))
            self._versions.append(parameter._version)
            groups[id(parameter)] = [slot]
        self.groups = list(groups.values())
        self._module = module

    def renewed(self, look: Look, trained: bytes) -> Parameters:
        """The same parameters, for a call that begins now: as the slots hold them, with their versions."""
        found = copy.copy(self)
        held = found.current()
        found._identities, found._versions = list(map(id, held)), list(map(VERSION, held))
        found.look, found.trained = look, trained
        return found

    def current(self) -> list[Tensor]:
        """What the slots hold now, one tensor [...] for each distinct parameter."""
        return [slots[0][0]._parameters[slots[0][1]] for slots in self.groups]  # type: ignore[misc]

    def check_unchanged(self, slots: list[tuple[str, ParameterSlot]] | None = None) -> None:
        """Raise BackwardError if a parameter was written to since this object was built, as by an optimizer step, or is
        another one; or if another wants a gradient, as of another adapter.

        Args:
            slots: `slots_of` the module as it is now, if known; none where the parameters that want a gradient are
                known to be those that wanted one.
        """
        held = self.current()
        if list(map(id, held)) != self._identities or list(map(VERSION, held)) != self._versions:
            known_as = zip(self.names, held, self._identities, self._versions, strict=True)
            for name, parameter, identity, version in known_as:
                if id(parameter) != identity:
                    raise BackwardError(
                        f"{name} is another tensor in backward than it was in forward (torch.func.functional_call puts "
                        "others in for a forward alone), so recomputing the layer would give the gradient of another "
                        "model. Load the values into the model's own parameters, or run it unpatched "
                        "(streambp.unpatch(model))."
                    )
                if parameter._version != version:
                    raise BackwardError(
                        f"{name} was changed in place between forward and backward, so recomputing the layer would give "
                        "the gradient of another model. Call backward before optimizer.step() or any other update."
                    )
        slots = slots_of(self._module) if slots is None else slots
        known = set(self._identities) if slots else ()
        for _, (owner, name) in slots:
            now = owner._parameters[name]
            if now is not None and now.requires_grad and id(now) not in known:
                raise BackwardError(
                    f"{type(owner).__name__}.{name} {list(now.shape)} wants a gradient in backward and wanted "
                    "none in forward (another adapter is active?), so recomputing the layer would give the gradient of "
                    "another model. Call backward before set_adapter or requires_grad_."
                )

    def shadowed(
        self, change: Callable[[Tensor], Tensor] = Tensor.detach
    ) -> contextlib.AbstractContextManager[list[Tensor]]:
        """Within, shadows [...] are in every slot; yields them in the order of `current`. [Note: shadows]

        Args:
            change: gives a shadow's value from the parameter's.
        """
        return self.replaced([change(parameter).requires_grad_() for parameter in self.current()])

    @contextlib.contextmanager
    def replaced(self, others: list[Tensor]) -> Iterator[list[Tensor]]:
        """Within, slots hold other tensors [...], in the order of `current`."""
        together = zip(self.groups, others, self.current(), strict=True)
        places: list[tuple[dict[str, Any], str, Tensor, Tensor]] = [
            (owner._parameters, name, other, own) for slots, other, own in together for owner, name in slots
        ]
        try:
            for table, name, other, _ in places:
                table[name] = other
            yield others
        finally:
            for table, name, _, own in places:
                table[name] = own


class GradientSum:
    """Sums a parameter list's gradients over chunks in promote_types(dtype, float32) (DESIGN.md section 2).

    Args:
        parts: how many gradients a parameter gets.

    alone: it is one, which is handed on as it is.
    """

    def __init__(self, count: int, parts: int) -> None:
        self._sums: list[Tensor | None] = [None] * count
        self.alone = parts == 1
        self.places: dict[int, int] = {}  # of shadows by their id, by which `adder` knows the sums
        self._casts: dict[tuple[int, torch.dtype, bool], Tensor] = {}  # by id, dtype and whether with a graph
        self._done: dict[int, int] = {}  # by parameter, products of the chunk at work that were added
        self._left: dict[int, int] = {}  # and those of them that a second attempt has not come to yet

    def begin(self, again: bool = False) -> None:
        """A chunk is differentiated. again: for the second time; products that were added are not added once more.
        [Note: once for each chunk]"""
        self._left = dict(self._done) if again else {}
        if not again:
            self._done.clear()

    def adder(self, weight: Tensor) -> Callable[[Tensor, Tensor], None] | None:
        """Adds a product [out, n] @ [n, in] to the gradient that a shadow stands for; None: it is not one, or a sum of one
        part would only be wider. [Note: sums inside products]"""
        index = self.places.get(id(weight))
        if index is None or self.alone:
            return None

        def add(left: Tensor, right: Tensor) -> None:
            if self._left.get(index):
                self._left[index] -= 1
                return
            self._sums[index] = add_product(self._sums[index], left, right)
            self._done[index] = self._done.get(index, 0) + 1

        return add

    def cast(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """The weight [out, in] in `dtype`, made once for a whole pass, whose chunks all run in the forward's autocast."""
        key = (id(weight), dtype, torch.is_grad_enabled())
        if key not in self._casts:
            self._casts[key] = weight.to(dtype)
        return self._casts[key]

    def add(self, gradients: list[Tensor | None]) -> None:
        """Add one part of each gradient [...], shaped like its parameter and in their order; None: this part has none.

        A single part is kept, not copied; of more the first is copied, and taken out of the list: if there was no memory
        for another, the same list can be added again. [Note: once for each chunk]
        """
        totals, parts = [], []
        for index, gradient in enumerate(gradients):
            if gradient is None:
                continue
            total = self._sums[index]
            if self.alone:
                self._sums[index] = gradient
            elif total is None:
                self._sums[index] = gradient.to(torch.promote_types(gradient.dtype, torch.float32), copy=True)
                gradients[index] = None
            else:
                totals.append(total)
                parts.append(gradient)
        if totals:
            torch._foreach_add_(totals, parts)

    def result(self, like: list[Tensor]) -> list[Tensor | None]:
        """The sums [...] in the shapes and dtypes of the parameters, `like`; None for a parameter that no chunk touched.

        Nothing is added any more.
        """
        self._casts.clear()
        sums = zip(self._sums, like, strict=True)
        return [
            total if total is None or total.dtype == parameter.dtype else total.to(parameter.dtype)
            for total, parameter in sums
        ]
