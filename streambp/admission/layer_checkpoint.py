"""Run a layer that cannot be chunked: all tokens at once, recomputed by torch's checkpoint in
backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointError

from streambp.admission import kept_values
from streambp.admission.generators import generator_states, generators_of, set_generators
from streambp.attention.masks import LazyMask
from streambp.cache_arguments import without_caches
from streambp.checkpoints import checkpoint_function
from streambp.chunks import Chunk
from streambp.distributed.engines import (
    JoinGradients,
    engine_ownership,
    reductions_of,
    silence_engine_hooks,
)
from streambp.errors import BackwardError, UnsupportedModelError
from streambp.fingerprint.hooks import HookKey, describe_hook, routing_hooks, watch_hooks
from streambp.fingerprint.snapshots import change_error, versions_of
from streambp.layer.arguments import refuse_written
from streambp.layer.call import find_disabled_parts
from streambp.layer.layer_state import CallReport, LayerState
from streambp.layer.recompute import Autocast, Parameters, check_mode, disable_checkpointing
from streambp.layer.side_effects import Buffers, buffers_of, find_written_buffers, replace_buffers
from streambp.recurrent.segments import mixers_of, run_by_segment


def run_unchunked(layer_state: LayerState, args: Any, kwargs: Any, report: CallReport) -> Any:
    """Run a decoder layer's own forward on all tokens at once under torch's checkpoint, and return
    its result. Used for a layer that cannot run in chunks.

    Args:
        layer_state: the decoder layer, with its settings and test results.
        args, kwargs: the arguments of the layer's forward.
        report: contains the reason to run the layer unchunked, for an error message, and the
            documents of packed rows. Modules with recurrent states run once for each document.
            [Note: segments]

    Raises:
        UnsupportedModelError: the layer reads the attention mask itself, which `patch` has
            replaced.
    """
    kwargs = without_caches(kwargs)
    configs = layer_state.cached_result(layer_state.kind.attention.configs)
    rows = report.rows
    mixers = [] if rows is None else layer_state.cached_result(mixers_of)

    def run(*args: Any, **kwargs: Any) -> Any:
        if (
            layer_state.tests.overwritten.inputs and torch.is_grad_enabled()
        ):  # [Note: writes through pointers]
            if args:
                args = args[0].clone(), *args[1:]
            else:
                kwargs["hidden_states"] = kwargs["hidden_states"].clone()
        # The recomputation runs after the model's forward has ended.
        segments = [] if rows is None else rows.segments(Chunk(0, 0, rows.ends[0][-1]))
        unchunked_run, args, kwargs = layer_state.kind.attention.unchunked_run(
            configs, args, kwargs
        )
        # ZeRO-3 counts the modules that ran, while other ranks may stream. ZeRO-3 leaf
        # modules inside the layer reduce their gradients by hooks of their own.
        hooks, modules = layer_state.cached_result(find_disabled_parts)
        silenced = silence_engine_hooks([] if layer_state.cached_result(reductions_of) else hooks)
        arrive, args, kwargs = _join_gradients(layer_state, args, kwargs)
        with (
            unchunked_run,
            disable_checkpointing(modules),
            run_by_segment(mixers, segments, None),
            silenced,
            arrive,
        ):
            return layer_state.forward(*args, **kwargs)

    try:
        if not torch.is_grad_enabled():
            return run(*args, **kwargs)
        # Recompute to the end, so that the output can be compared. [Note: witness]
        forward = CheckpointedForward(layer_state, run, args, kwargs)
        return checkpoint_function(forward, *args, early_stop=False, **kwargs)
    except (AttributeError, TypeError) as error:
        if LazyMask.__name__ not in str(error):
            raise
        raise UnsupportedModelError(
            f"{type(layer_state.layer).__name__} cannot stream: {report.reason}. It cannot run "
            f"unchunked either, because it reads the attention mask itself ({error}). If its "
            "attention's forward was replaced after streambp.patch, call streambp.patch again: the "
            "layer then gets the model's own mask. Otherwise use gradient checkpointing "
            "(streambp.unpatch(model))."
        ) from error


def _join_gradients(
    layer_state: LayerState, args: Any, kwargs: dict[str, Any]
) -> tuple[contextlib.AbstractContextManager[Any], Any, Any]:
    """Make all gradients of a layer leave its backward together, for DeepSpeed's ZeRO-1 and ZeRO-2.
    DeepSpeed puts gradients into buckets in the order of arrival, and the order must be the same on
    all ranks. Nothing changes under other engines, or without grad mode.

    Args:
        layer_state: the decoder layer, with its settings and test results.
        args, kwargs: the arguments of the layer's forward.

    Returns:
        A context manager in which the layer's forward must run: aliases replace the parameters, and
        autograd delivers their gradients from one node. Then the args and kwargs for the forward,
        with an alias of the input.
    """
    ownership = engine_ownership(layer_state.layer)
    if not torch.is_grad_enabled() or ownership.weights or not ownership.gradients:
        return contextlib.nullcontext(), args, kwargs
    layer_input = args[0] if args else kwargs["hidden_states"]
    parameters = Parameters(layer_state.layer, layer_input.device)
    hidden_states, *aliases = JoinGradients.apply(layer_input, *parameters.current())  # type: ignore[no-untyped-call]
    args, kwargs = (
        ((hidden_states, *args[1:]), kwargs)
        if args
        else (args, {**kwargs, "hidden_states": hidden_states})
    )
    return parameters.replace(aliases), args, kwargs


class CheckpointedForward:
    """A layer's forward for torch's checkpoint, with checks that the recomputation is the same. The
    first call is the forward, and later calls are recomputations.

    Checkpoint itself does not notice if the model or the batch changed after forward. The
    recomputation here raises if parameters, arguments, train or eval mode, or the layer's modules
    and hooks changed since forward. Buffers and the states of random generators are set to those of
    forward. [Note: fingerprint]

    Args:
        layer_state: the decoder layer, with its settings and test results.
        run: the function that checkpoint calls and repeats: runs the layer's forward.
        args, kwargs: the arguments of the forward.
    """

    def __init__(
        self, layer_state: LayerState, run: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> None:
        self._site, self._layer, self._run, self._fingerprint = (
            layer_state,
            layer_state.layer,
            run,
            layer_state.fingerprint,
        )
        self._backward_begins = layer_state.backward_begins
        self._look = self._fingerprint.take_snapshot(layer_state.layer)
        self._generators, self._training = (
            generators_of(layer_state, self._look),
            layer_state.layer.training,
        )
        values = [
            (name, x)
            for name, value in {"input": args, **kwargs}.items()
            for x in tree_leaves(value)
        ]
        tensors = [(name, x) for name, x in values if isinstance(x, Tensor)]
        hidden_states = tensors[0][1]
        self._device = hidden_states.device
        self._parameters = Parameters(layer_state.layer, self._device)
        self._witness = layer_state.witness(hidden_states, Autocast.capture(self._device))
        self._seen_arguments = [
            (name, x, x._version) for name, x in tensors if not x.is_inference()
        ]
        # buffers that the forward has changed, with their earlier values
        self._buffers: Buffers | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._buffers is None:
            versions = versions_of(self._look)
            buffer_copies = {
                slot: buffer.detach().clone() for slot, buffer in buffers_of(self._layer).items()
            }
            self._states = generator_states(self._generators)
            with watch_hooks(self._look.hooks) as modifying_hooks, self._explain_mismatch():
                result = self._run(*args, **kwargs)
            trained = Parameters(self._layer, self._device)
            if trained.names != self._parameters.names:  # a first call may make parameters
                self._parameters = trained
            self._forward_snapshot = self._fingerprint.record_forward(
                self._layer, self._look, versions, modifying_hooks
            )
            self._buffers = find_written_buffers(buffer_copies)
            self._record_or_compare((args, kwargs), result, in_backward=False)
            return result
        if self._backward_begins is not None:
            self._backward_begins(self._device)
        check_mode(self._layer, self._training)
        self._parameters.check_unchanged()
        refuse_written(self._seen_arguments)
        snapshot = self._fingerprint.take_snapshot(self._layer)
        self._fingerprint.check(self._layer, self._forward_snapshot, snapshot)
        # peft's modules get the same arguments, and the layer draws the same random numbers.
        states = generator_states(self._generators)
        set_generators(self._generators, self._states)
        modifying_hooks = set[HookKey]()
        try:
            nothing_left = kept_values.recomputation_context(self._site, snapshot)
            routing = routing_hooks(self._look.hooks.routing)
            with (
                replace_buffers(self._buffers),
                routing,
                nothing_left,
                watch_hooks(snapshot.hooks) as modifying_hooks,
            ):
                result = self._run(*args, **kwargs)
        finally:
            set_generators(self._generators, states)
            # The reverse shows nothing: torch stops a recomputation early, so some hooks do not
            # run.
            for key in sorted(modifying_hooks - self._forward_snapshot.modifying_hooks):
                raise change_error(
                    self._layer,
                    f"{describe_hook(key)} changes what it is given, and changed nothing in "
                    "forward",
                )
        self._record_or_compare((args, kwargs), result, in_backward=True)
        return result

    def _record_or_compare(self, layer_arguments: Any, result: Any, in_backward: bool) -> None:
        """Record a weighted sum of the output's rows in forward; in the recomputation, compare the
        sum with the record. A difference raises later, when `Witnesses.submit` evaluates all
        comparisons. [Note: witness]

        Args:
            layer_arguments: pair of the layer's positional and keyword arguments.
            result: the layer's result.
            in_backward: True in the recomputation, which runs in backward; False in forward.
        """
        output = result[0] if isinstance(result, tuple) else result
        if self._witness is None or not isinstance(output, Tensor):
            return
        x: Tensor = next(
            x for x in tree_leaves(layer_arguments) if isinstance(x, Tensor)
        )  # hidden_states
        self._witness.begin("whole", True, in_backward)
        self._witness.see("output", output, x if x.shape == output.shape else None)
        if in_backward:
            self._witness.end()

    def _explain_mismatch(self) -> saved_tensors_hooks:
        """Return a context manager for the forward under torch's checkpoint. If the recomputation
        saves other tensors than forward did, checkpoint raises a CheckpointError. The context
        manager wraps checkpoint's saved_tensors_hooks, and raises a `BackwardError` with a remedy
        in place of this error."""
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        assert hooks is not None
        layer, (pack, unpack) = type(self._layer).__name__, hooks

        def unpacked(packed: Any) -> Any:
            try:
                return unpack(packed)
            except CheckpointError as error:
                raise BackwardError(
                    f"{layer} was recomputed in backward and saved other tensors than in forward, "
                    "because a part of the layer has changed since. A common cause is a hook that "
                    "was removed before backward and returned its input unchanged in forward (an "
                    "adapter that starts as the identity). Remove hooks after backward only. "
                    f"Torch's checkpoint says: {str(error).strip().splitlines()[0]}"
                ) from error

        return saved_tensors_hooks(pack, unpacked)
