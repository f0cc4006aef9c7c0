"""Replace a causal language model's forward, and its output projection during that forward."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import is_initialized
from transformers import PreTrainedModel

from streambp.attention.interface import own_implementation
from streambp.attention.self_attending import biases_positions
from streambp.distributed.engines import engine_ownership
from streambp.errors import StreamBPError
from streambp.foreign import foreign_forward, foreign_of_class, trls_head
from streambp.head.log_probs import TokenLogProbs
from streambp.head.recipe import HeadRequest
from streambp.instance_forward import InstanceForward, has_backward_hooks, is_fsdp_unit
from streambp.known_names import (
    DECODER_MASK,
    EAGER,
    FUSED_HEAD_ARGUMENT,
    LOSS_TYPE,
    MASKED_LOSS,
    TRLS_FORWARD,
)
from streambp.layer.oom import explain_memory_errors
from streambp.lazy.dispatch import lazy_logits
from streambp.lazy.lazy_hidden import LazyHidden
from streambp.model.callers import (
    LOGITS_KEY,
    reads_logits,
    wants_predictions,
    without_logits,
)
from streambp.model.empty_batches import EmptyBatchWarning, LossOfLabels, any_label
from streambp.model.head_deferral import DeferredForward, HeldHead
from streambp.model.padding import hides_padding, warn_of_labels_after_padding
from streambp.model.split import find_split
from streambp.model.state import PatchState, has_cache, names_cache, wants_cache

LOSS_BLOCKWISE = "blockwise loss, no logits"
LOSS_WITHOUT_LABELS = (
    "as its caller computes it, from logits [B, T, V] (a call without labels), costs memory"
)
LOSS_UNPATCHED = (
    "as the unpatched model computes it, from logits [B, T, V]: they fit many times over"
)
LOSS_OF_PREDICTIONS = (
    "evaluations build the logits, which a Trainer takes for metrics or as predictions"
)
LOSS_WITH_LOGITS = "builds the logits: the call had a cache"


class CausalLMForward(InstanceForward):
    """Replacement of a causal language model's forward. If labels are given, the loss is computed
    block by block, and the logits [B, T, V] are never built.

    Args:
        module: the causal language model.
        state: state that all replaced forwards of the patched model share.
        norms: the final norms of the model's decoder. The loss may compute a final norm block by
            block, together with the output projection.

    Attributes:
        last: sentence for `describe` on how the loss was computed in the last training call. While
            there has been no training call, the sentence is about the last call of any kind.
        lazy: record of how the program used the lazy logits that the call of `last` returned. Lazy
            logits are computed where they are used. None if the call returned none.
        trained: number of calls in training mode with gradients.
        unlabelled: number of these calls without labels, which built the logits.
        predicted: True if an evaluation built the logits because a Trainer collects them.
        left_out: names of the output fields, for example "logits", that the last training call left
            None because it computed the loss block by block. Calls that return a tuple do not
            count. None before the first such call.
    """

    module: PreTrainedModel

    def __init__(
        self, module: PreTrainedModel, state: PatchState, norms: tuple[nn.Module, ...]
    ) -> None:
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
        """Call the model's forward as it was before `patch`.

        During the call, position_ids and labels are stored in the state that all replaced forwards
        share, because the model may not pass these arguments on to its backbone.
        """
        context = self.state.running
        previous = context.position_ids, context.labels, context.names_cache
        context.position_ids = kwargs.get("position_ids")
        context.labels = kwargs.get("labels"), kwargs.get("shift_labels")
        if context.names_cache is None:
            context.names_cache = names_cache(self.module, kwargs)
        try:
            if self.previous is None:
                trls = None
            else:
                trls = trls_head(getattr(self.previous, "__func__", None))
            if (
                trls is not None
                and not kwargs.get(FUSED_HEAD_ARGUMENT)
                and isinstance(trls[TRLS_FORWARD], MethodType)
            ):
                # The method in TRL's head is bound to the original model; a copy must bind the
                # function to itself.
                return trls[TRLS_FORWARD].__func__(self.module, *args, **kwargs)
            return super().original(*args, **kwargs)
        finally:
            context.position_ids, context.labels, context.names_cache = previous

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output. If labels are given, the loss is computed without building the
        logits. The argument `output_log_probs=True` adds the field `log_probs`, with the labels'
        log-probabilities for each token.

        Raises:
            StreamBPError: `output_log_probs=True` was passed without labels, with a cache, with
                StreamConfig(head=False), or to a model whose forward another library replaced.
        """
        if self.retired:
            return self.original(*args, **kwargs)
        with self.state.owner.enter():
            want_log_probs = kwargs.pop("output_log_probs", False)
            if args:
                kwargs = {**kwargs, **self.__signature__.bind_partial(*args).arguments}
            labels = kwargs.get("labels")
            if (
                not self.state.history.warned_of_padding
                and kwargs.get(self._mask_argument) is not None
                and self._averages_empty_rows
            ):
                self.state.history.warned_of_padding = warn_of_labels_after_padding(
                    kwargs, self._mask_argument
                )
            if labels is None and want_log_probs:
                raise StreamBPError(
                    "output_log_probs=True needs labels: the tokens whose log-probabilities are "
                    "wanted."
                )
            caches = has_cache(kwargs) or names_cache(self.module, kwargs)
            if (
                labels is None
                or not self.state.config.head
                or caches
                or self.third_party_forward is not None
            ):
                if want_log_probs:
                    self.refuse_foreign()
                    raise StreamBPError(
                        "output_log_probs=True needs StreamConfig(head=True) and no cache "
                        "(use_cache=False)."
                    )
                if is_initialized():
                    self._refuse_unshifted(kwargs)
                if labels is None and self._is_lazy(kwargs):
                    self.state.leave_cache_out(self.module.config.get_text_config(), kwargs)
                    request = HeadRequest(
                        self.state.pending, norms=self._steady_norms, handed_out=True
                    )
                    output = self._run(kwargs, request)
                    self._note(self._trains, None, lazy=request)
                    return _hand_out(output, request)
                output = self.original(**kwargs)
                if labels is not None or self._trains:
                    self._note(
                        self._trains,
                        LOSS_WITHOUT_LABELS if labels is None else LOSS_WITH_LOGITS,
                        labels is not None,
                    )
                return output
            if want_log_probs:
                scored, tokens, _ = self.score(kwargs, ())
                kind: Any = _with_log_probs(scored.__class__)
                return kind(**scored, log_probs=tokens.log_probs)
            output = None if self.state.unpatched is None else self._run_unpatched(kwargs)
            if output is None:
                return self._with_head(kwargs, HeadRequest(self.state.pending), hands_out=True)
            return output

    def _note(
        self,
        training: bool,
        how: str | None,
        labelled: bool = True,
        lazy: HeadRequest | None = None,
    ) -> None:
        """Count a call of the model, and store for `describe` how its loss was computed.

        Calls in evaluation are stored only until the first call in training.

        Args:
            training: True if the call was in training mode with gradients.
            how: sentence on how the loss was computed; None if the call returned lazy logits and no
                loss.
            labelled: True if labels were given.
            lazy: record of the returned lazy logits (computed where the program uses them); None:
                the call returned none.
        """
        self.trained += training
        self.unlabelled += training and not labelled
        if training or not self.trained:
            self.last = how
            self.lazy = lazy

    @property
    def third_party_forward(self) -> str | None:
        """Return the name of another library's function that replaced this model's forward and
        computes its loss (Liger's, for example); None if there is none."""
        kind: Any = type(self.module)
        if self.previous is not None:
            return foreign_forward(kind, self.previous)
        return foreign_of_class(
            kind,
            tuple(map(getattr, kind.__mro__, itertools.repeat("forward"), itertools.repeat(None))),
        )

    def refuse_foreign(self) -> None:
        """Raise `StreamBPError` if another library's function computes the model's loss, because
        log-probabilities for each token are then unavailable."""
        if self.third_party_forward is not None:
            raise StreamBPError(
                f"Per-token values were asked for, but {self.third_party_forward} replaces the "
                f"forward of {type(self.module).__name__} and computes another loss. Use the model "
                "without it."
            )

    def score(
        self,
        kwargs: dict[str, Any],
        fields: tuple[str, ...],
        temperature: float = 1.0,
        in_float32: bool = False,
    ) -> tuple[Any, TokenLogProbs, HeadRequest]:
        """Run the model without building logits, and return its output together with
        log-probabilities of the labels for each token.

        Args:
            kwargs: arguments of the model's forward, with labels.
            fields: fields of `TokenLogProbs` to compute beside log_probs, such as the entropy.
            temperature: divisor of the logits, also in the loss.
            in_float32: True: compute the output projection's products in float32. False: compute
                them in the precision of the model's own forward.

        Returns:
            The model's output, the values of each token [B, T - 1] (with shift_labels [B, T]), and
                a record of the output projection. `hidden_states()` of the record returns the
                hidden states [B, T - 1, h] of these tokens. If the record's `norm` is set, the
                hidden states are those before this norm.

        Raises:
            StreamBPError: the model's loss uses the logits outside of cross_entropy, or another
                library computes the loss.
        """
        self.refuse_foreign()
        request = HeadRequest(self.state.pending, fields, temperature, in_float32)
        kwargs["return_dict"] = True  # per-token values are fields
        output = self._with_head(kwargs, request)
        if request.values is None:
            raise StreamBPError(
                f"The loss of {type(self.module).__name__} does not go through cross_entropy on "
                f"its logits ({request.outcome.built_for}), so there are no per-token log-probabilities. "
                "Compute them from logits (call the model without labels)."
            )
        shift_labels = kwargs.get("shift_labels")
        shape = kwargs["labels"].shape if shift_labels is None else shift_labels.shape
        flat = request.hidden_states
        assert flat is not None
        # If shift_labels is missing, the last position of a row has no label.
        scored = slice(None) if shift_labels is not None else slice(-1)
        request.hidden_states = lambda: flat().view(*shape, -1)[:, scored]
        return output, request.values.each(lambda values: values.view(shape)[:, scored]), request

    def _with_head(
        self, kwargs: dict[str, Any], request: HeadRequest, hands_out: bool = False
    ) -> Any:
        if is_initialized():
            self._refuse_unshifted(kwargs)
        self.state.leave_cache_out(self.module.config.get_text_config(), kwargs)
        if hands_out and self._is_lazy(kwargs):
            lazy = HeadRequest(self.state.pending, beside_loss=True)
        else:
            lazy = None
        request.norms = self.norms if lazy is None else self._steady_norms
        request.handed_out = lazy is not None
        request.num_items = kwargs.get("num_items_in_batch")
        output = self._run(kwargs, request)
        output = self._finish(output) if lazy is None else _hand_out(output, lazy)
        if request.outcome.empty or not request.outcome.loss_in_blocks:
            labelled = any_label(kwargs["labels"], self._shifted_labels(kwargs))
            output = _without_nan(output, labelled)
            if self._trains:
                self.empty_batches.check(labelled)
        how = LOSS_BLOCKWISE
        if request.outcome.built_for is not None:
            how = f"builds the logits: the loss uses {request.outcome.built_for} on them, costs memory"
        elif not request.outcome.loss_in_blocks:
            how = (
                "builds the logits: the model's loss does not come from its output projection, "
                "costs memory"
            )
        elif request.outcome.hidden_built_for is not None:
            how = (
                f"{LOSS_BLOCKWISE}; the final norm's output is computed for the model's "
                f"{request.outcome.hidden_built_for}"
            )
        self._note(self._trains, how, lazy=lazy)
        return output

    def _run_unpatched(self, kwargs: dict[str, Any]) -> Any:
        """Run the model's own forward and loss, without chunks and without recomputation, and
        return the output. This is faster, and possible if all activations fit into memory. Return
        None if the micro-batch must be computed chunk by chunk instead. [Note: micro-batches as
        unpatched]"""
        returns_dict = kwargs.get("return_dict")
        returns_dict = (
            getattr(self.module.config, "return_dict", True)
            if returns_dict is None
            else returns_dict
        )
        trains = self._trains
        if not (trains and returns_dict) or self.left_out is None or self._is_lazy(kwargs):
            return None
        if has_backward_hooks(self.module.get_output_embeddings()):  # type: ignore[operator]
            return None
        config = self.module.config.get_text_config()
        self.state.leave_cache_out(config, kwargs)
        left_out = self.left_out

        def run() -> Any:
            output = self.original(**kwargs)
            fields = {name: value for name, value in output.items() if name not in left_out}
            labelled = any_label(kwargs["labels"], self._shifted_labels(kwargs))
            if isinstance(fields.get("loss"), Tensor):
                fields["loss"] = LossOfLabels.apply(fields["loss"], labelled)
            self.empty_batches.check(labelled)
            return type(output)(**fields)

        output = self.state.run_unpatched(
            run, kwargs, config, lambda: hides_padding(self.module, self.state, kwargs)
        )
        if output is not None:
            self._note(trains, LOSS_UNPATCHED)
        return output

    def _is_lazy(self, kwargs: dict[str, Any]) -> bool:
        """True if this call returns lazy logits (`LazyLogits`, computed on use). This requires the
        setting `lazy_logits=True`, or a caller that computes its own loss from logits although
        labels are passed.

        False if the call returns a cache, for example in eval mode by the model's config. False if
        a module of the model is an FSDP unit: FSDP's hooks read a module's outputs after FSDP has
        freed the module's weights.
        """
        config = self.state.config
        if not config.head:
            return False
        caller_needs_logits = kwargs.get("labels") is not None and reads_logits(by_name=True)
        if not (caller_needs_logits or config.lazy_logits):
            return False
        if self.third_party_forward is not None or has_cache(kwargs):
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
        """Return those of the final norms that have no submodules. The loss, or later use of lazy
        logits, may compute such a norm after the model's forward with the same result.

        A norm with submodules (PEFT's wrapper) may compute something else by the time the logits
        are used, because adapters can be switched in between.
        """
        return tuple(norm for norm in self.norms if not any(norm.children()))

    def _shifted_labels(self, kwargs: dict[str, Any]) -> Tensor | None:
        """Return the labels [B, T] that need no shift: those of `shift_labels`, or all labels of a
        model whose loss shifts none (encoder-decoders and masked language models). None if the
        model shifts its labels.

        Args:
            kwargs: arguments of a forward with labels.
        """
        if (
            self._mask_argument == DECODER_MASK
            or getattr(self.module, LOSS_TYPE, None) == MASKED_LOSS
        ):
            return kwargs["labels"]  # type: ignore[no-any-return]
        return kwargs.get("shift_labels")

    @property
    def _averages_empty_rows(self) -> bool:
        """True if the model's own attention returns the mean of all values for a query that may
        attend to no key (at left padding, for example). Eager attention does so, because it adds
        its mask to the scores; so does attention with a bias. Patched layers return 0 for such a
        query.

        False for encoders, where padding attends to the tokens after it.
        """
        layer_states = self.state.steps.layer_states
        if self._mask_argument != DECODER_MASK and any(
            layer_state.kind.attention.reads_ahead for layer_state in layer_states
        ):
            return False
        config: Any = self.module.config
        return own_implementation(config.get_text_config()) == EAGER or self._has_bias

    @functools.cached_property
    def _has_bias(self) -> bool:
        layer_states = self.state.steps.layer_states
        return biases_positions(self.module) or any(
            layer_state.kind.attention.adds_bias for layer_state in layer_states
        )

    @functools.cached_property
    def _mask_argument(self) -> str:
        """Return the name of the forward's argument that masks padding among the labels' tokens:
        "decoder_attention_mask" for an encoder-decoder, otherwise "attention_mask"."""
        is_encoder_decoder = getattr(self.module.config, "is_encoder_decoder", False)
        return DECODER_MASK if is_encoder_decoder else "attention_mask"

    @property
    def _trains(self) -> bool:
        return self.module.training and torch.is_grad_enabled()

    def _refuse_unshifted(self, kwargs: dict[str, Any]) -> None:
        """Raise StreamBPError if the call has labels without shift_labels while sequences are split
        over ranks. Called only if torch's process group is initialized.

        The label of a rank's last token is on the next rank, so a shift on each rank would lose
        that label.
        """
        if kwargs.get("labels") is None or kwargs.get("shift_labels") is not None:
            return
        config = self.module.config.get_text_config()  # type: ignore[operator, union-attr]
        if find_split(config, self.module.training) is not None:
            raise StreamBPError(
                "labels were given without shift_labels, and sequences are split over ranks. "
                "Shifting the labels of one shard would lose its last label. Shift before "
                "splitting (put shift_labels among the buffers of context_parallel) and pass the "
                "same tensor as labels and shift_labels."
            )

    @explain_memory_errors("in the model around its layers")
    def _run(self, kwargs: dict[str, Any], request: HeadRequest) -> Any:
        hidden_wanted = kwargs.get("output_hidden_states") or getattr(
            self.module.config, "output_hidden_states", False
        )
        output_embeddings = self.module.get_output_embeddings()  # type: ignore[operator]
        if has_backward_hooks(output_embeddings):
            request.outcome.built_for = "backward hooks"
            return self.original(**kwargs)
        # ZeRO-3 and FSDP units gather weights only while their module runs, so the norm is not
        # deferred. In accelerate, norm and head form one unit.
        gathered = engine_ownership(output_embeddings).weights
        # peft's forward adds adapters
        if gathered and type(output_embeddings).forward is not nn.Linear.forward:
            request.outcome.built_for = f"{type(output_embeddings).__name__}'s own forward"
            return self.original(**kwargs)
        projection = output_embeddings
        head = (
            HeldHead(self.module, projection, request)
            if gathered
            else DeferredForward(projection, request)
        )
        context = self.state.running
        try:
            context.defer_norm = None if hidden_wanted or gathered else request
            context.padding_unseen = functools.partial(
                hides_padding, self.module, self.state, kwargs, handed_out=request.handed_out
            )
            head.install()
            return self.original(**kwargs)
        finally:
            context.defer_norm = context.padding_unseen = None
            try:
                head.remove()
            except KeyboardInterrupt:
                head.remove()
                raise

    def _finish(self, output: Any) -> Any:
        """Return the model's output without the lazy tensors (`LazyHidden`) that its own forward
        put in the places of hidden states and logits.

        Hidden states are computed. Logits are removed (None in a `ModelOutput`), except in
        evaluation if the setting `eval_logits` is on or if the caller reads logits. The logits are
        then computed.
        """
        evaluates = not self.module.training
        logits_wanted = self.state.config.eval_logits and evaluates
        if evaluates and not logits_wanted and not torch.is_grad_enabled() and wants_predictions():
            logits_wanted = self.predicted = True
        logits_wanted |= evaluates and reads_logits()

        def real(value: Any) -> Any:
            if not isinstance(value, LazyHidden) or (
                value.recipe.weight is not None and not logits_wanted
            ):
                return value
            if value.recipe.weight is None:
                value.note("output")
            return value.build()

        if isinstance(output, tuple):
            return tuple(part for part in map(real, output) if not isinstance(part, LazyHidden))
        fields = {name: real(value) for name, value in output.items()}
        if self._trains:
            self.left_out = frozenset(
                name for name, value in fields.items() if isinstance(value, LazyHidden)
            )
        kind: Any = type(output)
        if isinstance(fields.get(LOGITS_KEY), LazyHidden):
            kind = without_logits(kind)
        return kind(**{k: v for k, v in fields.items() if not isinstance(v, LazyHidden)})


@functools.cache
def _with_log_probs(kind: Any) -> Any:
    """Return a subclass of a `ModelOutput` class with one more dataclass field, `log_probs`, for
    calls with `output_log_probs=True`.

    The field must be declared because FSDP2 and DDP look for tensors with gradients in declared
    fields alone.
    """
    field = ("log_probs", Tensor | None, None)
    return dataclasses.make_dataclass(
        kind.__name__, [field], bases=(kind,), namespace={"__module__": __name__}
    )


def _without_nan(output: Any, labelled: Tensor) -> Any:
    """Return a model's output whose loss is 0, instead of NaN, if no token has a label.

    Args:
        output: the output of a call with labels.
        labelled: scalar bool tensor, True if some token has a label.
    """
    # A loss function may return None for such a batch, and no field is left then.
    if isinstance(output, tuple):
        loss = next(iter(output), None)
    else:
        loss = output.get("loss")
    if not isinstance(loss, Tensor) or loss.dim():
        return output
    loss = LossOfLabels.apply(loss, labelled)
    if isinstance(output, tuple):
        return loss, *output[1:]
    return type(output)(**{**output, "loss": loss})


def _hand_out(output: Any, request: HeadRequest) -> Any:
    """Return a model's output with lazy logits (`LazyLogits`, computed where the program uses them)
    in place of the tensors that represented logits inside of the model's forward (`LazyHidden`).
    Hidden states, and the logits of a single position, are computed at once.

    Args:
        output: the model's output, a `ModelOutput` or a tuple.
        request: record of the output projection in this call. Later uses of the logits are noted
            there for `describe`.
    """

    def real_or_lazy(value: Any) -> Any:
        if not isinstance(value, LazyHidden):
            return value
        real = (
            value.materialized_tensor is not None
            or not value.has_own_node()
            or value.recipe.weight is None
        )
        if real or value.dim() < 2 or value.shape[-2] == 1:
            return value.build()
        return lazy_logits(value, request)

    if isinstance(output, tuple):
        return tuple(real_or_lazy(part) for part in output)
    return type(output)(**{name: real_or_lazy(value) for name, value in output.items()})
