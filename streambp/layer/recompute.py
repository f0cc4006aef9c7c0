"""What a recomputation must find as the forward found it: random state, autocast, and checkpointing switched off.

[Note: autocast] A program's autocast is for what its model computes. So `Autocast.off` is around the whole of a layer's
call, its trials and its backward pass, also if the program calls backward inside of its own autocast, and
`Autocast.restored` around the layer's own forward alone (`LayerCall.run`), in forward and where that is computed again.
Tensors that streambp joins, sums up and compares keep their dtypes: a join of float16 raises under bfloat16's autocast.
Gradients need none either: autograd gives each in the dtype of its value, and autocast would round the factors of a float32
region's gradients to half precision. The outer one keeps autocast's copies of weights over the chunks: they are dropped
where the outermost autocast ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.utils import parametrize

from streambp.errors import BackwardError
from streambp.known_names import CHECKPOINTING

NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()  # may be entered again and again


class Autocast(NamedTuple):
    """Autocast's state for a device and for the CPU. [Note: autocast]

    on: it casts on one of them. Where it does not, a backward pass, which is computed without, has nothing to restore.
    """

    states: tuple[tuple[str, bool, torch.dtype], ...]
    cache: bool
    on: bool

    @classmethod
    def capture(cls, device: torch.device) -> Autocast:
        """The state as it is now."""
        states, on = [], False
        for kind in ("cpu",) if device.type == "cpu" else (device.type, "cpu"):
            if torch.amp.is_autocast_available(kind):
                active = torch.is_autocast_enabled(kind)
                states.append((kind, active, torch.get_autocast_dtype(kind)))
                on |= active
        return cls(tuple(states), torch.is_autocast_cache_enabled(), on)

    def off(self) -> contextlib.AbstractContextManager[None]:
        """Within, nothing is cast."""
        return self.restored(enabled=False)

    def restored(self, enabled: bool = True) -> contextlib.AbstractContextManager[None]:
        """Within, autocast is as it was when this state was captured; or nothing is cast."""
        for kind, active, _ in self.states:
            if active or torch.is_autocast_enabled(kind):
                return self._switched(enabled)
        return NOTHING

    @contextlib.contextmanager
    def _switched(self, enabled: bool) -> Iterator[None]:
        cached = self.cache and torch.is_autocast_cache_enabled()  # a trial switches it off
        with contextlib.ExitStack() as stack:
            for kind, active, dtype in self.states:
                if active or torch.is_autocast_enabled(kind):
                    on = active and enabled
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=on, cache_enabled=cached))
            yield


WITHOUT_GENERATORS = ("cpu", "meta")  # devices whose random state is the CPU's


class RandomState(NamedTuple):
    """The CPU's and one device's generator states, taken as a chunk starts."""

    cpu: torch.Tensor
    device: torch.device
    accelerator: torch.Tensor | None

    @classmethod
    def capture(cls, device: torch.device) -> RandomState:
        """The states as they are now; `accelerator` is None for the CPU and meta."""
        if device.type in WITHOUT_GENERATORS:
            return cls(torch.default_generator.get_state(), device, None)
        return cls(torch.default_generator.get_state(), device, torch.get_device_module(device).get_rng_state(device))

    def is_current(self) -> bool:
        """Whether nothing was drawn since."""
        now = RandomState.capture(self.device)
        same = torch.equal(self.cpu, now.cpu)
        return same and (self.accelerator is None or torch.equal(self.accelerator, now.accelerator))  # type: ignore[arg-type]

    def restore(self) -> None:
        """Set the generators to these states."""
        torch.default_generator.set_state(self.cpu)
        if self.accelerator is not None:
            torch.get_device_module(self.device).set_rng_state(self.accelerator, self.device)

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """Within, random numbers are drawn as they were; afterwards the stream goes on where it was."""
        outer = RandomState.capture(self.device)
        self.restore()
        try:
            yield
        finally:
            outer.restore()


def check_mode(layer: nn.Module, training: bool) -> None:
    """Raise BackwardError if the layer is in another mode than it was in forward."""
    if layer.training != training:
        raise BackwardError(
            f"The layer was in {'train' if training else 'eval'} mode in forward and is in the other mode in "
            "backward, so its recomputation would differ. Call model.train() or model.eval() outside of a step."
        )


@contextlib.contextmanager
def computed_as_written(modules: list[nn.Module]) -> Iterator[None]:
    """Within, transformers does not checkpoint this layer: from 5.23 on its class's forward would wrap itself. Parametrized
    weights are computed where they are read, and not handed out of `parametrize.cached()`: what it holds was computed
    without a graph, or with one that ends elsewhere.

    TRL switches the flag on again between a forward and its backward, so that a recomputation needs this as well.

    Args:
        modules: those of the layer that have transformers' flag.
    """
    flagged, cached = [module for module in modules if module.__dict__.get(CHECKPOINTING[0])], parametrize._cache_enabled
    try:
        for module in flagged:
            module.gradient_checkpointing = False  # type: ignore[assignment]
        if cached:  # a process has one such number: where nobody caches, threads must not set it for each other
            parametrize._cache_enabled = 0
        yield
    finally:
        if cached:
            parametrize._cache_enabled = cached
        for module in flagged:
            module.gradient_checkpointing = True  # type: ignore[assignment]
