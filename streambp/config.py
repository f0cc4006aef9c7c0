"""`StreamConfig`: all settings of a user, checked when it is built."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Mapping
from typing import Any, Literal

from streambp.errors import ConfigError
from streambp.fields import check_fields, parse_bytes, parse_tokens, short_repr

SAVES = ("attn_out", "kv")
LAST_LAYERS_SEPARATOR = "@"  # separates a name in `saves` from a number of last layers
MAX_LAYER_DIGITS = 9  # at most, of a number of last layers


@dataclasses.dataclass(frozen=True)
class StreamConfig:
    """Settings of `streambp.patch`, which computes a model in chunks of the sequence (DESIGN.md
    section 8).

    Args:
        chunk_size: tokens of each row in one chunk, a number, "8k" or "auto".
        saves: tensors that forward saves, so that backward does not recompute them. "attn_out" is
            the attention output with its logsumexp, 2 * h bytes a token and layer in bf16. "kv" is
            the keys and values. Globs name Linear modules relative to the layer ("mlp.gate_proj",
            "mlp.*"); their outputs are saved where backward reads them. "attn_out@12" saves in the
            last 12 layers alone, whose backward comes first. "auto" saves, layer by layer, as much
            as the device's free memory allows, and decides anew in each forward. A micro-batch then
            runs unpatched if its activations fit into four fifths of that memory, see
            `unpatched_runs`. If tensors are offloaded, "auto" saves as much as the link to the host
            can carry during the compute.
        attention: the kernels of attention. "auto" takes the fastest kernel that can compute the
            model's attention. "cudnn" is cuDNN's fused attention on CUDA. "flash" is FlashAttention
            on CUDA and the fused kernel on CPU. "math" is plain matrix products on any device.
        head: compute the loss block by block if labels are given, and never build the logits.
            False: build the logits in every call.
        eval_logits: build the logits as well if labels are given in eval mode (for
            `compute_metrics`).
        lazy_logits: return logits that are computed on use (`LazyLogits`); a call with labels
            returns the loss and such logits. Log-probabilities, logsumexp, losses and metrics of
            each token are computed from lazy logits block by block; any other use builds the
            logits.
        offload: "cpu" moves each layer's input and the tensors of `saves` to host memory during the
            compute, and back a chunk ahead of their use. "auto" does the same, and chooses
            `gpu_memory` if it is not given. "if_faster" moves tensors in steps that are then faster
            by prediction, or would not fit otherwise. Pinned host memory has a price in seconds,
            and the first such steps pay it. Tensors stay if `saves` names them, if weights are in
            host memory, and on a CPU. "none" keeps all tensors on the device.
        host_memory: bytes of host memory for offloading on each rank, a number or "96GiB". None:
            nine tenths of the available memory, or half of it with offload="if_faster". The ranks
            of a machine share it.
        gpu_memory: bytes of device memory for tensors that live longer than a chunk, a number or
            "8GiB"; needs offloading. Keys and values of the running layer, with their gradients,
            come first; a part beyond the budget is streamed from and to the host. The rest of the
            budget holds saved tensors of the last layers. Weights, gradients and a chunk's own
            computation come on top. None: keys and values stay on the device, and all saved tensors
            leave; with offload="auto", the budget is the memory that the device had left in the
            first step.
        on_host_full: treatment of a tensor without room in `host_memory`. "keep": the tensor stays
            on the device. "recompute": backward recomputes the tensor, but a layer's input stays on
            the device. "raise": raise an error.
        documents: packed documents in recurrences and convolutions. "from_positions": states
            restart where position_ids do not grow by one, like attention, unless the call has an
            attention_mask, seq_idx or cu_seq_lens_q. "as_given": states restart where seq_idx and
            cu_seq_lens_q mark a document, as in the unpatched model; with position_ids alone,
            states continue from one document to the next.
        rows: the computation of a batch [B, T]. "as_given": B separate rows. "packed": one packed
            row without padding. A common beginning of several rows is then computed once
            (completions of one prompt, chosen and rejected). The model's outputs are still those of
            [B, T], except values at padding. A batch is packed only if a test of the model on such
            a row succeeded, and if packing saves enough tokens. "auto": like "packed", but only
            where results do not differ. Padded batches are then packed only if the caller gets no
            values at padding, and common beginnings are shared only if no dropout is drawn.
            `describe` reports the result.
        kernels: the kernels of norms, MLPs and the rotation of queries and keys. "auto": on an
            accelerator Liger's kernels, if liger-kernel is installed and computes the same as the
            model; otherwise, and on a CPU, the model's own. Streamed Linears with LoRA adapters of
            peft are one operation, on every device. "own": the model's kernels, and peft's
            adapters. "liger": Liger's norms and MLPs, or an error. "compiled": the model's norms,
            gated activations and rotation, compiled by torch (Triton's kernels on a GPU, C++ on a
            CPU), or "own" on a machine without a compiler. Kernels are set on this model's modules,
            and `unpatch` removes them. The results of Liger's and of compiled kernels are rounded
            at other points than the model's, in the same dtypes.
        unpatched_runs: allow a micro-batch to run unpatched, which is fastest, if saves="auto" and
            its activations fit. False: each micro-batch is computed in chunks. Then no result
            depends on the free memory, and a backward that runs out of memory is repeated.
        compare_backward: compare each layer that backward recomputes with the forward, and raise if
            the two differ. [Note: witness]
        share_prefixes: the former name of `rows`. True is rows="packed", False rows="as_given". The
            setting warns, and a later release will remove it.
        weights: "device": the weights stay where the program has put them. "cpu": the layers'
            weights live in host memory, within `host_memory`. Each layer's weights are copied to
            the device one layer ahead of their use, once in forward and once in backward. Adapters
            stay on the device. Gradients of layers that train all weights are moved to the host.
            "auto": frozen weights of the first layers live in host memory. The first forward
            decides how many layers the device has no room for during a step.
        towers: compute trained vision and audio towers, and encoders before a decoder, in chunks
            as well: for long videos, large images and hours of audio. False: they stay as they are.
            Micro-batches of a model with such a tower do not run unpatched.

    Raises:
        ConfigError: a value is not among those named above.
    """

    chunk_size: int | Literal["auto"] = "auto"
    saves: tuple[str, ...] | Literal["auto"] = "auto"
    attention: Literal["auto", "cudnn", "flash", "math"] = "auto"
    head: bool = True
    eval_logits: bool = False
    lazy_logits: bool = False
    offload: Literal["if_faster", "none", "cpu", "auto"] = "if_faster"
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
    towers: bool = False

    @property
    def always_moves(self) -> bool:
        """True if layer inputs and saved tensors are moved to host memory in each step."""
        return self.offload in ("cpu", "auto")

    @property
    def may_move(self) -> bool:
        """True if layer inputs and saved tensors are moved to host memory only in steps that are
        then faster by prediction, or would not fit otherwise. [Note: host by seconds]"""
        return self.offload == "if_faster" and self.saves == "auto" and self.weights == "device"

    @property
    def products(self) -> tuple[str, ...]:
        """Return the names in `saves` by which outputs of Linear modules are saved, for example
        "mlp.gate_proj" or the glob "mlp.*". The suffix "@n" of a name, by which only the last n
        layers save, is removed."""
        names = (name.partition(LAST_LAYERS_SEPARATOR)[0] for name in self.named_saves)
        return tuple(name for name in names if name not in SAVES)

    @functools.cached_property
    def named_saves(self) -> tuple[str, ...]:
        """Return the names in `saves` as given, including suffixes such as "@12" (the last 12
        layers only). Return () if `saves` is "auto"."""
        return () if self.saves == "auto" else tuple(self.saves)

    def of_layer(self, left: int) -> StreamConfig:
        """Return a copy of these settings for one layer. Names such as "attn_out@12" in `saves`,
        for the last 12 layers only, become "attn_out" if the layer is among these, and are left out
        otherwise.

        Args:
            left: number of layers from this one to the last, both included.
        """
        if not any(LAST_LAYERS_SEPARATOR in name for name in self.named_saves):
            return self
        parts = (name.partition(LAST_LAYERS_SEPARATOR) for name in self.named_saves)
        saves = dict.fromkeys(name for name, last, count in parts if not last or left <= int(count))
        return dataclasses.replace(self, saves=tuple(saves))

    def __post_init__(self) -> None:
        if isinstance(self.saves, list | tuple):  # command lines and JSON give ["auto"]
            saves = tuple(self.saves)
            is_auto = len(saves) == 1 and isinstance(saves[0], str) and saves[0] == "auto"
            object.__setattr__(self, "saves", "auto" if is_auto else saves)
        if isinstance(self.chunk_size, str) and self.chunk_size[:1].isdigit():
            object.__setattr__(self, "chunk_size", parse_tokens("chunk_size", self.chunk_size))
        for field in ("host_memory", "gpu_memory"):
            if getattr(self, field) is not None:
                object.__setattr__(self, field, parse_bytes(field, getattr(self, field)))
        check_fields(self, chunk_size=1)
        if self.share_prefixes is not None:
            rows = "packed" if self.share_prefixes else "as_given"
            warnings.warn(
                f"share_prefixes={self.share_prefixes} is now rows='{rows}', and will go with the "
                "next release.",
                DeprecationWarning,
                stacklevel=3,  # the line that builds the configuration
            )
            object.__setattr__(self, "rows", rows)
            object.__setattr__(self, "share_prefixes", None)
        for name in self.named_saves:
            start, last, count = name.partition(LAST_LAYERS_SEPARATOR)
            if last and not (
                start and count.isdecimal() and len(count) <= MAX_LAYER_DIGITS and int(count)
            ):
                raise ConfigError(
                    f"saves names {short_repr(name)}, where a number must follow "
                    f"{LAST_LAYERS_SEPARATOR}. Write how "
                    f"many of the last layers save the tensor, such as 'attn_out@12', or leave "
                    f"{LAST_LAYERS_SEPARATOR} out for all layers."
                )
        for field in ("host_memory", "gpu_memory"):
            moves = self.always_moves
            if field == "host_memory":
                moves = moves or self.may_move or self.weights != "device"
            if getattr(self, field) is not None and not moves:
                raise ConfigError(
                    f"{field} is set, but offload={self.offload!r} moves nothing; set "
                    "offload='cpu' or 'auto' too."
                )
        for field in ("eval_logits", "lazy_logits"):
            if getattr(self, field) and not self.head:
                raise ConfigError(
                    f"{field} is set, but head=False builds the logits in every call, so that it "
                    f"would change nothing; leave {field} out, or set head=True."
                )


CONFIG_FIELDS = tuple(field.name for field in dataclasses.fields(StreamConfig))


def config_of(values: Mapping[str, Any], source: str, base: StreamConfig) -> StreamConfig:
    """Return a copy of `base` with other values for the fields in `values`.

    Args:
        values: values by field name.
        source: origin of the values, such as a file's name, for the error message.
        base: the configuration to change.

    Raises:
        ConfigError: a name is unknown, or a value is not allowed.
    """
    unknown = [name for name in values if name not in CONFIG_FIELDS]
    if unknown:
        raise ConfigError(
            f"{source} has the unknown settings {short_repr(unknown)}. Use some of "
            f"{list(CONFIG_FIELDS)}."
        )
    return dataclasses.replace(base, **values)
