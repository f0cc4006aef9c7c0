"""Names of other libraries that streamed training depends on, by library.

Most of them are no documented interface: arguments of decoder layers, attributes that engines hang on modules, functions
that are known by their parameters. A library that renames one changes what is streamed, so each has one line with what it
is used for, and `tests/test_known_names.py` says which of them the installed versions still have. Left out are documented
arguments and attributes that every program uses (`input_ids`, `attention_mask`, `position_ids`, `labels`, `use_cache`) and
torch's public operations.

The names are those of transformers 5.24, torch 2.14, peft 0.21, DeepSpeed 0.19, accelerate 1.15 and TRL 1.16 where a line
does not say otherwise; "until" names the last version that has it.
"""

from __future__ import annotations

# ---- transformers: arguments of a decoder layer's forward

# The dimension of an argument's tokens; an argument that is not named here is handed to every chunk whole.
TOKEN_DIMS = {
    "hidden_states": -2,
    "position_embeddings": -2,
    "position_ids": -1,
    "cache_position": -1,
    "per_layer_input": -2,
    "shared_kv_states": -2,
    "attention_scaling": -2,
    "audio_token_mask": -1,
    "query_attn_mask": -1,
    "cross_attention_gate": -1,
    "image_attention_mask": -2,
    "cross_attention_mask": -2,
    "full_text_row_masked_out_mask": -2,
    "original_hidden_states": -2,
    "prev_router_hidden_states": -2,
    "ple_input_ids": -1,
    "seq_idx": -1,
    "block_states": -3,
    "messages": -3,
    "relative_distance": -2,
}
# Caches are known by their classes and methods [Note: cache arguments], but for tuples of keys and values, which models
# outside of transformers take by these names.
UNTYPED_CACHES = ("past_key_values", "past_key_value", "layer_past")
STATE = "state"  # xLSTM and RWKV: the layer takes its states there, and returns them behind its hidden states
PICKED = "prev_topk_indices"  # GLM 5: [B, T, k], the keys that an earlier layer picked
# Of backbones: all that a token of a tree of prefixes is known by, what may stand in place of its id, what is said beside
# it [B, T], what is given in the order of the tokens that another one marks; arguments that say nothing of tokens, and of
# language models those that say which are scored.
SHARED_INPUTS = ("input_ids", "attention_mask", "position_ids")
EMBEDS = "inputs_embeds"
PER_TOKEN = ("token_type_ids", "visual_pos_masks")
IN_ORDER = {"deepstack_visual_embeds": "visual_pos_masks"}  # Qwen3-VL: of each layer [visual tokens, h]
HIDDEN_STATES, ROUTER_LOGITS = "output_hidden_states", "output_router_logits"
SAYS_NOTHING_OF_TOKENS = (
    "use_cache", HIDDEN_STATES, "output_attentions", ROUTER_LOGITS, "return_dict", "num_items_in_batch",
)  # fmt: skip
LABELS = ("labels", "shift_labels")
Z_LOSS = "z_loss_coefficient"  # of configs (Bamba): a term of the loss that takes the logits of padding in
NOISY_EMBEDDINGS = "neftune_noise_alpha"  # of embeddings: a Trainer has a hook add noise, by the length of the rows
DISTANCES = "relative_distance"  # Inkling 2 from 5.24 on: [T, T], from each query to each key, for a bias of each pair
PER_KEY = ("alibi", DISTANCES)  # of BLOOM, and these: arguments whose last dimension is the keys
DOCUMENT_IDS = "seq_idx"  # [B, T], the document of each token, for convolutions and Mamba 2's scan
DOCUMENT_ENDS = "cu_seq_lens_q"  # [documents + 1], where documents end, for FlashAttention and delta rules

# ---- transformers: the attention interface

ATTENTION = "Attention"  # a part of the class's name of what attends, whatever its forward is
ATTENTION_TABLE = "ALL_ATTENTION_FUNCTIONS"  # read by the forward of an attention that goes through the interface
EAGER = "eager"  # the implementation that is no entry of the table
SDPA = "sdpa"  # the one that is torch's own
FLASH = "flash"  # is in the names of those that read cu_seq_lens_q, and position_ids whether there is a cache or not
EAGER_FORWARD = "eager_attention_forward"  # the function of a modeling file that stands for it
IMPLEMENTATION = "_attn_implementation_internal"  # of a config; past `__getattribute__`, which costs more than all else
EXPERTS_IMPLEMENTATION = "_experts_implementation_internal"  # of a config: how experts are multiplied
# Of transformers.integrations: not all that it registers is softmax attention over all keys that a mask allows.
SOFTMAX = ("sdpa_attention_forward", "flash_attention_forward", "flex_attention_forward")
FLASH_FORWARD = "_flash_attention_forward"  # called by transformers' flash attention, and replaced by others
HUB_KERNEL = ("flash_attn_forward", "supports_flash_attn")  # by what a registered hub kernel of flash attention is known
MASKING = "transformers.masking_utils"  # the module of transformers' own mask functions
DEPRECATION = "transformers.utils.deprecation"  # the module of decorators that transformers' own functions have at times
MASK_MAKERS = ("create_causal_mask", "create_bidirectional_mask")  # both in a model that is an encoder or a decoder
FOREIGN_ARGUMENTS = ("position_bias", "block_indices")  # of attention functions: change numbers, and are refused
PICKS = "indices"  # of attention functions: [B, S, k], the keys that an indexer picked for each query
SINKS = ("s_aux", "sinks")  # of attention functions: [H], logits of one more key

# ---- transformers: what layers call on their caches, and how they are built

UPDATE = "update"  # an attention that calls it on its cache attends over what it returns
INDEX_UPDATE = "update_index"  # MiniMax M3: the cached keys of an indexer that picks blocks
QUERY_OFFSET = "get_query_offset"  # Inkling: where queries start, for a bias of each pair of positions
SEQUENCE_LENGTH = "get_seq_length"  # llama4: how many tokens came before
LINEAR_CACHE = "get_linear_cache"  # MiniMax: the state of lightning attention
OWN_SCAN = "_rnn_scan"  # RecurrentGemma: the layer keeps the state itself
CONV_UPDATE, RECURRENT_UPDATE = "update_conv_state", "update_recurrent_state"  # of mixers with states
# What mixers with states call on their cache, and on themselves where they keep them.
STATE_PROTOCOL = (CONV_UPDATE, RECURRENT_UPDATE, "set_linear_cache", OWN_SCAN)
SHARES_LAYERS = "num_kv_shared_layers"  # Gemma 3n and 4: a config's number of layers that read the keys of earlier ones
SHARED_LAYERS = "shared_layers"  # through the cache, until 5.5
INDEXER = "Indexer"  # a part of the class's name of what picks keys in sparse attention
# What one calls on its cache, which collects its keys, and on its scores, with a mask of bools.
INDEXER_CALLS = ("update_indexer", "masked_fill")
# By these methods a forward's parameter is known as a cache, where it is not annotated as one.
CACHE_CALLS = (
    UPDATE, SEQUENCE_LENGTH, QUERY_OFFSET, LINEAR_CACHE, CONV_UPDATE, RECURRENT_UPDATE, "set_linear_cache",
    "update_indexer",
)  # fmt: skip
INDEX_HEADS = "n_heads"  # of an indexer: it has scores in so many heads
INDEX_TOPK = "index_topk"  # of an indexer: it picks so many keys for a query
FINAL_NORMS = ("norm", "final_layernorm", "ln_f", "final_norm", "norm_f", "final_layer_norm")  # of backbones, by attribute
READ_ALWAYS = ("config", "is_causal", "is_cross_attention", "scaling", "num_key_value_groups")  # by attention functions
CHECKPOINTING = ("gradient_checkpointing", "_gradient_checkpointing_func")  # of layers; trainers switch them at any time
FILLED_IN = "args_with_config_defaults"  # a variable of the decorator that passes what a config says, such as use_cache
CHECKPOINTING_SWITCHES = ("activation_checkpointing_", "gradient_checkpointing_")  # start the methods "enable", "disable"
PREDICTION = ("prediction_step", "prediction_loss_only")  # a Trainer's function and its variable: False asks for logits

# ---- kernels of fla, mamba_ssm and causal_conv1d, and transformers' own code in their place

CALLED_KERNEL = "implementation"  # in the closure of a kernel's wrapper: what it calls, be it transformers' own code
# Parameters by which a function is known, wherever a modeling file has it from.
DELTA_RULE = frozenset({"initial_state", "output_final_state"})
STATE_SCAN = frozenset({"initial_states", "return_final_states", "A"})  # Mamba 2
SELECTIVE_SCAN = frozenset({"delta_bias", "delta_softplus", "return_last_state"})  # Mamba 1
CONVOLUTION = frozenset({"weight", "bias", "activation"})
CONVOLUTION_STATE = "conv_state"  # of a convolution of one token, which is told apart by it
# For `streambp plan`, which counts what kernels allocate: one that transformers has code for in its place as well.
NO_PART_OF_A_STEP = ("_name_or_path", "transformers_version")  # of a configuration as a dict
ROTARY = "apply_rotary_pos_emb"  # of a modeling file: (q, k, cos, sin) -> (q, k) turned
ROTATED = ("q", "k", "cos", "sin")  # its first parameters; Gemma 3n's and 4's turns one tensor, and so does GPT-J's
GATED_MLP = ("gate_proj", "up_proj", "down_proj", "act_fn")  # of an MLP whose activation and product a kernel can fuse
FUSED_MLP = ("gate_up_proj", "down_proj", "activation_fn")  # the same with one product, gate before up
ACTIVATIONS = ("act_fn", "activation_fn")  # of an MLP or of experts
NORM = "RMSNorm"  # what names of classes end with, whose modules have one weight
PLANNED_CONVOLUTION = frozenset({"hidden_states", *CONVOLUTION})
PLANNED_DELTA_RULE = frozenset({"query", "key", "value", "g", "beta", "chunk_size", "initial_state"})
PLANNED_MAMBA1 = frozenset({"xz", "x_proj_weight", "delta_proj_weight", "out_proj_weight"})
PLANNED_SCAN = frozenset({"dt_softplus", "dt_limit", "return_final_states", "chunk_size"})
PLANNED_MAMBA2 = frozenset({"zxbcdt", "outproj_weight", "headdim", "ngroups"})
# The names under which modeling files import kernels, or None where the package is absent, and the package.
KERNEL_IMPORTS = {
    "causal_conv1d_fn": "causal_conv1d",
    "chunk_gated_delta_rule": "fla",
    "selective_scan_fn": "mamba_ssm",
    "mamba_inner_fn": "mamba_ssm",
    "mamba_chunk_scan_combined": "mamba_ssm",
    "mamba_split_conv1d_scan_combined": "mamba_ssm",
}

# ---- torch: modules and hooks

MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")  # a module's tables
FORWARD_HOOKS, BACKWARD_HOOKS = MODULE_HOOKS[:2], MODULE_HOOKS[2:]
WITH_KWARGS = "_forward_pre_hooks_with_kwargs"  # the table of those that are given keyword arguments
SHARD_HERE = "_local_tensor"  # of a DTensor: what this rank has of it
MODULE_TABLES = ("_parameters", "_buffers", "_modules")  # of what a module holds
GLOBAL_HOOKS = (  # tables in torch.nn.modules.module, of hooks on every module
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)
TENSOR_HOOKS = ("register_hook", "retain_grad")  # methods that ask for a tensor's gradient
UNSEEN_WRITES = frozenset({"data", "numpy", "data_ptr", "set_", "untyped_storage"})  # ways to write past a version
REPLICATE = "_replicate_for_data_parallel"  # of a module, called by DataParallel, which is refused
MOVES = "_apply"  # torch: what a module is moved and cast by
COMPILED = "_orig_mod"  # of what `torch.compile` makes of a module
COMPILED_CALL = "_compiled_call_impl"  # of a module that `Module.compile` has compiled; None of others
COMPILED_FROM = "_torchdynamo_orig_callable"  # of what it makes of a function
USE_COUNT = "_use_count"  # of a tensor: who refers to it. Without it no gradient is written over

# ---- torch: autograd's nodes and distributed training

ACCUMULATE_GRAD = "AccumulateGrad"  # the class of the node at a leaf
FUNCTION_OF_NODE = "_forward_cls"  # of the node of an autograd.Function
DDP_SINK = "_DDPSinkBackward"  # DDP's node around outputs: what reduces gradients late waits for it
FSDP_UNIT = "FSDPModule"  # the base class that `fully_shard` gives a module
FSDP_GROUPS = ("_fsdp_param_groups", "_fsdp_param_group")  # of its state: all, or the only one
FSDP_PARAMETERS = "fsdp_params"  # of a group
FSDP_GATHERS = ("mesh_info", "shard_process_group")  # of a group, and of that: the ranks that gather its parameters
FSDP_OFFLOADED = "offload_to_cpu"  # of one of these
FSDP1 = "FullyShardedDataParallel"  # the class of FSDP1, which is refused
FLAT_PARAMETER = "_is_flat_param"  # marks its parameters
CONTEXT_PARALLEL = "torch.distributed"  # where `scaled_dot_product_attention` comes from under context parallelism
GATHER = ("all_gather_single", "all_gather_into_tensor")  # of torch.distributed; the second up to torch 2.12
REDUCE_SCATTER = ("reduce_scatter_single", "reduce_scatter_tensor")
CONTEXT_PARALLEL_MESH = "device_mesh"  # what that function closes over
CONTEXT_PARALLEL_OPTIONS = "_cp_options"  # a global of its module
CONTEXT_PARALLEL_BALANCED = "enable_load_balance"  # of these: whether each rank holds two parts, early and late

# ---- DeepSpeed

ENGINES = ("deepspeed",)  # packages whose hooks on modules gather and reduce parameters
Z3_LEAF = "_z3_leaf"  # of a module: gathered as one unit. [Note: ZeRO-3 leaves]
PARTITIONED = "ds_id"  # of a parameter that ZeRO-3 manages
FULL_SHAPE = "ds_shape"  # its shape while it is elsewhere
ZERO_GROUP = "ds_process_group"  # of such a parameter: the ranks over which it is divided
GRADIENT_HOOKED = "grad_accum"  # of a parameter whose gradient ZeRO 1 and 2 wait for
ZERO_OPTIMIZERS = ("_z3_optimizer", "_zero_optimizer")  # where its optimizer hangs on a parameter
OFFLOADS_PARAMETERS = "offload_param"  # of that optimizer
OFFLOADS_STATES = ("offload_optimizer", "cpu_offload")  # of ZeRO-3's, and of ZeRO 1's and 2's
ZERO_COUNTERS = ("ds_", "applied_pre_backward_ref_cnt", "pre_bwd_fn", "post_bwd_fn")  # of modules, by how they start
# A node around a module's output: gathers its own parameters, of which a model has none, and counts that it ran. All ranks
# must have counted the same; the attribute is the function that does so.
PRE_BACKWARD, RUNS_BEFORE_BACKWARD = "PreBackwardFunctionForModuleBackward", "pre_backward_function"
SCALING_HOOK = "OutputBackwardHookManager"  # the engine's hook on a loss: divides by the accumulation steps
# Of the object in the closure of Ulysses' attention function: the group, the inner attention, and whether eval splits.
ULYSSES_GROUP, ULYSSES_ATTENTION, ULYSSES_NOT_IN_EVAL = "process_group", "attn", "disable_in_eval"

# ---- accelerate

# The function that hangs hooks on attention under context parallelism, which take its mask away.
DROPS_MASKS = "_attach_context_parallel_hooks"
ACCELERATE_ORIGINAL = "_original_forward"  # of a module: what stands inside of its mixed precision
ACCELERATE_HOOK, ACCELERATE_FORWARD = "_hf_hook", "_old_forward"  # of a module with device_map: its hook, its own forward

# ---- peft

ALORA_OFFSETS = "alora_offsets"  # handed to modules by hooks: counts tokens from the end of a sequence
FOR_ONE_FORWARD = (ALORA_OFFSETS, "adapter_names")  # all that peft hands its modules by hooks for one forward
CPT_FORWARD = "_cpt_forward"  # the function that computes a loss of its own from logits
BASE_LAYER = "base_layer"  # of peft's wrapper: the module that it stands around
PEFT_CHECKPOINTING = "_peft_gradient_checkpointing_forward_hooks"  # of modules, changed while a step runs

# ---- opacus, which no environment of the tests has

OPACUS = "opacus"  # the package whose hooks compute a gradient for each sample
OPACUS_MODULE = "GradSampleModule"  # a part of the name of its class around a model

# ---- TRL

TRLS_HEAD = "_fused_forward"  # the function that `add_fused_lm_head` makes
# What it closes over.
TRLS_FORWARD, TRLS_TEMPERATURE, TRLS_IN_FLOAT32, TRLS_OUTPUTS = (
    "original_forward", "temperature", "cast_lm_head_to_fp32", "outputs",
)  # fmt: skip
ASKS_TRLS_HEAD = "fused_lm_head"  # the argument by which trainers ask it
OPTIONAL_OUTPUTS = ("entropy", "is_top1", "mean_logits", "log_sum_sq_probs")  # fields that its output may have
# Of trainers that generate: the method that gives a step its micro-batch, and the attribute with all of a generation batch.
PREPARES, ROLLOUTS = "_prepare_inputs", "_buffered_inputs"
PROMPTS = ("prompt_ids", "prompt_mask")  # [B, P], what these have of each row's prompt
IMAGES_OF_ROWS = "num_images"  # how many images each row has, which are not row by row then
SPLITS = ("cp_size", "sp_size")  # of accelerate's ParallelismConfig: over how many ranks a sequence is split
# Settings of GRPOConfig that PPO, which derives from it, has no use for.
GRPOS_OWN = ("loss_type", "delta", "epsilon_high", "importance_sampling_level", "top_entropy_quantile")

# ---- verl, ms-swift and Unsloth, which no environment of the tests has

VERLS_SIZE = "get_ulysses_sequence_parallel_world_size"  # a global of verl's flash attention: over how many ranks it splits
VERLS_STRATEGY = "fsdp2"  # of verl's engine
VERLS_OFFLOAD = "enable_activation_offload"  # of verl's model config: wraps layers
SWIFTS_PLUGIN = "_swift_external"  # how ms-swift names a file that is given to it
UNSLOTH = "unsloth"  # modules whose forwards cannot be cut

# ---- Liger, which no environment of the tests has

LIGER = "liger_kernel"
LIGERS_PATCHES = "monkey_patch"  # of liger_kernel.transformers: the module of the functions that apply its kernels
LIGERS_TABLE = "MODEL_TYPE_TO_APPLY_LIGER_FN"  # these functions by a config's model_type
LIGERS_NORM = (
    "variance_epsilon",
    "offset",
    "casting_mode",
)  # of a norm: eps, what is added to its weight, its rounding
LIGERS_ROUNDINGS = ("llama", "gemma")  # before the product with the weight, after it
NOT_OF_LAYERS = ("rope", "cross_entropy", "fused_linear_cross_entropy")  # their arguments for what is replaced elsewhere

# ---- bitsandbytes, which the tests' environments need not have

BITSANDBYTES = "bitsandbytes"
COMPUTE_DTYPE = "compute_dtype"  # of a Linear with a 4-bit weight: what it casts its input to
QUANT_STATE = "quant_state"  # of a 4-bit weight: its shape, its dtype and its statistics
STATISTICS_8BIT = "SCB"  # of an 8-bit weight, which hands them on to its module

# ---- packages by what is theirs; `streambp` is ours

# Their hooks treat tokens alike, or gather and move parameters.
HOOKS_ARE_HARMLESS = ("torch", "transformers", "accelerate", "deepspeed", "streambp")
# Their modules and forwards treat tokens outside of attention alike.
MODULES_ARE_HARMLESS = (*HOOKS_ARE_HARMLESS, "peft", "liger_kernel", "torchao", "bitsandbytes")
# Their forwards compute a loss with torch's operations. [Note: foreign forwards]
FORWARDS_ARE_PLAIN = (*HOOKS_ARE_HARMLESS, "peft")
# Objects of theirs are not looked into. [Note: fingerprint]
OBJECTS_ARE_KNOWN = ("torch", "transformers", "peft", "deepspeed", "builtins", "collections", "functools")
