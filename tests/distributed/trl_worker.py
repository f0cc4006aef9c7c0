"""One rank of a run of trainers, TRL's or ours: `python -m tests.distributed.trl_worker TRAINER OBJECTIVE ENGINE FOLDER`.

Rank 0 saves the losses and the weights, before and after, to FOLDER/TRAINER.pt.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import trl

from streambp.integrations import trl as streamed
from tests.distributed.watch import engines_seen
from tests.families import build
from tests.integrations import test_trl

ZERO = {
    **dict.fromkeys(("gradient_accumulation_steps", "train_micro_batch_size_per_gpu", "gradient_clipping"), "auto"),
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}
DATA = {"SFT": test_trl.texts, "DPO": test_trl.pairs, "GRPO": test_trl.prompts, "PPO": test_trl.prompts}
ROLLOUTS = {"num_generations": 2, "max_completion_length": 6, "temperature": 1.0}
SETTINGS = {
    "SFT": {"max_length": 32},
    "DPO": {},
    "GRPO": {**ROLLOUTS, "beta": 0.04},
    "PPO": {**ROLLOUTS, "kl_coef": 0.04, "num_iterations": 1},
}


def main(trainer, objective, engine, folder):
    stage = int(engine.removeprefix("zero")) if engine.startswith("zero") else 0
    settings = {"max_steps": 3, "gradient_accumulation_steps": 2, "ddp_backend": "gloo", **SETTINGS[objective]}
    if stage:
        zero = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True}
        settings["deepspeed"] = {**ZERO, "zero_optimization": zero}
    where = streamed if trainer == "ours" else trl
    prefix = "Stream" if trainer == "ours" else ""
    if trainer == "ours":
        settings["stream_chunk_size"] = "5"
    extra = {"reward_funcs": test_trl.reward} if objective in ("GRPO", "PPO") else {}
    before = {name: p.detach().clone() for name, p in build("qwen3").named_parameters()}
    model = str(Path(folder) / "model")  # the reference is loaded from where the policy came from
    settings["model_init_kwargs"] = {"dtype": "float32"}
    with engines_seen() as engines:
        log, _, made = test_trl.train(
            getattr(where, f"{prefix}{objective}Trainer"), getattr(where, f"{prefix}{objective}Config"),
            DATA[objective](), Path(folder) / trainer, model=model, trainer=extra, **settings,
        )  # fmt: skip
    after = made.accelerator.get_state_dict(made.model_wrapped) if stage == 3 else made.model.state_dict()
    if dist.get_rank() == 0:
        weights = {name.removeprefix("module."): value.float() for name, value in after.items() if name in before}
        found = {"log": [entry["loss"] for entry in log], "before": before, "after": weights, "engines": sorted(engines)}
        torch.save(found, f"{folder}/{trainer}.pt")
    dist.barrier()
    dist.destroy_process_group()
    # At exit threads of gloo or DeepSpeed abort one process in some dozens ("terminate called without an active exception"
    # with TRL's own trainers, too); what is compared has been written.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
