"""What each framework is: its environment, and the command that trains with it.

Every command trains in float32 on a CPU with SGD, the learning rate constant, without clipping and
without dropout.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

STEPS, BATCH, CHUNK = 3, 2, 100
TRAINER = {
    "learning_rate": 1.0, "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "max_steps": STEPS, "logging_steps": 1,
    "save_steps": STEPS, "save_only_model": True, "seed": 3,
}  # fmt: skip
ADAPTED_LINEARS = ("q_proj", "down_proj")
EVALUATION_BATCH = BATCH + 1  # rows a batch: the last one is smaller


@dataclasses.dataclass(frozen=True)
class Kind:
    """What a run trains.

    stage: "sft" or "dpo".
    evaluates: on all rows after every step; SFT with the framework's own accuracy where it has one.
    """

    stage: str
    lora: bool = False
    evaluates: bool = False

    @property
    def rate(self) -> float:
        return 0.1 if self.stage == "dpo" else 1.0


KINDS = {
    "sft": Kind("sft"), "lora": Kind("sft", lora=True), "dpo": Kind("dpo"), "dpo-lora": Kind("dpo", lora=True),
    "sft-eval": Kind("sft", evaluates=True), "dpo-eval": Kind("dpo", evaluates=True),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Framework:
    """One framework.

    packages: for pip, with what it needs at these runs; `framework` itself is installed without its
    requirements. stand_ins: modules that it imports and these runs do not use, with the names that
    it imports from them. variables: of the environment of every run. command: (kind of run, inputs,
    output) -> the program, the first word of which is in the environment's bin. plugin: the same
    with the framework's own way to switch streambp on; and the variables that this takes.
    """

    framework: str
    packages: tuple[str, ...]
    command: Callable[[Kind, Path, Path], list[str]]
    plugin: Callable[[Kind, Path, Path], tuple[list[str], dict[str, str]]] | None = None
    stand_ins: dict[str, str] = dataclasses.field(default_factory=dict)


def write_yaml(path: Path, settings: dict[str, object]) -> str:
    """JSON is YAML."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(settings, indent=1))
    return str(path)


def llama_factory(kind: Kind, inputs: Path, output: Path) -> list[str]:
    settings: dict[str, object] = {
        **TRAINER, "learning_rate": kind.rate, "optim": "sgd", "stage": kind.stage, "do_train": True, "use_cpu": True,
        "model_name_or_path": str(inputs / "model"), "dataset": kind.stage, "dataset_dir": str(inputs / "data"),
        "template": "default", "cutoff_len": 1024, "output_dir": str(output), "report_to": "none",
        "per_device_train_batch_size": BATCH, "finetuning_type": "lora" if kind.lora else "full",
        "overwrite_cache": True,
    }  # fmt: skip
    if kind.lora:
        settings.update(lora_rank=4, lora_dropout=0.0, lora_target=",".join(ADAPTED_LINEARS))
    if kind.evaluates:
        settings.update(
            eval_dataset=kind.stage,
            eval_strategy="steps",
            eval_steps=1,
            per_device_eval_batch_size=EVALUATION_BATCH,
        )
        settings.update(compute_accuracy=kind.stage == "sft")
    return ["llamafactory-cli", "train", write_yaml(output.with_suffix(".yaml"), settings)]


def ms_swift(kind: Kind, inputs: Path, output: Path) -> list[str]:
    data = inputs / "data" / f"messages-{kind.stage}.jsonl"
    settings = {
        **TRAINER, "learning_rate": kind.rate, "optim": "sgd", "use_cpu": True, "model": inputs / "model",
        "model_type": "qwen3", "template": "qwen3", "dataset": data,
        "output_dir": output, "add_version": False, "report_to": "none", "torch_dtype": "float32", "bf16": False,
        "per_device_train_batch_size": BATCH, "tuner_type": "lora" if kind.lora else "full", "max_length": 1024,
        "save_total_limit": 1, "split_dataset_ratio": 0, "load_from_cache_file": False, "dataset_num_proc": 1,
        "dataloader_num_workers": 0, "attn_impl": "sdpa",
    }  # fmt: skip
    if kind.evaluates:
        settings.update(
            val_dataset=data,
            eval_strategy="steps",
            eval_steps=1,
            per_device_eval_batch_size=EVALUATION_BATCH,
        )
        settings.update({"eval_metric": "acc"} if kind.stage == "sft" else {})
    words = ["swift", *(["rlhf", "--rlhf_type", "dpo"] if kind.stage == "dpo" else ["sft"])]
    for name, value in settings.items():
        words += [f"--{name}", str(value).lower() if isinstance(value, bool) else str(value)]
    if kind.lora:
        words += ["--lora_rank", "4", "--lora_dropout", "0", "--target_modules", *ADAPTED_LINEARS]
    return words


def ms_swifts_callback(kind: Kind, inputs: Path, output: Path) -> tuple[list[str], dict[str, str]]:
    plugin = output.with_name("streambp_plugin.py")
    plugin.parent.mkdir(parents=True, exist_ok=True)
    plugin.write_text("import streambp.integrations.ms_swift\n")
    words = [
        *ms_swift(kind, inputs, output),
        "--external_plugins",
        str(plugin),
        "--callbacks",
        "streambp",
    ]
    return words, {"STREAMBP_LAUNCH": json.dumps({"chunk_size": CHUNK})}


def axolotl(kind: Kind, inputs: Path, output: Path, **options: object) -> list[str]:
    settings: dict[str, object] = {
        **TRAINER, "learning_rate": kind.rate, "base_model": str(inputs / "model"), "optimizer": "sgd",
        "lr_scheduler": "constant", "output_dir": str(output), "micro_batch_size": BATCH, "gradient_accumulation_steps": 1,
        "sequence_len": 1024, "bf16": False, "fp16": False, "tf32": False, "float32": True, "flash_attention": False,
        "sdp_attention": True, "gradient_checkpointing": True, "save_safetensors": True, "val_set_size": 0, "device": "cpu",
        "dataset_prepared_path": str(output.with_name(f"{output.name}-prepared")), "num_epochs": 1, **options,
    }  # fmt: skip
    del settings["lr_scheduler_type"]
    data: dict[str, object] = {
        "path": str(inputs / "data"),
        "ds_type": "json",
        "type": "chat_template",
    }
    if kind.stage == "dpo":
        settings.update(rl="dpo")
        data.update(data_files=["chosen-dpo.jsonl"], type="chat_template.default")
    else:
        data.update(data_files=["messages-sft.jsonl"], field_messages="messages")
    data.update(path=str(inputs / "data" / data.pop("data_files")[0]))  # type: ignore[index]
    if kind.lora:
        settings.update(
            adapter="lora",
            lora_r=4,
            lora_alpha=8,
            lora_dropout=0.0,
            lora_target_modules=list(ADAPTED_LINEARS),
        )
        # Triton: they want a GPU
        settings.update(lora_mlp_kernel=False, lora_qkv_kernel=False, lora_o_kernel=False)
    if kind.evaluates:
        settings.update(
            test_datasets=[data],
            eval_strategy="steps",
            eval_steps=1,
            eval_batch_size=EVALUATION_BATCH,
        )
    path = write_yaml(output.with_suffix(".yaml"), {**settings, "datasets": [data]})
    return ["axolotl", "train", path, "--launcher", "python"]


def axolotls_section(kind: Kind, inputs: Path, output: Path) -> tuple[list[str], dict[str, str]]:
    return axolotl(kind, inputs, output, streambp={"chunk_size": CHUNK}), {}


TORCH = "torch==2.13.0"
FRAMEWORKS = {
    "llama-factory": Framework(
        "llamafactory==0.9.5",
        (
            TORCH, "transformers==5.6.0", "trl==0.24.0", "peft==0.18.1", "accelerate==1.11.0", "datasets==4.0.0", "einops",
            "fire", "omegaconf", "pyyaml", "sentencepiece", "tiktoken", "tyro<0.9", "protobuf", "scipy", "matplotlib",
            "pandas", "modelscope", "torchdata==0.11.0", "fastapi", "uvicorn", "sse-starlette", "av==15.1.0",
        ),
        llama_factory,
        stand_ins={"torchaudio": ""},
    ),
    "ms-swift": Framework(
        "ms-swift==4.6.0",
        (TORCH, "ms-swift==4.6.0", "transformers==5.19.0", "trl==0.29.1"),
        ms_swift,
        ms_swifts_callback,
    ),
    "axolotl": Framework(
        "axolotl==0.21.0",
        (
            TORCH, "transformers==5.20.1", "trl==1.14.1", "peft==0.21.2", "accelerate==1.15.0", "datasets==5.0.1",
            "tokenizers==0.23.3", "kernels==0.17.2", "packaging==26.0", "typing-extensions==4.15.0", "hf_xet",
            "hf_transfer", "bitsandbytes==0.50.2", "sentencepiece",
            "pydantic==2.13.5", "addict", "fire", "PyYAML==6.0.3", "requests", "wandb", "einops",
            "colorama", "numba", "numpy<3,>=2.1", "typer==0.25.1", "evaluate==0.4.1", "scipy", "nvidia-ml-py==12.560.30",
            "art", "tensorboard", "python-dotenv==1.0.1", "zstandard==0.22.0", "fastcore", "langdetect==1.0.9",
            "immutabledict==4.2.0", "antlr4-python3-runtime==4.13.2", "schedulefree==1.4.1", "openenv-core",
            "axolotl-contribs-lgpl==0.0.7", "axolotl-contribs-mit==0.0.6", "posthog==6.7.11", "mistral-common==1.12.0",
            "liger-kernel==0.8.4",
        ),
        axolotl,
        axolotls_section,
    ),
}  # fmt: skip
