"""Replace the forwards of layers and of backbones; `causal_lm.py` replaces the forward of the
head.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import is_initialized
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedConfig, PreTrainedModel

from streambp.admission.entry import stream_layer
from streambp.admission.stacks import (
    adds_bias,
    cache_argument,
    is_bidirectional,
    kind_of,
    states_argument,
)
from streambp.admission.t5_bias import stream_biased
from streambp.admission.third_party import distinct_attentions, refuse_foreign_attention
from streambp.attention.interface import attention_configs, route_attention
from streambp.attention.masks import LazyMask
from streambp.device import has_data
from streambp.distributed.engines import differentiable_input
from streambp.distributed.host import engine_host_use
from streambp.errors import StreamBPError, UnsharedError
from streambp.foreign import eager_forward, wrapped_functions
from streambp.head.recipe import HeadRequest
from streambp.instance_forward import InstanceForward
from streambp.known_names import (
    APPLY_METHOD,
    CHECKPOINTING_ATTRIBUTES,
    DOCUMENT_ENDS,
    DOCUMENT_IDS,
    EAGER,
    ENGINE_PACKAGES,
    FLASH,
    FORWARD_HOOKS,
    KWARGS_HOOKS,
    REPLICATE,
    Z3_LEAF,
)
from streambp.layer.layer_state import LayerState
from streambp.layer.oom import explain_memory_errors
from streambp.model.absent_cache import with_absent_cache
from streambp.model.head_deferral import DeferredForward, can_be_deferred
from streambp.model.positions import warn_beyond_positions
from streambp.model.split import refuse_lone_layer, refuse_replicas, shards_of
from streambp.model.state import (
    PatchState,
    fills_in_defaults,
    has_cache,
    models_around,
    names_cache,
    wants_cache,
    warn_of_documents,
    warn_of_trials,
)
from streambp.offload.manager import OffloadManager
from streambp.prefixes.admission import attach_tree, check_streamed
from streambp.prefixes.calls import (
    REASON_ONE_ROW,
    REASON_RUN_UNPATCHED,
    PackedRowSizes,
    PaddingCheck,
    SharedPrefixes,
)
from streambp.prefixes.deferred_rows import RowsForward
from streambp.prefixes.tree import PrefixTree
from streambp.recurrent.documents import PackedRows, packed_rows
from streambp.sharded.bidirectional import stream_bidirectional
from streambp.sharded.layer import stream_shard


class LayerForward(InstanceForward):
    """Replacement of a decoder layer's forward: computes the layer chunk by chunk, unless the
    backbone decided that this call runs unpatched.

    Args:
        module: the decoder layer.
        state: state that all replaced forwards of the patched model share.
        index: index of the layer among all decoder layers of the patched model.
        final_norm: the backbone's final norm, if this is the last layer; the loss may compute the
            norm block by block. None for other layers.
        tower: True if the layer belongs to a vision or audio tower.
    """

    def __init__(
        self,
        module: nn.Module,
        state: PatchState,
        index: int = 0,
        final_norm: nn.Module | None = None,
        tower: bool = False,
    ) -> None:
        super().__init__(module)
        self.state = state
        self.layer_state = LayerState(
            module,
            state.config,
            kind_of(module, tower),
            offloader=state.offloader,
            weights=state.weights,
            index=index,
            previous=eager_forward(self.previous),
            owner=state.owner,
            witnesses=state.witnesses,
        )
        self.final_norm = final_norm
        self.leaf: RemovableHandle | None = None

    def install(self) -> None:
        """Replace the layer's forward, and mark the layer as a ZeRO-3 leaf module. DeepSpeed then
        gathers all weights of the layer at once, and not again for each chunk."""
        super().install()
        setattr(self.module, Z3_LEAF, True)
        self.meet_engine()

    def meet_engine(self) -> None:
        """Register a forward pre-hook that makes the layer's input require a gradient, if DeepSpeed
        is imported and the layer has no such hook. DeepSpeed would otherwise reduce the layer's
        gradients over ranks too early.

        The hook is not registered if DeepSpeed is absent, because it would only slow calls down.
        """
        if self.leaf is None and ENGINE_PACKAGES[0] in sys.modules:
            self.leaf = self.module.register_forward_pre_hook(
                differentiable_input, with_kwargs=True, prepend=True
            )

    def remove(self) -> None:
        """Restore the layer's forward, and remove the mark of a ZeRO-3 leaf module."""
        super().remove()
        self.module.__dict__.pop(Z3_LEAF, None)
        if self.leaf is not None:
            self.leaf.remove()

    def remove_from_attributes(self, attributes: dict[str, Any]) -> None:
        """Remove the replaced forward and the other changes of this object, such as the mark of a
        ZeRO-3 leaf module, from the attributes of a layer's copy.

        Args:
            attributes: the copy's `__dict__`.
        """
        super().remove_from_attributes(attributes)
        attributes.pop(APPLY_METHOD, None)
        attributes.pop(Z3_LEAF, None)
        if self.leaf is not None:
            for table in (FORWARD_HOOKS[1], KWARGS_HOOKS):
                attributes[table] = type(attributes[table])(
                    (key, hook) for key, hook in attributes[table].items() if key != self.leaf.id
                )

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Return the layer's output, computed chunk by chunk, or by the layer's own forward if this
        call must run unpatched (with a cache, for example)."""
        if self.retired:
            return self.original(*args, **kwargs)
        unpatched = self.state.unpatched
        context = self.state.running
        if context.bypass and unpatched is not None and unpatched.within:  # the call owns the model
            unpatched.enter_layer()
            return self.original(*args, **kwargs)
        with self.state.owner.enter():
            if context.failed is None:
                return self._call(args, kwargs)
            return self._call_in_trial(context.failed, args, kwargs)

    def _call_in_trial(
        self, failed: list[Exception], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call the layer during a test run of the model, and return its output. The test run
        computes the batch as one packed row, with common prefixes of rows only once, to check if
        packing is possible.

        An exception of a layer is appended to `failed` and not raised. After an exception every
        layer returns its input. The ranks of an engine thus all enter every layer, where they wait
        for each other to gather weights.

        Args:
            failed: exceptions of all layers in this test run so far.
            args: the layer's positional arguments.
            kwargs: the layer's keyword arguments.
        """
        if not failed:
            try:
                return self._call(args, kwargs)
            except Exception as error:
                failed.append(error)
        return args[0] if args else kwargs["hidden_states"]

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        context = self.state.running
        tree = context.tree
        if tree is not None:
            attach_tree(tree, self.layer_state, args, kwargs)
        if context.bypass or has_cache(kwargs):
            with self.layer_state.load_weights_once(
                args, kwargs, "a cache or attention weights were asked for"
            ):
                return self.original(*args, **kwargs)
        unmasked = (
            kwargs.get("attention_mask") is None
            and len(args) < 2
            and self.layer_state.kind.attention.reads_a_mask
            and not self.layer_state.kind.attention.needs_no_mask
        )
        if unmasked and any(
            config._attn_implementation == EAGER for config in attention_configs(self.module)
        ):
            # A model always passes a mask; a direct call of the layer may not.
            with self.layer_state.load_weights_once(
                args, kwargs, "eager attention without a mask reads later keys"
            ):
                return self.original(*args, **kwargs)
        if context.shards is None:
            if is_initialized():
                refuse_lone_layer(self.layer_state)
            compute: Callable[..., Any] = stream_layer
            if self.layer_state.kind.attention.reads_ahead:
                compute = stream_bidirectional
            elif self.layer_state.kind.attention.adds_bias:
                compute = stream_biased
            output = compute(
                self.layer_state,
                args,
                kwargs,
                context.packed_rows,
                forks=tree.forks if tree else (),
            )
        else:
            output = stream_shard(self.layer_state, args, kwargs, context.shards)
        if tree is not None:
            check_streamed(self.layer_state)
        norm = self.final_norm
        request = context.defer_norm
        if (
            norm is not None
            and request is not None
            and any(norm is head_norm for head_norm in request.norms)
            and can_be_deferred(norm)
        ):
            # Only after the last layer: some models normalise the embeddings with the same module.
            context.deferring = DeferredForward(norm, request, is_norm=True)
            context.deferring.install()
            context.defer_norm = None
        return output


class BackboneForward(InstanceForward):
    """Replacement of the forward of a backbone, the module that runs the decoder layers
    (`LlamaModel`, for example). Decides if a call runs chunk by chunk. Such a call makes no KV
    cache.

    Args:
        module: the backbone.
        state: state that all replaced forwards of the patched model share.
        layers: the backbone's decoder layers.
    """

    def __init__(
        self, module: PreTrainedModel, state: PatchState, layers: tuple[nn.Module, ...]
    ) -> None:
        super().__init__(module)
        self.state = state
        self.layers = layers
        self.keeps_states = any(states_argument(layer) is not None for layer in layers)
        self.checkpointed: list[nn.Module] = []
        self.attentions = distinct_attentions(
            layer for layer in layers if not cache_argument(layer)
        )
        self.prefixes: SharedPrefixes | None = None
        # If attention reads ahead, a token depends on later tokens of its row, too. A bias by
        # distance would count tokens of other rows in a packed row.
        joins = not any(is_bidirectional(layer) or adds_bias(layer) for layer in layers)
        if state.config.rows != "as_given" and joins:
            self.prefixes = SharedPrefixes(module, state.config.rows)

    def install(self) -> None:
        """Replace the backbone's forward. Also set a method that raises if nn.DataParallel copies
        the backbone to another device."""
        super().install()
        setattr(self.module, REPLICATE, refuse_replicas)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Return the backbone's output. The layers are computed chunk by chunk, or by their own
        forwards if this call must run unpatched (with a cache, for example)."""
        if self.retired:
            return self.original(*args, **kwargs)
        if args:
            kwargs = {**kwargs, **self.__signature__.bind_partial(*args).arguments}
        if ENGINE_PACKAGES[0] in sys.modules:
            for wrapper in self.state.wrappers:
                if isinstance(wrapper, LayerForward):
                    wrapper.meet_engine()
        state = self.state
        context = state.running
        with state.owner.enter():
            tokens = kwargs.get("input_ids")
            if tokens is None:
                tokens = kwargs.get("inputs_embeds")
            if state.weights is not None:
                state.weights.begin(tokens)
            previous = context.bypass, context.shards, context.packed_rows
            context.bypass = not self._streams(kwargs)
            context.shards = None
            context.packed_rows = None
            try:
                if context.bypass:
                    if self.prefixes is not None:
                        self.prefixes.decline_sharing(kwargs)
                    return self.original(**kwargs)
                for layer in self.layers:
                    # Trainer enables checkpointing at the start of training. In transformers up to
                    # 5.22 the flag would recompute the layer once more.
                    if layer.__dict__.get(CHECKPOINTING_ATTRIBUTES[0]):
                        layer.gradient_checkpointing = False  # type: ignore[assignment]
                        self.checkpointed.append(layer)
                self._check(kwargs, tokens)
                state.leave_cache_out(self.module.config, kwargs)
                cacheless = context.asked_cache and self._leaves_a_cache_out()
                if state.saves_policy is not None and isinstance(tokens, Tensor):
                    state.saves_policy.begin_forward(tokens.device)
                output = (
                    None
                    if state.unpatched is None or context.is_recomputation
                    else self._run_unpatched(kwargs)
                )
                if output is not None:
                    if self.prefixes is not None:
                        self.prefixes.last = REASON_RUN_UNPATCHED
                    state.steps.record_forward_end(id(self.module), tokens, None, unpatched=True)
                    return with_absent_cache(output) if cacheless else output
                if state.offloader is not None and not state.offloader.on_demand:
                    self._meet_engines_on_the_host(state.offloader)
                if is_initialized():
                    context.shards = shards_of(
                        kwargs, tokens, self.module.config, self.module.training, self._layer_states
                    )
                    state.history.split = context.shards or state.history.split
                    if state.host is not None:
                        state.host.allowed = context.shards is None
                context.packed_rows = (
                    self._packed_rows(kwargs, tokens) if self.keeps_states else None
                )
                if self.module.get_output_embeddings() is None:  # type: ignore[operator]
                    # gemma4 would run some layers on these positions alone; its head selects the
                    # positions anyway.
                    kwargs.pop("logits_to_keep", None)
                if torch.is_grad_enabled():
                    output = self._run(kwargs)
                else:
                    output = self._run_watching_draws(kwargs)
                self._note(_tokens_of_call(tokens, output))
                return with_absent_cache(output) if cacheless else output
            finally:
                try:
                    self._end_call(previous)
                except KeyboardInterrupt:
                    self._end_call(previous)
                    raise

    def _end_call(self, previous: tuple[Any, Any, Any]) -> None:
        """Reset what a call has set in the state that the replaced forwards share. Can be called
        again if it was interrupted (Ctrl-C).

        Args:
            previous: `bypass`, `shards` and `packed_rows` as they were before the call.
        """
        context = self.state.running
        context.asked_cache = False
        context.bypass, context.shards, context.packed_rows = previous
        if context.deferring is not None:
            context.deferring.remove()
            context.deferring = None
        if self.state.saves_policy is not None:
            self.state.saves_policy.end_forward()

    def _note(self, tokens: Any) -> None:
        """Note that a call was computed chunk by chunk, for `streambp.describe`. Also issue two
        warnings, once each: if the unpatched model would not separate packed documents, and if user
        hooks ran in tests of layers.

        Args:
            tokens: input_ids [B, T], inputs_embeds [B, T, h], or a tower's output [B, T, h].
        """
        state = self.state
        context = state.running
        if torch.is_grad_enabled() and not context.is_recomputation:
            shared = getattr(self.prefixes, "last", None)
            state.steps.record_forward_end(
                id(self.module), tokens, shared if isinstance(shared, PackedRowSizes) else None
            )
            if self.module.training and not state.history.warned_of_documents:
                implementation = self.module.config._attn_implementation  # type: ignore[union-attr]
                asked_cache = context.asked_cache and FLASH not in str(implementation)
                state.history.warned_of_documents = warn_of_documents(
                    self._layer_states, asked_cache, context.packed_rows is not None
                )
        if not state.history.warned_of_trials:
            state.history.warned_of_trials = warn_of_trials(self._layer_states)

    def _meet_engines_on_the_host(self, offloader: OffloadManager) -> None:
        """Tell the offloader how much host memory others need: a DeepSpeed engine with offloading,
        and weights that are stored on the host. Do nothing once the offloader has allocated host
        memory. Called in each forward, because engines exist only after `patch`.

        Args:
            offloader: moves saved tensors to host memory.
        """
        state = self.state
        if state.root is not None and not offloader.host_bytes:
            offloader.other_use.set_aside = engine_host_use(state.root).to_come
            weights = state.weights
            if weights is not None:
                offloader.other_use.weight_bytes = weights.host_bytes[0]
                offloader.other_use.gradient_bytes = weights.host_bytes[1]

    def _run_unpatched(self, kwargs: dict[str, Any]) -> Any:
        """Compute a training micro-batch by the model's own forward, without chunks, and return the
        output. This is faster, and possible if all activations fit into memory. Return None if the
        micro-batch must be computed chunk by chunk, and outside of training. [Note: micro-batches
        as unpatched]"""
        if not (self.module.training and torch.is_grad_enabled()):
            return None

        def run() -> Any:
            self.state.running.bypass = True
            try:
                return self.original(**kwargs)
            finally:
                self.state.running.bypass = False

        config: PreTrainedConfig = self.module.config.get_text_config()  # type: ignore[operator, union-attr]
        return self.state.run_unpatched(run, kwargs, config, self.state.running.padding_unseen)

    def _run_watching_draws(self, kwargs: dict[str, Any]) -> Any:
        """Run a forward without gradients, and return its output. Record if the forward drew random
        numbers (dropout).

        GradCache runs such a forward first, and then one of the same batch with gradients, which
        must draw the same numbers. Later steps therefore must not change the way in which layers
        are computed.
        """
        state = self.state
        device: torch.device = self.module.device  # type: ignore[assignment]
        run = functools.partial(self._run, kwargs)
        for watcher in (state.host, state.unpatched):
            if watcher is not None:
                run = functools.partial(watcher.watch_draws, run, device)
        return run()

    def packs(self, kwargs: Mapping[str, Any], padding_unseen: PaddingCheck) -> bool:
        """True if the patched model would compute this batch as one packed row: without padding,
        and with common prefixes of rows only once. The micro-batch then does not run unpatched.

        Args:
            kwargs: arguments of the backbone's forward.
            padding_unseen: function that returns True if no value at padding reaches the caller;
                None: such values may reach the caller.
        """
        labels = self.state.running.labels
        return self.prefixes is not None and self.prefixes.saves(
            kwargs, self._layer_states, labels, padding_unseen
        )

    def _run(self, kwargs: dict[str, Any]) -> Any:
        """Run the backbone's own forward, with layers that are computed chunk by chunk. A batch
        whose rows have common prefixes is passed as one packed row."""
        context = self.state.running
        deferred = context.defer_norm
        if context.tree is not None:
            raise UnsharedError(
                f"{type(self.module).__name__} runs inside another model that packs rows"
            )

        def over(
            kwargs: Mapping[str, Any],
            tree: PrefixTree | None,
            failed: list[Exception] | None = None,
        ) -> Any:
            trial = failed is not None
            packed_rows = context.packed_rows
            context.defer_norm = None if trial else deferred
            context.tree = tree
            context.failed = failed
            context.packed_rows = packed_rows if tree is None and not trial else None
            try:
                return self.original(**kwargs)
            finally:
                context.tree = None
                context.packed_rows = packed_rows
                context.failed = None

        # Configs of each layer's last call. A layer that has changed since then routes its own
        # config.
        configs = {id(self.module.config): self.module.config}
        for layer_state in self._layer_states:
            if not layer_state.kind.attention.ours:
                configs = {}  # custom attention needs the masks of its own setting
                break
            for config in layer_state.cached_result(layer_state.kind.attention.configs):
                configs[id(config)] = config
        with (
            explain_memory_errors("in the model around its layers"),
            route_attention(list(configs.values())),
        ):
            try:
                if self.prefixes is None or context.shards is not None or context.is_recomputation:
                    return self.original(**kwargs)
                ids = kwargs.get("input_ids")
                one_row = isinstance(ids, Tensor) and ids.shape[0] < 2
                if one_row and kwargs.get("attention_mask") is None and not is_initialized():
                    self.prefixes.last = REASON_ONE_ROW
                    return self.original(**kwargs)
                documents = context.packed_rows is not None
                later_rows = None
                if deferred is not None:
                    rows = functools.partial(self._call_again, dict(kwargs), deferred)
                    later_rows = RowsForward(rows, deferred.handed_out)
                return self.prefixes.call(
                    kwargs,
                    over,
                    lambda: self._layer_states,
                    context.labels,
                    documents,
                    context.padding_unseen,
                    later_rows,
                )
            except (AttributeError, TypeError) as error:
                if LazyMask.__name__ not in str(error):
                    raise
                # A layer that is not streamed used the lazy mask as a tensor.
                raise StreamBPError(
                    f"A layer of {type(self.module).__name__} reads the attention mask of streamed "
                    f"layers, and is none of those that streambp.patch found ({error}). If you have "
                    "replaced layers since, call streambp.patch again. towers=False leaves a tower "
                    "as it is."
                ) from error

    def _call_again(self, kwargs: dict[str, Any], request: HeadRequest) -> Any:
        """Compute a batch a second time, as separate rows with padding, and return the output. The
        first run had one packed row without padding, and the program has now read values at
        padding. [Note: padding that is read]

        Args:
            kwargs: arguments of the call.
            request: options of the output projection in this call, which also computes the final
                norm.
        """
        context = self.state.running
        previous = context.defer_norm, context.is_recomputation
        context.defer_norm = request
        context.is_recomputation = True
        try:
            return self.call(**kwargs)
        finally:
            context.defer_norm, context.is_recomputation = previous

    def _streams(self, kwargs: dict[str, Any]) -> bool:
        """True if a call is computed chunk by chunk. False if it must run unpatched: a cache is
        passed, or the call returns a cache or attention weights.

        A caller that passes `use_cache=True` gets a cache. If a caller does not pass `use_cache`,
        the model's config decides in evaluation. Training mode ignores the config, because most
        programs never read the cache of a step. This also holds without gradients: GradCache runs a
        batch without gradients first, and must draw the same dropout masks again with gradients.

        Args:
            kwargs: arguments of the backbone's forward.
        """
        if has_cache(kwargs):
            self.state.history.given_cache |= torch.is_grad_enabled() and self.module.training
            return False
        attentions = kwargs.get("output_attentions")
        if attentions or (
            attentions is None and getattr(self.module.config, "output_attentions", False)
        ):
            return False
        if self.module.training:
            # If a language model around this backbone runs, the caller of that model counts. Other
            # models around may pass their config's `use_cache` on as if it was an argument.
            passes_cache = self.state.running.names_cache
            if passes_cache is None:
                passes_cache = bool(
                    kwargs.get("use_cache")
                    and not self._has_outer_defaults
                    and names_cache(self.module, kwargs)
                )
            self.state.history.named_cache |= passes_cache and torch.is_grad_enabled()
            return not passes_cache
        use_cache = wants_cache(self.module.config, kwargs)
        if kwargs.get("use_cache") is None:
            self.state.history.unasked_cache |= use_cache and torch.is_grad_enabled()
        return not use_cache

    def _leaves_a_cache_out(self) -> bool:
        """True if the unpatched model would return a cache for this call, and the patched model
        does not, because the model is in training. The output then gets an `AbsentCache`
        placeholder.

        Called only for calls that request a cache, by argument or by the model's config.
        """
        if not self.module.training or self._makes_no_cache:
            return False
        return not (getattr(self.module, CHECKPOINTING_ATTRIBUTES[0], False) or self.checkpointed)

    @functools.cached_property
    def _makes_no_cache(self) -> bool:
        """True if this backbone never makes a cache: its class can be an encoder or a decoder, only
        decoders make caches, and the config says that it is an encoder."""
        if getattr(self.module.config, "is_decoder", False):
            return False
        for function in wrapped_functions(type(self.module).forward):
            code = getattr(function, "__code__", None)
            if code is not None and "is_decoder" in code.co_names:
                return True
        return False

    @functools.cached_property
    def _has_outer_defaults(self) -> bool:
        """True if a model around this backbone replaces missing arguments, such as `use_cache`, by
        the values in its config. The backbone then cannot see if the caller has passed
        `use_cache=True`."""
        root = self.state.root
        return root is not None and any(map(fills_in_defaults, models_around(self.module, root)))

    def remove_from_attributes(self, attributes: dict[str, Any]) -> None:
        """Remove the changes of this object from a copy of the backbone: the replaced forward, and
        the method that makes nn.DataParallel raise.

        Args:
            attributes: the copy's `__dict__`.
        """
        super().remove_from_attributes(attributes)
        attributes.pop(REPLICATE, None)

    def remove(self) -> None:
        """Restore the backbone's forward and its handling by nn.DataParallel. Turn gradient
        checkpointing of layers on again where a call has turned it off."""
        super().remove()
        self.module.__dict__.pop(REPLICATE, None)
        for layer in self.checkpointed:
            layer.gradient_checkpointing = True  # type: ignore[assignment]

    def _check(self, kwargs: dict[str, Any], tokens: Any) -> None:
        """Raise StreamBPError if the call cannot be computed chunk by chunk: without tokens, under
        TRL's activation offloading, or with another library's attention. Warn if rows are longer
        than the model's position embeddings were made for.

        Args:
            kwargs: arguments of the backbone's forward.
            tokens: input_ids [B, T], or inputs_embeds [B, T, h].
        """
        if tokens is not None and tokens.shape[1] == 0:
            raise StreamBPError(
                "The sequence has no tokens (T = 0). Pass at least one token per row."
            )
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if hooks is not None and (getattr(hooks[0], "__module__", None) or "").startswith("trl."):
            raise StreamBPError(
                "TRL's activation_offloading=True moves what autograd saves; streamed layers keep "
                "their own, which it cannot see. Set activation_offloading=False and use "
                "streambp.StreamConfig(offload='cpu') instead."
            )
        history = self.state.history
        if (
            isinstance(tokens, Tensor)
            and tokens.shape[1] > history.positions_known_to
            and self.module.training
        ):
            history.positions_known_to = self._warn_beyond_positions(kwargs, tokens)
        refuse_foreign_attention(self.attentions)

    def _warn_beyond_positions(self, kwargs: dict[str, Any], tokens: Tensor) -> int:
        """Warn if rows are longer than the model's position embeddings were made for. Return the
        number of tokens up to which later calls need no such check.

        Args:
            kwargs: arguments of the backbone's forward.
            tokens: input_ids [B, T], or inputs_embeds [B, T, h].
        """
        text: PreTrainedConfig = self.module.config.get_text_config()  # type: ignore[operator, union-attr]
        config = getattr(self.state.root, "config", None)
        if not isinstance(config, PreTrainedConfig):
            config = text
        positions = kwargs.get("position_ids")
        if positions is None:
            positions = self.state.running.position_ids
        return warn_beyond_positions(config, text, tokens, positions)

    def _packed_rows(self, kwargs: dict[str, Any], tokens: Any) -> PackedRows | None:
        """Return the packed documents of each row, if layers with recurrent states must read the
        documents from position_ids. Return None if other arguments mark the documents, or if each
        row is one document.

        Args:
            kwargs: arguments of the backbone's forward.
            tokens: input_ids [B, T], or inputs_embeds [B, T, h].
        """
        positions = kwargs.get("position_ids")
        positions = self.state.running.position_ids if positions is None else positions
        if self.state.config.documents != "from_positions" or not isinstance(positions, Tensor):
            return None
        marks_documents = any(
            kwargs.get(name) is not None for name in ("attention_mask", DOCUMENT_IDS, DOCUMENT_ENDS)
        )
        if marks_documents or not has_data(positions):
            return None
        if positions.dim() == 3 and positions.shape[0] == 4:  # text, time, height and width
            positions = positions[0]
        if tokens is None or positions.dim() != 2 or positions.shape[1] != tokens.shape[1]:
            return None
        return packed_rows(positions, tokens.shape[0])

    @functools.cached_property
    def _layer_states(self) -> list[LayerState]:
        layer_ids = set(map(id, self.layers))
        return [
            w.layer_state
            for w in self.state.wrappers
            if isinstance(w, LayerForward) and id(w.module) in layer_ids
        ]


def _tokens_of_call(tokens: Any, output: Any) -> Any:
    """Return tensors from whose shape `describe` takes the batch size and the number of tokens.
    This is `tokens`, or for a vision or audio tower, which gets no tokens, its last hidden states
    [B, T, h]. None if these have no batch dimension.

    Args:
        tokens: input_ids [B, T] or inputs_embeds [B, T, h]; None for a tower.
        output: the backbone's output.
    """
    if tokens is not None:
        return tokens
    states = getattr(output, "last_hidden_state", None)
    if isinstance(states, Tensor) and states.dim() == 3:
        return states
    return None
