"""torchrun --nproc-per-node 2 -m tests.distributed.trainer_script LOOP CONFIG OUTPUT, for DDP with
- for CONFIG

Trains under HF Trainer or a loop on accelerate, with a DeepSpeed config; rank 0 saves weights and
what was seen. accelerate is not told to use the CPU (`Accelerator(cpu=True)`, ACCELERATE_USE_CPU):
it would choose DDP.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin
from deepspeed.runtime.zero import GatheredParameters
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

import streambp
from streambp.attention import prefix
from streambp.integrations import deepspeed as plugin
from tests.distributed.watch import engines_seen
from tests.families import build, make_batch
from tests.seeds import seed_of

STEPS = 3


def examples():
    return [
        {name: value[0] for name, value in make_batch("plain", seed=seed, rows=1).items()}
        for seed in range(2 * STEPS)
    ]


def with_trainer(model, config, output):
    arguments = TrainingArguments(
        str(output.parent / "trainer"), report_to=[], per_device_train_batch_size=1,
        **({"use_cpu": True, "ddp_backend": "gloo"} if config == "-" else {"deepspeed": config}),
        optim="sgd", learning_rate=0.1, lr_scheduler_type="constant", max_grad_norm=0.0, max_steps=STEPS, seed=seed_of(3),
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(
        model,
        arguments,
        train_dataset=examples(),
        callbacks=[plugin.DeepSpeedStreamCallback()] * (config != "-"),
    )
    trainer.train()
    return trainer.state.log_history[-1]["train_loss"], trainer.accelerator.distributed_type


def with_accelerate(model, config, output):
    stream = plugin.stream_config(plugin.read(config))
    if stream is not None:
        streambp.patch(model, stream)
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    loader = DataLoader(examples(), batch_size=1)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loader
    )
    model.train()
    for batch in loader:
        loss = model(**batch, use_cache=False).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return float(loss), accelerator.distributed_type


def main():
    loop, config, output = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    chunks, real = [], prefix.PrefixChunkAttention.attend
    prefix.PrefixChunkAttention.attend = lambda self, call: (
        chunks.append(call.q.shape[2]) or real(self, call)
    )
    model = build("qwen3")
    with engines_seen() as engines:
        loss, kind = {"trainer": with_trainer, "accelerate": with_accelerate}[loop](
            model, config, output
        )
    weights = {}
    for name, parameter in model.named_parameters():
        with GatheredParameters([parameter]):
            weights[name] = parameter.detach().cpu().clone()
    if torch.distributed.get_rank() == 0:
        engine_report = {"engines": sorted(engines), "distributed_type": kind.value}
        torch.save({"weights": weights, "chunks": chunks, "loss": loss, **engine_report}, output)
    torch.distributed.barrier()


if __name__ == "__main__":
    main()
