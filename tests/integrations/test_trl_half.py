"""TRL's own trainers in half precision, as its tests have them: gpt-oss in DPO, a float16 model in
KTO's bfloat16.

covers: admission/own_run.py, layer/choices.py, layer/recompute.py
"""

from __future__ import annotations

import copy

import pytest
import torch

import streambp
from tests import zoo
from tests.families import VOCABULARY, build
from tests.seeds import seeded

pytest.importorskip("trl", reason="TRL is not installed")
pytest.importorskip("peft", reason="peft is not installed")

from datasets import Dataset
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer

from tests.integrations.test_trl import pairs, tokenizer, words


def losses(trainer_class, config_class, model, data, folder, config=None, **settings):
    """Of a few steps of one of TRL's trainers, as it comes or with a patched model; and which
    weights have changed."""
    model, reference = copy.deepcopy(model), copy.deepcopy(model)
    weights_before = {name: p.detach().clone() for name, p in model.named_parameters()}
    if config is not None:
        streambp.patch(model, config)
    arguments = config_class(
        output_dir=str(folder), max_steps=3, per_device_train_batch_size=2, learning_rate=1e-1, optim="sgd", use_cpu=True,
        logging_steps=1, report_to=[], save_strategy="no", disable_tqdm=True, seed=0, **settings,
    )  # fmt: skip
    trainer = trainer_class(
        model=model,
        ref_model=reference,
        args=arguments,
        train_dataset=data,
        processing_class=tokenizer(),
    )
    trainer.train()
    changed_names = [
        name for name, p in model.named_parameters() if not torch.equal(p, weights_before[name])
    ]
    return [row["loss"] for row in trainer.state.log_history if "loss" in row], changed_names, model


def compare(*args, **settings):
    expected, trained, _ = losses(*args, **settings)
    for config in (streambp.StreamConfig(), streambp.StreamConfig(chunk_size=5, saves=())):
        our_losses, changed_names, model = losses(*args, config=config, **settings)
        assert our_losses == pytest.approx(expected, rel=2e-2)
        assert changed_names == trained
        assert trained
        assert {layer.path for layer in streambp.describe(model).layers} <= {
            "streams",
            "as unpatched",
        }


@pytest.mark.full
def test_dpo_of_gpt_oss(tmp_path):
    model = zoo.build("gpt_oss", torch.bfloat16, seed=0, vocab_size=VOCABULARY)
    compare(DPOTrainer, DPOConfig, model, pairs(), tmp_path)


@pytest.mark.full
def test_kto_of_a_float16_model(tmp_path):
    generator = seeded(0)
    rows = [
        {
            "prompt": words(generator, 6, 9),
            "completion": " " + words(generator, 2, 6),
            "label": i % 2 == 0,
        }
        for i in range(12)
    ]
    compare(
        KTOTrainer,
        KTOConfig,
        build("llama", torch.float16),
        Dataset.from_list(rows),
        tmp_path,
        bf16=True,
    )
