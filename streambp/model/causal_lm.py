"""What `patch` puts in place of a causal language model's forward, and of its output projection during it."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import is_initialized
from transformers import PreTrainedConfig, PreTrainedModel

from streambp.attention.interface import own_implementation
from streambp.attention.own import biases_positions
from streambp.cache_arguments import has_cache
from streambp.distributed.engines import held
from streambp.errors import StreamBPError
from streambp.foreign import foreign_forward, foreign_of_class, trls_head
from streambp.head.log_probs import TokenLogProbs
from streambp.head.recipe import HeadRequest
from streambp.instance_forward import InstanceForward, has_backward_hooks, is_fsdp_unit
from streambp.known_names import ASKS_TRLS_HEAD, TRLS_FORWARD
from streambp.layer.oom import explaining
from streambp.lazy.deferred import Deferred
from streambp.lazy.dispatch import lazy_logits
from streambp.model.callers import computes_its_own_loss, wants_predictions
from streambp.model.deferring import DeferredForward, HeldHead
from streambp.model.empty_batches import EmptyBatchWarning, LossOfLabels, any_label
from streambp.model.left_out import LOGITS, left_out
from streambp.model.padding import hides_padding, warn_of_labels_after_padding
from streambp.model.split import find_split
from streambp.model.state import PatchState, names_cache, wants_cache

BLOCKWISE = "blockwise loss, no logits"
WITHOUT_LABELS = "as its caller computes it, from logits [B, T, V] (a call without labels), costs memory"
AS_UNPATCHED = "as the unpatched model computes it, from logits [B, T, V]: they fit many times over"
PREDICTED = "evaluations build the logits, which a Trainer takes for metrics or as predictions"
WITH_LOGITS = "builds the logits: the call had a cache"


class CausalLMForward(InstanceForward):
    """A causal language model whose loss is computed without logits when labels are given (DESIGN.md section 8).

    Args:
        norms: the final norms of its decoder; the head's blocks may compute them.

    What became of the head in its calls so far, for `describe`:

    last: how the last call computed its loss, the last one in training if there was one.
    lazy: of that call, if its logits are computed where they are used, what became of them.
    trained: so many calls in training. unlabelled: so many of these came without labels, and had real logits.
    predicted: evaluations built their logits, because a Trainer takes them.
    left_out: fields of the last streamed call's output in training that hold no tensor; None: there was none, or a tuple.
    """

    def __init__(self, module: PreTrainedModel, state: PatchState, norms: tuple[nn.Module, ...]) -> None:
        super().__init__(module)
        self.norms = norms
        self.state = state
        self.last: str | None = None
        self.lazy: HeadRequest | None = None
        self.trained = self.unlabelled = 0
        self.predicted = False
        self.left_out: frozenset[str] | None = None
        self.empty_batches = EmptyBatchWarning()

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """The forward that `patch` found; within, the state has the call's position_ids and labels for a backbone that gets
        none."""
        running = self.state.running
        before = running.position_ids, running.labels, running.names_cache
        running.position_ids = kwargs.get("position_ids")
        running.labels = kwargs.get("labels"), kwargs.get("shift_labels")
        if running.names_cache is None:
            running.names_cache = names_cache(self.module, kwargs)
        try:
            trls = None if self.previous is None else trls_head(getattr(self.previous, "__func__", None))
            if trls is not None and not kwargs.get(ASKS_TRLS_HEAD) and isinstance(trls[TRLS_FORWARD], MethodType):
                # Of this model: what TRL's head holds is bound to the one that it was given to, which a copy is not.
                return trls[TRLS_FORWARD].__func__(self.module, *args, **kwargs)
            return super().original(*args, **kwargs)
        finally:
            running.position_ids, running.labels, running.names_cache = before

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output, with its loss computed without logits where labels are given.

        Raises:
            StreamBPError: per-token values are asked for where there are none.
        """
        if self.retired:
            return self.original(*args, **kwargs)
        with self.state.owner.enter():
            want_log_probs = kwargs.pop("output_log_probs", False)
            if args:
                kwargs = {**kwargs, **self.__signature__.bind_partial(*args).arguments}
            labels = kwargs.get("labels")
            if not self.state.warned_of_padding and kwargs.get("attention_mask") is not None:
                attention = own_implementation(self.module.config.get_text_config())  # type: ignore[operator, union-attr]
                if attention == "eager" or self._biased:  # it averages where nothing may be read
                    self.state.warned_of_padding = warn_of_labels_after_padding(kwargs)
            if labels is None and want_log_probs:
                raise StreamBPError("output_log_probs=True needs labels: the tokens whose log-probabilities are wanted.")
            caches = has_cache(kwargs) or names_cache(self.module, kwargs)
            if labels is None or not self.state.config.head or caches or self.foreign is not None:
                if want_log_probs:
                    self.refuse_foreign()
                    raise StreamBPError(
                        "output_log_probs=True needs StreamConfig(head=True) and no cache (use_cache=False)."
                    )
                self._refuse_unshifted(kwargs)
                if labels is None and self._is_lazy(kwargs):
                    self._leave_cache(kwargs)
                    request = HeadRequest(self.state.pending, norms=self._steady_norms, handed_out=True)
                    output = self._run(kwargs, request)
                    self._note(self._trains, None, lazy=request)
                    return _hand_out(output, request)
                output = self.original(**kwargs)
                if labels is not None or self._trains:
                    self._note(self._trains, WITHOUT_LABELS if labels is None else WITH_LOGITS, labels is not None)
                return output
            if want_log_probs:
                scored, tokens, _ = self.score(kwargs, ())
                kind: Any = _with_log_probs(scored.__class__)
                return kind(**scored, log_probs=tokens.log_probs)
            output = None if self.state.unpatched is None else self._unstreamed(kwargs)
            return self._with_head(kwargs, HeadRequest(self.state.pending), hands_out=True) if output is None else output

    def _note(self, training: bool, how: str | None, labelled: bool = True, lazy: HeadRequest | None = None) -> None:
        """Count a call and remember how it computed its loss; evaluations only until a call in training."""
        self.trained += training
        self.unlabelled += training and not labelled
        if training or not self.trained:
            self.last, self.lazy = how, lazy

    @property
    def foreign(self) -> str | None:
        """The function of another library that computes this model's loss. [Note: foreign forwards]"""
        kind: Any = type(self.module)
        if self.previous is not None:
            return foreign_forward(kind, self.previous)
        return foreign_of_class(
            kind, tuple(map(getattr, kind.__mro__, itertools.repeat("forward"), itertools.repeat(None)))
        )

    def refuse_foreign(self) -> None:
        """Raises StreamBPError where per-token values cannot be had."""
        if self.foreign is not None:
            raise StreamBPError(
                f"Per-token values were asked for, but {self.foreign} stands in place of the forward of "
                f"{type(self.module).__name__} and computes its loss in its own way. Use the model without it."
            )

    def score(
        self, kwargs: dict[str, Any], wanted: tuple[str, ...], temperature: float = 1.0, in_float32: bool = False
    ) -> tuple[Any, TokenLogProbs, HeadRequest]:
        """The model's output without logits, and per-token values of its labels [B, T - 1] (with shift_labels [B, T]).

        Args:
            kwargs: of the model's forward, with labels.
            wanted: fields of `TokenLogProbs`, beside log_probs.
            temperature: the logits are divided by it, for the loss as well.
            in_float32: compute the head's products in float32.

        Returns:
            The output; the values; and the request, whose hidden_states give [B, T - 1, h], what the head computed them
            from, before its `norm` if there is one.

        Raises:
            StreamBPError: the loss takes the logits elsewhere than to cross_entropy, or another library computes it.
        """
        self.refuse_foreign()
        request = HeadRequest(self.state.pending, wanted, temperature, in_float32)
        kwargs["return_dict"] = True  # per-token values are fields
        output = self._with_head(kwargs, request)
        if request.values is None:
            raise StreamBPError(
                f"The loss of {type(self.module).__name__} does not go through cross_entropy on its logits "
                f"({request.built_for}), so there are no per-token log-probabilities. Compute them from logits (call the "
                "model without labels)."
            )
        shift_labels = kwargs.get("shift_labels")
        shape = kwargs["labels"].shape if shift_labels is None else shift_labels.shape
        flat = request.hidden_states
        assert flat is not None
        # Without shift_labels the last position of a row has no label.
        kept = slice(None) if shift_labels is not None else slice(-1)
        request.hidden_states = lambda: flat().view(*shape, -1)[:, kept]
        return output, request.values.each(lambda values: values.view(shape)[:, kept]), request

    def _with_head(self, kwargs: dict[str, Any], request: HeadRequest, hands_out: bool = False) -> Any:
        self._refuse_unshifted(kwargs)
        self._leave_cache(kwargs)
        lazy = HeadRequest(self.state.pending, beside_loss=True) if hands_out and self._is_lazy(kwargs) else None
        request.norms = self.norms if lazy is None else self._steady_norms
        request.handed_out = lazy is not None
        request.num_items = kwargs.get("num_items_in_batch")
        output = self._run(kwargs, request)
        output = self._finish(output) if lazy is None else _hand_out(output, lazy)
        if request.empty or not request.used:
            labelled = any_label(kwargs["labels"], kwargs.get("shift_labels"))
            output = _without_nan(output, labelled)
            if self._trains:
                self.empty_batches.check(labelled)
        how = BLOCKWISE
        if request.built_for is not None:
            how = f"builds the logits: the loss uses {request.built_for} on them, costs memory"
        elif not request.used:
            how = "builds the logits: the model's loss does not come from its output projection, costs memory"
        elif request.hidden_built_for is not None:
            how = f"{BLOCKWISE}; the final norm's output is computed for the model's {request.hidden_built_for}"
        self._note(self._trains, how, lazy=lazy)
        return output

    def _unstreamed(self, kwargs: dict[str, Any]) -> Any:
        """The model's own loss as unpatched; None where the loss is to be computed without logits.
        [Note: micro-batches as unpatched]"""
        named = kwargs.get("return_dict")
        named = getattr(self.module.config, "return_dict", True) if named is None else named
        trains = self._trains
        if not (trains and named) or self.left_out is None or self._is_lazy(kwargs):
            return None
        if has_backward_hooks(self.module.get_output_embeddings()):  # type: ignore[operator]
            return None
        config, left_out = self._leave_cache(kwargs), self.left_out

        def run() -> Any:
            output = self.original(**kwargs)
            fields = {name: value for name, value in output.items() if name not in left_out}
            if isinstance(fields.get("loss"), Tensor):
                labelled = any_label(kwargs["labels"], kwargs.get("shift_labels"))
                fields["loss"] = LossOfLabels.apply(fields["loss"], labelled)
                self.empty_batches.check(labelled)
            return type(output)(**fields)

        output = self.state.as_unpatched(run, kwargs, config, lambda: hides_padding(self.module, self.state, kwargs))
        if output is not None:
            self._note(trains, AS_UNPATCHED)
        return output

    def _is_lazy(self, kwargs: dict[str, Any]) -> bool:
        """Whether the logits of this call are computed where they are used, as config or caller ask for. Not where
        a cache is returned, as by the model's config in eval mode; nor in an FSDP unit, which looks at outputs when its
        weights are gone."""
        config = self.state.config
        if not config.head:
            return False
        asked = kwargs.get("labels") is not None and computes_its_own_loss()
        if not (asked or config.lazy_logits):
            return False
        if self.foreign is not None or has_cache(kwargs):
            return False
        if config.eval_logits and not self.module.training:
            return False
        if names_cache(self.module, kwargs):
            return False
        if wants_cache(self.module.config.get_text_config(), kwargs) and not self._trains:  # type: ignore[operator, union-attr]
            return False
        return not any(map(is_fsdp_unit, self.module.modules()))

    @property
    def _steady_norms(self) -> tuple[nn.Module, ...]:
        """One with modules inside (PEFT's) may be another one when logits are used: adapters are switched for a while."""
        return tuple(norm for norm in self.norms if not any(norm.children()))

    @functools.cached_property
    def _biased(self) -> bool:
        return biases_positions(self.module)

    @property
    def _trains(self) -> bool:
        return self.module.training and torch.is_grad_enabled()

    def _refuse_unshifted(self, kwargs: dict[str, Any]) -> None:
        """Split over ranks, a shard's last token has its label on the next rank, where shifting here cannot find it."""
        if kwargs.get("labels") is None or kwargs.get("shift_labels") is not None or not is_initialized():
            return
        config = self.module.config.get_text_config()  # type: ignore[operator, union-attr]
        if find_split(config, self.module.training) is not None:
            raise StreamBPError(
                "labels were given without shift_labels while sequences are split over ranks; shifting a shard's labels "
                "would lose its last one. Shift before splitting (put shift_labels among the buffers of context_parallel) "
                "and pass the same tensor as labels and as shift_labels."
            )

    def _leave_cache(self, kwargs: dict[str, Any]) -> PreTrainedConfig:
        """The call makes none from here on. Returned is the text model's config."""
        config: PreTrainedConfig = self.module.config.get_text_config()  # type: ignore[operator, union-attr]
        self.state.check_cache(config, kwargs)
        kwargs["use_cache"] = False
        return config

    @explaining("in the model around its layers")
    def _run(self, kwargs: dict[str, Any], request: HeadRequest) -> Any:
        hidden_wanted = kwargs.get("output_hidden_states") or getattr(self.module.config, "output_hidden_states", False)
        output_embeddings = self.module.get_output_embeddings()  # type: ignore[operator]
        if has_backward_hooks(output_embeddings):
            request.built_for = "backward hooks"
            return self.original(**kwargs)
        # Under ZeRO-3, and in an FSDP unit (accelerate makes one of norm and head), a module's weights are here only while
        # it runs: the norm runs as ever.
        gathered = held(output_embeddings).weights
        if gathered and type(output_embeddings).forward is not nn.Linear.forward:  # peft's does more than its weight
            request.built_for = f"{type(output_embeddings).__name__}'s own forward"
            return self.original(**kwargs)
        own = output_embeddings
        head = HeldHead(self.module, own, request) if gathered else DeferredForward(own, request)
        self.state.running.defer_norm = None if hidden_wanted or gathered else request
        self.state.running.padding_unseen = functools.partial(
            hides_padding, self.module, self.state, kwargs, handed_out=request.handed_out
        )
        head.install()
        try:
            return self.original(**kwargs)
        finally:
            self.state.running.defer_norm = self.state.running.padding_unseen = None
            head.remove()

    def _finish(self, output: Any) -> Any:
        """The output without deferred logits, or with real ones where they are to be seen; hidden states are real."""
        evaluates = not self.module.training
        logits_wanted = self.state.config.eval_logits and evaluates
        if evaluates and not logits_wanted and not torch.is_grad_enabled() and wants_predictions():
            logits_wanted = self.predicted = True
        logits_wanted |= evaluates and computes_its_own_loss()

        def real(value: Any) -> Any:
            if not isinstance(value, Deferred) or (value.recipe.weight is not None and not logits_wanted):
                return value
            if value.recipe.weight is None:
                value.note("output")
            return value.build()

        if isinstance(output, tuple):
            return tuple(part for part in map(real, output) if not isinstance(part, Deferred))
        fields = {name: real(value) for name, value in output.items()}
        if self._trains:
            self.left_out = frozenset(name for name, value in fields.items() if isinstance(value, Deferred))
        kind: Any = type(output)
        if isinstance(fields.get(LOGITS), Deferred):
            kind = left_out(kind)
        return kind(**{k: v for k, v in fields.items() if not isinstance(v, Deferred)})


@functools.cache
def _with_log_probs(kind: Any) -> Any:
    """A kind of output that has log_probs among its fields: FSDP2 and DDP look for gradients in declared ones alone."""
    field = ("log_probs", Tensor | None, None)
    return dataclasses.make_dataclass(kind.__name__, [field], bases=(kind,), namespace={"__module__": __name__})


def _without_nan(output: Any, labelled: Tensor) -> Any:
    """Return the output of a call with labels, with a loss of 0 in place of NaN where no token has a label.

    Args:
        labelled: a scalar bool, of `any_label`.
    """
    loss = output[0]
    if not isinstance(loss, Tensor) or loss.dim():
        return output
    loss = LossOfLabels.apply(loss, labelled)
    if isinstance(output, tuple):
        return loss, *output[1:]
    return type(output)(**{**output, "loss": loss})


def _hand_out(output: Any, request: HeadRequest) -> Any:
    """A model's output with logits that are computed where they are used; a single position's are real.

    request: of that use; what the model's own loss did with deferred ones is in another.
    """

    def real_or_lazy(value: Any) -> Any:
        if not isinstance(value, Deferred):
            return value
        real = value.written is not None or not value.known() or value.recipe.weight is None
        if real or value.dim() < 2 or value.shape[-2] == 1:
            return value.build()
        return lazy_logits(value, request)

    if isinstance(output, tuple):
        return tuple(real_or_lazy(part) for part in output)
    return type(output)(**{name: real_or_lazy(value) for name, value in output.items()})
