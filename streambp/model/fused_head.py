"""Compute TRL's fused head with the streamed head.

TRL 1.16 adds a second way to call its models: `model(..., labels=..., fused_lm_head=True)` returns
per-token values instead of logits. Every loss and metric of its trainers uses these values. TRL's
own head stores dhidden in float32 for all tokens, and computes the final norm outside of its blocks
(16 KB for each token at h = 4096). The streamed head stores neither, and uses the logits of the
model's own forward with any scale or softcap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from streambp.foreign import trls_head, wrapped_functions
from streambp.head.log_probs import TokenLogProbs
from streambp.head.recipe import HeadRequest
from streambp.instance_forward import InstanceForward
from streambp.known_names import OPTIONAL_OUTPUTS, TRLS_IN_FLOAT32, TRLS_OUTPUTS, TRLS_TEMPERATURE
from streambp.model.causal_lm import CausalLMForward

if TYPE_CHECKING:
    from trl.trainer.utils import FusedCausalLMOutput


class FusedHead(InstanceForward):
    """Forward of a causal language model that accepts TRL's argument `fused_lm_head=True`, and then
    returns per-token values (TRL's `FusedCausalLMOutput`) instead of logits.

    Args:
        causal: the model's patched forward, which also runs calls without `fused_lm_head=True`.
        temperature: divisor of the logits.
        in_float32: True: compute the output projection's products in float32. False: compute them
            in the precision of the model's own forward.
        outputs: names of the fields to compute for each token, such as "log_probs" or "entropy".
    """

    def __init__(
        self,
        causal: CausalLMForward,
        temperature: float,
        in_float32: bool,
        outputs: tuple[str, ...],
    ) -> None:
        super().__init__(causal.module)
        self.state = causal.state
        self.causal = causal
        self.temperature = temperature
        self.in_float32 = in_float32
        self.outputs = outputs
        self.requested_outputs = tuple(name for name in OPTIONAL_OUTPUTS if name in outputs)

    def install(self) -> None:
        """Replace the model's forward by this object, and add this object to the replacements that
        `unpatch` removes."""
        super().install()
        self.order = 1 + max(wrapper.order for wrapper in self.state.wrappers)
        self.state.enter(self)

    def call(self, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        """Return TRL's `FusedCausalLMOutput` if `fused_lm_head=True` is passed, and otherwise the
        model's usual output."""
        if self.retired or not fused_lm_head:
            return self.original(*args, **kwargs)
        if args:
            kwargs = {**kwargs, **self.__signature__.bind_partial(*args).arguments}
        if kwargs.get("labels") is None:
            kwargs["labels"] = kwargs.get("shift_labels")
        scored = self.causal.score(
            kwargs, self.requested_outputs, self.temperature, self.in_float32
        )
        return self.output(kwargs, *scored)

    def output(
        self, kwargs: dict[str, Any], output: Any, values: TokenLogProbs, request: HeadRequest
    ) -> FusedCausalLMOutput:
        """Return TRL's `FusedCausalLMOutput`, made from the results of the model's call.

        Args:
            kwargs: arguments of the model's call, with labels.
            output: the model's output without logits.
            values: log-probabilities and the other values of each token.
            request: record of the output projection's input, for subclasses; not used here.
        """
        from trl.trainer.utils import FusedCausalLMOutput

        shift_labels = kwargs.get("shift_labels")
        return FusedCausalLMOutput(
            loss=output.loss,
            log_probs=values.log_probs,
            entropy=values.entropy,
            log_sum_sq_probs=values.log_sum_sq_probs,
            mean_logits=values.mean_logits,
            is_top1=values.is_top1,
            label_mask=(kwargs["labels"][:, 1:] if shift_labels is None else shift_labels) != -100,
            aux_loss=output.get("aux_loss"),
        )


def add_head(
    causal: CausalLMForward,
    temperature: float = 1.0,
    cast_lm_head_to_fp32: bool = False,
    outputs: tuple[str, ...] = ("log_probs",),
    head_class: type[FusedHead] = FusedHead,
) -> None:
    """Make a patched model accept `fused_lm_head=True`, like TRL's `add_fused_lm_head`.

    If another library replaced the model's forward, TRL's own function is called, because TRL's
    function runs the backbone instead of that forward.

    Args:
        causal: the model's patched forward.
        temperature: divisor of the logits.
        cast_lm_head_to_fp32: True: compute the output projection's products in float32.
        outputs: names of the fields to compute for each token, such as "log_probs" or "entropy".
        head_class: the class of the new forward.

    Raises:
        StreamBPError: another library replaced the model's forward, and `head_class` is a subclass
            of `FusedHead`.
    """
    from trl.trainer.utils import add_fused_lm_head as add_trls_head

    if causal.third_party_forward is not None and head_class is FusedHead:
        add_trls_head(causal.module, temperature, cast_lm_head_to_fp32, outputs)
        return
    causal.refuse_foreign()
    head_class(causal, temperature, cast_lm_head_to_fp32, outputs).install()


def copy_head(causal: CausalLMForward, previous: FusedHead | None) -> FusedHead | None:
    """Return a new `FusedHead` for a model that is patched again, with the settings of the fused
    head that the model had before; None if the model had none. A fused head is a forward that
    accepts `fused_lm_head=True` and returns per-token values in place of logits.

    Args:
        causal: the model's new patched forward.
        previous: the model's `FusedHead` from a previous patch; None: look for a head that TRL's
            `add_fused_lm_head` made.
    """
    if previous is not None:
        return type(previous)(causal, previous.temperature, previous.in_float32, previous.outputs)
    settings = next(
        (s for f in wrapped_functions(causal.previous) if (s := trls_head(f)) is not None), None
    )
    if settings is None:
        return None
    return FusedHead(
        causal, settings[TRLS_TEMPERATURE], settings[TRLS_IN_FLOAT32], settings[TRLS_OUTPUTS]
    )
