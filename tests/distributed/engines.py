"""One adapter for each engine: what a training loop, a checkpoint and a comparison need of it,
unpatched and patched.

A case is a dictionary (it travels as JSON). The engine's: "stage", "accumulation", "zero",
"options", "reshard", "offload". The model's: "model", "tied", "frozen", "lora", "head_saved" (a
trained copy of the head, beside "lora"), "router", "experts", "packed", "zero_init", "dtype",
"autocast" (the engine's forward is under this dtype's autocast), "fixed" (weights do not change).
"stream" is the StreamConfig; "one_chunk_on" is a rank whose sequences are not cut, "padded_on" the
only rank whose rows are padded, "padded_from" the first micro-batch with padding, "unlabelled_on" a
rank that has no labels in every second batch.
"eval" and "resume" are what happens between steps; with "logits" the loss is computed from lazy
logits.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import streambp
from streambp.model.packed_adapters import activate_packed
from tests import zoo
from tests.families import FAMILIES, SIZES, build
from tests.layer.test_covering_precision import route_by_token
from tests.layer.test_packed_expert_adapters import as_decoded
from tests.layer.test_packed_experts import EXPERTS, pack
from tests.seeds import seed_torch

MIXTURES = ("qwen3_moe", "mixtral", "gpt_oss")
# where errors of bfloat16 are compared: one draw of a noise says little
WIDE_SIZES = {"hidden_size": 64, "num_hidden_layers": 3}


def model_for(case, seed=0):
    """The model of a case; other weights for another seed."""
    seed_torch(seed)
    name = case.get("model", "qwen3")
    changes = {"tie_word_embeddings": True} if case.get("tied") else {}
    if case.get("zero_init"):  # weights are elsewhere as soon as they are made
        model_class, config_class, extra = FAMILIES[name]
        return model_class(
            config_class(**{**SIZES, **extra, "pad_token_id": None}, attn_implementation="sdpa")
        ).train()
    if case.get("dtype"):
        changes = {**changes, **WIDE_SIZES}
    if name not in FAMILIES:
        changes = {**changes, "output_router_logits": True} if case.get("router") else changes
        model = zoo.build(name, torch.float32, seed, **changes)
        if name == "qwen3_moe":
            model.set_experts_implementation(case.get("experts", "eager"))
    else:
        model = build(name, seed=seed, **{"num_hidden_layers": 2, **changes})
    if in_half_precision(case):
        model.to(getattr(torch, case["dtype"]))
        if name in MIXTURES:
            route_by_token(model)
    if case.get("few_bits"):
        quantize_linears(model, case["few_bits"], case.get("decoded", False))
    if case.get("frozen"):
        model.get_input_embeddings().requires_grad_(False)
    if case.get("lora"):
        import peft

        targets = [
            "q_proj",
            "v_proj",
            {**dict.fromkeys(MIXTURES, "o_proj"), "qwen3_5_text": "out_proj"}.get(
                name, "down_proj"
            ),
        ]
        experts = case["lora"] == "experts"
        parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"] if experts else None
        model = peft.get_peft_model(
            model,
            peft.LoraConfig(
                r=4,
                target_modules=targets,
                target_parameters=parameters,
                init_lora_weights=False,
                modules_to_save=["lm_head"] if case.get("head_saved") else None,
            ),
        )
    if case.get("packed") and case.get("decoded"):
        return as_decoded(model)
    if case.get("packed"):
        pack_experts(model)
    return model


def in_half_precision(case):
    """A frozen base, whose dtype is that of the decoded weights."""
    return case.get("dtype") and case.get("lora")


def quantize_linears(model, storage, decoded):
    """Linears of layers in 4 bits, whose bytes are stored as numbers of the dtype `storage`, or in 8
    bits for "int8". If `decoded`: plain Linears with the same values."""
    import bitsandbytes

    few_bits = {"quant_type": "nf4"}
    if storage != "int8":
        few_bits["quant_storage"] = getattr(torch, storage)
    for layer in decoder_layers(model):
        for module in list(layer.modules()):
            for name, old in list(module.named_children()):
                if not isinstance(old, torch.nn.Linear):
                    continue
                sizes = (old.in_features, old.out_features, old.bias is not None)
                values = old.weight.detach().clone()
                if storage == "int8":
                    new = bitsandbytes.nn.Linear8bitLt(*sizes, has_fp16_weights=False)
                    new.weight = bitsandbytes.nn.Int8Params(
                        values, requires_grad=False, has_fp16_weights=False
                    )
                else:
                    new = bitsandbytes.nn.Linear4bit(*sizes, values.dtype, **few_bits)
                    new.weight = bitsandbytes.nn.Params4bit(
                        values, requires_grad=False, module=new, **few_bits
                    )
                new.to("cpu")  # where it is quantized
                if not decoded:
                    setattr(module, name, new)
                elif storage == "int8":
                    old.weight.data = new.weight.data * (new.weight.SCB[:, None] / 127)
                else:
                    state = new.weight.quant_state
                    old.weight.data = bitsandbytes.functional.dequantize_4bit(new.weight, state)
    # where peft looks
    model.is_loaded_in_8bit = storage == "int8" and not decoded
    model.is_loaded_in_4bit = storage != "int8" and not decoded


def pack_experts(model):
    """Experts in 4 bits, as bitsandbytes stores them. peft alone cannot train their adapters, so
    the unpatched model has the cure of `patch` too."""
    for module in list(model.modules()):
        if type(module).__name__.endswith("Experts"):
            for name in EXPERTS:
                pack(module, name, SimpleNamespace(append=lambda entry: None))
    activate_packed(model, stays=True)


def config_for(case, rank):
    """Chunks differ in size, and so in number, between ranks."""
    stream = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in case.get("stream", {}).items()
    }
    size = 64 if case.get("one_chunk_on") == rank else 5 + 2 * rank
    if case.get("one_chunk_on") is not None:
        stream.setdefault("rows", "as_given")  # packed ones stream
    return streambp.StreamConfig(chunk_size=size, lazy_logits=case.get("logits", False), **stream)


def loss_on_logits(model, batch):
    """Log-probabilities and entropies as GRPO trainers take them: several results of the same
    logits."""
    labels = batch["labels"][:, 1:]
    logits = model(
        **{name: x for name, x in batch.items() if name != "labels"}, use_cache=False
    ).logits
    logits = logits[:, :-1].float() / 0.9
    label_logits = torch.gather(logits, -1, labels.clamp(min=0)[..., None])[..., 0]
    log_probs = label_logits - torch.stack([row.logsumexp(-1) for row in logits])
    p = logits.log_softmax(-1)
    has_label = labels != -100
    return -(log_probs[has_label].mean() + 0.1 * (p.exp() * p).sum(-1)[has_label].mean())


def decoder_layers(model):
    return next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList))


class SingleProcess:
    """No engine: the bare model, which is given every rank's batches in turn."""

    casts = False  # under the case's autocast

    def __init__(self, case, rank=0, patched=None, seed=0):
        self.case, self.accumulation = case, case.get("accumulation", 1)
        self.module = self.make_model(seed)
        if patched == "before":
            streambp.patch(self.module, config_for(case, rank))
        self.wrapped = self.wrap(self.module)
        if patched == "after":
            streambp.patch(self.wrapped, config_for(case, rank))
        if patched == "checkpointing":
            self.module.gradient_checkpointing_enable()
        self.wrapped.train()

    def make_model(self, seed):
        model = model_for({**self.case, "decoded": bool(self.case.get("dtype"))}, seed)
        if self.case.get("dtype"):  # the truth for these weights
            model.to(getattr(torch, self.case["dtype"])).float()
        return model

    def wrap(self, model):
        self.optimizer = self.make_optimizer(model)
        return model

    def make_optimizer(self, model):
        # errors of gradients are compared at the same weights
        is_fixed = self.case.get("dtype") or self.case.get("fixed")
        learning_rate = 0.0 if is_fixed else 0.1
        trainable = [p for p in model.parameters() if p.requires_grad]
        return torch.optim.SGD(trainable, lr=learning_rate, momentum=0.9)

    def loss(self, batch):
        if self.case.get("logits"):
            return loss_on_logits(self.wrapped, batch)
        dtype = getattr(torch, self.case.get("autocast", "bfloat16"))
        with torch.autocast("cpu", dtype, enabled=self.casts and "autocast" in self.case):
            return self.wrapped(**batch, use_cache=False).loss

    def micro_step(self, batch, last, share=1.0):
        """Forward and backward; `last` before an optimizer step."""
        (self.loss(batch) * share / self.accumulation).backward()

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()

    def trainable(self):
        return {name: p for name, p in self.module.named_parameters() if p.requires_grad}

    def gradients(self):
        """Before `step`: of every trainable parameter, averaged over ranks, whole."""
        return {
            name: None if p.grad is None else full_tensor_of(p.grad)
            for name, p in self.trainable().items()
        }

    def weights(self):
        return {name: full_tensor_of(p) for name, p in self.trainable().items()}

    def evaluate(self, batch):
        self.wrapped.eval()
        with torch.no_grad():
            loss = self.loss(batch)
        self.wrapped.train()
        return loss


class InFloat64(SingleProcess):
    def make_model(self, seed):
        model = model_for({**self.case, "decoded": True, "packed": False}, seed).double()
        if self.case.get("packed"):  # decoded weights have the dtype that was packed
            pack_experts(model)
        return model


def full_tensor_of(tensor):
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return tensor.detach().cpu().double().clone()


class DDP(SingleProcess):
    casts = True

    def make_model(self, seed):
        return model_for(self.case, seed).to(getattr(torch, self.case.get("dtype", "float32")))

    def wrap(self, model):
        self.optimizer = self.make_optimizer(model)
        return torch.nn.parallel.DistributedDataParallel(model, **self.case.get("options", {}))

    def micro_step(self, batch, last):
        with contextlib.nullcontext() if last else self.wrapped.no_sync():
            super().micro_step(batch, last)

    def save(self, folder: Path):
        if dist.get_rank() == 0:
            torch.save(
                (self.module.state_dict(), self.optimizer.state_dict()), folder / "checkpoint.pt"
            )
        dist.barrier()

    def load(self, folder: Path):
        model, optimizer = torch.load(folder / "checkpoint.pt", weights_only=True)
        self.module.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)


class FSDP2(SingleProcess):
    casts = True

    def make_model(self, seed):
        return model_for(self.case, seed)

    def wrap(self, model):
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        options = {"reshard_after_forward": self.case.get("reshard", True)}
        if self.case.get("offload"):
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        if self.case.get("dtype"):
            options["mp_policy"] = MixedPrecisionPolicy(
                param_dtype=getattr(torch, self.case["dtype"]), reduce_dtype=torch.float32
            )
        for layer in decoder_layers(model):
            fully_shard(layer, **options)
        fully_shard(model, **options)
        self.optimizer = self.make_optimizer(model)
        return model

    def micro_step(self, batch, last):
        self.wrapped.set_requires_gradient_sync(last)
        super().micro_step(batch, last)

    def _state(self):
        from torch.distributed.checkpoint.state_dict import (
            get_model_state_dict,
            get_optimizer_state_dict,
        )

        return {
            "model": get_model_state_dict(self.module),
            "optimizer": get_optimizer_state_dict(self.module, self.optimizer),
        }

    def save(self, folder: Path):
        dcp.save(self._state(), checkpoint_id=str(folder))

    def load(self, folder: Path):
        from torch.distributed.checkpoint.state_dict import (
            set_model_state_dict,
            set_optimizer_state_dict,
        )

        state = self._state()
        dcp.load(state, checkpoint_id=str(folder))
        set_model_state_dict(self.module, state["model"])
        set_optimizer_state_dict(self.module, self.optimizer, state["optimizer"])


class DeepSpeed(SingleProcess):
    """ZeRO-1 to -3, which bring autocast along."""

    def settings(self):
        autocast = {"enabled": True, "dtype": self.case.get("autocast")}
        return {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": self.case["stage"], **self.case.get("zero", {})},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            **({"bf16": {"enabled": True}} if self.case.get("dtype") == "bfloat16" else {}),
            **({"torch_autocast": autocast} if "autocast" in self.case else {}),
        }

    def make_model(self, seed):
        import deepspeed

        if self.case.get("zero_init"):
            with deepspeed.zero.Init(config_dict_or_path=self.settings()):
                return model_for(self.case, seed)
        return model_for(self.case, seed).to(getattr(torch, self.case.get("dtype", "float32")))

    def wrap(self, model):
        import deepspeed

        engine, *_ = deepspeed.initialize(
            model=model, optimizer=self.make_optimizer(model), config=self.settings()
        )
        return engine

    def micro_step(self, batch, last):
        self.wrapped.backward(self.loss(batch))
        if not last:
            self.wrapped.step()

    def step(self):
        self.wrapped.step()

    def gradients(self):
        from deepspeed.utils import safe_get_full_grad

        return {name: full_tensor_of(safe_get_full_grad(p)) for name, p in self.trainable().items()}

    def weights(self):
        import deepspeed

        weights = {}
        for name, parameter in self.trainable().items():
            with deepspeed.zero.GatheredParameters([parameter], enabled=self.case["stage"] == 3):
                weights[name] = full_tensor_of(parameter)
        return weights

    def save(self, folder: Path):
        self.wrapped.save_checkpoint(str(folder), tag="half")

    def load(self, folder: Path):
        path, _ = self.wrapped.load_checkpoint(str(folder), tag="half")
        assert path is not None


ENGINES = {"ddp": DDP, "fsdp": FSDP2, "deepspeed": DeepSpeed}
