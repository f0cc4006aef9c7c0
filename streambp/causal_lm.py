"""What `patch` puts in place of a causal language model's forward, and of its output projection during it."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from streambp.distributed.sequence_parallel import find_ulysses
from streambp.distributed.zero import is_partitioned
from streambp.errors import StreamBPError
from streambp.head.blocks import Wanted
from streambp.head.deferred import Deferred, HeadRecord, Recipe
from streambp.head.log_probs import TokenLogProbs
from streambp.instance_forward import InstanceForward
from streambp.wrappers import PatchState


@dataclasses.dataclass
class Scored:
    """A model's output, and what its labels scored: tokens [B, T - 1] of labels[:, 1:] (with shift_labels [B, T]).

    hidden_states [B, T - 1, h] is what the head computed them from, before `norm` if there is one.
    """

    output: Any
    tokens: TokenLogProbs
    hidden_states: Tensor
    norm: nn.Module | None


class CausalLMForward(InstanceForward):
    """A causal language model whose loss is computed without logits when labels are given (DESIGN.md section 8)."""

    def __init__(self, module: PreTrainedModel, state: PatchState) -> None:
        super().__init__(module)
        self.state = state

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.retired:
            return self.original(*args, **kwargs)
        want_log_probs = kwargs.pop("output_log_probs", False)
        if args:
            kwargs = {**kwargs, **dict(inspect.signature(self).bind_partial(*args).arguments)}
        labels = kwargs.get("labels")
        if labels is None and want_log_probs:
            raise StreamBPError("output_log_probs=True needs labels: the tokens whose log-probabilities are wanted.")
        if labels is None or not self.state.config.head or self._caches(kwargs):
            if want_log_probs:
                raise StreamBPError("output_log_probs=True needs StreamConfig(head=True) and no cache (use_cache=False).")
            self._refuse_unshifted(kwargs)
            return self.original(**kwargs)
        if want_log_probs:
            scored = self.score(kwargs, Wanted())
            scored.output["log_probs"] = scored.tokens.log_probs
            return scored.output
        return self._with_record(kwargs, HeadRecord(self.state.pending))

    def score(self, kwargs: dict[str, Any], wanted: Wanted, temperature: float = 1.0, in_float32: bool = False) -> Scored:
        """The model's output without logits, and per-token values of its labels.

        Args:
            kwargs: of the model's forward, with labels.
            wanted: which values, beside log-probabilities.
            temperature: the logits are divided by it, for the loss as well.
            in_float32: compute the head's products in float32.

        Raises:
            StreamBPError: the model's loss takes its logits elsewhere than to cross_entropy.
        """
        record = HeadRecord(self.state.pending, wanted, temperature, in_float32)
        kwargs["return_dict"] = True  # per-token values are fields
        output = self._with_record(kwargs, record)
        if record.values is None:
            raise StreamBPError(
                f"The loss of {type(self.module).__name__} does not go through cross_entropy on its logits "
                f"({record.built_for}), so there are no per-token log-probabilities. Compute them from logits (call the "
                "model without labels)."
            )
        shift_labels = kwargs.get("shift_labels")
        shape = kwargs["labels"].shape if shift_labels is None else shift_labels.shape
        tokens = record.values.view(shape)
        assert record.hidden_states is not None
        hidden_states = record.hidden_states.view(*shape, -1)
        if shift_labels is not None:
            return Scored(output, tokens, hidden_states, record.norm)
        return Scored(output, tokens.without_last(), hidden_states[:, :-1], record.norm)

    def _with_record(self, kwargs: dict[str, Any], record: HeadRecord) -> Any:
        self._refuse_unshifted(kwargs)
        kwargs["use_cache"] = False
        record.num_items = kwargs.get("num_items_in_batch")
        output = self._run(kwargs, record)
        self.state.head_built_for = record.built_for
        return self._finish(output)

    def _refuse_unshifted(self, kwargs: dict[str, Any]) -> None:
        """Split over ranks, a shard's last token has its label on the next rank, where shifting here cannot find it."""
        ulysses = find_ulysses(self.module.config.get_text_config()._attn_implementation_internal)  # type: ignore[operator, union-attr]
        given = kwargs.get("labels") is not None and kwargs.get("shift_labels") is None
        if ulysses is not None and given and ulysses.splits(self.module.training):
            raise StreamBPError(
                "labels were given without shift_labels while sequences are split over ranks; shifting a shard's labels "
                "would lose its last one. Shift before splitting and pass the same tensor as labels and as shift_labels."
            )

    def _caches(self, kwargs: dict[str, Any]) -> bool:
        return kwargs.get("past_key_values") is not None or bool(kwargs.get("use_cache") and not self.module.training)

    def _run(self, kwargs: dict[str, Any], record: HeadRecord) -> Any:
        config = self.module.config
        hidden_wanted = kwargs.get("output_hidden_states") or getattr(config, "output_hidden_states", False)
        output_embeddings = self.module.get_output_embeddings()  # type: ignore[operator]
        gathered = is_partitioned(output_embeddings.weight)
        # Under ZeRO-3 a module's weights are here only while it runs: the norm runs as ever, and the head with the loss.
        head = HeadLater(self.module, output_embeddings, record) if gathered else DeferredHead(output_embeddings, record)
        self.state.defer_norm = None if hidden_wanted or gathered else record
        head.install()
        try:
            return self.original(**kwargs)
        finally:
            self.state.defer_norm = None
            head.remove()

    def _finish(self, output: Any) -> Any:
        """The output without deferred logits, or with real ones where they are to be seen."""
        logits_wanted = self.state.config.eval_logits and not self.module.training
        if isinstance(output, tuple):
            kept = (part.build() if isinstance(part, Deferred) and logits_wanted else part for part in output)
            return tuple(part for part in kept if not isinstance(part, Deferred))
        fields = {
            name: value.build() if isinstance(value, Deferred) and logits_wanted else value
            for name, value in output.items()
        }
        result: ModelOutput = type(output)(**{k: v for k, v in fields.items() if not isinstance(v, Deferred)})
        return result


class DeferredHead(InstanceForward):
    """The output projection for one forward; makes its input `Deferred` where the final norm could not."""

    def __init__(self, module: nn.Module, record: HeadRecord) -> None:
        super().__init__(module)
        self.record = record

    def __call__(self, hidden_states: Tensor) -> Tensor:
        if not isinstance(hidden_states, Deferred):
            hidden_states = Deferred(hidden_states, Recipe(self.record))
        result: Tensor = self.original(hidden_states)
        return result


class HeadLater(nn.Module):
    """In the output projection's place for one forward: the projection is called when the loss is computed, not before."""

    def __init__(self, model: nn.Module, head: nn.Module, record: HeadRecord) -> None:
        super().__init__()
        self._model, self._head = [model], [head]  # in lists, so as not to become submodules
        self._name = next(name for name, child in model.named_children() if child is head)
        self.record = record

    def install(self) -> None:
        self._model[0]._modules[self._name] = self

    def remove(self) -> None:
        self._model[0]._modules[self._name] = self._head[0]

    @property
    def weight(self) -> Any:
        return self._head[0].weight

    def forward(self, hidden_states: Tensor) -> Tensor:
        head = self._head[0]
        return Deferred(hidden_states, Recipe(self.record, weight=head.weight, bias=head.bias, head=head))  # type: ignore[arg-type]
