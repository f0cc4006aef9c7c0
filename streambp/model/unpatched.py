"""Micro-batches that run as the unpatched model would, because all that this keeps fits many times over.

[Note: micro-batches as unpatched] Streaming saves memory, and pays for it with Python: some milliseconds a layer, which a
long sequence hides and a short one does not. With saves="auto" a micro-batch of one chunk is handed to the unpatched
model's own forward and to torch's own autograd, if the graphs of all layers and the logits take a quarter at most of what
a step without saves would leave free. Loss and gradients are those of the unpatched model, bit for bit; hooks, autocast and
whatever else changes between forward and backward act as they do unpatched.

The quarter is there because such a graph cannot be let go of. [Note: saves that fit] Where it is not enough:

    forward runs out of memory         the micro-batch is streamed instead, from the same random numbers
    a layer is in a checkpoint         the same, and so are all that follow
    forward keeps twice the quarter    the same (on devices that tell what they have free)
    backward runs out of memory        the error goes to the caller, a warning says so; from then on only micro-batches of
                                       half the tokens [Note: bare errors]
    forward takes more than predicted  the prediction is multiplied by as much (on devices that tell what they have free)

With StreamConfig(unpatched_runs=False) every micro-batch streams, whose backward can be repeated.

Each layer has to be streamed once before: what it takes is seen there, and that it can be streamed at all. Where no fused
kernel can attend (`AsSdpa`), the scores that torch builds are counted besides; a mask [T, T] always is.

A program must not see by the memory how a micro-batch ran. So what streaming computes otherwise than the unpatched model
is always streamed (softcaps and sinks under sdpa, documents of `cu_seq_lens_q`, a checkpoint's second forward), and what
it says or leaves out is kept: the warning of documents, a loss of 0 without a valid label, outputs without logits.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import is_initialized
from transformers import PreTrainedConfig

from streambp.attention.carriers import attention_configs
from streambp.attention.interface import own_implementation
from streambp.chunks import plan_chunks
from streambp.config import StreamConfig
from streambp.device import MEMORY_ERRORS, is_out_of_memory, make_room, tells_memory
from streambp.distributed.engines import engine_hooks
from streambp.known_names import EAGER, SDPA
from streambp.layer.recompute import RandomState
from streambp.layer.site import LayerSite
from streambp.model.split import find_split
from streambp.model.steps import Steps
from streambp.offload.costs import AsUnpatched
from streambp.offload.policy import SLACK, SavesPolicy

SHARE = 0.25  # of the memory that a step without saves leaves free
SCORES, MASK = 16, 4  # bytes of a token and a key: of each head, where scores are built and softmaxed; of a mask beside
LOGITS = 16  # bytes: a logit and its gradient, in the model's dtype and in float32, and one more of these
# Of all layers, without a generator, each resumption of which is a call.
INDEX, HEADS, SEEN_WRITING = map(operator.attrgetter, ("index", "sdpa.heads", "seen_writing"))
T = TypeVar("T")


class ComputedAgainError(Exception):
    """Somebody's checkpoint is around a layer of a model that runs as unpatched, and will call the layer by itself."""


class UnpatchedRuns:
    """Decides for each micro-batch of a patched model whether it runs as unpatched. [Note: micro-batches as unpatched]

    Args:
        chooser: knows what each layer's graph takes, and what is free. steps: of the model, with all its layers.

    most: tokens over all rows, by what once was too much. factor: by which forward took more than predicted.
    """

    def __init__(self, config: StreamConfig, chooser: SavesPolicy, steps: Steps) -> None:
        self.config, self.chooser, self.steps = config, chooser, steps
        self.most = math.inf
        self.factor = 1.0
        self.within = False  # such a forward is running

    def __getstate__(self) -> Any:
        """A copied or pickled model has seen nothing."""
        return self.config, self.chooser, self.steps

    def __setstate__(self, state: Any) -> None:
        UnpatchedRuns.__init__(self, *state)

    def attempt(
        self, run: Callable[[], T], kwargs: Mapping[str, Any], config: PreTrainedConfig, packs: Callable[[], bool]
    ) -> T | None:
        """What `run` returns; None if the micro-batch is to be streamed.

        Args:
            run: the unpatched model's forward. kwargs: of the call, in training. config: of the text model.
            packs: whether the call is computed as a packed row else; asked last, since that looks at the batch.
        """
        given = kwargs.get("input_ids") if kwargs.get("input_ids") is not None else kwargs.get("inputs_embeds")
        if not isinstance(given, Tensor) or given.dim() < 2:
            return None
        self.chooser.begins(given.device)
        if not self._can(given, config):
            return None
        tokens = given.shape[0] * given.shape[1]
        found = self.predicted(tokens, given.shape[1], given.device, config)
        if found is None or found.bytes > SHARE * found.room or packs():
            return None
        random, before = RandomState.capture(given.device), self.chooser.free(given.device)
        self.within, allocators = True, True
        try:
            result = run()
        except MEMORY_ERRORS as error:
            if not is_out_of_memory(error):
                raise
            result, allocators = None, isinstance(error, torch.OutOfMemoryError)
        except ComputedAgainError:
            random.restore()
            self.most = 0
            return None
        finally:
            self.within = False
        # Not above: the error's frames hold tensors.
        after = self.chooser.free(given.device) if result is not None and tells_memory(given.device) else None
        took = 0.0 if before is None or after is None else before - after
        if before is not None and took > found.bytes + SLACK * before:
            self.factor *= took / found.bytes
        if result is None or took > 2 * SHARE * found.room:
            result, self.most = None, tokens // 2
            make_room(given.device, allocators)
            random.restore()
            return None
        self.chooser.latest = found
        self.steps.watch(result)
        return result

    def enter_layer(self) -> None:
        """A layer begins, within.

        Raises:
            ComputedAgainError: a checkpoint is around it, whose second call in backward would be a streamed one.
        """
        if not torch.is_grad_enabled() or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            raise ComputedAgainError

    def predicted(self, tokens: int, length: int, device: torch.device, config: PreTrainedConfig) -> AsUnpatched | None:
        """As `kept_unpatched`; None also where several stacks count their layers from 0."""
        if len(set(map(INDEX, self.steps.sites))) < len(self.steps.sites):
            return None
        heads, vocabulary = list(map(HEADS, self.steps.sites)), getattr(config, "vocab_size", 0)
        return kept_unpatched(self.chooser, tokens, length, device, heads, vocabulary, self.factor)

    def _can(self, given: Tensor, config: PreTrainedConfig) -> bool:
        """Whether the micro-batch is one chunk and the unpatched model computes the same, in memory that grows with T."""
        if torch._C._current_graph_task_id() != -1:  # a reentrant checkpoint around the model, which was streamed before
            return False
        self._heed_backward()
        batch_size, length = given.shape[:2]
        if not 0 < batch_size * length <= self.most:
            return False
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            return False
        if is_initialized() and find_split(config, True) is not None:
            return False
        for site in self.steps.sites:
            if not any(map(SEEN_WRITING, site.findings.values())) or not is_plain(site):
                return False
        size = self.chooser.size(batch_size, length, given.device) if self.chooser.sizes else self.config.chunk_size
        return len(plan_chunks(length, batch_size, size)) == 1

    def _heed_backward(self) -> None:
        last = self.steps.last
        if last is not None and last.unpatched and last.in_backward and not last.over:  # it raised, perhaps out of memory
            self.most = min(self.most, last.tokens // 2)


def kept_unpatched(
    chooser: SavesPolicy,
    tokens: int,
    length: int,
    device: torch.device,
    heads: Sequence[int],
    vocabulary: int,
    factor: float = 1.0,
) -> AsUnpatched | None:
    """What a micro-batch keeps as unpatched: graphs of all layers and logits [B, T, V]; None where that is not known.

    Args:
        tokens: of all rows. length: of a row. heads: whose scores each layer builds. factor: of all that is kept.
    """
    known = chooser.graphs(tokens, device)
    if known is None:
        return None
    graphs, spare = known
    keys = (MASK * len(heads) + SCORES * sum(heads)) * length
    return AsUnpatched(tokens, factor * (graphs + tokens * (keys + LOGITS * vocabulary)), spare)


def is_plain(site: LayerSite) -> bool:
    """Whether a layer that was streamed does the same unpatched without building its scores by itself, and no engine's
    hooks are inside it."""
    if (
        site.last.because is not None
        or site.kind.states.carries
        or site.kind.attention.picks_keys
        or site.of(engine_hooks)
        or not site.kind.attention.reads_a_mask  # it attends by itself, with all scores
    ):
        return False
    own = set(map(own_implementation, site.of(attention_configs)))
    return EAGER not in own and (SDPA not in own or site.sdpa.same)
