"""Trainers whose accumulation steps hold no token to learn from, wholly or in one micro-batch, with
tied heads, LoRA and trained copies of the head, against unpatched trainers in float64.

covers: integrations/trl/trainer.py, launch/hook.py, launch/settings.py, model/empty_batches.py
"""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings

import pytest
import torch
import transformers

import streambp
from streambp.head.log_probs import HeadGradients
from streambp.launch import process
from streambp.launch.hook import SETTINGS_VARIABLE, TRL_HEAD_TRAINERS, ImportHook
from streambp.launch.settings import settings_from_fields
from tests.families import VOCABULARY, build
from tests.head.test_empty_batches import EMPTY, check_like_unpatched
from tests.oracle import lift_float32_casts, worst_error
from tests.seeds import seed_torch, seeded

pytest.importorskip("trl", reason="TRL is not installed")
pytest.importorskip("peft", reason="peft is not installed")

import peft
from datasets import Dataset
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)
from trl.trainer.dpo_trainer import DataCollatorForPreference
from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference

from streambp.integrations.trl import (
    StreamDPOConfig,
    StreamDPOTrainer,
    StreamGRPOConfig,
    StreamGRPOTrainer,
    StreamSFTConfig,
    StreamSFTTrainer,
)
from tests.integrations.test_trl import (
    STREAM_ARGUMENTS,
    FullLogits,
    prompts,
    tokenizer,
    train,
    words,
)

FIELDS = {"chunk_size": 5}
MAX_LENGTH = 12
LABELLED = (True, False, False, False, True, True)  # of rows: in part, not at all, all
SETUPS = {
    "tied": {},
    "lora": {"target_modules": ["q_proj", "down_proj"]},
    "head saved": {"target_modules": ["q_proj", "down_proj"], "modules_to_save": ["lm_head"]},
}


@pytest.fixture(autouse=True)
def exact_stock_head(monkeypatch):
    lift_float32_casts(monkeypatch)
    monkeypatch.setattr("trl.trainer.utils._ChunkedLogProbFunction", FullLogits)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return the folders of the models of both families; TRL loads the reference model from
    there."""
    folders = {}
    for family in ("qwen2", "qwen3"):
        folders[family] = tmp_path_factory.mktemp(family)
        build(family, torch.float64).save_pretrained(folders[family])
    return folders


@pytest.fixture(scope="module")
def weights_by_case():
    """Return a dict for the weights of unpatched runs, which several doors are compared with."""
    return {}


def tokenized():
    """Return rows of tokens, some of them without a label."""
    generator = seeded(0)
    rows = []
    for index, labelled in enumerate(LABELLED):
        ids = torch.randint(3, VOCABULARY, (MAX_LENGTH - index,), generator=generator)
        labels = ids if labelled else torch.full_like(ids, -100)
        rows.append({"input_ids": ids.tolist(), "labels": labels.tolist()})
    return Dataset.from_list(rows)


def long_prompts():
    """Return pairs; the collator cuts the prompts of some before their completions."""
    generator = seeded(0)
    rows = []
    for labelled in LABELLED:
        lengths = (3, 5) if labelled else (MAX_LENGTH + 3, MAX_LENGTH + 6)
        row = {"prompt": words(generator, *lengths)}
        for name in ("chosen", "rejected"):
            row[name] = " " + words(generator, 3, 6)
        rows.append(row)
    return Dataset.from_list(rows)


def unpaired():
    """Return the chosen completions of `long_prompts`, or the rejected ones, with labels."""
    rows = []
    for index, row in enumerate(long_prompts()):
        name = ("rejected", "chosen")[index % 2]
        rows.append({"prompt": row["prompt"], "completion": row[name], "label": bool(index % 2)})
    return Dataset.from_list(rows)


def longest(completions, **_):
    return [float(len(text)) for text in completions]


IN_ORDER = {"train_sampling_strategy": "sequential", "max_steps": 3}
ONLINE = {
    "mask_truncated_completions": True, "max_completion_length": 2, "num_generations": 2, "max_steps": 4,
    "trainer": {"reward_funcs": [longest]},
}  # fmt: skip
TRAINERS = {
    "trainer": (
        transformers.Trainer, transformers.TrainingArguments, tokenized,
        {**IN_ORDER, "trainer": {"data_collator": transformers.DataCollatorForSeq2Seq(tokenizer())}},
    ),
    "sft": (SFTTrainer, SFTConfig, tokenized, {**IN_ORDER, "max_length": None}),
    "dpo": (
        DPOTrainer, DPOConfig, long_prompts,
        {**IN_ORDER, "trainer": {"data_collator": DataCollatorForPreference(pad_token_id=0, max_length=MAX_LENGTH)}},
    ),
    "kto": (
        KTOTrainer, KTOConfig, unpaired,
        {**IN_ORDER, "loss_type": "apo_zero_unpaired", "trainer": {
            "data_collator": DataCollatorForUnpairedPreference(pad_token_id=0, max_length=MAX_LENGTH)
        }},
    ),
    "grpo": (GRPOTrainer, GRPOConfig, prompts, ONLINE),
    "rloo": (RLOOTrainer, RLOOConfig, prompts, ONLINE),
}  # fmt: skip
LAYOUTS = {
    "accumulated": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2},
    "batch of two": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1},
}
STREAM = {
    "sft": (StreamSFTTrainer, StreamSFTConfig),
    "dpo": (StreamDPOTrainer, StreamDPOConfig),
    "grpo": (StreamGRPOTrainer, StreamGRPOConfig),
}


@contextlib.contextmanager
def launched(monkeypatch):
    """Context manager that changes transformers and TRL as `streambp launch` does, for a time."""
    with monkeypatch.context() as changes:
        changes.setattr(process.atexit, "register", lambda function, **_: None)
        changes.setenv(SETTINGS_VARIABLE, settings_from_fields(FIELDS).to_json())
        changes.setattr(transformers.Trainer, "__init__", transformers.Trainer.__init__)
        for name in TRL_HEAD_TRAINERS:
            module = sys.modules[f"trl.trainer.{name}_trainer"]
            changes.setattr(module, "add_fused_lm_head", module.add_fused_lm_head)
        hook = ImportHook()
        for name, change in hook.actions.items():
            change(sys.modules[name])
        yield


def trained(kind, door, setup, layout, folder, folders, monkeypatch):
    """Return the log, the weights and the trainer of a run that came through a door: "unpatched",
    "stream", "patch" or "launch"."""
    trainer, config, data, settings = TRAINERS[kind]
    settings = {**settings, **LAYOUTS[layout]}
    source = {"model": str(folders["qwen2" if setup == "tied" else "qwen3"])}
    lora = peft.LoraConfig(**SETUPS[setup], init_lora_weights=False)
    seed_torch(3)  # of the adapters
    if kind == "trainer":
        model = transformers.AutoModelForCausalLM.from_pretrained(source["model"], dtype="auto")
        source["model"] = peft.get_peft_model(model, lora) if SETUPS[setup] else model
    else:
        source["model_init_kwargs"] = {"dtype": "auto"}
        if SETUPS[setup]:
            settings["trainer"] = {**settings.get("trainer", {}), "peft_config": lora}
    if door == "stream":
        trainer, config = STREAM[kind]
        settings |= STREAM_ARGUMENTS
    if door == "patch":
        settings["patch_with"] = streambp.StreamConfig(**FIELDS)
    with launched(monkeypatch) if door == "launch" else contextlib.nullcontext():
        log, weights, trainer = train(trainer, config, data(), folder, **source, **settings)
    is_patched = any("_streambp" in vars(module) for module in trainer.model.modules())
    assert is_patched == (door != "unpatched")
    return log, weights, trainer


def check(kind, door, setup, layout, folder, folders, monkeypatch, weights_by_case):
    """The trainer's weights are finite, and those of the unpatched trainer."""
    run = functools.partial(
        trained, setup=setup, layout=layout, folder=folder, folders=folders, monkeypatch=monkeypatch
    )
    case = (kind, setup, layout)
    if case not in weights_by_case:
        weights_by_case[case] = run(kind, "unpatched")[:2]
    log, expected = weights_by_case[case]
    norms = [step["grad_norm"] for step in log]
    assert 0.0 in norms, norms
    assert max(norms) > 0.0
    _, weights, _ = run(kind, door)
    assert all(weight.isfinite().all() for weight in weights.values())
    assert worst_error(weights, expected) <= 1e-9


DOORS = {
    "sft": ("stream", "patch", "launch"),
    "trainer": ("patch", "launch"),
    "dpo": ("stream", "launch"),
    "kto": ("launch",),
    "grpo": ("stream", "launch"),
    "rloo": ("launch",),
}


def cases(*kinds):
    """Return pairs of the kinds of trainers and their doors."""
    return [(kind, door) for kind in kinds for door in DOORS[kind]]


@pytest.mark.fast("tied-accumulated-sft-stream", "lora-accumulated-trainer-launch")
@pytest.mark.parametrize(("kind", "door"), cases("sft", "trainer"))
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("setup", SETUPS)
def test_steps_without_labels(
    kind, setup, layout, door, tmp_path, folders, monkeypatch, weights_by_case
):
    check(kind, door, setup, layout, tmp_path, folders, monkeypatch, weights_by_case)


@pytest.mark.full
@pytest.mark.parametrize(("kind", "door"), cases("dpo", "kto", "grpo", "rloo"))
@pytest.mark.parametrize("setup", SETUPS)
def test_steps_without_completions(
    kind, setup, door, tmp_path, folders, monkeypatch, weights_by_case
):
    """GRPO's and RLOO's completions are truncated, which leaves a group of two without a token."""
    check(kind, door, setup, "batch of two", tmp_path, folders, monkeypatch, weights_by_case)


COUNTS = (None, 0, torch.tensor(0), torch.tensor(7))


def step_of_no_label(trainer, count):
    """Return the loss and the gradients of a micro-batch without a label, which a trainer divides
    by a count, and the warnings that name it."""
    batch = list(trainer.get_train_dataloader())[1]
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    trainer.model.zero_grad()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loss = trainer.compute_loss(trainer.model, dict(batch), num_items_in_batch=count)
    loss.backward()
    gradients = {
        name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None
    }
    return loss.detach(), gradients, [w for w in caught if EMPTY in str(w.message)]


def check_counts(kind, setup, door, folder, folders, monkeypatch):
    """The gradients that are finite unpatched are finite and equal, whatever the count."""
    # the trainers are made, and do not train
    monkeypatch.setattr(transformers.Trainer, "train", lambda self: None)
    expected, ours = (
        trained(kind, name, setup, "batch of two", folder, folders, monkeypatch)[2]
        for name in ("unpatched", door)
    )
    messages = []
    for count in COUNTS:
        _, expected_gradients, _ = step_of_no_label(expected, count)
        loss, gradients, warned = step_of_no_label(ours, count)
        check_like_unpatched(gradients, expected_gradients, by_entry=True)
        assert loss.isfinite()
        assert kind not in ("trainer", "sft") or loss == 0.0
        messages += warned
    assert len(messages) == 1


@pytest.mark.fast("tied-trainer-patch", "head saved-sft-stream", "lora-dpo-stream")
@pytest.mark.parametrize(("kind", "door"), cases("trainer", "sft", "dpo", "kto"))
@pytest.mark.parametrize("setup", SETUPS)
def test_counts_of_a_step_without_labels(kind, setup, door, tmp_path, folders, monkeypatch):
    check_counts(kind, setup, door, tmp_path, folders, monkeypatch)


def nan_of_empty_batches(monkeypatch):
    """Make gradients of the head NaN where no token has a label."""

    def results(self, *arguments, real=HeadGradients.results):
        gradients = real(self, *arguments)
        if self.inputs.labelled:
            return gradients
        return tuple(None if x is None else x + torch.nan for x in gradients)

    monkeypatch.setattr(HeadGradients, "results", results)


def test_mutant_of_counts(tmp_path, folders, monkeypatch):
    nan_of_empty_batches(monkeypatch)
    with pytest.raises((AssertionError, streambp.StreamBPError)):
        check_counts("trainer", "tied", "patch", tmp_path, folders, monkeypatch)


@pytest.mark.full
@pytest.mark.parametrize("door", ["stream", "patch", "launch"])
@pytest.mark.parametrize("setup", ["tied", "head saved"])
def test_mutant(setup, door, tmp_path, folders, monkeypatch, weights_by_case):
    arguments = (tmp_path, folders, monkeypatch, weights_by_case)
    check("sft", door, setup, "accumulated", *arguments)
    nan_of_empty_batches(monkeypatch)
    with pytest.raises((AssertionError, streambp.StreamBPError)):
        check("sft", door, setup, "accumulated", *arguments)
