"""Training programs that know nothing of streambp, as files to run.

python programs.py KIND OUTPUT: KIND is one of those below. OUTPUT gets the losses and the weights, before and after.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Trainer, TrainingArguments

VOCABULARY, LENGTH, STEPS, RATE = 96, 21, 3, 0.5


def model_of(seed=0):
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=8, max_position_embeddings=64, initializer_range=0.3,
        )
    )  # fmt: skip


def rows(count=2 * STEPS):
    ids = torch.randint(0, VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in ids]


def arguments(output, **options):
    return TrainingArguments(
        str(output.parent / "trainer"), report_to=[], per_device_train_batch_size=2, optim="sgd", learning_rate=RATE,
        lr_scheduler_type="constant", max_grad_norm=0.0, max_steps=STEPS, logging_steps=1, save_strategy="no",
        disable_tqdm=True, use_cpu=True, **options,
    )  # fmt: skip


def right(prediction):
    """A metric that needs logits."""
    return {"right": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def reward(completions, **fields):
    """For GRPO: how often the letter that starts every word is followed by a 1."""
    return [float(text.count("w1")) for text in completions]


def trainer(output):
    """Evaluation with logits; the model is trainer by `model_init`, twice."""
    hf_trainer = Trainer(
        args=arguments(output, per_device_eval_batch_size=2), model_init=lambda: model_of(), train_dataset=rows(),
        eval_dataset=rows(2), compute_metrics=right,
    )  # fmt: skip
    hf_trainer.train()
    metrics = hf_trainer.evaluate()
    losses = [step["loss"] for step in hf_trainer.state.log_history if "loss" in step]
    return (
        hf_trainer.model,
        losses,
        {"right": metrics["eval_right"], "eval_loss": metrics["eval_loss"]},
    )


def empty_row(output):
    """A row without labels, and a step of two such rows."""
    data = rows()
    for index in (1, 2, 3):
        data[index]["labels"] = torch.full_like(data[index]["labels"], -100)
    options = arguments(output, train_sampling_strategy="sequential", logging_nan_inf_filter=False)
    trainer = Trainer(model_of(), options, train_dataset=data)
    trainer.train()
    losses = [step["loss"] for step in trainer.state.log_history if "loss" in step]
    return trainer.model, losses, {}


def loop(output):
    """Without Trainer; twice the same model, once from its files."""
    losses = []
    first = model_of()
    first.save_pretrained(output.parent / "saved")
    for model in (first, Qwen3ForCausalLM.from_pretrained(output.parent / "saved")):
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        for step in range(STEPS):
            ids = torch.stack([row["input_ids"] for row in rows()[2 * step : 2 * step + 2]])
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    return model, losses, {}


def padded_rows(number):
    """A batch of two rows, one of them with padding on the right."""
    ids = torch.stack([row["input_ids"] for row in rows()[2 * number : 2 * number + 2]])
    mask = torch.ones_like(ids)
    mask[1, LENGTH - 8 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def statistics_of(logits, mask=None):
    logits = logits.float() if mask is None else logits.float()[mask.bool()]
    return {"squares": logits.square().mean(), "logsumexp": logits.logsumexp(-1).mean()}


def statistics(output):
    """Statistics over all logits, padding included, in training and in evaluation; one of them is
    in the loss."""
    model, losses, metrics = model_of().train(), [], {}
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(STEPS):
        outputs = model(**padded_rows(step))
        values = statistics_of(outputs.logits)
        loss = outputs.loss + 1e-2 * values["squares"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        metrics |= {f"{name} {step}": float(value.detach()) for name, value in values.items()}
    model.eval()
    with torch.no_grad():
        evaluated = statistics_of(model(**padded_rows(0)).logits)
    metrics |= {f"evaluated {name}": float(value) for name, value in evaluated.items()}
    return model, losses, metrics


KINDS = {"trainer": trainer, "empty row": empty_row, "loop": loop, "statistics": statistics}


def main():
    kind, output = sys.argv[1], Path(sys.argv[2])
    model, losses, metrics = KINDS[kind](output)
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    torch.save({"losses": losses, "weights": weights, **metrics}, output)


if __name__ == "__main__":
    main()
