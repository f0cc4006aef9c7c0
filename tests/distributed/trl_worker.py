"""One rank of a run of trainers, TRL's or ours: `python -m tests.distributed.trl_worker TRAINERS
OBJECTIVES ENGINE FOLDER`.

Names are separated by commas. Rank 0 saves the losses and the weights, before and after, to
FOLDER/OBJECTIVE-TRAINER.pt.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import trl
from accelerate.state import AcceleratorState
from accelerate.utils import DeepSpeedSequenceParallelConfig, ParallelismConfig
from datasets import Dataset
from trl.generation.vllm_generation import VLLMGeneration

import streambp
from streambp.integrations import trl as streamed
from tests.distributed.context_trainer import FSDP2, let_accelerate_shard, mutate
from tests.distributed.watch import engines_seen
from tests.families import VOCABULARY, build
from tests.integrations import test_trl
from tests.seeds import seeded

ZERO = {
    **dict.fromkeys(
        ("gradient_accumulation_steps", "train_micro_batch_size_per_gpu", "gradient_clipping"),
        "auto",
    ),
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}
BY_VLLM = "GRPO-vLLM"  # GRPO with `use_vllm=True`, and packed rows where they stream


def long_prompts():
    """Prompts of more tokens than a shared prefix needs (`prefixes.tree.MIN_SHARED_TOKENS`)."""
    generator = seeded(0)
    return Dataset.from_list([{"prompt": test_trl.words(generator, 66, 72)} for _ in range(16)])


class VLLMStandIn(VLLMGeneration):
    """In place of vLLM, which needs a GPU: random completions, with the same log-probability for
    each token. The weights are gathered and named by TRL's own code, as for vLLM.

    Attributes:
        synced: names and sums of the weights that vLLM would have got, for each time.
        generator: the source of this rank's completions.
    """

    def _init_vllm(self):
        self.synced = []
        self.generator = seeded(1 + self.accelerator.process_index)

    def sync_weights(self):
        self.synced.append(
            {name: value.double().sum().item() for name, value in self._iter_named_params()}
        )

    def generate(self, prompts, images, num_generations, profiler=None):
        completions = []
        for _ in prompts:
            count = int(torch.randint(2, self.max_completion_length, (), generator=self.generator))
            tokens = torch.randint(3, VOCABULARY, (count,), generator=self.generator)
            completions.append(tokens.tolist())
        log_probs = [[[-math.log(VOCABULARY)]] * len(tokens) for tokens in completions]
        return prompts, completions, log_probs, None


DATA = {
    BY_VLLM: long_prompts,
    "SFT": test_trl.texts,
    "DPO": test_trl.pairs,
    "GRPO": test_trl.prompts,
    "PPO": test_trl.prompts,
}
ROLLOUTS = {"num_generations": 2, "max_completion_length": 6, "temperature": 1.0}
SETTINGS = {
    "SFT": {"max_length": 32},
    "DPO": {},
    "GRPO": {**ROLLOUTS, "beta": 0.04},
    "PPO": {**ROLLOUTS, "kl_coef": 0.04, "num_iterations": 1},
}
SETTINGS[BY_VLLM] = {**SETTINGS["GRPO"], "use_vllm": True, "vllm_mode": "colocate"}


def engine_settings(engine):
    if engine == "fsdp2":
        return {"use_cpu": False, "fsdp": "full_shard", "fsdp_config": FSDP2}
    if engine == "ddp":
        return {"ddp_backend": "gloo"}
    stage = 3 if engine == "ulysses" else int(engine.removeprefix("zero"))
    zero = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True}
    settings = {"ddp_backend": "gloo", "deepspeed": {**ZERO, "zero_optimization": zero}}
    if engine == "ulysses":
        handler = DeepSpeedSequenceParallelConfig(
            sp_attn_implementation="sdpa", sp_seq_length_is_variable=True
        )
        settings["pad_to_multiple_of"] = 32
        settings["parallelism_config"] = ParallelismConfig(
            sp_backend="deepspeed", sp_size=2, sp_handler=handler
        )
    return settings


def weights_of(trl_trainer, engine):
    if engine in ("zero3", "ulysses"):
        return trl_trainer.accelerator.get_state_dict(trl_trainer.model_wrapped)
    parameters = trl_trainer.model.named_parameters()
    return {
        name: p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for name, p in parameters
    }


def train(trainer, objective, engine, folder):
    AcceleratorState._reset_state(reset_partial_state=True)
    settings = {
        "max_steps": 3,
        "gradient_accumulation_steps": 2,
        **engine_settings(engine),
        **SETTINGS[objective],
    }
    where, prefix = (trl, "") if trainer == "theirs" else (streamed, "Stream")
    if trainer != "theirs":
        settings["stream_chunk_size"] = "5"
        if objective == BY_VLLM:
            settings |= {"stream_chunk_size": "29", "stream_rows": "packed"}
    kind = objective.partition("-")[0]
    extra = {"reward_funcs": test_trl.reward} if kind in ("GRPO", "PPO") else {}
    initial = {name: p.detach().clone() for name, p in build("qwen3").named_parameters()}
    model = str(Path(folder) / "model")  # the reference is loaded from where the policy came from
    settings["model_init_kwargs"] = {"dtype": "float32"}
    with contextlib.ExitStack() as stack:
        if trainer == "mutant":
            mutate(stack.enter_context(pytest.MonkeyPatch.context()))
        if objective == BY_VLLM:
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            patch.setattr("trl.trainer.grpo_trainer.VLLMGeneration", VLLMStandIn)
        engines = stack.enter_context(engines_seen())
        log, _, trl_trainer = test_trl.train(
            getattr(where, f"{prefix}{kind}Trainer"), getattr(where, f"{prefix}{kind}Config"),
            DATA[objective](), Path(folder) / trainer, model=model, trainer=extra, **settings,
        )  # fmt: skip
    trained_weights = weights_of(trl_trainer, engine)
    if dist.get_rank() == 0:
        weights = {
            name.removeprefix("module."): value.float()
            for name, value in trained_weights.items()
            if name in initial
        }
        result = {
            "log": [entry["loss"] for entry in log],
            "before": initial,
            "after": weights,
            "engines": sorted(engines),
        }
        if objective == BY_VLLM:
            result["synced"] = trl_trainer.vllm_generation.synced
        if trainer != "theirs":
            described = streambp.describe(trl_trainer.model)
            result |= {
                "paths": sorted({layer.path for layer in described.layers}),
                "described": str(described),
            }
        torch.save(result, f"{folder}/{objective}-{trainer}.pt")
    dist.barrier()


def main(trainers, objectives, engine, folder):
    if engine == "fsdp2":
        let_accelerate_shard()
    for objective in objectives.split(","):
        for trainer in trainers.split(","):
            train(trainer, objective, engine, folder)
    dist.destroy_process_group()
    # At exit threads of gloo or DeepSpeed abort one process in some dozens ("terminate called
    # without an active exception" with TRL's own trainers, too); what is compared has been written.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
