"""`StreamConfig`: everything a user can choose, checked when it is built."""

from __future__ import annotations

import dataclasses
from typing import Literal

from streambp.errors import ConfigError

SAVES = ("attn_out", "kv")
ATTENTION = ("auto", "cudnn", "flash", "math")


@dataclasses.dataclass(frozen=True)
class StreamConfig:
    """How a patched model streams (DESIGN.md section 8).

    Args:
        chunk_size: positions per row of the batch that are recomputed and differentiated at a time, or "auto".
        saves: what backward keeps on the device instead of recomputing it, out of "attn_out" (the attention output
            with its logsumexp, 2 * h bytes a token and layer in bf16) and "kv" (the keys and values).
        attention: the kernels that attend one block. "auto" takes the fastest that fits; "flash" is FlashAttention on
            CUDA and the fused kernel on CPU; "math" is plain matrix products on any device.
        head: with labels, compute the loss block by block and never build the logits.
        eval_logits: in eval mode, build the logits as well when labels are given (for `compute_metrics`).

    Raises:
        ConfigError: a value is not among those named above.
    """

    chunk_size: int | Literal["auto"] = "auto"
    saves: tuple[str, ...] = ()
    attention: Literal["auto", "cudnn", "flash", "math"] = "auto"
    head: bool = True
    eval_logits: bool = False

    def __post_init__(self) -> None:
        size = self.chunk_size
        if size != "auto" and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ConfigError(f'chunk_size is {size!r}; it must be a positive number of tokens, or "auto".')
        if isinstance(self.saves, str) or not all(isinstance(name, str) for name in self.saves):
            raise ConfigError(f"saves is {self.saves!r}; it must be a tuple of names, such as saves=('attn_out',).")
        object.__setattr__(self, "saves", tuple(self.saves))
        unknown = sorted(set(self.saves) - set(SAVES))
        if unknown:
            raise ConfigError(f"saves names {unknown}; it may name {list(SAVES)}.")
        if self.attention not in ATTENTION:
            raise ConfigError(f"attention is {self.attention!r}; it must be one of {list(ATTENTION)}.")
        for field in ("head", "eval_logits"):
            if not isinstance(getattr(self, field), bool):
                raise ConfigError(f"{field} is {getattr(self, field)!r}; it must be True or False.")
