"""Run a micro-batch unpatched if the memory that the unpatched model keeps fits.

[Note: micro-batches as unpatched] Streaming saves memory and costs some milliseconds of Python for
each layer. A long sequence hides this time and a short sequence does not. If saves="auto", a
micro-batch of one chunk runs through the unpatched model's own forward and torch's own autograd.
The condition is: the graphs of all layers and the logits take at most four fifths of the memory
that a step without saves leaves free. Loss and gradients equal the unpatched model's bit for bit.
Hooks, autocast and other changes between forward and backward act as unpatched.

The chunk size of a CPU follows a rule that does not know the free memory. There a micro-batch of
several chunks may run unpatched too, unless the program has chosen the chunk size.

A fifth stays free as a guard, because such a graph cannot be freed early. [Note: saves that fit] If
the guard is not enough:

    forward runs out of memory         the micro-batch is streamed instead, from the same random numbers
    a layer is in a checkpoint         the same, and so are all that follow
    forward takes half of the guard    the same (on devices that report free memory)
    backward runs out of memory        the error goes to the caller, with a warning; from then on only
                                       micro-batches of half the tokens run unpatched
                                       (`steps.py` warns)
    forward takes more than predicted  the prediction is scaled by the ratio (on devices that report
                                       free memory)

If StreamConfig(unpatched_runs=False) is set, every micro-batch streams, and a backward can then be
retried.

Each layer must have streamed once before, which measures its memory and proves that the layer can
stream. If no fused kernel can attend (`SdpaComparison`), the attention scores that torch builds are
counted too; a mask [T, T] is always counted.

Results must not depend on the free memory, which decides how a micro-batch runs. A call for which
streaming computes something else than the unpatched model therefore always streams. Examples are
softcaps and sinks under sdpa, documents of `cu_seq_lens_q`, and a checkpoint's second forward. The
warnings and outputs of streaming are unchanged: the warning about documents, a loss of 0 without a
valid label, outputs without logits.

GradCache (CachedMultipleNegativesRankingLoss) computes embeddings without gradients, and once more
with gradients from the same random state. The gradient is right if both forwards draw the same
dropout masks. A forward without gradients streams, and streamed attention draws other masks than
torch's. So no micro-batch runs unpatched after a forward without gradients has drawn random
numbers. A forward in training mode and without gradients streams even if the config asks for a
cache.
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

from streambp.attention.interface import attention_configs, own_implementation
from streambp.chunks import plan_chunks
from streambp.config import StreamConfig
from streambp.device import (
    MEMORY_ERRORS,
    RandomState,
    is_out_of_memory,
    make_room,
    reports_memory,
    run_and_watch_draws,
)
from streambp.distributed.engines import engine_hooks
from streambp.known_names import EAGER, SDPA
from streambp.layer.layer_state import LayerState
from streambp.model.split import find_split
from streambp.model.steps import Steps
from streambp.offload.costs import UnpatchedChoice
from streambp.offload.policy import IGNORED_FREE_MEMORY_FRACTION, SavesPolicy

MAX_SHARE_OF_FREE_MEMORY = 0.8  # fraction of the memory that a step without saves leaves free
SCORE_BYTES, MASK_BYTES = (
    16,
    4,
)  # bytes for each query and key: scores of one head with softmax; a mask
LOGIT_BYTES = 16  # bytes of a logit and its gradient, in the model's dtype and float32, and 4 more
# Used with map over all layers, because each step of a generator is a call.
GET_INDEX, GET_HEADS, GET_SEARCHED_FOR_WRITES = map(
    operator.attrgetter, ("index", "last_call.sdpa.heads", "searched_for_writes")
)
T = TypeVar("T")


class LayerRecomputationError(Exception):
    """Raised inside of an unpatched forward if a user's checkpoint surrounds a single layer. The
    checkpoint would call the layer again in backward, and this call would run in chunks. The error
    is caught, and the micro-batch is computed chunk by chunk."""


class UnpatchedRuns:
    """Decides for each micro-batch of a patched model if the model's own forward computes it,
    without chunks and recomputation. This is fastest if all activations fit into memory. [Note:
    micro-batches as unpatched]

    Args:
        config: the user's settings.
        saves_policy: predicts the bytes of each layer's graph, and the free bytes.
        steps: notes on the model's steps, and the state of each decoder layer (`LayerState`).

    Attributes:
        max_tokens: micro-batches with more tokens, over all rows, run in chunks. Lowered after a
            run that needed too much memory.
        factor: measured memory of a forward divided by the predicted memory; multiplies later
            predictions.
        within: True while an unpatched forward runs.
        drew: True if a forward without gradients has drawn random numbers; no micro-batch runs
            unpatched afterwards.
    """

    def __init__(self, config: StreamConfig, saves_policy: SavesPolicy, steps: Steps) -> None:
        self.config = config
        self.saves_policy = saves_policy
        self.steps = steps
        self.max_tokens = math.inf
        self.factor = 1.0
        self.within = False  # an unpatched forward is running
        self.drew = False

    def __getstate__(self) -> Any:
        """Return the arguments of the constructor, for copy and pickle. A copy starts as before the
        first step."""
        return self.config, self.saves_policy, self.steps

    def __setstate__(self, state: Any) -> None:
        UnpatchedRuns.__init__(self, *state)

    def attempt(
        self,
        run: Callable[[], T],
        kwargs: Mapping[str, Any],
        config: PreTrainedConfig,
        packs: Callable[[], bool],
    ) -> T | None:
        """Compute a micro-batch by the model's own forward, and return its output. Return None if
        the micro-batch must be computed chunk by chunk. Reasons are a graph of more than four
        fifths of the free memory, lack of memory in the run, and results that could differ.

        Args:
            run: calls the unpatched model's forward.
            kwargs: arguments of the model's call in training.
            config: config of the text model.
            packs: function that returns True if the patched model would compute rows with common
                prefixes as one packed row. Called last, because the function reads the batch.
        """
        if kwargs.get("input_ids") is not None:
            inputs = kwargs.get("input_ids")
        else:
            inputs = kwargs.get("inputs_embeds")
        if not isinstance(inputs, Tensor) or inputs.dim() < 2:
            return None
        self.saves_policy.begin_forward(inputs.device)
        if not self._can_run(inputs, config):
            return None
        tokens = inputs.shape[0] * inputs.shape[1]
        prediction = self.predict_memory(tokens, inputs.shape[1], inputs.device, config)
        if (
            prediction is None
            or prediction.bytes > MAX_SHARE_OF_FREE_MEMORY * prediction.headroom
            or packs()
        ):
            return None
        random = RandomState.capture(inputs.device)
        free_before = self.saves_policy.free(inputs.device)
        last = self.steps.last
        self.within = True
        allocators = True
        try:
            result = run()
        except MEMORY_ERRORS as error:
            if not is_out_of_memory(error):
                raise
            result = None
            allocators = isinstance(error, torch.OutOfMemoryError)
        except LayerRecomputationError:
            self.steps.forget_since(last)
            random.restore()
            self.max_tokens = 0
            return None
        finally:
            self.within = False
        # Here and not in the except block, because the error's frames reference tensors.
        if result is not None and reports_memory(inputs.device):
            free_after = self.saves_policy.free(inputs.device)
        else:
            free_after = None
        used_bytes = 0.0 if free_before is None or free_after is None else free_before - free_after
        if (
            free_before is not None
            and used_bytes > prediction.bytes + IGNORED_FREE_MEMORY_FRACTION * free_before
        ):
            self.factor *= used_bytes / prediction.bytes
        if result is None or used_bytes > (1 + MAX_SHARE_OF_FREE_MEMORY) / 2 * prediction.headroom:
            result = None
            self.max_tokens = tokens // 2
            self.steps.forget_since(last)
            make_room(inputs.device, allocators)
            random.restore()
            return None
        self.saves_policy.latest = prediction
        self.steps.hook_backward(result)
        return result

    def watch_draws(self, run: Callable[[], T], device: torch.device) -> T:
        """Run a forward without gradients, and return its result. Record in `drew` if it drew
        random numbers (dropout).

        If so, no later micro-batch runs unpatched. The program may be GradCache, which computes a
        batch without gradients first, and then again with gradients and the same dropout masks. The
        model's own forward would draw other masks than the forward in chunks.

        Args:
            run: calls the forward, which is computed in chunks.
            device: device of the forward.
        """
        if self.drew:
            return run()
        result, self.drew = run_and_watch_draws(run, device)
        return result

    def enter_layer(self) -> None:
        """Check that a layer is not inside of a user's checkpoint. Each layer calls this method at
        the start of its forward, while the model runs unpatched.

        Raises:
            LayerRecomputationError: grad mode is off or saved_tensors_hooks are active, so a
                checkpoint surrounds the layer. The checkpoint's recomputation would run chunk by
                chunk.
        """
        if (
            not torch.is_grad_enabled()
            or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        ):
            raise LayerRecomputationError

    def predict_memory(
        self, tokens: int, length: int, device: torch.device, config: PreTrainedConfig
    ) -> UnpatchedChoice | None:
        """Return the predicted bytes that a micro-batch saves for backward if it runs unpatched,
        and the free bytes. Return None if they are unknown, or if the model has several backbones.

        Args:
            tokens: number of tokens over all rows.
            length: tokens of each row.
            device: the device.
            config: config of the text model, for the vocabulary size.
        """
        if len(set(map(GET_INDEX, self.steps.layer_states))) < len(self.steps.layer_states):
            return None
        heads = list(map(GET_HEADS, self.steps.layer_states))
        vocabulary = getattr(config, "vocab_size", 0)
        return unpatched_saved_bytes(
            self.saves_policy, tokens, length, device, heads, vocabulary, self.factor
        )

    def _can_run(self, inputs: Tensor, config: PreTrainedConfig) -> bool:
        """True if a micro-batch may run unpatched, provided that the memory suffices. False, for
        example, before the first call in chunks, and if the unpatched forward would give other
        numbers than the chunks.

        Args:
            inputs: input_ids [B, T] or inputs_embeds [B, T, h].
            config: config of the text model.
        """
        if self.drew:
            return False
        if torch._C._current_graph_task_id() != -1:  # a reentrant checkpoint recomputes the model
            return False
        self._heed_backward()
        batch_size, length = inputs.shape[:2]
        if not 0 < batch_size * length <= self.max_tokens:
            return False
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            return False
        if is_initialized() and find_split(config, True) is not None:
            return False
        for layer_state in self.steps.layer_states:
            if not any(
                map(GET_SEARCHED_FOR_WRITES, layer_state.tests.results.values())
            ) or not is_plain(layer_state):
                return False
        size = self.config.chunk_size
        if self.saves_policy.sizes:
            if self.saves_policy.figures.seconds is None:  # chunks have the size of a rule
                return True
            size = self.saves_policy.size(batch_size, length, inputs.device)
        return len(plan_chunks(length, batch_size, size)) == 1

    def _heed_backward(self) -> None:
        last = self.steps.last
        if last is not None and last.unpatched and last.in_backward and not last.over:  # raised
            self.max_tokens = min(self.max_tokens, last.tokens // 2)


def unpatched_saved_bytes(
    saves_policy: SavesPolicy,
    tokens: int,
    length: int,
    device: torch.device,
    heads: Sequence[int],
    vocabulary: int,
    factor: float = 1.0,
) -> UnpatchedChoice | None:
    """Return the bytes that a micro-batch saves for backward if it runs unpatched (graphs of all
    layers, and logits [B, T, V]), together with the free bytes. Return None if they are unknown.

    Args:
        saves_policy: predicts the bytes of each layer's graph, and the free bytes.
        tokens: number of tokens over all rows.
        length: tokens of each row.
        device: the device.
        heads: number of heads, by layer, for which torch would build attention scores [T, T]; 0 if
            a fused kernel computes the layer's attention.
        vocabulary: V, the vocabulary size.
        factor: multiplies the predicted bytes.
    """
    graph_bytes = saves_policy.graphs(tokens, device)
    if graph_bytes is None:
        return None
    graphs, spare = graph_bytes
    keys = (MASK_BYTES * len(heads) + SCORE_BYTES * sum(heads)) * length
    return UnpatchedChoice(
        tokens, factor * (graphs + tokens * (keys + LOGIT_BYTES * vocabulary)), spare
    )


def is_plain(layer_state: LayerState) -> bool:
    """True if a layer's own forward gives the same numbers as its forward in chunks, and does not
    build attention scores [T, T]. Only if all layers are plain may a micro-batch run unpatched.

    False for a layer with hooks of an engine (DeepSpeed, FSDP) inside.
    """
    if (
        layer_state.last_call.report.reason is not None
        or layer_state.kind.states.carries
        or layer_state.kind.attention.picks_keys
        or layer_state.cached_result(engine_hooks)
        or not layer_state.kind.attention.reads_a_mask  # custom attention, with all scores
    ):
        return False
    implementations = set(map(own_implementation, layer_state.cached_result(attention_configs)))
    return EAGER not in implementations and (
        SDPA not in implementations or layer_state.last_call.sdpa.same_numbers
    )
