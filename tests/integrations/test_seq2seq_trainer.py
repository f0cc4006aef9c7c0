"""transformers' trainers with models of two stacks, ten steps, against the same steps unpatched.

covers: admission/stacks.py, admission/t5_bias.py, model/causal_lm.py, lazy/loss_rules.py
"""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments
from transformers.models.t5 import modeling_t5

import streambp
from streambp.attention import masks
from streambp.errors import StreamBPError
from streambp.layer.function import BackwardPass
from streambp.lazy import row_rules
from tests.admission import test_biased
from tests.model import test_encoder_decoders
from tests.oracle import MAX_FLOAT64_ERROR, worst_error
from tests.seeds import seed_of
from tests.sharded.test_bidirectional import paligemma

pytest.importorskip("accelerate", reason="Trainer needs accelerate")

STEPS = 10
MAX_TOKENS = 22  # 3 chunks of 7, and one token
CHUNK = 7
START, END, FIRST, IMAGE, LAST = 2, 2, 3, 60, 59  # tokens; those of texts are FIRST to LAST

pytestmark = pytest.mark.usefixtures("float64_everywhere", "float64_totals")

SUPPORTS_T5 = hasattr(modeling_t5, "eager_attention_forward")
WHY_NOT_T5 = "T5 of this transformers attends without the interface: its layers run unchunked"


@pytest.fixture
def float64_totals(monkeypatch):
    """Sums of label smoothing in float64, which transformers' Trainer asks for in float32."""
    real = torch.Tensor.sum

    def total(self, *args, dtype=None, **kwargs):
        if dtype is torch.float32 and self.dtype == torch.float64:
            dtype = torch.float64
        return real(self, *args, dtype=dtype, **kwargs)

    monkeypatch.setattr(torch.Tensor, "sum", total)


def text_of(length):
    return torch.randint(FIRST, LAST, (length,))


def lengths(longest):
    """Lengths of the texts of a data set, of which each batch of two has one of full length."""
    return [longest if row % 2 else int(torch.randint(3, longest, ())) for row in range(2 * STEPS)]


def texts():
    return [
        {"input_ids": text_of(source), "labels": text_of(target)}
        for source, target in zip(lengths(19), lengths(MAX_TOKENS)[::-1], strict=True)
    ]


def sounds():
    """Spectrograms [mels, frames] and their transcripts."""
    return [
        {"input_features": torch.randn(8, 40), "labels": text_of(length)}
        for length in lengths(MAX_TOKENS)
    ]


def collate(rows):
    """A batch of texts or sounds, with what a decoder reads, as DataCollatorForSeq2Seq makes it."""
    labels = pad_sequence([row["labels"] for row in rows], True, -100)
    read = labels.masked_fill(labels == -100, 0).roll(1, 1)
    read[:, 0] = START
    batch = {"labels": labels, "decoder_input_ids": read}
    if "input_features" in rows[0]:
        return batch | {"input_features": torch.stack([row["input_features"] for row in rows])}
    sources = [row["input_ids"] for row in rows]
    batch["input_ids"] = pad_sequence(sources, True, 0)
    batch["attention_mask"] = pad_sequence([torch.ones_like(source) for source in sources], True, 0)
    return batch


def images():
    """Pictures with a question, which reads ahead, and an answer, which does not."""
    rows = []
    for row in range(2 * STEPS):
        question = int(torch.randint(5, 10, ()))
        answer = MAX_TOKENS - 4 - question if row % 2 else int(torch.randint(1, 8, ()))
        ids = torch.cat([torch.full((4,), IMAGE), text_of(question + answer)])
        kinds = (torch.arange(len(ids)) >= 4 + question).long()
        picture = torch.randn(3, 16, 16)
        rows.append({"input_ids": ids, "token_type_ids": kinds, "pixel_values": picture})
    return rows


def collate_images(rows):
    ids, kinds = (
        pad_sequence([row[name] for row in rows], True, 0)
        for name in ("input_ids", "token_type_ids")
    )
    return {
        "input_ids": ids, "token_type_ids": kinds, "attention_mask": (ids != 0).long(),
        "labels": ids.masked_fill(kinds == 0, -100),
        "pixel_values": torch.stack([row["pixel_values"] for row in rows]),
    }  # fmt: skip


MODEL_BUILDERS = {
    "bart": test_encoder_decoders.MODEL_BUILDERS["bart"],
    "t5": functools.partial(test_biased.model_of, "t5"),
    "whisper": test_encoder_decoders.MODEL_BUILDERS["whisper"],
    "paligemma": paligemma,
}
LAYERS = {"t5": 6}
TOWERS = {
    "bart": "left as it is: BartEncoder", "whisper": "left as it is: WhisperEncoder",
    "paligemma": "left as it is: SiglipVision",
}  # fmt: skip
DATA = {"bart": texts, "t5": texts, "whisper": sounds, "paligemma": images}
FORMS = {
    "plain": {},
    "label smoothing": {"label_smoothing_factor": 0.2},
    "lazy label smoothing": {"label_smoothing_factor": 0.2},
    "accumulation": {"gradient_accumulation_steps": 2},
    "generation": {"predict_with_generate": True, "generation_max_length": 9},
}


def train(model, name, rows, folder, steps, **settings):
    """Train by SGD; returns the trainer and the weights' changes."""
    weights_before = {name: p.detach().clone() for name, p in model.named_parameters()}
    kinds = Seq2SeqTrainer, Seq2SeqTrainingArguments, collate
    if name == "paligemma":
        kinds = Trainer, TrainingArguments, collate_images
    make_trainer, make_arguments, collator = kinds
    arguments = make_arguments(
        str(folder), max_steps=steps, per_device_train_batch_size=2, optim="sgd", learning_rate=0.05,
        lr_scheduler_type="constant", max_grad_norm=1.0, logging_steps=1, report_to=[], save_strategy="no",
        use_cpu=True, disable_tqdm=True, seed=seed_of(5), remove_unused_columns=False, **settings,
    )  # fmt: skip
    trainer = make_trainer(model, arguments, collator, train_dataset=rows)
    trainer.train()
    return trainer, {
        name: p.detach() - weights_before[name] for name, p in model.named_parameters()
    }


def logged(trainer, key):
    """A figure of each step, with all digits."""
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def check(name, form, folder, steps=STEPS):
    stock = MODEL_BUILDERS[name]().train()
    config = streambp.StreamConfig(chunk_size=CHUNK, lazy_logits=form.startswith("lazy"))
    ours = streambp.patch(copy.deepcopy(stock), config)
    rows = DATA[name]()
    expected, expected_changes = train(stock, name, rows, folder, steps, **FORMS[form])
    our_trainer, changes = train(ours, name, rows, folder, steps, **FORMS[form])
    for key in ("loss", "grad_norm"):
        assert len(logged(expected, key)) == steps
        assert logged(our_trainer, key) == pytest.approx(logged(expected, key), rel=1e-10, abs=0.0)
    assert min(logged(expected, "grad_norm")) > 0.1  # each step moved the weights
    assert worst_error(changes, expected_changes) <= MAX_FLOAT64_ERROR
    if form == "generation":
        our_output, stock_output = (
            trainer.predict(rows[:6]) for trainer in (our_trainer, expected)
        )
        assert (our_output.predictions == stock_output.predictions).all()
        assert our_output.metrics["test_loss"] == pytest.approx(
            stock_output.metrics["test_loss"], rel=1e-10
        )
    assert min(logged(our_trainer, "stream_chunks")) >= 2
    assert max(logged(our_trainer, "stream_whole_layers")) == 0
    described = streambp.describe(ours)
    assert [layer.path for layer in described.layers] == ["streams"] * LAYERS.get(name, 2)
    if name in TOWERS:
        assert TOWERS[name] in str(described)
    else:
        assert "left as it is" not in str(described)
    # Label smoothing takes the labels out of the call, and a loss from logits.
    builds_logits = form == "label smoothing"
    assert ("from logits [B, T, V]" in str(described)) == builds_logits


def cases():
    for name in MODEL_BUILDERS:
        skip = pytest.mark.skipif(name == "t5" and not SUPPORTS_T5, reason=WHY_NOT_T5)
        for form in FORMS:
            if (name, form) != ("paligemma", "generation"):
                yield pytest.param(name, form, marks=skip)


@pytest.mark.fast("paligemma-plain")
@pytest.mark.parametrize(("name", "form"), list(cases()))
def test_ten_steps(name, form, tmp_path):
    check(name, form, tmp_path)


MUTANTS = {
    "the encoder gets one chunk's gradient": (
        BackwardPass, "add", test_encoder_decoders.add_to_the_encoder_once, "whisper", "generation",
    ),
    "the encoder's padding is read": (
        masks.LazyMask, "to_key_mask", lambda self, is_added: None, "bart", "accumulation",
    ),
    "the bias loses one chunk's gradient": (
        BackwardPass, "add", test_biased.lose_one_chunk, "t5", "accumulation",
    ),
    "label smoothing of the other sign": (
        row_rules, "match_log_softmax",
        lambda node, real=row_rules.match_log_softmax: real(node) and (real(node)[0], 1.0),
        "whisper", "lazy label smoothing",
    ),
    "chunks end within an image's question": (
        masks, "find_barriers", lambda tile, length, device: (), "paligemma", "plain",
    ),
}  # fmt: skip


@pytest.mark.fast("label smoothing of the other sign", "chunks end within an image's question")
@pytest.mark.parametrize("mutant", list(MUTANTS))
def test_mutants(mutant, monkeypatch, tmp_path):
    module, attribute, replacement, name, form = MUTANTS[mutant]
    if name == "t5" and not SUPPORTS_T5:
        pytest.skip(WHY_NOT_T5)
    monkeypatch.setattr(module, attribute, replacement)
    with pytest.raises((AssertionError, StreamBPError)):
        check(name, form, tmp_path, steps=2)
