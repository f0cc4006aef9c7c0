"""Whatever cannot be exact is refused, with what was found, what was expected and what to do.

covers: chunks.py, errors.py
"""

from __future__ import annotations

import copy
import dataclasses
import types

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import context_parallel
from transformers import LlamaConfig, LlamaModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import streambp
from streambp.admission import entry, stacks
from streambp.admission.probe import Verdict
from streambp.attention import masks
from streambp.distributed import context_parallel as distributed_context
from streambp.distributed.ulysses import SplitGroup
from streambp.errors import UnsupportedMaskError
from streambp.model import split as model_split
from tests import zoo
from tests.distributed.one_rank import with_shifted_labels
from tests.families import LENGTH, build, make_batch
from tests.oracle import gradients, worst_error
from tests.versions import needs_decoders_of_encoders


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("chunk_size", 0), ("chunk_size", -3), ("chunk_size", "large"), ("chunk_size", True), ("chunk_size", 2.0),
        ("saves", "kv"), ("saves", (3,)), ("saves", ("kv@0",)), ("saves", ("@2",)), ("saves", ("kv@x",)),
        ("saves", ("kv@1@2",)), ("attention", "fast"), ("head", 1), ("eval_logits", None),
        ("lazy_logits", "yes"), ("rows", "tree"), ("share_prefixes", 1), ("unpatched_runs", "no"),
        ("compare_backward", None),
        ("weights", "host"),
    ],
)  # fmt: skip
def test_config_values(field, value):
    with pytest.raises(streambp.StreamBPError, match=field):
        streambp.StreamConfig(**{field: value})


@pytest.mark.parametrize(("old_value", "rows"), [(True, "packed"), (False, "as_given")])
def test_the_former_name_of_packed_rows(old_value, rows):
    with pytest.warns(DeprecationWarning, match=f"share_prefixes={old_value} is now rows='{rows}'"):
        config = streambp.StreamConfig(rows="auto", share_prefixes=old_value)
    assert config == streambp.StreamConfig(rows=rows)


@pytest.mark.parametrize("field", ["eval_logits", "lazy_logits"])
def test_logits_that_are_built_anyway(field):
    with pytest.raises(
        streambp.StreamBPError, match=f"{field} is set, but head=False builds the logits"
    ):
        streambp.StreamConfig(head=False, **{field: True})


@pytest.mark.parametrize("value", ["8 gigs", "1e9e9", "GB", "8Gi", "-1GB", "1e999", ""])
def test_units_of_memory_are_named(value):
    with pytest.raises(
        streambp.StreamBPError,
        match=r"host_memory is .*KB, KiB, MB, MiB, GB, GiB, TB, TiB\.",
    ):
        streambp.StreamConfig(offload="cpu", host_memory=value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("8gb", 8e9),
        ("8GB", 8e9),
        ("8 gib", 2**33),
        ("1.5TiB", 1.5 * 2**40),
        ("1e9", 1e9),
        ("1e3kb", 1e6),
        (" 7 b ", 7),
        (1e9, 1e9),
    ],
)
def test_memory_in_units(value, expected):
    assert streambp.StreamConfig(offload="cpu", host_memory=value).host_memory == expected


def test_saves_that_name_nothing():
    with pytest.raises(streambp.StreamBPError, match=r"'mlp\.gate'.*mlp\.gate_proj"):
        streambp.patch(build("qwen3"), streambp.StreamConfig(saves=("kv", "mlp.gate")))


def test_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        streambp.StreamConfig().chunk_size = 3


@pytest.mark.parametrize(
    "make",
    [
        lambda: LlamaModel(LlamaConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, is_causal=False)),
        lambda: zoo.build("deepseek_v4"),
        lambda: zoo.build("rwkv"),
        lambda: torch.nn.Sequential(torch.nn.Linear(2, 2)),
    ],
    ids=["causal modules", "sparse", "states in place", "no transformer"],
)  # fmt: skip
def test_unsupported_models(make):
    model = make()
    with pytest.raises(streambp.StreamBPError, match="cannot be streamed"):
        streambp.patch(model)
    assert not any("forward" in m.__dict__ for m in model.modules())


@pytest.mark.parametrize("class_name", ["Qwen3DecoderLayer", "Qwen3Model"])
def test_unsloths_forwards(class_name, monkeypatch):
    """It replaces them on transformers' classes, for every model of the process."""
    model = build("qwen3")
    owner = {type(module).__name__: type(module) for module in model.modules()}[class_name]
    forward = types.FunctionType(
        (lambda self, *args: args[0]).__code__, {"__name__": "unsloth.models.llama"}
    )
    monkeypatch.setattr(owner, "forward", forward)
    with pytest.raises(
        streambp.StreamBPError,
        match=rf"Unsloth has replaced the forward of {class_name} \(in unsloth\.models",
    ):
        streambp.patch(model)
    assert not any("forward" in m.__dict__ for m in model.modules())
    monkeypatch.undo()
    streambp.patch(model)


def test_not_a_model():
    with pytest.raises(streambp.StreamBPError, match="This is a str; pass a model"):
        streambp.patch("Qwen/Qwen3-8B")


def test_bidirectional_config():
    model = build("llama")
    model.config.is_causal = False
    with pytest.raises(streambp.StreamBPError, match="bidirectional"):
        streambp.patch(model)


def streamed(family="qwen3", **overrides):
    return streambp.patch(build(family, **overrides), streambp.StreamConfig(chunk_size=5))


ENCODERS = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40, "vocab_size": 64,
    "input_embedding_size": 32, "embedding_size": 32, "max_position_embeddings": 64,
}  # fmt: skip


@needs_decoders_of_encoders
@pytest.mark.parametrize("family", ["MegatronBert", "RemBert", "RoFormer"])
def test_decoders_that_are_encoders_unless_told(family):
    """A causal language model of an encoder's configuration looks ahead, as unpatched."""
    config = getattr(transformers, f"{family}Config")(**ENCODERS)
    tokens = torch.randint(3, 64, (2, 23))
    for is_decoder in (False, True):
        config.is_decoder = is_decoder
        model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
        expected = gradients(copy.deepcopy(model), input_ids=tokens, labels=tokens)[1]
        streambp.patch(model, streambp.StreamConfig(chunk_size=5))
        grads = gradients(model, input_ids=tokens, labels=tokens)[1]
        assert worst_error(grads, expected) <= 1e-4
        assert {layer.path for layer in streambp.describe(model).layers} == {"streams"}


def test_an_encoders_mask(monkeypatch):
    """Of one row for all queries, in a model whose code has other names than transformers'."""
    monkeypatch.setattr(stacks, "BIDIRECTIONAL_MASKS", ())
    model = transformers.MarkupLMModel(transformers.MarkupLMConfig(**ENCODERS)).train()
    streambp.patch(model, streambp.StreamConfig(chunk_size=5))
    with pytest.raises(
        streambp.StreamBPError, match=r"one row of keys for all 23 queries.* as an encoder's"
    ):
        model(input_ids=torch.randint(3, 64, (2, 23)))


def test_non_causal_mask():
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool)
    with pytest.raises(streambp.StreamBPError, match="comes after"):
        streamed()(**make_batch("plain"), attention_mask=mask, use_cache=False)


def test_mask_of_the_wrong_size():
    mask = torch.ones(1, 1, LENGTH - 1, LENGTH, dtype=torch.bool).tril()
    with pytest.raises(streambp.StreamBPError, match="shape"):
        streamed()(**make_batch("plain"), attention_mask=mask, use_cache=False)


@pytest.mark.parametrize("family", ["qwen3", "lfm2"])
def test_mask_that_wants_a_gradient(family, monkeypatch):
    """Of layers that stream and of layers that run whole."""
    model = streambp.patch(zoo.build(family, torch.float32), streambp.StreamConfig(chunk_size=5))
    if family == "lfm2":
        monkeypatch.setattr(entry, "can_stream", lambda call: Verdict(False))
    lowest = torch.finfo(torch.float32).min
    mask = torch.full((1, 1, LENGTH, LENGTH), lowest).triu(1).requires_grad_()
    with pytest.raises(streambp.StreamBPError, match="requires a gradient"):
        model(**make_batch("plain"), attention_mask=mask, use_cache=False)
    with torch.no_grad():
        assert model(**make_batch("plain"), attention_mask=mask, use_cache=False).loss.isfinite()


def test_two_dimensional_mask_of_the_wrong_size():
    with pytest.raises(streambp.StreamBPError, match=r"covers 28 keys.*23 tokens"):
        streamed()(**make_batch("plain"), attention_mask=torch.ones(2, LENGTH + 5), use_cache=False)


MASKS_OF_THREE_DIMENSIONS = {
    "bool": torch.ones(2, LENGTH, LENGTH, dtype=torch.bool).tril(),
    "float": torch.zeros(2, LENGTH, LENGTH),
    "integers": torch.ones(1, 2, LENGTH, dtype=torch.long),
}


def check_mask_of_three_dimensions(family, kind, labelled):
    mask = MASKS_OF_THREE_DIMENSIONS[kind]
    model = zoo.build(family, torch.float32)
    streambp.patch(model, streambp.StreamConfig(chunk_size=5))
    batch = make_batch("plain")
    ids = batch if labelled else {"input_ids": batch["input_ids"]}
    with pytest.raises(UnsupportedMaskError, match=r"Pass it 2-D, \[B, T\].* or 4-D"):
        model(**ids, attention_mask=mask)


@pytest.mark.parametrize("labelled", [True, False])
@pytest.mark.parametrize("kind", MASKS_OF_THREE_DIMENSIONS)
@pytest.mark.parametrize("family", ["llama", "gemma2", "bert"])
def test_masks_of_three_dimensions(family, kind, labelled):
    """A decoder with one kind of layer, one with two, and an encoder: torch's own errors would
    name a tensor of five dimensions, or a mask would be left out."""
    check_mask_of_three_dimensions(family, kind, labelled)


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_a_mask_that_nobody_looks_at_is_found(family, monkeypatch):
    monkeypatch.setattr(masks.LazyMask, "__init__", with_any_mask(masks.LazyMask.__init__))
    with pytest.raises((pytest.fail.Exception, RuntimeError)):
        check_mask_of_three_dimensions(family, "bool", labelled=True)


def with_any_mask(real):
    def start(self, **description):
        real(self, **{**description, "attention_mask": None})
        self.description = description

    return start


def test_no_tokens():
    with pytest.raises(streambp.StreamBPError, match="T = 0"):
        streamed()(input_ids=torch.zeros(1, 0, dtype=torch.long), use_cache=False)


def test_labels_outside_the_vocabulary():
    batch = make_batch("plain")
    batch["labels"][0, 4] = 999
    with pytest.raises(streambp.StreamBPError, match="999"):
        streamed()(**batch, use_cache=False)


@pytest.mark.parametrize("kwargs", [{}, {"output_log_probs": True}])
def test_labels_of_another_length(kwargs):
    """One label fewer a row would pair every label of the later rows with another position."""
    batch = make_batch("plain")
    with pytest.raises(streambp.StreamBPError, match="44 labels for 46 positions"):
        streamed()(
            input_ids=batch["input_ids"], labels=batch["labels"][:, :-1], use_cache=False, **kwargs
        )


def test_inner_fsdp_unit():
    model = streamed()
    mlp = model.model.layers[0].mlp
    mlp.__class__ = type("FSDPMLP", (type("FSDPModule", (), {}), type(mlp)), {})
    with pytest.raises(streambp.StreamBPError, match="FSDP unit"):
        model(**make_batch("plain"), use_cache=False)


def test_replicas_of_data_parallel():
    """Their forwards would be the original's, whose weights are on another device."""
    model = build("qwen3")
    streambp.patch(model)
    with pytest.raises(streambp.StreamBPError, match="torchrun"):
        [module._replicate_for_data_parallel() for module in model.modules()]
    streambp.unpatch(model)
    assert all(module._replicate_for_data_parallel() for module in model.modules())


def test_offloaded_weights():
    model = streamed()
    projection = model.model.layers[0].mlp.up_proj
    projection.weight = torch.nn.Parameter(projection.weight.to("meta"))
    with pytest.raises(streambp.StreamBPError, match=r"mlp.up_proj.weight is on the meta device"):
        model(**make_batch("plain"), use_cache=False)


def test_tensor_parallel_parameters(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        model = streamed()
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        projection = model.model.layers[0].mlp.up_proj
        projection.weight = torch.nn.Parameter(DTensor.from_local(projection.weight.detach(), mesh))
        with pytest.raises(streambp.StreamBPError, match=r"mlp.up_proj.weight is a DTensor"):
            model(**make_batch("plain"), use_cache=False)
    finally:
        torch.distributed.destroy_process_group()


def test_attention_that_does_more_than_we_do(monkeypatch):
    model = streamed("llama")
    attention = type(model.model.layers[0].self_attn)
    real = attention.forward
    monkeypatch.setattr(
        attention, "forward", lambda self, *a, **k: real(self, *a, **{**k, "position_bias": 5.0})
    )
    with pytest.raises(streambp.StreamBPError, match="position_bias"):
        model(**make_batch("plain"), use_cache=False)


def reads_the_mask(module, args, kwargs):
    assert kwargs["attention_mask"].dtype.is_floating_point


def test_layer_that_reads_the_mask_itself():
    model = streamed()
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(reads_the_mask, with_kwargs=True)
    with pytest.raises(streambp.StreamBPError, match="reads the attention mask itself"):
        model(**make_batch("plain"), use_cache=False)


def test_describe_needs_a_patched_model():
    with pytest.raises(streambp.StreamBPError, match="not patched"):
        streambp.describe(build("llama"))


def test_mode_changed_between_forward_and_backward():
    model = streamed()
    loss = model(**make_batch("plain"), use_cache=False).loss
    model.eval()
    with pytest.raises(streambp.StreamBPError, match="mode"):
        loss.backward()


def test_log_probs_without_labels():
    with pytest.raises(streambp.StreamBPError, match="needs labels"):
        streamed()(input_ids=make_batch("plain")["input_ids"], output_log_probs=True)


def test_config_of_another_type():
    with pytest.raises(streambp.StreamBPError, match="LlamaConfig"):
        streambp.patch(build("llama"), LlamaConfig())


def test_ulysses_whose_process_group_cannot_be_found(monkeypatch):
    def uattn_wrapper(*args, **kwargs):
        raise AssertionError("never called")

    uattn_wrapper.__module__ = "deepspeed.runtime.sequence_parallel.ulysses_sp"
    # undone without a trace
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", uattn_wrapper)
    with pytest.raises(streambp.StreamBPError, match="Ulysses"):
        streamed()(**make_batch("plain"), use_cache=False)


@pytest.fixture
def a_group_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("left_out", "message"),
    [
        ("shift_labels", "labels were given without shift_labels"),
        ("position_ids", "position_ids are missing"),
        ("mesh", "did not find its one-dimensional mesh or its order of shards"),
        ("one split", "DeepSpeed Ulysses and torch's context parallelism both split this batch"),
    ],
)
def test_torch_context_parallelism(left_out, message, a_group_of_one, monkeypatch):
    """What accelerate's ParallelismConfig(cp_size=...) enters around every step."""
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
    batch, model = with_shifted_labels(make_batch("plain", length=24)), streamed()
    batch = {name: tensor.clone() for name, tensor in batch.items() if name != left_out}
    if left_out == "mesh":
        monkeypatch.setattr(distributed_context, "CONTEXT_PARALLEL_MESH", "a mesh of another name")
    if left_out == "one split":
        monkeypatch.setattr(model_split, "find_ulysses", lambda implementation: SplitGroup(None))
    split = context_parallel(mesh, buffers=list(batch.values()), buffer_seq_dims=[1] * len(batch))
    with split, pytest.raises(streambp.StreamBPError, match=message):
        model(**batch, use_cache=False)
