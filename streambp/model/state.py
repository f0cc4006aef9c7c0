"""Hold the state that the wrappers of one patched model share."""

from __future__ import annotations

import dataclasses
import operator
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import transformers
from torch import Tensor, nn
from torch.distributed import is_initialized
from transformers import PreTrainedConfig, PreTrainedModel

from streambp.admission.third_party import named_hooks
from streambp.attention.interface import own_implementation
from streambp.cache_arguments import is_cache_class
from streambp.config import StreamConfig
from streambp.device import has_data
from streambp.distributed.engines import engine_ownership
from streambp.errors import UnsupportedModelError
from streambp.foreign import wrapped_functions
from streambp.head.one_pass import PendingGradients
from streambp.head.recipe import HeadRequest
from streambp.instance_forward import InstanceForward, PatchedModuleRef, StepOwner, WeakSequence
from streambp.known_names import (
    CHECKPOINTING_ATTRIBUTES,
    CONFIG_DEFAULTS_VARIABLE,
    DOCUMENT_ENDS,
    FLASH,
    STATE_ARGUMENT,
    UNTYPED_CACHES,
)
from streambp.layer.layer_state import LayerState
from streambp.layer.witness import Witnesses
from streambp.model.fused_layers import InstalledKernels
from streambp.model.head_deferral import DeferredForward
from streambp.model.steps import Steps
from streambp.model.unpatched import UnpatchedRuns
from streambp.offload.host_choice import HostChoice
from streambp.offload.manager import OffloadManager
from streambp.offload.policy import SavesPolicy
from streambp.offload.weights import HostWeights
from streambp.prefixes.calls import PaddingCheck
from streambp.prefixes.tree import PrefixTree
from streambp.recurrent.documents import PackedRows
from streambp.sharded.shards import Shards

T = TypeVar("T")


@dataclasses.dataclass
class ForwardContext:
    """State of one call of a patched model. All replaced forwards of the model share this object
    during the call.

    Attributes:
        bypass: True while layers run their own forward without chunks, because the call returns a
            cache or attention weights, or because its activations fit into memory.
        defer_norm: options of the output projection in this call, if the final norm is computed
            later, together with the logits; None: the final norm runs in the model's forward as
            usual.
        deferring: the object that replaces the final norm's forward until the call ends; None: the
            norm is not replaced.
        shards: the part of each sequence that this rank holds; None: sequences are not split.
        packed_rows: the boundaries of packed documents in the rows, if layers with recurrent states
            must read these from position_ids; None otherwise.
        position_ids: argument of the causal language model's call, stored because Mamba does not
            pass position_ids to its backbone.
        labels: pair of the arguments labels and shift_labels of the language model's call; None for
            an argument that was not passed.
        padding_unseen: function that returns True if no value at padding (hidden states, logits)
            reaches the caller; None: such values may reach the caller.
        tree: the batch's rows as one packed row, without padding, and with common prefixes of rows
            only once. None: rows are computed separately.
        failed: exceptions of layers in the test run that checks if rows can share prefixes; None:
            this is no test run.
        asked_cache: True if the forward would return a cache unpatched, by its arguments or the
            model's config.
        names_cache: True if the caller of a training call passes `use_cache=True`; None: the
            backbone is called without a language model around it.
        is_recomputation: True during a second computation of the batch, with separate rows. The
            first was one packed row without padding, and the program then read values at padding.
            [Note: padding that is read]
    """

    bypass: bool = False
    defer_norm: HeadRequest | None = None
    deferring: DeferredForward | None = None
    shards: Shards | None = None
    packed_rows: PackedRows | None = None
    position_ids: Any = None
    labels: tuple[Any, Any] = (None, None)
    padding_unseen: PaddingCheck = None
    tree: PrefixTree | None = None
    failed: list[Exception] | None = None
    asked_cache: bool = False
    names_cache: bool | None = None
    is_recomputation: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> ForwardContext:
        """Return a new context, because no forward of the copied model is running. The planner
        copies the model during a forward, and a copy of the batch's tensors would stay in device
        memory."""
        return ForwardContext()


@dataclasses.dataclass
class CallHistory:
    """Facts about all calls of a patched model so far. Some facts are for `streambp.describe`, and
    some prevent a second warning.

    Attributes:
        split: the split of sequences over ranks in the most recent call that had a split; None: no
            call had a split.
        warned_of_padding: True after the warning that a position of left padding predicts a label.
            The label's gradient then differs from that under eager attention.
        warned_of_documents: True after the warning that the unpatched model would treat a row as
            one document, although its position_ids restart.
        warned_of_trials: True after the warning that user hooks also ran when layers were tested on
            random tokens.
        positions_known_to: number of tokens in a row up to which no warning about the model's
            positions is due.
        unasked_cache: True if a call with gradients ran unpatched because the model's config
            returns a cache.
        given_cache: True if a training call received a cache, and ran unpatched.
        named_cache: True if a training call passed `use_cache=True`, and ran unpatched.
    """

    split: Shards | None = None
    warned_of_padding: bool = False
    warned_of_documents: bool = False
    warned_of_trials: bool = False
    positions_known_to: int = 0
    unasked_cache: bool = False
    given_cache: bool = False
    named_cache: bool = False


@dataclasses.dataclass
class PatchState:
    """State that all replaced forwards of one patched model share, from `patch` to `unpatch`.

    Attributes:
        config: the user's settings.
        owner: lock by which one thread at a time computes with the model. [Note: owner of a step]
        witnesses: checks that backward's recomputation of a layer gives the same numbers as its
            forward. [Note: witness]
        home: weak reference to the module that was passed to `patch` and holds this state.
        left_alone: names of parts of the model that are not patched, with reasons.
        fused: record of the kernels of Liger, or of torch's compiler, that `patch` set on the
            model's modules.
        running: state of the call that is running now.
        pending: gradients that the loss computed in forward, until backward returns them.
        offloader: moves saved tensors to host memory; None without offloading.
        steps: notes on the last micro-batch with gradients, and the state of each decoder layer.
        saves_policy: decides chunk_size="auto", saves="auto" and offload="auto", and its str() is
            the rule for chunks. None: no setting is decided by the free memory.
        weights: manager of the layers' weights on the host; None: the weights are on the device.
        unpatched: decides which micro-batches run unpatched, without chunks, because memory
            suffices. None: every micro-batch runs in chunks. [Note: micro-batches as unpatched]
        wrappers: all replaced forwards that `unpatch` restores, in the order of their installation.
        history: facts about the calls so far, for reports and for warnings that appear once.
        shares_through_cache: True if layers of the unpatched model share keys and values through
            its cache, so that the model computes something else without a cache.
    """

    config: StreamConfig
    owner: StepOwner = dataclasses.field(default_factory=StepOwner, repr=False)
    witnesses: Witnesses = dataclasses.field(default_factory=Witnesses, repr=False)
    home: PatchedModuleRef = dataclasses.field(default_factory=PatchedModuleRef, repr=False)
    left_alone: tuple[str, ...] = ()
    fused: InstalledKernels = dataclasses.field(default_factory=InstalledKernels, repr=False)
    running: ForwardContext = dataclasses.field(default_factory=ForwardContext, repr=False)
    pending: PendingGradients = dataclasses.field(default_factory=PendingGradients)
    offloader: OffloadManager | None = None
    weights: HostWeights | None = None
    steps: Steps = dataclasses.field(default_factory=Steps, repr=False)
    saves_policy: SavesPolicy | None = None
    unpatched: UnpatchedRuns | None = None
    wrappers: WeakSequence[InstanceForward] = dataclasses.field(default_factory=WeakSequence)
    history: CallHistory = dataclasses.field(default_factory=CallHistory, repr=False)
    shares_through_cache: bool = False

    @property
    def root(self) -> nn.Module | None:
        """Return the module that was passed to `patch`. If it was deleted, return the outermost
        remaining module with a replaced forward; None if there is none."""
        return self.home()

    @property
    def host(self) -> HostChoice | None:
        """Return the object that decides in each micro-batch if saved tensors move to host memory.
        Return None if the settings alone decide."""
        if self.saves_policy is None:
            return None
        return self.saves_policy.host

    def enter(self, wrapper: InstanceForward) -> None:
        """Register an object that replaces a module's forward: add the object to `wrappers`. If the
        module is a decoder layer, add the layer's state to `steps` and `weights` too.

        Called when the object is installed, and for a copy of the object if the module is copied.
        """
        self.wrappers.enter(wrapper, operator.attrgetter("order"))
        self.home.enter(wrapper.module)
        layer_state = getattr(wrapper, "layer_state", None)
        if layer_state is not None:
            self.steps.layer_states.enter(layer_state, operator.attrgetter("index"))
            if self.weights is not None:
                self.weights.ranges.layer_states[layer_state.index] = layer_state

    def leave_cache_out(self, config: PreTrainedConfig, kwargs: dict[str, Any]) -> None:
        """Set `use_cache=False` in the arguments of a call, and record in `running.asked_cache` if
        the unpatched call would make a KV cache.

        Args:
            config: the model's config, whose `use_cache` counts if the call passes none.
            kwargs: arguments of the call; changed in place.

        Raises:
            UnsupportedModelError: the unpatched call would make a cache, and the model computes
                something else without a cache.
        """
        wants_a_cache = wants_cache(config, kwargs)
        if self.shares_through_cache and wants_a_cache:
            raise UnsupportedModelError(
                f"transformers {transformers.__version__} passes keys and values from one layer of "
                "this model to another in its cache. Streamed calls have no cache: each layer "
                "would use its own keys, as under gradient checkpointing, and another model would "
                "be trained. Install transformers 5.6 or newer, which shares keys without a "
                "cache. use_cache=False (or config.use_cache = False) trains without shared keys."
            )
        self.running.asked_cache |= wants_a_cache
        kwargs["use_cache"] = False

    def run_unpatched(
        self,
        run: Callable[[], T],
        kwargs: Mapping[str, Any],
        config: PreTrainedConfig,
        padding_unseen: PaddingCheck,
    ) -> T | None:
        """Run a training micro-batch through the unpatched model's forward, and return the output.
        Return None if the micro-batch must be computed chunk by chunk, for example because its
        graph would take too much memory.

        [Note: micro-batches as unpatched]

        Args:
            run: the unpatched model's forward.
            kwargs: arguments of the call.
            config: config of the text model.
            padding_unseen: function that returns True if no value at padding (hidden states,
                logits) reaches the caller; None: such values may reach the caller.
        """
        if self.unpatched is None:
            return None
        if self.weights is not None and self.weights.ranges.layers:
            return None  # graphs would reference reused slots
        if self.unpatched.within:
            return run()
        # This rank alone may retry the run. [Note: what a rank decides alone]
        root = self.root if is_initialized() else None
        if root is not None and any(engine_ownership(root)):
            return None
        cached = self.running.asked_cache and not self.history.warned_of_documents
        if finds_other_documents(kwargs, own_implementation(config), cached):
            return None

        def packs() -> bool:
            for wrapper in self.wrappers:
                ask = getattr(wrapper, "packs", None)  # backbones have it
                if ask is not None and ask(kwargs, padding_unseen):
                    return True
            return False

        return self.unpatched.attempt(run, kwargs, config, packs)


def has_cache(kwargs: Mapping[str, Any]) -> bool:
    """True if a call's keyword arguments contain a KV cache, or initial states of a recurrence. A
    patched model runs such a call unpatched."""
    for name, value in kwargs.items():
        if value is None:
            continue
        kind: Any = type(value)
        if is_cache_class(kind) or name == STATE_ARGUMENT or name in UNTYPED_CACHES:
            return True
    return False


def names_cache(model: nn.Module, kwargs: Mapping[str, Any]) -> bool:
    """True if the caller of a model passes `use_cache=True` and the unpatched model would return a
    cache. Such a call runs unpatched, also in training.

    False in training under gradient checkpointing, because transformers then returns no cache.
    """
    if not kwargs.get("use_cache"):
        return False
    return not (
        model.training
        and any(getattr(module, CHECKPOINTING_ATTRIBUTES[0], False) for module in model.modules())
    )


def fills_in_defaults(model: nn.Module) -> bool:
    """True if a decorator of transformers around a model's forward sets missing arguments, such as
    `use_cache`, to the values in the model's config. The backbone inside then cannot see which
    arguments the caller passed."""
    codes = (
        getattr(function, "__code__", None) for function in wrapped_functions(type(model).forward)
    )
    return any(CONFIG_DEFAULTS_VARIABLE in getattr(code, "co_varnames", ()) for code in codes)


def models_around(part: nn.Module, root: nn.Module) -> list[nn.Module]:
    """Return the transformers models in `root` that contain `part`, without `part` itself. Such a
    model may change the caller's arguments before `part` is called."""
    models = [
        model
        for model in root.modules()
        if isinstance(model, PreTrainedModel) and model is not part
    ]
    return [model for model in models if any(module is part for module in model.modules())]


def wants_cache(config: PreTrainedConfig, kwargs: Mapping[str, Any]) -> bool:
    """True if a call's argument `use_cache` is true. If the argument is missing or None, the
    model's config decides."""
    use_cache = kwargs.get("use_cache")
    return bool(getattr(config, "use_cache", False) if use_cache is None else use_cache)


def finds_other_documents(
    kwargs: Mapping[str, Any], implementation: str | None, cached: bool
) -> bool:
    """True if patched layers would treat a row as several packed documents, and the unpatched model
    would treat the row as one. The micro-batch then must not run unpatched, because its results
    would differ. Documents are marked by position_ids, or by FlashAttention's argument
    cu_seq_lens_q.

    Args:
        kwargs: arguments of a model's call.
        implementation: the model's attention implementation, such as "sdpa".
        cached: True if the unpatched call makes a cache; transformers then derives no documents
            from position_ids.
    """
    if FLASH in str(implementation):
        return False
    positions = kwargs.get("position_ids")
    ends = kwargs.get(DOCUMENT_ENDS)
    read = (
        kwargs.get("attention_mask") is None
        and isinstance(positions, Tensor)
        and positions.dim() == 2
    )
    if not (read and has_data(positions)):  # type: ignore[arg-type]
        return ends is not None
    if ends is None and not cached:
        return False
    starts = int((positions.diff(dim=-1) != 1).sum())  # type: ignore[union-attr]  # waits for the device, as transformers does
    return (cached and starts > 0) or (ends is not None and starts != len(ends) - 2)


def warn_of_documents(layer_states: list[LayerState], unseen: bool, states: bool) -> bool:
    """Warn if patched layers separate packed documents of a row where the unpatched model would
    not. Return True if a warning was issued.

    Args:
        layer_states: states of the decoder layers.
        unseen: True if the unpatched model's attention treats each row as one document, because the
            call makes a cache.
        states: True if the unpatched recurrences and convolutions continue from one document to the
            next.
    """
    unpatched = []
    cure = ""
    if unseen and any(
        layer_state.last_call.report.documents is not None
        and layer_state.last_call.report.documents[0] == "position_ids"
        for layer_state in layer_states
    ):
        unpatched.append(
            "attend across them, because its config makes a cache for this call, with which "
            "transformers does not look for documents (with use_cache=False it does)"
        )
    if states:
        unpatched.append("let its recurrences and convolutions go on from one to the next")
        cure = (
            " Set StreamConfig(documents='as_given') if recurrences and convolutions alone are to "
            "go on."
        )
    if not unpatched:
        return False
    warnings.warn(
        "position_ids restart, so streamed layers treat each row as several documents and "
        f"separate the documents. The unpatched model would {' and '.join(unpatched)}. Pass "
        "attention_mask=torch.ones_like(input_ids) if each row is one document whose positions "
        f"skip: transformers looks for no documents where a mask is given.{cure}",
        stacklevel=2,
    )
    return True


def warn_of_trials(layer_states: list[LayerState]) -> bool:
    """Warn if user hooks inside of layers ran on other tokens than those of the batch. The first
    call tests each layer on random tokens, and hooks run in these tests as well. Return True if a
    warning was issued.

    Args:
        layer_states: states of the decoder layers.
    """
    names_by_hook: dict[str, list[str]] = {}
    for layer_state in layer_states:
        for hook, paths in layer_state.tests.hooks_run_in_tests.items():
            names_by_hook.setdefault(hook, []).extend(
                f"{type(layer_state.layer).__name__} {layer_state.index}: {path}" for path in paths
            )
    if names_by_hook:
        warnings.warn(
            "Hooks inside decoder layers ran on the random tokens of a first call's tests, beside "
            f"the batch: {named_hooks(names_by_hook)}. streambp restores all values that hooks "
            "store in Python, but nothing that they write elsewhere (a file, a logger). If these "
            "hooks do, call streambp.warm_up(model, **inputs) before you register them: then no "
            "test runs the hooks.",
            stacklevel=2,
        )
    return bool(names_by_hook)
