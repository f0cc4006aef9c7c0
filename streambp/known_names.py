"""List the names of other libraries that streamed training depends on, by library.

Most of these names belong to no documented interface: arguments of decoder layers, attributes that
engines set on modules, parameters by which functions are identified. A library that renames one
changes what is streamed. Each name therefore has one line with its use, and
`tests/repository/test_known_names.py` lists the names that installed versions still have.
Documented arguments and attributes that every program uses are left out (`input_ids`,
`attention_mask`, `position_ids`, `labels`, `use_cache`), and so are torch's public operations.

The names are from transformers 5.24, torch 2.15, peft 0.21, DeepSpeed 0.19, accelerate 1.15 and TRL
1.16 unless a line says otherwise; "until" names the last version with the name.
"""

from __future__ import annotations

# ---- transformers: arguments of a decoder layer's forward

# The token dimension of each argument. Every chunk gets all other arguments uncut.
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
    "sinusoidal_pos": -2,
}
# Caches are found by classes and methods (`cache_arguments.py`). Tuples of keys and values are
# found by these names, which models outside of transformers use.
UNTYPED_CACHES = ("past_key_values", "past_key_value", "layer_past")
# xLSTM and RWKV: argument with the layer's states, returned after its hidden states
STATE_ARGUMENT = "state"
PICKED_KEYS_ARGUMENT = "prev_topk_indices"  # GLM 5: [B, T, k], keys picked by an earlier layer
# Arguments of backbones, in this order. First come the arguments that identify a token in a tree of
# prefixes, a replacement of token ids, and further arguments per token [B, T]. Then come arguments
# in the order of the tokens that another argument marks, and arguments independent of tokens. Last
# come arguments of language models that select scored tokens.
SHARED_INPUTS = ("input_ids", "attention_mask", "position_ids")
EMBEDDINGS_ARGUMENT = "inputs_embeds"
TOKEN_ARGUMENTS = ("token_type_ids", "visual_pos_masks")
# Qwen3-VL: for each layer [visual tokens, h]
MARKED_TOKEN_ARGUMENTS = {"deepstack_visual_embeds": "visual_pos_masks"}
HIDDEN_STATES, ROUTER_LOGITS = "output_hidden_states", "output_router_logits"
TOKEN_INDEPENDENT_ARGUMENTS = (
    "use_cache", HIDDEN_STATES, "output_attentions", ROUTER_LOGITS, "return_dict", "num_items_in_batch",
)  # fmt: skip
LABELS = ("labels", "shift_labels")
# config attribute (Bamba): a loss term that includes the logits of padding
Z_LOSS = "z_loss_coefficient"
# embedding attribute: a Trainer's hook adds noise by row length
NOISY_EMBEDDINGS = "neftune_noise_alpha"
# Inkling 2 from transformers 5.24 on: [T, T], distance of each query and key, for a bias of each
# pair
DISTANCES = "relative_distance"
KEY_ARGUMENTS = ("alibi", DISTANCES)  # BLOOM, Inkling 2: arguments whose last dimension is the keys
SEGMENT_ENDS = "cu_seqlens"  # [segments + 1], where images and frames end in a tower's one row
DOCUMENT_IDS = "seq_idx"  # [B, T], the document of each token, for convolutions and Mamba 2's scan
DOCUMENT_ENDS = (
    "cu_seq_lens_q"  # [documents + 1], where documents end, for FlashAttention and delta rules
)

# ---- transformers: the attention interface

ATTENTION = "Attention"  # part of attention classes' names, whatever their forward
ATTENTION_TABLE = "ALL_ATTENTION_FUNCTIONS"  # read by attention forwards that use the interface
EAGER = "eager"  # the implementation outside of the table
SDPA = "sdpa"  # torch's own implementation
# part of the names of implementations that read cu_seq_lens_q and position_ids, with or without a
# cache
FLASH = "flash"
EAGER_FORWARD = "eager_attention_forward"  # a modeling file's function for eager attention
# config attribute that bypasses the slow `__getattribute__`
IMPLEMENTATION = "_attn_implementation_internal"
# class of experts in MXFP4, whose kernels have no backward
MXFP4_EXPERTS = "Mxfp4GptOssExperts"
# class that decodes MXFP4 weights in from_pretrained, and modules of this class and its quantizer
MXFP4_INTEGRATION = "transformers.integrations.mxfp4"
MXFP4_DECODING = "Mxfp4Dequantize"
MXFP4_QUANTIZER = "transformers.quantizers.quantizer_mxfp4"
# ends of the names of a checkpoint's tensors: the bytes and the scales of a weight
MXFP4_PARTS = ("_blocks", "_scales")
# config attribute: the implementation of expert products
EXPERTS_IMPLEMENTATION = "_experts_implementation_internal"
# table of functions by name of implementation, which transformers and programs register
EXPERTS_TABLE = "ALL_EXPERTS_FUNCTIONS"
EXPERTS_INTEGRATION = "transformers.integrations.moe"
# Functions of transformers.integrations that are softmax attention over all keys that a mask
# allows.
SOFTMAX_FUNCTIONS = ("sdpa_attention_forward", "flash_attention_forward", "flex_attention_forward")
# called by transformers' flash attention; other libraries replace it
FLASH_FORWARD = "_flash_attention_forward"
# names that identify a registered hub kernel of flash attention
HUB_KERNEL = ("flash_attn_forward", "supports_flash_attn")
MASKING_MODULE = "transformers.masking_utils"  # module of transformers' own mask functions
# module of decorators around some transformers functions
DEPRECATION_MODULE = "transformers.utils.deprecation"
# a model with both is an encoder or a decoder
MASK_MAKERS = ("create_causal_mask", "create_bidirectional_mask")
# names in the code of encoders, whose mask hides nothing but padding
BIDIRECTIONAL_MASKS = (MASK_MAKERS[1], "extended_attention_mask")
# method of older models that makes a causal mask for a decoder, and else a bidirectional one
EITHER_MASK = "get_extended_attention_mask"
# attention arguments that change values, and are refused
FOREIGN_ARGUMENTS = ("block_indices",)
POSITION_BIAS = "position_bias"  # T5: attention argument [1 or B, H, S, T], added to the scores
DECODER_MASK = "decoder_attention_mask"  # encoder-decoders: which of the decoder's tokens exist
# attribute of models with the kind of their loss, and the kind that shifts no labels
LOSS_TYPE = "loss_type"
MASKED_LOSS = "ForMaskedLM"
CROSS_BIAS = "encoder_decoder_position_bias"  # T5, layers: the same of cross-attention, zeros
# T5, attention modules: True with a table of biases, the table, and the functions that read it
HAS_TABLE = "has_relative_attention_bias"
BIAS_TABLE = "relative_attention_bias"
COMPUTE_BIAS = "compute_bias"
BUCKETS = "_relative_position_bucket"
PICKS_ARGUMENT = "indices"  # attention argument: [B, S, k], an indexer's picked keys for each query
SINK_ARGUMENTS = ("s_aux", "sinks")  # attention arguments: [H], logits of one more key

# ---- transformers: what layers call on their caches, and how they are built

UPDATE_METHOD = "update"  # attention that calls this cache method attends over its result
INDEX_UPDATE = "update_index"  # MiniMax M3: cached keys of an indexer that picks blocks
# Inkling: position of the first query, for a bias of position pairs
QUERY_OFFSET = "get_query_offset"
SEQUENCE_LENGTH = "get_seq_length"  # llama4: number of earlier tokens
LINEAR_CACHE = "get_linear_cache"  # MiniMax: state of lightning attention
OWN_SCAN = "_rnn_scan"  # RecurrentGemma: the layer itself stores the state
# cache methods of mixers with states
CONV_UPDATE, RECURRENT_UPDATE = "update_conv_state", "update_recurrent_state"
# Methods that mixers with states call on their cache, or on themselves if they store their states.
STATE_PROTOCOL = (CONV_UPDATE, RECURRENT_UPDATE, "set_linear_cache", OWN_SCAN)
# Gemma 3n and 4, config: number of layers that read earlier layers' keys
SHARED_LAYER_COUNT = "num_kv_shared_layers"
SHARED_LAYERS = "shared_layers"  # the layers read through the cache, until 5.5
INDEXER = "Indexer"  # part of the class name of modules that pick keys in sparse attention
# Methods that an indexer calls: on its cache, which collects its keys; on its scores, with a bool
# mask.
INDEXER_CALLS = ("update_indexer", "masked_fill")
# Methods that identify a forward's cache parameter without an annotation.
CACHE_CALLS = (
    UPDATE_METHOD, SEQUENCE_LENGTH, QUERY_OFFSET, LINEAR_CACHE, CONV_UPDATE, RECURRENT_UPDATE,
    "set_linear_cache",
    "update_indexer",
)  # fmt: skip
INDEX_HEADS = "n_heads"  # indexer attribute: number of heads with scores
INDEX_TOPK = "index_topk"  # indexer attribute: number of picked keys per query
# backbone attributes
FINAL_NORMS = ("norm", "final_layernorm", "ln_f", "final_norm", "norm_f", "final_layer_norm")
# read by attention functions
ATTENTION_ATTRIBUTES = (
    "config",
    "is_causal",
    "is_cross_attention",
    "scaling",
    "num_key_value_groups",
)
# layer attributes that trainers switch at any time
CHECKPOINTING_ATTRIBUTES = ("gradient_checkpointing", "_gradient_checkpointing_func")
# variable of the decorator that adds the config's values, such as use_cache
CONFIG_DEFAULTS_VARIABLE = "args_with_config_defaults"
# prefixes of the methods "enable" and "disable"
CHECKPOINTING_SWITCHES = ("activation_checkpointing_", "gradient_checkpointing_")
TRAINERS_LOSS = ("compute_loss", "Trainer")  # the method that programs override, and its class
# a Trainer's function and its variable: False requires logits
PREDICTION = ("prediction_step", "prediction_loss_only")

# ---- kernels of fla, mamba_ssm and causal_conv1d, and transformers' own code in their place

# in a kernel wrapper's closure: the called function, possibly transformers' own code
CALLED_KERNEL = "implementation"
# Parameters that identify a function, independent of its import in a modeling file.
DELTA_RULE = frozenset({"initial_state", "output_final_state"})
STATE_SCAN = frozenset({"initial_states", "return_final_states", "A"})  # Mamba 2
SELECTIVE_SCAN = frozenset({"delta_bias", "delta_softplus", "return_last_state"})  # Mamba 1
CONVOLUTION = frozenset({"weight", "bias", "activation"})
CONVOLUTION_STATE = "conv_state"  # parameter that identifies a convolution of one token
# For `streambp plan`, which counts kernel allocations, also of kernels that transformers can
# replace.
IRRELEVANT_CONFIG_KEYS = (
    "_name_or_path",
    "transformers_version",
)  # keys of a configuration as a dict
ROTARY = "apply_rotary_pos_emb"  # function of a modeling file: (q, k, cos, sin) -> rotated (q, k)
# its first parameters; Gemma 3n, Gemma 4 and GPT-J rotate one tensor
ROTARY_PARAMETERS = ("q", "k", "cos", "sin")
# Linears of one module that read the same tensor in most models, numbered by set; each call
# verifies this.
SHARED_INPUT_LINEARS = {
    "q_proj": 0, "k_proj": 0, "v_proj": 0, "gate_proj": 1, "up_proj": 1, "query": 2, "key": 2, "value": 2,
}  # fmt: skip
# MLP attributes; a kernel can fuse activation and product
GATED_MLP = ("gate_proj", "up_proj", "down_proj", "act_fn")
# the same with a single product, gate before up
FUSED_MLP = ("gate_up_proj", "down_proj", "activation_fn")
ACTIVATIONS = ("act_fn", "activation_fn")  # attributes of an MLP or of experts
NORM_CLASS_SUFFIX = "RMSNorm"  # ending of the class names of norms with one weight
PLANNED_CONVOLUTION = frozenset({"hidden_states", *CONVOLUTION})
PLANNED_DELTA_RULE = frozenset(
    {"query", "key", "value", "g", "beta", "chunk_size", "initial_state"}
)
PLANNED_MAMBA1 = frozenset({"xz", "x_proj_weight", "delta_proj_weight", "out_proj_weight"})
PLANNED_SCAN = frozenset({"dt_softplus", "dt_limit", "return_final_states", "chunk_size"})
PLANNED_MAMBA2 = frozenset({"zxbcdt", "outproj_weight", "headdim", "ngroups"})
# Names under which modeling files import kernels (None without the package), and the package.
KERNEL_IMPORTS = {
    "causal_conv1d_fn": "causal_conv1d",
    "chunk_gated_delta_rule": "fla",
    "selective_scan_fn": "mamba_ssm",
    "mamba_inner_fn": "mamba_ssm",
    "mamba_chunk_scan_combined": "mamba_ssm",
    "mamba_split_conv1d_scan_combined": "mamba_ssm",
}

# ---- torch: modules and hooks

# hook tables of a module
MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
HOOK_TABLE_SUFFIX = (
    "_hooks"  # end of the names of a module's tables of hooks, state dicts' among them
)
FORWARD_HOOKS, BACKWARD_HOOKS = MODULE_HOOKS[:2], MODULE_HOOKS[2:]
KWARGS_HOOKS = "_forward_pre_hooks_with_kwargs"  # table of hooks with keyword arguments
LOCAL_SHARD = "_local_tensor"  # DTensor attribute: this rank's shard
MODULE_TABLES = ("_parameters", "_buffers", "_modules")  # tables with a module's content
GLOBAL_HOOKS = (  # tables in torch.nn.modules.module, of hooks on every module
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)
TENSOR_HOOKS = ("register_hook", "retain_grad")  # methods that require a tensor's gradient
# writes that change no version counter
UNSEEN_WRITES = frozenset({"data", "numpy", "data_ptr", "set_", "untyped_storage"})
# namespaces of torch's collectives
COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
REPLICATE = "_replicate_for_data_parallel"  # module method called by DataParallel, which is refused
APPLY_METHOD = "_apply"  # torch method that moves and casts a module
# transformers: set at a model's first call, which installs hooks
CAPTURE_HOOKS_FLAG = "_output_capturing_hooks_installed"
COMPILED_MODULE_ATTRIBUTE = "_orig_mod"  # attribute of a module made by `torch.compile`
# attribute of a module compiled by `Module.compile`, otherwise None
COMPILED_CALL = "_compiled_call_impl"
COMPILED_FROM = "_torchdynamo_orig_callable"  # attribute of a function made by `torch.compile`
USE_COUNT = "_use_count"  # tensor attribute: its references; required to overwrite gradients

# ---- torch: autograd's nodes and distributed training

ACCUMULATE_GRAD = "AccumulateGrad"  # class of a leaf's node
FUNCTION_OF_NODE = "_forward_cls"  # attribute of an autograd.Function's node
DDP_SINK = "_DDPSinkBackward"  # DDP's node around outputs; late reductions wait for it
FSDP_UNIT = "FSDPModule"  # base class that `fully_shard` adds to a module
# attributes of the FSDP state: all groups, or the only one
# beginning of the attribute in which torch's `fully_shard` stores a module's state
COMPOSABLE_STATE = "__composable_api_state_key"
FSDP_GROUPS = ("_fsdp_param_groups", "_fsdp_param_group")
FSDP_PARAMETERS = "fsdp_params"  # group attribute
# group attribute, and its attribute: the ranks that gather the group's parameters
FSDP_GATHERS = ("mesh_info", "shard_process_group")
FSDP_OFFLOADED = "offload_to_cpu"  # attribute of an FSDP parameter
FSDP1 = "FullyShardedDataParallel"  # class of FSDP1, which is refused
FLAT_PARAMETER = "_is_flat_param"  # marks FSDP1's flat parameters
# module of `scaled_dot_product_attention` under context parallelism
CONTEXT_PARALLEL = "torch.distributed"
# torch.distributed functions; the second until torch 2.12
GATHER = ("all_gather_single", "all_gather_into_tensor")
REDUCE_SCATTER = ("reduce_scatter_single", "reduce_scatter_tensor")
CONTEXT_PARALLEL_MESH = "device_mesh"  # in the closure of the replaced attention function
CONTEXT_PARALLEL_OPTIONS = "_cp_options"  # global of the function's module
# option: each rank holds an early and a late part
CONTEXT_PARALLEL_BALANCED = "enable_load_balance"

# ---- DeepSpeed

ENGINE_PACKAGES = ("deepspeed",)  # packages whose module hooks gather and reduce parameters
Z3_LEAF = "_z3_leaf"  # marks a module that is gathered as one unit. See `distributed/engines.py`.
PARTITION_ID = "ds_id"  # attribute of a parameter that ZeRO-3 manages
FULL_SHAPE = "ds_shape"  # the parameter's shape when gathered
ZERO_GROUP = "ds_process_group"  # parameter attribute: the ranks that share the parameter
GRADIENT_HOOKED = "grad_accum"  # attribute of a parameter whose gradient ZeRO-1 and ZeRO-2 wait for
# parameter attributes that hold the optimizer
ZERO_OPTIMIZERS = ("_z3_optimizer", "_zero_optimizer")
OFFLOADS_PARAMETERS = "offload_param"  # optimizer attribute
# optimizer attributes: of ZeRO-3; of ZeRO-1 and ZeRO-2
OFFLOADS_STATES = ("offload_optimizer", "cpu_offload")
# prefixes of module attributes
ZERO_COUNTERS = ("ds_", "applied_pre_backward_ref_cnt", "pre_bwd_fn", "post_bwd_fn")
# A node around a module's output, which gathers the module's own parameters and counts its runs. A
# model has no own parameters, but all ranks must have the same count. The attribute is the node's
# function.
PRE_BACKWARD, RUNS_BEFORE_BACKWARD = "PreBackwardFunctionForModuleBackward", "pre_backward_function"
# the engine's hook on a loss, which divides by the accumulation steps
SCALING_HOOK = "OutputBackwardHookManager"
# Attributes of an object in the closure of Ulysses' attention function: the group, the inner
# attention, and the eval setting.
ULYSSES_GROUP, ULYSSES_ATTENTION, ULYSSES_NOT_IN_EVAL = "process_group", "attn", "disable_in_eval"

# ---- accelerate

# The function that registers hooks on attention under context parallelism; the hooks remove its
# mask.
MASK_DROPPING_HOOKS = "_attach_context_parallel_hooks"
# module attribute: the forward inside its mixed precision
ACCELERATE_ORIGINAL = "_original_forward"
# attributes of a module with device_map: its hook, its own forward
ACCELERATE_HOOK, ACCELERATE_FORWARD = "_hf_hook", "_old_forward"

# ---- peft

ALORA_OFFSETS = "alora_offsets"  # passed to modules by hooks; counts tokens from a sequence's end
# all arguments that peft passes by hooks for a single forward
PEFT_FORWARD_ARGUMENTS = (ALORA_OFFSETS, "adapter_names")
CPT_FORWARD = "_cpt_forward"  # the function that computes its own loss from logits
BASE_LAYER = "base_layer"  # attribute of peft's wrapper: the wrapped module
# modules of adapted Linears
LORA_LAYERS, LORA_OF_PACKED = "peft.tuners.lora.layer", "peft.tuners.lora.bnb"
LORA_FACTORS = ("lora_A", "lora_B")  # attributes of adapted Linears: the tables of adapter Linears
# method of the module of an adapted parameter: a context manager with the adapters added
ADAPTER_ACTIVATION = "_activate_lora"
# module attribute that changes during a step
PEFT_CHECKPOINTING = "_peft_gradient_checkpointing_forward_hooks"

# ---- opacus, which no environment of the tests has

OPACUS = "opacus"  # package whose hooks compute a gradient for each sample
OPACUS_MODULE = "GradSampleModule"  # part of the class name of its model wrapper

# ---- TRL

TRLS_HEAD = "_fused_forward"  # function made by `add_fused_lm_head`
# Variables in the function's closure.
TRLS_FORWARD, TRLS_TEMPERATURE, TRLS_IN_FLOAT32, TRLS_OUTPUTS = (
    "original_forward", "temperature", "cast_lm_head_to_fp32", "outputs",
)  # fmt: skip
FUSED_HEAD_ARGUMENT = "fused_lm_head"  # argument by which trainers request the head
# optional fields of the head's output
OPTIONAL_OUTPUTS = ("entropy", "is_top1", "mean_logits", "log_sum_sq_probs")
# Of trainers that generate: the method that returns a step's micro-batch, and the attribute with a
# full generation batch.
PREPARE_INPUTS, ROLLOUTS = "_prepare_inputs", "_buffered_inputs"
PROMPT_FIELDS = ("prompt_ids", "prompt_mask")  # [B, P], prompt entries of a batch
IMAGES_OF_ROWS = "num_images"  # number of images in each row; images are then not row by row
# ParallelismConfig attributes: the number of ranks that share a sequence
SPLIT_SIZES = ("cp_size", "sp_size")
# Settings of GRPOConfig that its subclass for PPO does not use.
GRPO_ONLY_SETTINGS = (
    "loss_type",
    "delta",
    "epsilon_high",
    "importance_sampling_level",
    "top_entropy_quantile",
)

# ---- verl, ms-swift and Unsloth, which no environment of the tests has

# global of verl's flash attention: the number of ranks that share a sequence
VERLS_SIZE = "get_ulysses_sequence_parallel_world_size"
VERLS_STRATEGY = "fsdp2"  # of verl's engine
VERLS_OFFLOAD = "enable_activation_offload"  # setting of verl's model config that wraps layers
SWIFTS_PLUGIN = "_swift_external"  # ms-swift's module name for a file that it loads
UNSLOTH = "unsloth"  # its forwards cannot be chunked

# ---- Liger, which no environment of the tests has

LIGER = "liger_kernel"
# module in liger_kernel.transformers whose functions apply its kernels
LIGERS_PATCHES = "monkey_patch"
LIGERS_TABLE = "MODEL_TYPE_TO_APPLY_LIGER_FN"  # the functions by a config's model_type
# of a norm: eps, what is added to its weight, its rounding
LIGERS_NORM = ("variance_epsilon", "offset", "casting_mode")
LIGERS_ROUNDINGS = ("llama", "gemma")  # rounding before the product with the weight; after it
# arguments for parts that streambp replaces elsewhere
LIGER_OTHER_PARTS = ("rope", "cross_entropy", "fused_linear_cross_entropy")

# ---- bitsandbytes, which the tests' environments need not have

BITSANDBYTES = "bitsandbytes"
PACKED_PARAMETERS = "bitsandbytes.nn.parametrize"  # 4-bit weights that are not a Linear's
# attribute of a Linear with a 4-bit weight: dtype to which it casts its input
COMPUTE_DTYPE = "compute_dtype"
QUANT_STATE = "quant_state"  # attribute of a 4-bit weight: its shape, dtype and statistics
STATISTICS_8BIT = "SCB"  # attribute of an 8-bit weight, which passes it to its module

# ---- torchao, which the tests' environments need not have

TORCHAO = "torchao"
FLOAT8_LINEAR = "Float8Linear"  # class name of a Linear that trains in float8
FLOAT8_PRODUCT = "matmul_with_hp_or_float8_args"  # autograd Function of its forward
FLOAT8_CAST = "hp_tensor_to_float8_dynamic"  # function that casts an operand of a product
FLOAT8_ROLE = "gemm_input_role"  # argument of the cast: which operand it is
POWERS_OF_TWO = "round_scales_to_power_of_2"  # field of its config
# Fields of its config: how activations and their gradients are cast, in products over features and
# in the product over tokens.
FLOAT8_CASTS = ("cast_config_input", "cast_config_grad_output")
FLOAT8_CASTS_FOR_WEIGHTS = (
    "cast_config_input_for_grad_weight",
    "cast_config_grad_output_for_grad_weight",
)

# ---- packages by what is theirs; `streambp` is ours

# Packages whose hooks treat tokens alike, or gather and move parameters.
HOOKS_ARE_HARMLESS = ("torch", "transformers", "accelerate", "deepspeed", "streambp")
# Packages whose modules and forwards treat tokens alike outside of attention.
MODULES_ARE_HARMLESS = (*HOOKS_ARE_HARMLESS, "peft", "liger_kernel", TORCHAO, "bitsandbytes")
# package that each `assert` of a test module calls; its session holds iterators
PYTEST = "_pytest"
# Packages whose forwards compute a loss with torch's operations. See `foreign.py`.
FORWARDS_ARE_PLAIN = (*HOOKS_ARE_HARMLESS, "peft")
# Packages whose objects are compared by class alone. [Note: fingerprint]
OBJECTS_ARE_KNOWN = (
    "torch",
    "transformers",
    "peft",
    "deepspeed",
    "builtins",
    "collections",
    "functools",
)
