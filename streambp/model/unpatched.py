"""Micro-batches that run as the unpatched model would, because all that this keeps fits many times over.

[Note: micro-batches as unpatched] Streaming saves memory, and pays for it with Python: some milliseconds a layer, which a
long sequence hides and a short one does not. With saves="auto" a micro-batch of one chunk is handed to the unpatched
model's own forward and to torch's own autograd, if the graphs of all layers and the logits take a quarter at most of what
a step without saves would leave free. Loss and gradients are those of the unpatched model, bit for bit; hooks, autocast and
whatever else changes between forward and backward act as they do unpatched.

The quarter is there because such a graph cannot be let go of. [Note: saves that fit] Where it is not enough:

    forward runs out of memory         the micro-batch is streamed instead, from the same random numbers
    backward runs out of memory        the error goes to the caller; from then on only micro-batches of half the tokens
    forward takes more than predicted  the prediction is multiplied by as much (on devices that tell what they have free)

Each layer has to be streamed once before: what it takes is seen there, and that it can be streamed at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed import is_initialized
from transformers import PreTrainedConfig

from streambp.attention.carriers import attention_configs
from streambp.chunks import plan_chunks
from streambp.config import StreamConfig
from streambp.distributed.engines import engine_hooks
from streambp.instance_forward import is_fsdp_unit
from streambp.known_names import EAGER, GRADIENT_HOOKED
from streambp.layer.recompute import RandomState
from streambp.layer.site import LayerSite
from streambp.model.split import find_split
from streambp.offload.fitting import AsUnpatched, FittingSaves

SHARE = 0.25  # of the memory that a step without saves leaves free
LOGITS = 16  # bytes: a logit and its gradient, in the model's dtype and in float32, and one more of these
TELLING = ("cuda",)  # types of devices whose free memory changes with this process alone, and is known at any time
T = TypeVar("T")


class UnpatchedRuns:
    """Decides for each micro-batch of a patched model whether it runs as unpatched. [Note: micro-batches as unpatched]

    Args:
        chooser: knows what each layer's graph takes, and what is free. sites: all layers.

    most: tokens over all rows, by what once was too much. factor: by which forward took more than predicted.
    """

    def __init__(self, config: StreamConfig, chooser: FittingSaves, sites: list[LayerSite]) -> None:
        self.config, self.chooser, self.sites = config, chooser, sites
        self.most = math.inf
        self.factor = 1.0
        self._within = False
        self._differentiated = 0  # tokens of the micro-batch whose backward has begun and not ended

    def __getstate__(self) -> Any:
        """A copied or pickled model has seen nothing."""
        return self.config, self.chooser, self.sites

    def __setstate__(self, state: Any) -> None:
        UnpatchedRuns.__init__(self, *state)

    def attempt(self, run: Callable[[], T], kwargs: Mapping[str, Any], config: PreTrainedConfig) -> T | None:
        """What `run` returns; None if the micro-batch is to be streamed.

        Args:
            run: the unpatched model's forward. kwargs: of the call, in training. config: of the text model.
        """
        if self._within:
            return run()
        given = kwargs.get("input_ids") if kwargs.get("input_ids") is not None else kwargs.get("inputs_embeds")
        if not isinstance(given, Tensor) or given.dim() < 2 or not self._can(given, config):
            return None
        tokens = given.shape[0] * given.shape[1]
        predicted = self.predicted(tokens, given.device, config)
        spare = self.chooser.spare(given.device, tokens, tokens)
        if predicted is None or spare is None or predicted > SHARE * spare:
            return None
        random, before = RandomState.capture(given.device), self.chooser.free(given.device)
        self._within = True
        try:
            result = run()
        except torch.OutOfMemoryError:
            result = None
            self.most = tokens // 2
        finally:
            self._within = False
        if result is None:  # not above: the error's frames hold tensors
            random.restore()
            return None
        self.chooser.latest = AsUnpatched(tokens, predicted, spare)
        self._watch(result, tokens, predicted, given.device, before)
        return result

    def predicted(self, tokens: int, device: torch.device, config: PreTrainedConfig) -> float | None:
        """Bytes that the graphs of all layers and the logits [B, T, V] take; None where a layer's are not known."""
        if len({site.index for site in self.sites}) < len(self.sites):  # several stacks count their layers from 0
            return None
        graphs = self.chooser.graphs(tokens, device)
        return None if graphs is None else self.factor * (graphs + LOGITS * tokens * config.vocab_size)

    def _can(self, given: Tensor, config: PreTrainedConfig) -> bool:
        """Whether the micro-batch is one chunk and the unpatched model computes the same, in memory that grows with T."""
        self._heed_backward()
        batch_size, length = given.shape[:2]
        if not 0 < batch_size * length <= self.most or self.config.share_prefixes:
            return False
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            return False
        if is_initialized() and find_split(config, True) is not None:
            return False
        first = self.sites[0]
        rule, size = first.chunk_rule, self.config.chunk_size
        size = size if rule is None else rule(first.index, batch_size, length, given.device)
        return len(plan_chunks(length, batch_size, size)) == 1 and all(map(_is_plain, self.sites))

    def _heed_backward(self) -> None:
        if self._differentiated:  # it raised, and may have run out of memory
            self.most = min(self.most, self._differentiated // 2)
            self._differentiated = 0

    def _watch(self, result: Any, tokens: int, predicted: float, device: torch.device, before: float | None) -> None:
        """See what forward took, and whether the backward of its result ends."""
        if before is not None and device.type in TELLING:
            self.factor *= max(1.0, (before - (self.chooser.free(device) or 0.0)) / predicted)

        def ended() -> None:
            self._differentiated = 0

        def begun(_: Tensor) -> None:
            self._differentiated = tokens
            Variable._execution_engine.queue_callback(ended)  # type: ignore[attr-defined]

        for value in _tensors(result):
            if value.requires_grad:
                value.register_hook(begun)
                return


def _tensors(result: Any) -> Iterable[Tensor]:
    values = result.values() if isinstance(result, Mapping) else result if isinstance(result, tuple) else (result,)
    return (value for value in values if isinstance(value, Tensor))


def _belongs_to_engine(layer: nn.Module) -> bool:
    return bool(engine_hooks(layer)) or any(hasattr(parameter, GRADIENT_HOOKED) for parameter in layer.parameters())


def _is_plain(site: LayerSite) -> bool:
    """Whether a layer was streamed, builds no mask [T, T], and no engine but DDP waits for its parameters or gradients."""
    return not (
        not site.looked_at
        or site.last.because is not None
        or site.kind.states.carries
        or site.kind.attention.picks_keys
        or is_fsdp_unit(site.layer)
        or site.of(_belongs_to_engine)
        or any(config._attn_implementation == EAGER for config in site.of(attention_configs))
    )
