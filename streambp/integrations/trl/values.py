"""Value head on the policy's backbone, or a value model, in one call with the policy's
log-probabilities.

The value head reads the same hidden states as the language-model head, before the final norm.
autograd adds the gradients of both heads, and the backbone is differentiated once.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor, nn

from streambp.checkpoints import checkpoint_function
from streambp.head.blocks import token_blocks
from streambp.head.log_probs import TokenLogProbs
from streambp.head.recipe import HeadRequest
from streambp.model.fused_head import FusedHead

VALUE_HEAD, VALUE_MODEL = "value_head", "value_model"


def blockwise_values(hidden_states: Tensor, norm: nn.Module | None, head: nn.Module) -> Tensor:
    """Return the value head's prediction for each token, head(norm(hidden_states)), [B, T] in
    promote_types(dtype, float32). The values are computed for blocks of tokens.

    Backward recomputes the norm of each block, because saving the normed states of all tokens would
    need more memory than the hidden states.

    Args:
        hidden_states: [B, T, h].
        norm: the final norm; None: hidden_states are normed already.
        head: the value head, a Linear with one output.
    """

    def values(block: Tensor) -> Tensor:
        block = block if norm is None else norm(block)
        weight_dtype = next(head.parameters()).dtype
        result: Tensor = head(block.to(weight_dtype)).squeeze(-1)
        return result.to(torch.promote_types(result.dtype, torch.float32))

    flat = hidden_states.reshape(-1, hidden_states.shape[-1])
    parts = [checkpoint_function(values, flat[block]) for block in token_blocks(flat.shape[0])]
    return torch.cat(parts).view(hidden_states.shape[:-1])


@functools.cache
def _with_values(kind: Any) -> Any:
    """Return a subclass of TRL's output class with one more dataclass field, `state_values`.

    Engines read declared fields alone. FSDP2 gathers the final norm's weight before their backward.
    DDP with find_unused_parameters=True looks for the value head behind them.
    """
    field = ("state_values", Tensor | None, None)
    return dataclasses.make_dataclass(
        kind.__name__, [field], bases=(kind,), namespace={"__module__": __name__}
    )


class PolicyAndValueHead(FusedHead):
    """Forward of a policy that returns log-probabilities of the labels in place of logits, like
    `FusedHead`, and also `state_values` for PPO. A state value is predicted for each label: the
    value of the state before the label's token."""

    def call(self, *args: Any, values: bool = False, **kwargs: Any) -> Any:
        """Return the output of `FusedHead.call`: per-token values such as log-probabilities if
        `fused_lm_head=True` is passed, otherwise the model's usual output.

        Args:
            args: arguments of the model's forward.
            values: True to add `state_values` to the output.
            kwargs: keyword arguments of the model's forward, and `fused_lm_head`.
        """
        self.with_values = values
        return super().call(*args, **kwargs)

    def output(
        self, kwargs: dict[str, Any], output: Any, values: TokenLogProbs, request: HeadRequest
    ) -> Any:
        """Return the output with log-probabilities that `FusedHead.output` makes. If the forward
        was called with values=True, add `state_values`, with the shape of log_probs and in float32
        or a wider dtype.

        Args:
            kwargs: keyword arguments of the model's forward, with which a separate value model is
                called.
            output: the model's output without logits.
            values: log-probabilities and the other results of each token, not the state values.
            request: record with the hidden states and the final norm, from which a value head
                computes the state values.
        """
        result = super().output(kwargs, output, values, request)
        if not self.with_values:
            return result
        value_model = getattr(self.module, VALUE_MODEL, None)
        if value_model is None:
            head = getattr(self.module, VALUE_HEAD)
            assert request.hidden_states is not None
            state_values = blockwise_values(request.hidden_states(), request.norm, head)
        else:
            inputs = {}
            for name in ("input_ids", "attention_mask", "position_ids"):
                if name in kwargs:
                    inputs[name] = kwargs[name]
            of_states = value_model(**inputs, use_cache=False).logits.squeeze(-1)  # [B, T]
            wide = of_states.to(torch.promote_types(of_states.dtype, torch.float32))
            state_values = wide[:, : values.log_probs.shape[1]]
        kind: Any = type(result)
        return _with_values(kind)(**result, state_values=state_values)
