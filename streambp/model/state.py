"""What the wrappers of one patched model share."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import transformers
from torch import nn
from torch.distributed import is_initialized
from transformers import PreTrainedConfig, PreTrainedModel

from streambp.alive import Home, Living
from streambp.attention.interface import own_implementation
from streambp.config import StreamConfig
from streambp.distributed.engines import held
from streambp.errors import UnsupportedModelError
from streambp.foreign import wrapped_functions
from streambp.head.one_pass import Pending
from streambp.head.recipe import HeadRequest
from streambp.instance_forward import InstanceForward
from streambp.known_names import CHECKPOINTING, FILLED_IN
from streambp.layer.owner import StepOwner
from streambp.layer.witness import Witnesses
from streambp.model.deferring import DeferredForward
from streambp.model.fused_layers import Fused
from streambp.model.packing import finds_other_documents
from streambp.model.steps import Steps
from streambp.model.unpatched import UnpatchedRuns
from streambp.offload.manager import OffloadManager
from streambp.offload.policy import SavesPolicy
from streambp.offload.weights import HostWeights
from streambp.prefixes.calls import Unseen
from streambp.prefixes.tree import Tree
from streambp.recurrent.documents import PackedRows
from streambp.sharded.shards import Shards

T = TypeVar("T")


@dataclasses.dataclass
class ForwardContext:
    """What the wrappers of one patched model share during a forward.

    bypass: it is to be as unpatched (a cache or attention weights were asked for).
    defer_norm: its head wants the final norm to be left to it. deferring: what stands in for that norm meanwhile.
    shards: how its sequences are split over ranks, if they are.
    packed_rows: its documents, if layers with states are to find them in position_ids.
    position_ids: of a causal language model's call; Mamba's hands them to nobody.
    labels: of that call, as `known_names.LABELS` has them.
    padding_unseen: of that call, whether nothing that padding is given goes to the caller (hidden states, logits).
    tree: its rows, if it computes them as a packed row. [Note: tree of rows]
    failed: of a running trial of that, what layers raised; None: none is running.
    asked_cache: it is to have a cache unpatched, by its arguments or the model's config.
    names_cache: its caller passed `use_cache=True`, of a call in training; None: no language model around is running.
    again: its rows are computed after a packed row, for who reads padding. [Note: padding that is read]
    """

    bypass: bool = False
    defer_norm: HeadRequest | None = None
    deferring: DeferredForward | None = None
    shards: Shards | None = None
    packed_rows: PackedRows | None = None
    position_ids: Any = None
    labels: tuple[Any, Any] = (None, None)
    padding_unseen: Unseen = None
    tree: Tree | None = None
    failed: list[Exception] | None = None
    asked_cache: bool = False
    names_cache: bool | None = None
    again: bool = False


@dataclasses.dataclass
class PatchState:
    """What the wrappers of one patched model share.

    owner: who is computing with the model. [Note: owner of a step]
    witnesses: compare backward passes with forwards. [Note: witness]
    home: what was given to `patch`, and has this.
    left_alone: parts of it that do not stream, and why. fused: kernels of others on its modules.
    running: what is known of the running forward alone.
    steps: notes on its steps. [Note: notes on a step]
    policy: what decides chunk_size="auto", whose rule its str() says, saves="auto" and offload="auto".
    weights: where those of the layers live; None: on the device.
    unpatched: decides which micro-batches run as unpatched, where saves="auto" decides. [Note: micro-batches as unpatched]
    wrappers: all that `unpatch` takes off, in the order in which they were put on.
    warned_of_padding: that a label's gradient differs from eager attention's.
    split: how sequences were split over ranks, the last time that they were.
    warned_of_documents: that the unpatched model would not take a row for several documents.
    warned_of_trials: that hooks saw the trials of layers.
    unasked_cache: a call with gradients ran as unpatched, because by its config the model was to return a cache.
    given_cache: a call in training was given a cache, and ran as unpatched. named_cache: one was asked for a cache by
        `use_cache=True`, and ran as unpatched.
    shares_through_cache: without a cache the unpatched model would compute something else.
    """

    config: StreamConfig
    owner: StepOwner = dataclasses.field(default_factory=StepOwner, repr=False)
    witnesses: Witnesses = dataclasses.field(default_factory=Witnesses, repr=False)
    home: Home = dataclasses.field(default_factory=Home, repr=False)
    left_alone: tuple[str, ...] = ()
    fused: Fused = dataclasses.field(default_factory=Fused, repr=False)
    running: ForwardContext = dataclasses.field(default_factory=ForwardContext, repr=False)
    pending: Pending = dataclasses.field(default_factory=Pending)
    offloader: OffloadManager | None = None
    weights: HostWeights | None = None
    steps: Steps = dataclasses.field(default_factory=Steps, repr=False)
    policy: SavesPolicy | None = None
    unpatched: UnpatchedRuns | None = None
    wrappers: Living[InstanceForward] = dataclasses.field(default_factory=Living)
    split: Shards | None = None
    warned_of_padding: bool = False
    warned_of_documents: bool = False
    warned_of_trials: bool = False
    unasked_cache: bool = False
    given_cache: bool = False
    named_cache: bool = False
    shares_through_cache: bool = False

    @property
    def root(self) -> nn.Module | None:
        """What was given to `patch`, if it is still there; else the outermost module that streams; None: there is none."""
        return self.home()

    def enter(self, wrapper: InstanceForward) -> None:
        """A wrapper is put on, or copied with its module."""
        self.wrappers.enter(wrapper, operator.attrgetter("order"))
        self.home.enter(wrapper.module)
        site = getattr(wrapper, "site", None)
        if site is not None:
            self.steps.sites.enter(site, operator.attrgetter("index"))
            if self.weights is not None:
                self.weights.ranges.sites[site.index] = site

    def check_cache(self, config: PreTrainedConfig, kwargs: Mapping[str, Any]) -> None:
        """Asked of a call before it is made without a cache.

        Raises:
            UnsupportedModelError: unpatched it has one, and needs it.
        """
        wanted = wants_cache(config, kwargs)
        if self.shares_through_cache and wanted:
            raise UnsupportedModelError(
                f"transformers {transformers.__version__} hands keys and values from one layer of this model to another in "
                "its cache. Streamed calls have none: each layer would use its own, as under gradient checkpointing; "
                "another model would be trained. Install transformers 5.6 or newer, which shares them without a cache. "
                "To compute what this version computes without one, pass use_cache=False (or set config.use_cache = False)."
            )
        self.running.asked_cache |= wanted

    def as_unpatched(
        self,
        run: Callable[[], T],
        kwargs: Mapping[str, Any],
        config: PreTrainedConfig,
        padding_unseen: Unseen,
    ) -> T | None:
        """What `run`, the unpatched model's forward, returns; None where a micro-batch in training is to be streamed.
        [Note: micro-batches as unpatched]

        Args:
            kwargs: of the call. config: of the text model. padding_unseen: as `running`'s.
        """
        if self.unpatched is None:
            return None
        if self.weights is not None and self.weights.ranges.layers:
            return None  # its graph would hold slots, where other layers' weights come next
        if self.unpatched.within:
            return run()
        # It may be begun again, on this rank alone. [Note: what a rank decides alone]
        root = self.root if is_initialized() else None
        if root is not None and any(held(root)):
            return None
        cached = self.running.asked_cache and not self.warned_of_documents
        if finds_other_documents(kwargs, own_implementation(config), cached):
            return None

        def packs() -> bool:
            for wrapper in self.wrappers:
                ask = getattr(wrapper, "packs", None)  # of backbones
                if ask is not None and ask(kwargs, padding_unseen):
                    return True
            return False

        return self.unpatched.attempt(run, kwargs, config, packs)


def names_cache(model: nn.Module, kwargs: Mapping[str, Any]) -> bool:
    """Whether the caller of a model asks for a cache by `use_cache=True` and gets one unpatched. Under gradient
    checkpointing transformers makes none in training."""
    if not kwargs.get("use_cache"):
        return False
    return not (model.training and any(getattr(module, CHECKPOINTING[0], False) for module in model.modules()))


def fills_in_defaults(model: nn.Module) -> bool:
    """Whether transformers' decorator around a model's forward passes what the config says for what the caller does not."""
    codes = (getattr(function, "__code__", None) for function in wrapped_functions(type(model).forward))
    return any(FILLED_IN in getattr(code, "co_varnames", ()) for code in codes)


def models_around(part: nn.Module, root: nn.Module) -> list[nn.Module]:
    """The transformers models in `root` that hold a module, and are not it."""
    models = [model for model in root.modules() if isinstance(model, PreTrainedModel) and model is not part]
    return [model for model in models if any(module is part for module in model.modules())]


def wants_cache(config: PreTrainedConfig, kwargs: Mapping[str, Any]) -> bool:
    """Whether a call's `use_cache` is on; where it is not given, the model's config decides."""
    use_cache = kwargs.get("use_cache")
    return bool(getattr(config, "use_cache", False) if use_cache is None else use_cache)
