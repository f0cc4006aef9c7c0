"""What older transformers and torch in range do not have of what tests ask for: marks that skip,
each with its reason."""

from __future__ import annotations

import inspect

import pytest
import torch
import transformers
from packaging import version
from transformers import Trainer, modeling_rope_utils
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.aria import modeling_aria
from transformers.models.bamba import modeling_bamba
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1DecoderLayer
from transformers.models.gemma3n import modeling_gemma3n
from transformers.models.gemma4 import modeling_gemma4
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaAttention
from transformers.models.lfm2 import modeling_lfm2
from transformers.models.rembert import modeling_rembert

from streambp.accumulate import HAS_ADDMM_DTYPE

TRANSFORMERS_VERSION = version.parse(transformers.__version__)
STATES_IN_CHUNKS = version.parse("5.15") <= TRANSFORMERS_VERSION
needs_states = pytest.mark.skipif(
    not STATES_IN_CHUNKS,
    reason="before transformers 5.15 mixers go on from a state with a single token only: their layers run whole",
)
needs_mambas_states = pytest.mark.skipif(
    not STATES_IN_CHUNKS,
    reason="before transformers 5.15 Mamba keeps no states where streambp can give it one: it is refused",
)
needs_diffllamas_calls = pytest.mark.skipif(
    version.parse("5.15") > TRANSFORMERS_VERSION,
    reason="before transformers 5.15 DiffLlama attends by itself, not through the interface",
)
# its rotary embedding gives float32, unpatched as well
NOT_IN_FLOAT64 = ("phimoe",) if version.parse("5.23") > TRANSFORMERS_VERSION else ()
# Its experts asked the host how many tokens each of them got.
ROUTING_VERSIONS = (
    ("aria_text",) if "tokens_per_expert.cpu()" in inspect.getsource(modeling_aria) else ()
)
# With or without: what the layers of a hybrid are said to do.
HYBRID_PATHS = {"streams"} if STATES_IN_CHUNKS else {"streams", "checkpoints"}
# what its mixer is called with, to its kernel
LFM2_PASSES_ON = "seq_idx" not in inspect.getsource(modeling_lfm2)
MIXERS_ARE_FUNCTIONS = hasattr(modeling_bamba, "mamba2_chunk_scan")
needs_mixer_functions = pytest.mark.skipif(
    not MIXERS_ARE_FUNCTIONS,
    reason="before transformers 5.15 plain torch of mixers is no function, for which a kernel could stand in",
)
_told = (
    inspect.getsource(FalconH1DecoderLayer.forward).partition("self.mamba(")[2].partition(")")[0]
)
needs_falcons_documents = pytest.mark.skipif(
    "**kwargs" not in _told,
    reason="before transformers 5.17 Falcon-H1 tells its mixers nothing of packed rows",
)
needs_positions_in_layers = pytest.mark.skipif(
    version.parse("5.24") <= TRANSFORMERS_VERSION,
    reason="from transformers 5.24 on GPT-J's layers are given cosines and sines, and no layer reads positions",
)
# The field of an output that holds the cache.
CACHE_FIELD = "cache" if hasattr(CausalLMOutputWithPast, "cache") else "past_key_values"
# Chunks have a mask of bools where the whole has none.
_takes_bools = "attention_mask.dtype == torch.bool" in inspect.getsource(GlmMoeDsaAttention.forward)
INDEXERS_IN_CHUNKS = hasattr(Cache, "update_indexer") and _takes_bools
needs_indexers = pytest.mark.skipif(
    not INDEXERS_IN_CHUNKS,
    reason="this transformers' indexers keep their keys to themselves, or add to a mask of bools: their layers run whole",
)
try:
    from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Attention

    _masks_bools = "attention_mask.dtype == torch.bool" in inspect.getsource(
        DeepseekV32Attention.forward
    )
except ImportError:
    _masks_bools = False
needs_deepseeks_picks = pytest.mark.skipif(
    not _masks_bools,
    reason="this transformers has no DeepSeek V3.2, or one that with padding reads later keys; patched it is refused",
)
# 5.5.0 and the newest give the mask of images to sliding layers alone.
IMAGES_IN_FULL_LAYERS = not any(
    marker in inspect.getsource(modeling_gemma4)
    for marker in ("Full attention: causal only", "sliding_mask_kwargs[")
)
_rembert = inspect.getsource(modeling_rembert.RemBertModel.forward)
needs_decoders_of_encoders = pytest.mark.skipif(
    "create_causal_mask" not in _rembert,
    reason="this transformers' RemBert is bidirectional with is_decoder=True as well: its layers run whole",
)
SHARES_THROUGH_CACHE = ".shared_layers[" in inspect.getsource(modeling_gemma3n)
needs_sharing_without_cache = pytest.mark.skipif(
    SHARES_THROUGH_CACHE,
    reason="this transformers' Gemma 3n shares keys and values in its cache alone, in training none",
)

# Before, each kind of layer can compute the frequencies of long sequences once only.
LONGROPE_BY_KIND_FAILS = 'hasattr(self, f"{layer_type}_long_inv_freq")' in inspect.getsource(
    modeling_rope_utils
)
needs_counted_versions = pytest.mark.skipif(
    version.parse("5.20") > TRANSFORMERS_VERSION,
    reason="limits are counted with the newest transformers; with older ones a step looks at more of a model",
)
needs_names_in_graphs = pytest.mark.skipif(
    version.parse(torch.__version__) < version.parse("2.13"),
    reason="torch 2.11's compiler raises at a lookup by a subclass of str, as a routed config's name is",
)
# The loss of a micro-batch is divided by all labels of the step, and by the number of micro-batches
# once more: by accelerate, which is told that number.
TRAINER_DIVIDES_TWICE = '["num_steps"] = 1' not in inspect.getsource(
    Trainer.create_accelerator_and_postprocess
)

# On meta: a product of half-precision factors, added to a sum in float32.
SUM_WITHOUT_DATA = (
    torch.ops.aten.addmm.dtype_out if HAS_ADDMM_DTYPE else torch.ops.aten.addmm_.default
)


def _differentiates_edges_of_functions():
    """True if `torch.autograd.grad` takes the graph's edge to an autograd Function whose output is
    deleted, as a schedule does."""
    leaf = torch.ones(1, requires_grad=True)
    edge = torch.autograd.graph.GradientEdge(_Copy.apply(leaf).grad_fn, 0)
    try:
        torch.autograd.grad([edge], [leaf], [torch.ones(1)])
    except RuntimeError:
        return False
    return True


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


needs_edges_of_functions = pytest.mark.skipif(
    not _differentiates_edges_of_functions(),
    reason="before torch 2.12 a zero-bubble schedule's second backward takes no autograd Function at all",
)
