"""Random generators other than torch's default ones, whose states are saved for each chunk.

A module may own a generator of torch, Python or NumPy. Third-party code, such as stochastic depth,
may draw from the global generators of `random` and `numpy.random`. Chunks and recomputations would
draw other numbers there. A layer that draws from such a generator therefore runs unchunked, and
repeats the same numbers in backward.
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

from streambp.admission.snapshot import StateRestorer
from streambp.admission.third_party import foreign_parts
from streambp.fingerprint.snapshots import Generator, LayerSnapshot, ModuleSnapshot
from streambp.layer.call import LayerCall
from streambp.layer.layer_state import LayerState
from streambp.layer.products import has_global_hooks
from streambp.layer.side_effects import buffers_of, replace_buffers, use_buffers

# Only third-party code counts: transformers' layers never draw here, but other threads may.
GLOBAL_GENERATORS: tuple[Generator, ...] = (random._inst, np.random.mtrand._rand)  # type: ignore[attr-defined]


def generators_of(layer_state: LayerState, snapshot: LayerSnapshot) -> list[Generator]:
    """Return the random generators that the layer may draw from, without torch's default
    generators. These are generators in modules' attributes, and those of `random` and
    `numpy.random` if third-party code runs in the layer.

    Args:
        layer_state: the decoder layer, with its settings and test results.
        snapshot: snapshot of the layer's modules, hooks and attributes.
    """
    shared = (
        layer_state.previous is not None
        or snapshot.hooks.locations
        or has_global_hooks()
        or layer_state.cached_result(foreign_parts)
    )
    return [*snapshot.body.generators, *(GLOBAL_GENERATORS if shared else ())]


def generator_states(generators: Sequence[Generator]) -> list[Any]:
    """Return the present state of each generator, in the order of `generators`. States of torch
    generators are uint8 tensors on the CPU. `set_generators` restores the states."""
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
    """Set random generators back to earlier states, so that they draw the same numbers again.

    Args:
        generators: the generators.
        states: the states, in the same order, as returned by `generator_states`.
    """
    for generator, state in zip(generators, states, strict=True):
        if isinstance(generator, random.Random):
            generator.setstate(state)
        elif isinstance(generator, torch.Generator | np.random.RandomState):
            generator.set_state(state)
        else:
            generator.bit_generator.state = state


def has_drawn(generators: Sequence[Generator], states: Sequence[Any]) -> bool:
    """True if random numbers were drawn from one of the generators since its state was read. A
    layer that draws from such a generator runs unchunked.

    Args:
        generators: the generators.
        states: the earlier result of `generator_states` for the same generators.
    """
    return not all(
        torch.equal(earlier_state, current_state)
        if isinstance(earlier_state, Tensor)
        else pickle.dumps(earlier_state) == pickle.dumps(current_state)
        for earlier_state, current_state in zip(states, generator_states(generators), strict=True)
    )


@contextlib.contextmanager
def keep_generator_states(generators: Sequence[Generator]) -> Iterator[None]:
    """Context manager for a test run that restores the generators' states afterwards. The layer's
    real call then draws the same numbers as without a test."""
    states = generator_states(generators)
    try:
        yield
    finally:
        set_generators(generators, states)


def generators_inside(module: nn.Module) -> tuple[Generator, ...]:
    """Return the random generators among a module's attributes, and the default generators of
    Python's `random` and of NumPy. A test run restores their states. Torch's default generators are
    restored elsewhere."""
    return (*ModuleSnapshot(module, set()).generators, *GLOBAL_GENERATORS)


@contextlib.contextmanager
def restore_module_state(
    module: nn.Module, generators: Sequence[Generator] | None = None
) -> Iterator[StateRestorer]:
    """Context manager for a test or warm-up that restores a module's attributes, buffers and random
    generators afterwards. Torch's default generators are not restored. Yields the `StateRestorer`
    object, which can also restore the attributes between two runs. [Note: a trial leaves nothing]

    Args:
        module: the module.
        generators: the result of `generators_inside` for the module, if a caller has it; None: the
            generators are searched, which takes as long as reading all of the module's values.
    """
    if generators is None:
        generators = generators_inside(module)
    buffers = buffers_of(module)
    with (
        replace_buffers(buffers),
        keep_generator_states(generators),
        StateRestorer(module, buffers) as restored,
    ):
        yield restored


@contextlib.contextmanager
def trial_context(call: LayerCall) -> Iterator[StateRestorer]:
    """Context manager for a test run of a layer: the layer's attributes, buffers and random
    generators are restored afterwards. Yields the `StateRestorer` object, which can also restore
    the attributes between two runs.

    Must be entered inside `LayerCall.prepare_layer`. The changes that `prepare_layer` makes to
    modules and configs then belong to the state that is restored.
    """
    buffers, generators = (
        buffers_of(call.layer_state.layer),
        generators_of(call.layer_state, call.snapshot),
    )
    with (
        replace_buffers(buffers),
        keep_generator_states(generators),
        StateRestorer(call.layer_state.layer, buffers) as restored,
    ):
        yield restored


def learn_changes(call: LayerCall, state: StateRestorer) -> None:
    """Take a new snapshot of the layer after a test run. Snapshots are compared to detect a changed
    layer. Later comparisons ignore the attributes that the run has changed, for example a counter.
    Buffers are still compared: the run wrote to copies of them.

    Args:
        call: the layer's call, whose attribute `snapshot` is replaced.
        state: the `StateRestorer` that `trial_context` yields, with the original buffers.
    """
    fingerprint = call.layer_state.fingerprint
    with use_buffers(state.buffers):
        call.snapshot = fingerprint.learn(call.layer_state.layer, call.snapshot)
