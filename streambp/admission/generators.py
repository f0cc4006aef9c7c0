"""Random numbers that a layer draws elsewhere than from torch's default generators, whose states are kept for each chunk.

A module may hold a generator, of torch, Python or NumPy; code that others wrote may draw from those that `random` and
`numpy.random` share with the whole program (stochastic depth, say). Chunks and recomputations would draw other numbers, so
that a layer that draws there runs whole, and draws once more the same in backward.
"""

from __future__ import annotations

import contextlib
import pickle
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from streambp.admission.insides import foreign_parts
from streambp.admission.snapshot import Restored
from streambp.fingerprint.looks import Body, Generator, Look
from streambp.layer.call import LayerCall
from streambp.layer.products import hooked_everywhere
from streambp.layer.side_effects import buffers_of, in_place_of_buffers
from streambp.layer.site import LayerSite

# transformers' own layers never draw from these, and other threads may at any time.
OF_ALL: tuple[Generator, ...] = (random._inst, np.random.mtrand._rand)  # type: ignore[attr-defined]


def generators_of(site: LayerSite, look: Look) -> list[Generator]:
    """Those that the layer may draw from: its own, and if others wrote a part or a hook of it, those that all share."""
    shared = site.previous is not None or look.hooks.places or hooked_everywhere() or site.of(foreign_parts)
    return [*look.body.generators, *(OF_ALL if shared else ())]


def generator_states(generators: Sequence[Generator]) -> list[Any]:
    """What `set_generators` takes: each generator's state, of torch's a tensor of uint8 on the CPU."""
    states: list[Any] = []
    for generator in generators:
        if isinstance(generator, torch.Generator):
            states.append(generator.get_state())
        elif isinstance(generator, random.Random):
            states.append(generator.getstate())
        elif isinstance(generator, np.random.RandomState):
            states.append(generator.get_state(legacy=False))
        else:
            states.append(generator.bit_generator.state)
    return states


def set_generators(generators: Sequence[Generator], states: Sequence[Any]) -> None:
    """Put generators back to what `generator_states` gave for them; what was drawn since is drawn again."""
    for generator, state in zip(generators, states, strict=True):
        if isinstance(generator, random.Random):
            generator.setstate(state)
        elif isinstance(generator, torch.Generator | np.random.RandomState):
            generator.set_state(state)
        else:
            generator.bit_generator.state = state


def has_drawn(generators: Sequence[Generator], states: Sequence[Any]) -> bool:
    """Whether one of them is no longer in its state of these."""
    return not all(
        torch.equal(one, other) if isinstance(one, Tensor) else pickle.dumps(one) == pickle.dumps(other)
        for one, other in zip(states, generator_states(generators), strict=True)
    )


@contextlib.contextmanager
def generators_kept(generators: Sequence[Generator]) -> Iterator[None]:
    """Within, what is drawn from them does not count."""
    states = generator_states(generators)
    try:
        yield
    finally:
        set_generators(generators, states)


@contextlib.contextmanager
def leaving_no_trace(module: nn.Module) -> Iterator[Restored]:
    """Within, what a module's parts count, set, write to buffers or draw does not stay, but for torch's own generators.
    [Note: a trial leaves nothing]"""
    buffers, generators = buffers_of(module), (*Body(module, set()).generators, *OF_ALL)
    with in_place_of_buffers(buffers), generators_kept(generators), Restored(module) as restored:
        yield restored


@contextlib.contextmanager
def on_trial(call: LayerCall) -> Iterator[Restored]:
    """The same of a call's layer. Entered where the call is streaming, which switches modules and configs."""
    buffers, generators = buffers_of(call.layer), generators_of(call.site, call.look)
    with in_place_of_buffers(buffers), generators_kept(generators), Restored(call.layer) as restored:
        yield restored
