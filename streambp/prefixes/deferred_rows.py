"""Compute hidden states of a call's rows after its packed row, for a program that reads logits at
padding.

A second forward equals the first only while the model is unchanged. Versions of weights and buffers
and the modules' modes are compared. The tokens of the packed row are recomputed as well, and must
equal the first results.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from streambp.accumulate import HALF_DTYPES
from streambp.errors import StreamBPError, UnsharedError
from streambp.layer.recompute import Autocast
from streambp.lazy.lazy_hidden import LazyHidden
from streambp.prefixes.admission import HALF_TRIAL_TOLERANCE, TRIAL_TOLERANCE, draws_noise
from streambp.prefixes.tree import PrefixTree

# types of module attributes that may change its results
FLAG_TYPES = (bool, int, float, str, type(None))


@dataclasses.dataclass(frozen=True)
class ModelSnapshot:
    """Snapshot of a model's parameters, buffers and flags. A second forward of a batch raises if
    the model has changed since the first.

    Attributes:
        versions: parameters and buffers, each with its version counter.
        flags: a dict for each module, with the attributes that are numbers, strings, bools or None;
            [] if the model has no active dropout or other noise.
    """

    versions: list[tuple[Tensor, int]]
    flags: list[dict[str, Any]]

    @classmethod
    def capture(cls, module: nn.Module) -> ModelSnapshot:
        """Return a snapshot of the module. The snapshot refers to the module's parameters and
        buffers, and copies no values."""
        tensors = [*module.parameters(), *module.buffers()]
        versions = []
        for x in tensors:
            version = 0 if x.is_inference() else x._version
            versions.append((x, version))
        flags: list[dict[str, Any]] = []
        if draws_noise(module):
            flags = _flags(module)
        return cls(versions, flags)

    def is_outdated(self, module: nn.Module) -> bool:
        """True if a parameter or buffer of the module was replaced or modified since the snapshot.
        Attributes that are numbers, strings or bools count too if dropout or noise is active.

        Args:
            module: the module of which the snapshot was taken.
        """
        current = ModelSnapshot.capture(module)
        if len(current.versions) != len(self.versions) or current.flags != self.flags:
            return True
        pairs = zip(self.versions, current.versions, strict=True)
        return any(x is not y or i != j for (x, i), (y, j) in pairs)


def _flags(module: nn.Module) -> list[dict[str, Any]]:
    """Return one dict for each module inside `module`, from names to attributes that are numbers,
    strings, bools or None, for comparison with the same attributes later. Lists of strings (peft's
    active adapters) are included."""
    flags_by_module = []
    for part in module.modules():
        flags: dict[str, Any] = {}
        for name, value in vars(part).items():
            if isinstance(value, FLAG_TYPES):
                flags[name] = value
            elif isinstance(value, list) and all(isinstance(entry, str) for entry in value):
                flags[name] = list(value)
        flags_by_module.append(flags)
    return flags_by_module


@dataclasses.dataclass(frozen=True)
class RowsForward:
    """The forward of a backbone over the rows of a batch, stored to be run later. The batch was
    computed as one packed row without padding. The forward over the rows runs only if the program
    then reads values at padding.

    Attributes:
        run: function that runs the forward and returns the backbone's output.
        handed_out: True if the call's logits are returned to user code, which may read padding.
    """

    run: Callable[[], Any]
    handed_out: bool


class DeferredRows:
    """Hidden states of a batch's rows, computed only if the program reads values at padding, which
    a packed row does not have. The packed row has the tokens of all rows, without padding and with
    shared prefixes once. [Note: padding that is read]

    Args:
        module: the backbone.
        rows_forward: the backbone's forward over the rows.
        tree: the packed row of the first forward.
        on_padding_read: called, without arguments, when the program reads padding.
    """

    def __init__(
        self,
        module: nn.Module,
        rows_forward: RowsForward,
        tree: PrefixTree,
        on_padding_read: Callable[[], None],
    ) -> None:
        self.module = module
        self.rows_forward = rows_forward
        self.tree = tree
        self.on_padding_read = on_padding_read
        self.moment = ModelSnapshot.capture(module)
        self.graded = torch.is_grad_enabled()
        self.inferred = torch.is_inference_mode_enabled()
        self.autocast: Autocast | None = None
        self.source: Tensor | None = None

    def set_packed_states(self, output: Any) -> Callable[[bool], Tensor] | None:
        """Store the hidden states [N, h] of the packed row, which a later forward over the rows
        must reproduce. Return the method `compute`, which runs this later forward, or None if no
        user code can read padding.

        Args:
            output: the backbone's output for the packed row.

        Raises:
            UnsharedError: user code may read padding, and the final norm's output is no lazy
                tensor, so a read would not be noticed.
        """
        hidden = output[0]
        if not isinstance(hidden, LazyHidden) or hidden.materialized_tensor is not None:
            if self.rows_forward.handed_out:
                raise UnsharedError(
                    "its final norm is not left to the head, which may read padding"
                )
            return None
        self.source = hidden.source.detach().reshape(-1, hidden.source.shape[-1])
        self.autocast = Autocast.capture(hidden.device)
        return self.compute

    def compute(self, graded: bool) -> Tensor:
        """Run the backbone over the rows and return their hidden states [B * T, h]. The program has
        read values at padding, which the packed row of the first forward did not have.

        Args:
            graded: True: build an autograd graph, if the packed row's forward built one. False:
                build none.

        Raises:
            StreamBPError: the model has changed since the first forward, or its results differ.
        """
        self.on_padding_read()
        if self.moment.is_outdated(self.module):
            raise _change_error()
        assert self.autocast is not None
        with self._restore_settings(graded), self.autocast.restore():
            hidden = self.rows_forward.run()[0]
        assert isinstance(hidden, LazyHidden)
        assert hidden.materialized_tensor is None
        rows = hidden.source.reshape(-1, hidden.source.shape[-1])
        self._compare(rows.detach())
        return rows

    @contextlib.contextmanager
    def _restore_settings(self, graded: bool) -> Iterator[None]:
        with torch.inference_mode(self.inferred), torch.set_grad_enabled(graded and self.graded):
            yield

    def _compare(self, rows: Tensor) -> None:
        """Raise StreamBPError if the hidden states [B * T, h] of tokens differ from those of the
        first forward by more than rounding. Nothing is compared for a model with dropout or noise.

        Args:
            rows: hidden states of the second forward.
        """
        assert self.source is not None
        if self.moment.flags:
            return  # the second forward draws other noise
        token_positions = self.tree.token_positions(rows.device).flatten()  # [B * T]
        is_token = token_positions < self.tree.length
        expected = self.source[token_positions[is_token]]
        computed = rows[is_token]
        difference = computed.double() - expected.double()
        if rows.dtype in HALF_DTYPES:
            distance = difference.norm() / expected.double().norm().clamp(min=1e-30)
            bar = HALF_TRIAL_TOLERANCE
        else:
            distance = difference.abs().max() / expected.abs().max().clamp(min=1e-30)
            bar = TRIAL_TOLERANCE
        if not bool(distance <= bar):
            raise _change_error()


def _change_error() -> StreamBPError:
    return StreamBPError(
        "Logits at padding are read after the model has changed, and were not computed before: the "
        "batch was computed without its padding. Read them before the optimizer's step and before "
        "adapters or modes are switched, or set StreamConfig(rows='as_given')."
    )
