"""`StreamConfig`: all settings of a user, checked when it is built."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Mapping
from typing import Any, Literal

from streambp.errors import ConfigError
from streambp.fields import check_fields, parse_bytes, parse_tokens, shown

SAVES = ("attn_out", "kv")
LAST = "@"  # separates a name in `saves` from a number of last layers
DIGITS = 9  # at most, of a number of last layers


@dataclasses.dataclass(frozen=True)
class StreamConfig:
    """How a patched model streams (DESIGN.md section 8).

    Args:
        chunk_size: tokens of each row in one chunk, as a number or as "8k", or "auto".
        saves: tensors that forward keeps so that backward need not recompute them: "attn_out" (the attention output with
            its logsumexp, 2 * h bytes a token and layer in bf16), "kv" (the keys and values), and globs of the names of
            Linear modules relative to the layer ("mlp.gate_proj", "mlp.*"), for their outputs where backward reads them.
            "attn_out@12" saves in the last 12 layers alone, whose backward comes first. "auto" saves as much as the
            device's free memory allows, by layer, decided anew in each forward; a micro-batch of one chunk that needs less
            than a quarter of that memory runs unpatched, see `unpatched_runs`. With offloading, "auto" saves as much as
            the link to the host can carry behind the compute.
        attention: the kernels of attention. "auto" takes the fastest that fits; "flash" is FlashAttention on CUDA and the
            fused kernel on CPU; "math" is plain matrix products on any device.
        head: with labels, compute the loss block by block and never build the logits.
        eval_logits: in eval mode, build the logits as well when labels are given (for `compute_metrics`).
        lazy_logits: return a stand-in for logits, with labels beside the loss. Log-probabilities, logsumexp, losses and
            metrics of each token are computed from it block by block; any other use builds the logits.
        offload: "cpu" moves each layer's input and what `saves` names to host memory behind the compute, and back a chunk
            ahead of its use. "auto" does too, and chooses `gpu_memory` if it is not given.
        host_memory: bytes of host memory for offloading on each rank, as a number or as "96GiB"; None: nine tenths of the
            available memory, shared by the ranks of a machine.
        gpu_memory: with offloading, bytes of device memory for tensors that live longer than a chunk, as a number or as
            "8GiB". Keys and values of the layer at work, with their gradients, come first; those beyond the budget are
            streamed from and to the host. The rest of the budget keeps saved tensors of the last layers. Weights, gradients
            and a chunk's own computation come on top. None: keys and values stay, and all saved tensors leave; with
            offload="auto", the budget is the memory that the device had left in the first step.
        on_host_full: a tensor that does not fit into `host_memory`: "keep" it on the device, "recompute" it in backward (a
            layer's input is kept), or "raise".
        documents: packed documents in recurrences and convolutions. "from_positions": they start anew where position_ids do
            not grow by one, as attention does, unless the call has an attention_mask, seq_idx or cu_seq_lens_q.
            "as_given": they start anew where seq_idx and cu_seq_lens_q say so, as in the unpatched model; with position_ids
            alone they go on from one document to the next.
        rows: how a batch [B, T] is computed. "as_given": its rows as they are. "packed": as one packed row without padding,
            in which tokens stand once that rows have in common at their beginning (completions of one prompt, chosen and
            rejected), where the model was tried on it and enough is saved; outputs are those of [B, T], but for values at
            padding. "auto": the same where nobody sees a difference: of padded batches only where the caller gets no such
            values, and beginnings in common only where no dropout is drawn. `describe` says what became of it.
        kernels: of norms, MLPs and the rotation of queries and keys. "auto": Liger's on an accelerator, where liger-kernel
            is installed and computes what the model does; else the model's, as on every CPU. Streamed Linears with LoRA
            adapters of peft's are one operation, on every device. "own": the model's, and peft's adapters. "liger":
            Liger's norms and MLPs, or an error. "compiled": the model's norms, gated activations and rotation, compiled by
            torch (Triton's kernels on a GPU, C++ on a CPU), or "own" on a machine without a compiler. They are put on this
            model's modules and taken off by `unpatch`, and round in other places than the model's, in its dtypes.
        unpatched_runs: with saves="auto", whether a micro-batch may run unpatched, which is fastest. False: each one
            streams, so that no number depends on the free memory and a backward that runs out of it is repeated.
        compare_backward: whether backward compares the layers that it computes again with those of the forward, and raises
            where they differ. [Note: witness]
        share_prefixes: the former name. True is rows="packed", False rows="as_given"; it warns, and will go.
        weights: "cpu": the layers' weights live in host memory, within `host_memory`, and come to the device a layer ahead
            of their use, once in each direction. Adapters stay on the device; of layers that train as a whole gradients
            leave for the host. "auto": frozen weights of as many of the first layers as the device has no room for beside a
            step; the first forward decides.

    Raises:
        ConfigError: a value is not among those named above.
    """

    chunk_size: int | Literal["auto"] = "auto"
    saves: tuple[str, ...] | Literal["auto"] = "auto"
    attention: Literal["auto", "cudnn", "flash", "math"] = "auto"
    head: bool = True
    eval_logits: bool = False
    lazy_logits: bool = False
    offload: Literal["none", "cpu", "auto"] = "none"
    host_memory: int | str | None = None
    gpu_memory: int | str | None = None
    on_host_full: Literal["keep", "recompute", "raise"] = "keep"
    documents: Literal["from_positions", "as_given"] = "from_positions"
    rows: Literal["as_given", "packed", "auto"] = "auto"
    kernels: Literal["auto", "own", "liger", "compiled"] = "auto"
    unpatched_runs: bool = True
    compare_backward: bool = True
    share_prefixes: bool | None = None
    weights: Literal["device", "cpu", "auto"] = "device"

    @property
    def products(self) -> tuple[str, ...]:
        """Return the globs among `saves`."""
        names = (name.partition(LAST)[0] for name in self.named_saves)
        return tuple(name for name in names if name not in SAVES)

    @functools.cached_property
    def named_saves(self) -> tuple[str, ...]:
        """Return `saves`; () for "auto"."""
        return () if self.saves == "auto" else tuple(self.saves)

    def of_layer(self, left: int) -> StreamConfig:
        """Return the configuration of a layer that is one of the last `left` layers.

        Names that end in "@n" apply to the last n layers.
        """
        if not any(LAST in name for name in self.named_saves):
            return self
        parts = (name.partition(LAST) for name in self.named_saves)
        saves = dict.fromkeys(name for name, last, count in parts if not last or left <= int(count))
        return dataclasses.replace(self, saves=tuple(saves))

    def __post_init__(self) -> None:
        if isinstance(self.saves, list | tuple):  # command lines and JSON give ["auto"]
            saves = tuple(self.saves)
            alone = len(saves) == 1 and isinstance(saves[0], str) and saves[0] == "auto"
            object.__setattr__(self, "saves", "auto" if alone else saves)
        if isinstance(self.chunk_size, str) and self.chunk_size[:1].isdigit():
            object.__setattr__(self, "chunk_size", parse_tokens("chunk_size", self.chunk_size))
        for field in ("host_memory", "gpu_memory"):
            if getattr(self, field) is not None:
                object.__setattr__(self, field, parse_bytes(field, getattr(self, field)))
        check_fields(self, chunk_size=1)
        if self.share_prefixes is not None:
            rows = "packed" if self.share_prefixes else "as_given"
            warnings.warn(
                f"share_prefixes={self.share_prefixes} is now rows='{rows}', and will go with the next release.",
                DeprecationWarning,
                stacklevel=3,  # the line that builds the configuration
            )
            object.__setattr__(self, "rows", rows)
            object.__setattr__(self, "share_prefixes", None)
        for name in self.named_saves:
            start, last, count = name.partition(LAST)
            if last and not (start and count.isdecimal() and len(count) <= DIGITS and int(count)):
                raise ConfigError(
                    f"saves names {shown(name)}; behind {LAST} comes how many of the last layers save it, such as "
                    "'attn_out@12'. Without it all do."
                )
        for field in ("host_memory", "gpu_memory"):
            moves = self.offload != "none" or (field == "host_memory" and self.weights != "device")
            if getattr(self, field) is not None and not moves:
                raise ConfigError(f"{field} is set, but offload='none' moves nothing; set offload='cpu' or 'auto' too.")
        for field in ("eval_logits", "lazy_logits"):
            if getattr(self, field) and not self.head:
                raise ConfigError(
                    f"{field} is set, but head=False builds the logits in every call, so that it would change nothing; "
                    f"leave {field} out, or set head=True."
                )


FIELDS = tuple(field.name for field in dataclasses.fields(StreamConfig))


def config_of(found: Mapping[str, Any], source: str, base: StreamConfig) -> StreamConfig:
    """Return `base` with these fields, by name.

    Args:
        found: values by field.
        source: their origin, for the message.
        base: the configuration to change.

    Raises:
        ConfigError: a name is unknown, or a value is not allowed.
    """
    unknown = [name for name in found if name not in FIELDS]
    if unknown:
        raise ConfigError(f"{source} has the settings {shown(unknown)}; it may have {list(FIELDS)}.")
    return dataclasses.replace(base, **found)
