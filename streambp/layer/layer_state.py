"""State of a streamed layer: how it streams, and the test results of its calls."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Hashable
from collections.abc import Set as AbstractSet
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from streambp.attention.backend import KernelUse, SdpaComparison
from streambp.attention.interface import InterfaceAttention, NoAttention
from streambp.chunks import ChunkPlan
from streambp.config import StreamConfig
from streambp.device import has_data, matmul_dtype
from streambp.errors import StreamBPError, UnsupportedModelError
from streambp.fingerprint.hooks import HookKey, describe_hook
from streambp.fingerprint.snapshots import Fingerprint, LayerSnapshot
from streambp.foreign import has_compiled_parts
from streambp.instance_forward import StepOwner
from streambp.layer.adapters import LoraModules, keep_reasons, lora_modules_of
from streambp.layer.choices import ReplayedChoices
from streambp.layer.float8_linears import CastOnce
from streambp.layer.packed_experts import DecodedOnce, replaced_forwards
from streambp.layer.products import UnreadInHalves, UnreadProducts, has_global_hooks, plain_linears
from streambp.layer.recompute import NULL_CONTEXT, Autocast
from streambp.layer.witness import (
    CHANGED_CHOICES_TOLERANCE,
    HALF_TOLERANCE_EPS,
    RELATIVE_TOLERANCES,
    ValuePair,
    Witness,
    Witnesses,
    dtypes_of,
    makes_choices,
)
from streambp.offload.manager import OffloadManager
from streambp.offload.policy import SavesPolicy
from streambp.offload.weights import HostWeights
from streambp.recurrent.carriers import StateCarrier
from streambp.recurrent.documents import PackedRows

T = TypeVar("T")
Key = TypeVar("Key")
ANY_CHUNK_SIZE = 0  # key in `TrialResult.tested_lengths` for all chunk sizes
# part of a kind of call: third-party code within reach. [Note: kept values]
THIRD_PARTY_CODE_KEY = "code of others"
MAX_KINDS_OF_CALLS = 32  # most kinds of calls with stored results, for each layer
# doubts before a possibly temporary reason counts for all calls of a kind
DOUBTS_BEFORE_DECISION = 4


def remember(entries: dict[Key, T], key: Key, value: T) -> T:
    """Insert `value` under `key` as the newest entry of the dict `entries`, and return `value`. If
    the dict then has more than `MAX_KINDS_OF_CALLS` entries, the oldest entry is dropped. Used for
    a layer's test results."""
    entries.pop(key, None)
    entries[key] = value
    if len(entries) > MAX_KINDS_OF_CALLS:
        del entries[next(iter(entries))]
    return value


@dataclasses.dataclass(frozen=True)
class OverwrittenTensors:
    """The tensors that a layer's forward overwrites in place, among those that backward may need.
    [Note: writes through pointers]

    Attributes:
        products: names of the Linears whose outputs are overwritten.
        attention_output: True if the output of attention is overwritten.
        inputs: True if a kernel overwrites hidden_states or recurrent states without incrementing
            the tensors' version counters.
    """

    products: frozenset[str] = frozenset()
    attention_output: bool = False
    inputs: bool = False


@dataclasses.dataclass
class TrialResult:
    """Results of testing a decoder layer for calls of one kind. Calls are of one kind if their
    arguments have the same names, types and dtypes, and the layer the same modules, hooks and
    requires_grad flags.

    Attributes:
        is_tested: True if the decision between chunks and an unchunked run has been made for these
            calls.
        reason: the reason why calls of this kind run unchunked; None: they run in chunks.
        searched_for_writes: the autocast states under which the layer was tested for in-place
            writes. A call under another state is tested first.
        tested_lengths: dict from chunk size to the longest sequence length, in tokens, that needs
            no further test. The key `ANY_CHUNK_SIZE` has the length for all chunk sizes that are no
            keys of the dict. None: no test ran.
        adopted: True if the results were copied from calls of the layer with fewer hooks, without a
            test.
        doubts: number of failed tests whose reason may be temporary, such as an exception. A call
            with such a test runs unchunked, and the next call is tested again.
    """

    is_tested: bool = False
    reason: str | None = None
    searched_for_writes: frozenset[Autocast] = frozenset()
    tested_lengths: dict[int, int] | None = None
    adopted: bool = False
    doubts: int = 0

    def set_result(self, reason: str | None) -> None:
        """Store the decision whether calls of this kind run in chunks. Later calls follow the
        decision without another test.

        Args:
            reason: the reason why calls of this kind run unchunked; None: they run in chunks.
        """
        self.is_tested, self.reason = True, reason

    def add_doubt(self, reason: str) -> None:
        """Count a failed test whose reason may be temporary, such as an exception in the layer. The
        next call is tested again. After `DOUBTS_BEFORE_DECISION` (4) failed tests, all calls of
        this kind run unchunked.

        Args:
            reason: the reason to run unchunked.
        """
        self.doubts += 1
        if self.doubts >= DOUBTS_BEFORE_DECISION:
            self.set_result(reason)


class TrialResults(dict[frozenset[tuple[str, Any]], TrialResult]):
    """Dict of a layer's test results by kind of call (`Arguments.kind`: names, types and dtypes of
    the arguments, and the layer's modules, hooks and requires_grad flags). Reading a kind without
    results inserts new, empty results, as `collections.defaultdict` does. If the dict then has more
    than `MAX_KINDS_OF_CALLS` (32) kinds, the oldest one is dropped."""

    def __missing__(self, kind: frozenset[tuple[str, Any]]) -> TrialResult:
        return remember(self, kind, TrialResult())


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """The objects that pass keys, values and recurrent states of one decoder layer from chunk to
    chunk. [Note: carriers]

    Attributes:
        attention: passes keys and values to later chunks; an instance of the base class
            `NoAttention` if the layer has no attention.
        states: passes recurrent states to later chunks; `states.carries` is False for a layer
            without such states.
        position_cache: name of the argument for a cache that the layer asks only for the number of
            earlier tokens; empty: the layer has no such argument.
    """

    attention: NoAttention = dataclasses.field(default_factory=InterfaceAttention)
    states: StateCarrier = dataclasses.field(default_factory=StateCarrier)
    position_cache: str = ""


@dataclasses.dataclass(frozen=True)
class CallReport:
    """Facts about one call of a layer, which `streambp.describe` prints.

    Attributes:
        reason: the reason why the layer ran unchunked under a checkpoint; None: the layer ran in
            chunks, or in one chunk.
        longest: pair of the longest chunk's length and the reason for this length, if a chunk is
            longer than the requested chunk size; None otherwise. [Note: chunk ends]
        document_arguments: names of the arguments through which the layer's kernels get boundaries
            of packed documents; (): none.
        rows: the packed documents for each of which modules with recurrent states run separately;
            None: there are none. [Note: segments]
        documents: pair of the name of the argument that passes packed documents to attention, and
            the number of documents; None: no documents.
        plan: the chunks of the call.
    """

    reason: str | None = None
    longest: tuple[int, str] | None = None
    document_arguments: tuple[str, ...] = ()
    rows: PackedRows | None = None
    documents: tuple[str, int] | None = None
    plan: ChunkPlan | None = None


@dataclasses.dataclass
class WarmUp:
    """State that all layers of a model share after `streambp.warm_up(model)`, which tests the
    layers with their hooks.

    Attributes:
        on: True: a layer with hooks that were registered later is not tested again. Such hooks are
            watched while they run. False: one of these hooks has modified a value, so all layers
            are tested with their current hooks.
    """

    on: bool = True


@dataclasses.dataclass
class LastCall:
    """Facts about a layer's last call, for `streambp.describe` and for error messages.

    Attributes:
        report: facts for `describe`.
        kernels: the attention kernels that ran.
        sdpa: the kernels that torch's scaled_dot_product_attention would use, for the last call
            with a backward.
        error_has_advice: True if the layer has raised an out-of-memory error in this step that
            names the setting to change, so that no other message has to.
        adapters: the layer's Linears and experts with LoRA adapters, by name, as last read.
    """

    report: CallReport = CallReport()
    kernels: frozenset[KernelUse] = frozenset()
    sdpa: SdpaComparison = dataclasses.field(default_factory=SdpaComparison)
    error_has_advice: bool = False
    adapters: LoraModules = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class LayerTests:
    """Results of a layer's tests on random tokens.

    Attributes:
        results: test results by kind of call, `Arguments.kind`.
        unread: the Linears whose outputs backward never reads, by the key `LayerCall.unread_key`.
        unread_in_halves: like `unread`, for a layer that is computed in two halves: up to its
            attention and behind it. Keys contain the kind of call and the tested length.
        overwritten: the tensors that the forward overwrites in place.
        at_last_positions: True: tests give their tokens the highest positions of the call; False:
            the first positions, because the layer raised at the highest ones.
        third_party_modules: names of modules inside the layer that are neither torch's nor
            transformers'. [Note: foreign insides]
        max_tested_tokens: the number of tokens on which the layer was compared with its unchunked
            run, if memory was too short for the full sequence. None: memory was not too short, or
            no such test was needed.
        kernels_take_documents: True if document boundaries from position_ids are passed to the
            layer's state kernels; False: a test failed with the boundaries, so modules with states
            run once for each document.
        tested_hooks: the hooks inside the layer with which the layer was tested.
        hooks_run_in_tests: dict from the name of a third-party hook that ran in tests to the
            modules on which the hook is registered.
        warm_up: the model's warm-up state; None: `warm_up` was not called.
        differing: paths of values that the forward stores, and that differ in chunks from those of
            an unchunked run; found in tests of any kind of call. [Note: kept values]

    Hooks that are registered after `warm_up` are not tested. A test would run them on random
    tokens, and a hook that collects values would store the test's values. Instead, the forward of a
    training step checks that a new hook modifies no value, and the backward that the hook keeps no
    graph. If a hook does either, the step ends with an error, and the layer is tested with the hook
    from then on. A hook that does neither cannot change the result of a test.
    """

    results: TrialResults = dataclasses.field(default_factory=TrialResults)
    unread: dict[tuple[Any, ...], UnreadProducts] = dataclasses.field(default_factory=dict)
    unread_in_halves: dict[tuple[Any, ...], UnreadInHalves] = dataclasses.field(
        default_factory=dict
    )
    overwritten: OverwrittenTensors = OverwrittenTensors()
    at_last_positions: bool = True
    third_party_modules: list[str] = dataclasses.field(default_factory=list)
    max_tested_tokens: int | None = None
    kernels_take_documents: bool = True
    tested_hooks: set[HookKey] = dataclasses.field(default_factory=set)
    hooks_run_in_tests: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    warm_up: WarmUp | None = None
    differing: set[str] = dataclasses.field(default_factory=set)

    def forget(self, reason: str | None) -> None:
        """Delete the stored decision that calls run unchunked for `reason`, so that these calls are
        tested again. The number of failed tests (`TrialResult.doubts`) becomes 0 for all kinds of
        calls.

        Called when an unchunked run raises. The cause of its exception, such as a wrong argument,
        may also have made the earlier test fail, and may be gone in the next call.

        Args:
            reason: the reason of the decision; None: no decision is deleted.
        """
        for findings in self.results.values():
            findings.doubts = 0
            if findings.is_tested and reason is not None and findings.reason == reason:
                findings.set_result(None)
                findings.is_tested = False

    def covers(self, findings: TrialResult, plan: ChunkPlan) -> bool:
        """True if a call needs no further test of the layer at its length. This holds for a call of
        one chunk, and for a layer without third-party modules. A layer with such modules must have
        been tested at this length or more, with this chunk size. [Note: foreign insides]

        Args:
            findings: test results for calls of this kind.
            plan: the chunks of the call.
        """
        tested_lengths = findings.tested_lengths
        if len(plan.ends) == 1 or (tested_lengths is None and not self.third_party_modules):
            return True
        return tested_lengths is not None and plan.length <= tested_lengths.get(
            plan.size, tested_lengths[ANY_CHUNK_SIZE]
        )

    def reuse_result(self, kind: frozenset[tuple[str, Any]], snapshot: LayerSnapshot) -> None:
        """Copy the results of tested calls to calls of another kind, so that these are not tested.
        The two kinds must differ only by hooks that were registered after `warm_up`. Does nothing
        before `warm_up`.

        If one of these hooks has since modified a value (`warm_up.on` is False), delete all copied
        results instead.

        Args:
            kind: the kind of the untested calls, their key in `results`.
            snapshot: snapshot of the layer with its present hooks.
        """
        if self.warm_up is None or not snapshot.hooks.locations:
            return
        if not self.warm_up.on:
            for adopted_kind in [
                adopted_kind for adopted_kind, findings in self.results.items() if findings.adopted
            ]:
                del self.results[adopted_kind]
        elif not self.results[kind].is_tested:
            state = dict(kind)["state"]  # (modules, hooks, trainable parameters)
            for earlier_kind, findings in [
                pair for pair in self.results.items() if pair[1].is_tested
            ]:
                earlier_state = dict(earlier_kind)["state"]
                differing = {name for name, _ in earlier_kind ^ kind} - {THIRD_PARTY_CODE_KEY}
                differs_in_hooks_alone = differing == {"state"} and earlier_state[::2] == state[::2]
                if differs_in_hooks_alone and set(earlier_state[1]) <= set(state[1]):
                    # the source of a copy counts as newly used
                    remember(self.results, earlier_kind, findings)
                    remember(self.results, kind, dataclasses.replace(findings, adopted=True))
                    return

    def refuse_untested(self, modifying_hooks: AbstractSet[HookKey], layer: nn.Module) -> None:
        """Raise if a hook that modifies values was registered after `warm_up` and was therefore
        never tested. Before raising, set `warm_up.on` to False, so that all layers are tested with
        their current hooks from then on.

        Args:
            modifying_hooks: the hooks that modified a value in this forward.
            layer: the decoder layer, named in the error.

        Raises:
            StreamBPError: there is such a hook.
        """
        if self.warm_up is None or not self.warm_up.on:
            return
        for key in sorted(modifying_hooks - self.tested_hooks):
            self.warm_up.on = False
            raise StreamBPError(
                f"{describe_hook(key)} of {type(layer).__name__} modifies its values and was "
                "registered after streambp.warm_up, so it was never tested. After warm_up only "
                "hooks that modify nothing may be added. Register the hook before warm_up, or "
                "repeat the step: from now on layers are tested with their current hooks."
            )


@dataclasses.dataclass
class LayerState:
    """Everything that streambp stores for one decoder layer: the module, its settings, and the
    results of its tests.

    Attributes:
        layer: the decoder layer.
        config: the user's settings.
        kind: the objects that pass keys, values and states from chunk to chunk.
        offloader: moves saved tensors to the host; None: saved tensors stay on the device.
        saves_policy: chooses what to save for `saves="auto"`; None: the config says what to save.
        weights: the host copies of the weights; None: weights stay on the device.
        index: the layer's index in the model.
        chunk_rule: function of the layer's index, the number of rows, the positions of a row and
            the device; returns the chunk size. None: the config's chunk size is used.
        previous: the forward that another library had set on the layer before `patch`; None: there
            was none.
        choices: replays routers' choices of experts; None: routers choose freely. [Note: choices]
        backward_begins: callback of the model, called with the device when the layer's backward
            begins; None: no callback.
        owner: the thread that may use the model now. [Note: owner of a step]
        witnesses: compares backward's recomputation with forward, for all layers of the model.
            [Note: witness]
        fingerprint: takes snapshots of the layer's modules, hooks and attributes.
            [Note: fingerprint]
        tests: results of the layer's tests.
        last_call: facts about the last call.
    """

    layer: nn.Module
    config: StreamConfig
    kind: LayerKind = LayerKind()
    offloader: OffloadManager | None = None
    saves_policy: SavesPolicy | None = None
    weights: HostWeights | None = None
    index: int = 0
    chunk_rule: Callable[[int, int, int, torch.device], int] | None = None
    previous: Callable[..., Any] | None = None
    choices: ReplayedChoices | None = None
    backward_begins: Callable[[torch.device], None] | None = None
    owner: StepOwner = dataclasses.field(default_factory=StepOwner, repr=False, compare=False)
    witnesses: Witnesses = dataclasses.field(default_factory=Witnesses, repr=False, compare=False)
    fingerprint: Fingerprint = dataclasses.field(
        default_factory=Fingerprint, repr=False, compare=False
    )
    tests: LayerTests = dataclasses.field(default_factory=LayerTests)
    last_call: LastCall = dataclasses.field(default_factory=LastCall)

    @property
    def forward(self) -> Callable[..., Any]:
        """Return the unpatched forward of the layer, bound to the layer: its class's forward, or
        the one that another library had set on the layer before `patch`."""
        return self.previous or functools.partial(type(self.layer).forward, self.layer)

    @property
    def on_host(self) -> bool:
        """True if the layer's weights are stored on the host, and copied to the device when the
        layer runs."""
        return self.weights is not None and self.index not in self.weights.ranges.staying

    def load_weights(
        self, direction: str, device: torch.device
    ) -> contextlib.AbstractContextManager[None]:
        """Context manager in which the layer's weights are on the device. Does nothing for a layer
        whose weights are not stored on the host.

        Args:
            direction: the pass that needs the weights: "forward", "backward" or "trial" (a test of
                the layer).
            device: the device.
        """
        if self.weights is None:
            return NULL_CONTEXT
        return self.weights.on_device(self.index, direction, device, decodes=direction != "trial")

    def load_weights_once(
        self, args: Any, kwargs: Any, reason: str
    ) -> contextlib.AbstractContextManager[None]:
        """Context manager in which the layer's weights are on the device, for a call that runs
        unchunked. Does nothing for a layer whose weights are not stored on the host.

        A call with an autograd graph raises: the graph would need the weights until backward, but
        other layers' weights replace them on the device after the call.

        Args:
            args: the call's positional arguments.
            kwargs: the call's keyword arguments.
            reason: the reason why the call does not run in chunks, for the error.

        Raises:
            UnsupportedModelError: the call would build a graph.
        """
        if not self.on_host:
            return NULL_CONTEXT
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        if torch.is_grad_enabled() and any(
            x.requires_grad for x in (*tensors, *self.layer.parameters())
        ):
            raise UnsupportedModelError(
                f"{type(self.layer).__name__} {self.index} does not stream: {reason}. Its graph "
                "would hold weights on the device, where those of other layers come next. Call the "
                "model under torch.no_grad(), or leave weights='cpu' out."
            )
        self.fingerprint.take_snapshot(self.layer)
        assert self.weights is not None
        return self.weights.on_device(self.index, "forward", tensors[0].device)

    @property
    def can_retry_chunks(self) -> bool:
        """True if a chunk that runs out of device memory is computed again, after saved tensors
        have been freed. This requires that `saves="auto"` chose the saved tensors, and that the
        user's settings do not move all saved tensors to the host. [Note: once for each chunk]"""
        offloader = self.offloader
        return self.saves_policy is not None and (offloader is None or offloader.on_demand)

    @property
    def linears(self) -> dict[str, nn.Linear]:
        """Return the layer's Linears, by name, whose outputs may be skipped or saved, and whose
        weight gradients may be summed over chunks. Return {} while global module hooks
        (`register_module_forward_hook`) are registered, because such hooks may change at any time.
        """
        if has_global_hooks():
            return {}
        # Where the last call ran peft's code, gradients of peft's inner Linears are summed in
        # float32.
        names: tuple[str, ...] = ()
        if self.adapters:
            names = tuple(
                name for name, lora_module in self.adapters.items() if lora_module.can_be_fused
            )
        return self.cached_result(
            functools.partial(plain_linears, adapted=names), ("linears", names)
        )

    @property
    def replaced_forwards(self) -> list[DecodedOnce | CastOnce]:
        """Return one object for each module of the layer that decodes a 4-bit weight or casts a
        weight to float8. While the layer runs in chunks, the object replaces the module's forward,
        so that weights are decoded or cast once for all chunks instead of once for each."""
        return self.cached_result(replaced_forwards)

    @property
    def adapters(self) -> LoraModules:
        """Return the layer's LoRA Linears and adapted experts by name; {} if the setting `kernels`
        is not "auto"."""
        if self.config.kernels != "auto":
            return {}
        lora_modules = self.cached_result(lora_modules_of)
        previous = self.last_call.adapters
        if lora_modules is not previous:
            # A layer's first forward may set attributes, and then its Linears are read again.
            keep_reasons(previous, lora_modules)
            self.last_call.adapters = lora_modules
        return lora_modules

    def coarsest_dtype(self, dtype: torch.dtype, device: str, autocast: Autocast) -> torch.dtype:
        """Return the dtype with the largest rounding error among `dtype`, the dtypes of the layer's
        parameters and autocast's dtype. Comparisons of this layer's values tolerate the rounding
        errors of this dtype.

        If that dtype is float32 and the device may use TF32, a dtype with TF32's precision is
        returned (`matmul_dtype`). Kernels choose TF32 by the number of rows, so chunks may use it
        where the full sequence does not.

        Args:
            dtype: the dtype of the layer's input.
            device: the device type.
            autocast: the autocast state of the call.
        """
        cast = (to for _, active, to in autocast.states if active)
        coarsest = max(
            (dtype, *self.cached_result(dtypes_of), *cast), key=lambda dtype: torch.finfo(dtype).eps
        )
        return matmul_dtype(device) or coarsest if coarsest == torch.float32 else coarsest

    def witness(self, x: Tensor, autocast: Autocast) -> Witness | None:
        """Return a new `Witness` for one call of the layer, which records sums of forward's values.
        Backward compares the sums with sums of the recomputed values, and raises if two sums
        differ. None if the comparison is disabled (`compare_backward`), or if x is empty or has no
        data (a meta tensor).

        Args:
            x: [..., T, h], the layer's input.
            autocast: the autocast state of the call.
        """
        if not self.config.compare_backward or not has_data(x) or not x.numel():
            return None
        dtype, device = x.dtype, x.device.type  # the closure must not keep x alive

        def compared(_: nn.Module) -> Callable[[Tensor, Tensor, Tensor | None], ValuePair]:
            coarsest = self.coarsest_dtype(dtype, device, autocast)
            tolerance = RELATIVE_TOLERANCES.get(
                coarsest, HALF_TOLERANCE_EPS * torch.finfo(coarsest).eps
            )
            if (
                coarsest not in RELATIVE_TOLERANCES
                and (device != "cpu" or self.cached_result(has_compiled_parts))
                and self.cached_result(makes_choices)
            ):
                tolerance = CHANGED_CHOICES_TOLERANCE  # kernels may sum in any order
            return functools.partial(ValuePair, self.layer, self.index, autocast.on, tolerance)

        cache_key = "compared", dtype, device, autocast.states
        return Witness(
            self.witnesses, lambda: self.cached_result(compared, (*cache_key, matmul_dtype(device)))
        )

    def cached_result(self, question: Callable[[nn.Module], T], cache_key: Hashable = None) -> T:
        """Return `question(layer)`, cached until the layer's modules, hooks or attributes change.
        Calls of the layer thus inspect its modules once. [Note: fingerprint]

        Args:
            question: a function of the layer, whose result depends on nothing else.
            cache_key: the key of the result in the cache; None: `question` is the key. A lambda or
                partial needs a key, because a new object would never be found.
        """
        answers = (self.fingerprint.last or self.fingerprint.take_snapshot(self.layer)).answers
        key = cache_key or question
        if key not in answers:
            answers[key] = question(self.layer)
        answer: T = answers[key]
        return answer
