"""Names of other libraries: the installed versions have those that `known_names.py` lists, and no
other module lists any.

covers: known_names.py
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from packaging import version
from torch import nn
from torch.distributed import fsdp
from torch.distributed._composable.contract import contract
from torch.distributed.tensor.experimental import _attention as ring
from torch.nn.parallel import distributed as ddp

from streambp import known_names
from streambp.launch import hook

PACKAGE = Path(known_names.__file__).parent
UNKNOWN_NAME = "_a_name_that_nobody_has"
# The versions whose names are listed; older ones lack some of them.
VERSIONS = {
    "transformers": "5.24",
    "torch": "2.15",
    "peft": "0.21",
    "deepspeed": "0.19",
    "accelerate": "1.15",
    "trl": "1.16",
}
# Of no model of transformers 5.24, with the last version that has it. Models outside of
# transformers may.
REMOVED_NAMES = {
    "cache_position": "before 5.23",
    "get_extended_attention_mask": "before 5.23",
    "past_key_value": "before 5.23",
    "past_key_values": "5.23",
    "shared_layers": "5.5",
}
# which the tests' environments need not have
PACKAGES_ELSEWHERE = {"deepspeed", "liger_kernel", "torchao", "bitsandbytes"}
# Of transformers: modules that all models have in common.
COMMON_WORDS = (
    "configuration_utils", "cache_utils", "masking_utils", "trainer", "hub_kernels", "sdpa_", "flash_", "flex_",
    "output_capturing", "generic", "mxfp4",
)  # fmt: skip


def sources(library, starts=("modeling_", *COMMON_WORDS)):
    """The texts of a library's modules; of transformers those of models and what they have in
    common."""
    [folder] = importlib.util.find_spec(library).submodule_search_locations
    root = Path(folder, "distributed", "fsdp") if library == "torch" else Path(folder)
    paths = (
        path
        for path in root.rglob("*.py")
        if library != "transformers" or path.name.startswith(starts)
    )
    return [path.read_text("utf-8", errors="replace") for path in paths]


@functools.cache
def words(library):
    """All identifiers in a library's source."""
    return frozenset(
        word for text in sources(library) for word in re.findall(r"[A-Za-z_]\w*", text)
    )


@functools.cache
def arguments():
    """The parameters of all forwards of transformers' models, and the keywords that these hand
    on."""
    names: set[str] = set()
    for text in sources("transformers", "modeling_"):
        for part in re.findall(r"def forward\(([^()]*(?:\([^()]*\)[^()]*)*)\)", text):
            names.update(re.findall(r"(?:^|[,\n])\s*(\w+)\s*(?=[:=,]|$)", part))
        for part in re.findall(r"\(TypedDict[^)]*\):(.*?)\n\n\n", text, re.S):
            names.update(re.findall(r"\n    (\w+):", part))
    return frozenset(names)


def of_torch():
    """What torch's own objects have."""
    weight = nn.Linear(1, 1).weight
    (leaf, _), *_ = (weight * 2).grad_fn.next_functions
    node = ddp._DDPSink._backward_cls
    compiled = (torch.compile(nn.Linear(1, 1)), torch.compile(lambda x: x))
    of_objects = (
        nn.Module(),
        weight,
        node,
        torch.nn.modules.module,
        dist,
        ring,
        ring._cp_options,
        *compiled,
    )
    classes = (node, fsdp.FSDPModule, fsdp.FullyShardedDataParallel, torch.distributed)
    names = {type(leaf).__name__, *(value.__name__ for value in classes)}
    return names.union(*map(dir, of_objects), *(vars(o) for o in compiled), words("torch"))


def ends_and_starts():
    """Return the known ends and starts of names that a module has after `fully_shard`'s contract."""
    module = nn.Module()
    contract()(lambda module: module)(module)
    names = [str(name) for name in vars(module)]
    ends: set[str] = (
        {known_names.HOOK_TABLE_SUFFIX}
        if any(n.endswith(known_names.HOOK_TABLE_SUFFIX) for n in names)
        else set()
    )
    start = known_names.COMPOSABLE_STATE
    return ends | ({start} if any(name.startswith(start) for name in names) else set())


def packages():
    names = {*known_names.OBJECTS_ARE_KNOWN, *known_names.MODULES_ARE_HARMLESS}
    return {name for name in names if importlib.util.find_spec(name)}


def modules():
    names = (
        "transformers.masking_utils", "transformers.utils.deprecation", "peft.tuners.lora.layer", "peft.tuners.lora.bnb",
        "_pytest",
    )  # fmt: skip
    return {name for name in names if importlib.util.find_spec(name)}


def packing():
    name = "bitsandbytes.nn.parametrize"
    return {name} if importlib.util.find_spec(name) else set()


def namespaces():
    """Return the namespaces of torch's operations."""
    return {name.partition("::")[0] for name in torch._C._dispatch_get_all_op_names()}


def indexers():
    return {"Indexer"} if any(word.endswith("Indexer") for word in words("transformers")) else set()


# The constants by the library that has their names, and by what tells: its sources, where nothing
# else is said.
CHECKED_NAMES = {
    (
        "transformers",
        arguments,
    ): "TOKEN_DIMS UNTYPED_CACHES STATE_ARGUMENT PICKED_KEYS_ARGUMENT DISTANCES KEY_ARGUMENTS "
    "SEGMENT_ENDS DOCUMENT_IDS DOCUMENT_ENDS",
    ("transformers", modules): """
        MASKING_MODULE DEPRECATION_MODULE EXPERTS_INTEGRATION MXFP4_INTEGRATION MXFP4_QUANTIZER""",
    ("pytest", modules): "PYTEST",
    ("transformers", indexers): "INDEXER",
    ("transformers", None): """
        ATTENTION_TABLE EAGER SDPA FLASH EAGER_FORWARD IMPLEMENTATION EXPERTS_IMPLEMENTATION
        SOFTMAX_FUNCTIONS FLASH_FORWARD HUB_KERNEL MASK_MAKERS BIDIRECTIONAL_MASKS EITHER_MASK FOREIGN_ARGUMENTS
        PICKS_ARGUMENT SINK_ARGUMENTS UPDATE_METHOD INDEX_UPDATE INDEXER_CALLS
        INDEX_HEADS INDEX_TOPK POSITION_BIAS DECODER_MASK LOSS_TYPE MASKED_LOSS CROSS_BIAS HAS_TABLE BIAS_TABLE
        COMPUTE_BIAS
        BUCKETS QUERY_OFFSET SEQUENCE_LENGTH LINEAR_CACHE OWN_SCAN CACHE_CALLS MXFP4_EXPERTS
        MXFP4_DECODING MXFP4_PARTS EXPERTS_TABLE
        CONV_UPDATE RECURRENT_UPDATE STATE_PROTOCOL ATTENTION SHARED_LAYER_COUNT SHARED_LAYERS
        FINAL_NORMS ATTENTION_ATTRIBUTES CHECKPOINTING_ATTRIBUTES CHECKPOINTING_SWITCHES
        PREDICTION CONFIG_DEFAULTS_VARIABLE CALLED_KERNEL DELTA_RULE STATE_SCAN SELECTIVE_SCAN
        CONVOLUTION CONVOLUTION_STATE PLANNED_CONVOLUTION TRAINERS_LOSS PLANNED_DELTA_RULE
        PLANNED_MAMBA1 PLANNED_SCAN PLANNED_MAMBA2 KERNEL_IMPORTS SHARED_INPUTS
        EMBEDDINGS_ARGUMENT TOKEN_ARGUMENTS MARKED_TOKEN_ARGUMENTS HIDDEN_STATES ROUTER_LOGITS
        Z_LOSS ROTARY_PARAMETERS SHARED_INPUT_LINEARS CAPTURE_HOOKS_FLAG
        TOKEN_INDEPENDENT_ARGUMENTS LABELS NOISY_EMBEDDINGS IRRELEVANT_CONFIG_KEYS ROTARY
        GATED_MLP FUSED_MLP ACTIVATIONS NORM_CLASS_SUFFIX""",
    ("torch", of_torch): """
        MODULE_HOOKS FORWARD_HOOKS BACKWARD_HOOKS KWARGS_HOOKS MODULE_TABLES GLOBAL_HOOKS
        TENSOR_HOOKS UNSEEN_WRITES REPLICATE APPLY_METHOD LOCAL_SHARD COMPILED_MODULE_ATTRIBUTE
        COMPILED_CALL COMPILED_FROM USE_COUNT ACCUMULATE_GRAD FUNCTION_OF_NODE DDP_SINK
        FSDP_UNIT FSDP_GROUPS FSDP_PARAMETERS FSDP_GATHERS FSDP_OFFLOADED FSDP1 FLAT_PARAMETER
        CONTEXT_PARALLEL CONTEXT_PARALLEL_MESH CONTEXT_PARALLEL_OPTIONS
        CONTEXT_PARALLEL_BALANCED GATHER REDUCE_SCATTER""",
    ("torch", ends_and_starts): "COMPOSABLE_STATE HOOK_TABLE_SUFFIX",
    ("torch", namespaces): "COLLECTIVES",
    ("deepspeed", None): """
        Z3_LEAF PARTITION_ID FULL_SHAPE ZERO_GROUP GRADIENT_HOOKED ZERO_OPTIMIZERS
        OFFLOADS_PARAMETERS OFFLOADS_STATES ZERO_COUNTERS PRE_BACKWARD RUNS_BEFORE_BACKWARD
        SCALING_HOOK ULYSSES_GROUP ULYSSES_ATTENTION ULYSSES_NOT_IN_EVAL""",
    (
        "accelerate",
        None,
    ): "ACCELERATE_ORIGINAL ACCELERATE_HOOK ACCELERATE_FORWARD MASK_DROPPING_HOOKS SPLIT_SIZES",
    ("peft", modules): "LORA_LAYERS LORA_OF_PACKED",
    (
        "peft",
        None,
    ): "BASE_LAYER LORA_FACTORS ALORA_OFFSETS PEFT_FORWARD_ARGUMENTS CPT_FORWARD "
    "PEFT_CHECKPOINTING ADAPTER_ACTIVATION",
    ("trl", None): """
        TRLS_HEAD TRLS_FORWARD TRLS_TEMPERATURE TRLS_IN_FLOAT32 TRLS_OUTPUTS FUSED_HEAD_ARGUMENT
        OPTIONAL_OUTPUTS GRPO_ONLY_SETTINGS PREPARE_INPUTS ROLLOUTS PROMPT_FIELDS IMAGES_OF_ROWS""",
    ("verl", None): "VERLS_SIZE VERLS_STRATEGY VERLS_OFFLOAD",
    ("swift", None): "SWIFTS_PLUGIN",
    ("unsloth", None): "UNSLOTH",
    ("opacus", None): "OPACUS OPACUS_MODULE",
    ("bitsandbytes", packing): "PACKED_PARAMETERS",
    ("bitsandbytes", None): "BITSANDBYTES COMPUTE_DTYPE QUANT_STATE STATISTICS_8BIT",
    (
        "torchao",
        None,
    ): "TORCHAO FLOAT8_LINEAR FLOAT8_PRODUCT FLOAT8_CAST FLOAT8_ROLE POWERS_OF_TWO FLOAT8_CASTS "
    "FLOAT8_CASTS_FOR_WEIGHTS",
    (
        "liger_kernel",
        None,
    ): "LIGER LIGERS_PATCHES LIGERS_TABLE LIGERS_NORM LIGERS_ROUNDINGS LIGER_OTHER_PARTS",
    (
        "torch",
        packages,
    ): "ENGINE_PACKAGES HOOKS_ARE_HARMLESS MODULES_ARE_HARMLESS FORWARDS_ARE_PLAIN "
    "OBJECTS_ARE_KNOWN",
}
CHECKS = {constant: check for check, listed in CHECKED_NAMES.items() for constant in listed.split()}
# Names that are made of others: DeepSpeed's ds_ starts many, and autograd calls the node of a
# Function by its class.
STARTS = {
    "ds_": "ds_id",
    "activation_checkpointing_": "activation_checkpointing_enable",
    "gradient_checkpointing_": "gradient_checkpointing_enable",
    "PreBackwardFunctionForModuleBackward": "PreBackwardFunctionForModule",
}


def constants():
    return {name: value for name, value in vars(known_names).items() if name.isupper()}


def missing_names(constant, names):
    """Those of a constant's names that the installed library does not have, though its version
    should."""
    library, tells = CHECKS[constant]
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    installed = version.parse(importlib.metadata.version(library))
    names_of_library = words(library) if tells is None else tells()
    names_to_find = [
        STARTS.get(name, name) for name in ([names] if isinstance(names, str) else names)
    ]
    lacking = [
        name
        for name in names_to_find
        if name not in names_of_library and name not in PACKAGES_ELSEWHERE | REMOVED_NAMES.keys()
    ]
    if (
        lacking
        and installed < version.parse(VERSIONS.get(library, "0"))
        and UNKNOWN_NAME not in lacking
    ):
        pytest.skip(f"{library} {installed} is older than {VERSIONS[library]} and has no {lacking}")
    return lacking


@pytest.mark.parametrize("constant", CHECKS)
def test_the_installed_version_has_it(constant):
    library, _ = CHECKS[constant]
    lacking = missing_names(constant, constants()[constant])
    assert not lacking, (
        f"{library} {importlib.metadata.version(library)} has no {lacking} any more: what "
        f"{constant} is for"
    )


@pytest.mark.parametrize("constant", CHECKS)
def test_a_name_that_nobody_has_is_found(constant):
    names = constants()[constant]
    assert (
        missing_names(constant, [*([names] if isinstance(names, str) else names), UNKNOWN_NAME])[-1]
        == UNKNOWN_NAME
    )


def test_every_constant_is_checked():
    assert constants().keys() == CHECKS.keys()
    names = {
        name
        for value in constants().values()
        for name in ([value] if isinstance(value, str) else value)
    }
    assert REMOVED_NAMES.keys() | STARTS.keys() | PACKAGES_ELSEWHERE <= names


def test_names_that_are_gone_are_gone():
    """Such a name has come back otherwise, and belongs to those that are asked for."""
    if version.parse(importlib.metadata.version("transformers")) < version.parse(
        VERSIONS["transformers"]
    ):
        pytest.skip("an older transformers may still have them")
    assert not arguments() & REMOVED_NAMES.keys()


def test_the_launch_hook_waits_for_modules_that_are_there():
    """It imports nothing, so that its names stand in its own file."""
    waits = [
        name
        for name in hook.ImportHook().actions
        if importlib.util.find_spec(name.partition(".")[0]) is not None
    ]
    assert [name for name in waits if importlib.util.find_spec(name) is None] == []
    assert importlib.util.find_spec("transformers.a_trainer_that_nobody_has") is None


def private_names(tree):
    """Strings in a module that look like another library's private attribute."""
    parts = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in node.values
    }
    constants = (
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and id(node) not in parts
    )
    return {
        value
        for value in constants
        if isinstance(value, str)
        and re.fullmatch(r"_[a-z]\w+", value)
        and not value.startswith("_streambp")
    }


def test_private_names_stand_in_one_module():
    # an argument and an operation, which torch checks by itself
    of_torchs_functions = {"_stacklevel", "_grouped_mm"}
    paths = [path for path in PACKAGE.rglob("*.py") if path.name != "known_names.py"]
    names_of_module = {
        path.name: private_names(ast.parse(path.read_text())) - of_torchs_functions
        for path in paths
    }
    assert {name: names for name, names in names_of_module.items() if names} == {}
    assert private_names(ast.parse('hasattr(module, "_hf_hook")')) == {"_hf_hook"}


def test_a_table_of_dimensions_counts_from_the_end():
    """Leading dimensions differ: streams, batch."""
    assert isinstance(known_names.TOKEN_DIMS, Mapping)
    assert set(known_names.TOKEN_DIMS.values()) <= {-1, -2, -3}
