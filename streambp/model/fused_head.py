"""TRL's fused head, computed by ours.

TRL 1.16 gives its models a second way to be called: `model(..., labels=..., fused_lm_head=True)` returns per-token
values instead of logits, and every loss and metric of its trainers is made of these. Its own head keeps dhidden in
float32 for all tokens and the final norm outside of its blocks (16 KB a token each at h = 4096); ours does not, and takes
the model's logits as the model's own forward computes them, whatever its scale or softcap.
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
    """A causal language model's forward that answers `fused_lm_head=True` with a `FusedCausalLMOutput`.

    Args:
        causal: the model's streamed forward; other calls go there.
        temperature: the logits are divided by it.
        in_float32: compute the head's products in float32.
        outputs: which per-token fields to fill in.
    """

    def __init__(self, causal: CausalLMForward, temperature: float, in_float32: bool, outputs: tuple[str, ...]) -> None:
        super().__init__(causal.module)
        self.state = causal.state
        self.causal = causal
        self.temperature = temperature
        self.in_float32 = in_float32
        self.outputs = outputs
        self.wanted = tuple(name for name in OPTIONAL_OUTPUTS if name in outputs)

    def install(self) -> None:
        """Also for `unpatch` to take off."""
        super().install()
        self.order = 1 + max(wrapper.order for wrapper in self.state.wrappers)
        self.state.enter(self)

    def call(self, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        """A `FusedCausalLMOutput` where it is asked for; the model's output otherwise."""
        if self.retired or not fused_lm_head:
            return self.original(*args, **kwargs)
        if args:
            kwargs = {**kwargs, **self.__signature__.bind_partial(*args).arguments}
        if kwargs.get("labels") is None:
            kwargs["labels"] = kwargs.get("shift_labels")
        scored = self.causal.score(kwargs, self.wanted, self.temperature, self.in_float32)
        return self.output(kwargs, *scored)

    def output(
        self, kwargs: dict[str, Any], output: Any, values: TokenLogProbs, request: HeadRequest
    ) -> FusedCausalLMOutput:
        """What TRL's trainers expect, of what `score` gave for `kwargs`."""
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
    """Give a patched model a fused head; called like TRL's `add_fused_lm_head`, in its place.

    TRL's own stays where the model's forward was written by another library: it calls the backbone, not that forward.

    Args:
        causal: the model's streamed forward.
        temperature, cast_lm_head_to_fp32, outputs: as TRL names them.
        head_class: what stands in for TRL's head.
    """
    from trl.trainer.utils import add_fused_lm_head as add_trls_head

    if causal.foreign is not None and head_class is FusedHead:
        add_trls_head(causal.module, temperature, cast_lm_head_to_fp32, outputs)
        return
    causal.refuse_foreign()
    head_class(causal, temperature, cast_lm_head_to_fp32, outputs).install()


def head_again(causal: CausalLMForward, before: FusedHead | None) -> FusedHead | None:
    """A head like the one that a model had when it was patched: of ours, or of TRL's `add_fused_lm_head`."""
    if before is not None:
        return type(before)(causal, before.temperature, before.in_float32, before.outputs)
    settings = next((s for f in wrapped_functions(causal.previous) if (s := trls_head(f)) is not None), None)
    if settings is None:
        return None
    return FusedHead(causal, settings[TRLS_TEMPERATURE], settings[TRLS_IN_FLOAT32], settings[TRLS_OUTPUTS])
