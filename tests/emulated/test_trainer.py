"""HF's Trainer on the emulated device: it trains as the unpatched model does on the CPU, through
all that a run has.

covers: model/patching.py, model/wrappers.py
"""

from __future__ import annotations

import pytest
import torch
from transformers import Trainer, TrainingArguments

import streambp
from tests.families import build, make_batch
from tests.oracle import MAX_FLOAT64_ERROR
from tests.tiers import thinned

pytestmark = pytest.mark.emulated(any=True)
ROWS = [
    {name: x[0] for name, x in make_batch("plain", seed=seed, rows=1, device="cpu").items()}
    for seed in range(8)
]


EPSILON = 1e-3  # AdamW divides by the gradient's size plus this: where that is rounding alone, a step is what rounding says
PARAMETERS = {"rtol": MAX_FLOAT64_ERROR, "atol": MAX_FLOAT64_ERROR}
FLOAT = torch.Tensor.float  # torch's own, beside `float64_oracle`


def train(folder, device, config, resume=False, **arguments):
    """The trainer after 4 steps of 2 micro-batches, or after 2 and their checkpoint's other 2."""
    model = build("qwen3", torch.float64, device="cpu")
    if config is not None:
        streambp.patch(model, config)
    settings = {
        "gradient_accumulation_steps": 2, "per_device_train_batch_size": 1, "max_grad_norm": 0.5, "learning_rate": 1e-3,
        "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "report_to": [], "seed": 3, "disable_tqdm": True,
    }  # fmt: skip
    settings |= {
        "use_cpu": device.type == "cpu",
        "max_steps": 4,
        "save_strategy": "steps",
        "save_steps": 2,
        "adam_epsilon": EPSILON,
        **arguments,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_TORCH_DEVICE", device.type)
        trainer = Trainer(
            model,
            TrainingArguments(str(folder), **settings),
            train_dataset=ROWS,
            eval_dataset=ROWS[:3],
        )
        assert trainer.args.device.type == device.type
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2") if resume else None)
    assert {p.device.type for p in model.parameters()} == {device.type}
    return trainer


def logged_values(trainer):
    """Losses, norms and evaluations as logged."""
    names = ("loss", "grad_norm", "eval_loss")
    return [
        float(entry[name]) for entry in trainer.state.log_history for name in names if name in entry
    ]


def parameters(model):
    return [parameter.detach().cpu() for parameter in model.parameters()]


@pytest.mark.usefixtures("float64_oracle")
@pytest.mark.parametrize("offload", thinned(["none", "cpu"], lambda offload: offload == "cpu"))
def test_it_trains_as_unpatched_and_goes_on_from_a_checkpoint(offload, device, tmp_path):
    config = streambp.StreamConfig(chunk_size=7, saves=("attn_out",), offload=offload)
    plain = train(tmp_path / "plain", torch.device("cpu"), None)
    ours = train(tmp_path / "ours", device, config)
    resumed = train(tmp_path / "ours", device, config, resume=True)
    assert len(logged_values(plain)) == 12
    for trainer in (ours, resumed):
        torch.testing.assert_close(
            logged_values(trainer), logged_values(plain), rtol=MAX_FLOAT64_ERROR, atol=0
        )
        torch.testing.assert_close(parameters(trainer.model), parameters(plain.model), **PARAMETERS)


def scaled(device, config, use_float16):
    """Losses, norms and parameters of 3 steps of 2 micro-batches, by hand: accelerate knows makers
    by name.

    use_float16: under float16 autocast; without, in float64.
    """
    model = build("qwen3", torch.float32 if use_float16 else torch.float64, device=device)
    if config is not None:
        streambp.patch(model, config)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, eps=EPSILON)
    scaler = torch.amp.GradScaler(device.type)
    values = []
    for number in range(3):
        for part in range(2):
            batch = make_batch("left-padded", seed=2 * number + part, device=device)
            with torch.autocast(device.type, torch.float16, enabled=use_float16):
                loss = model(**batch, use_cache=False).loss / 2
            scaler.scale(loss).backward()
            values.append(loss.item())
        with pytest.MonkeyPatch.context() as patch:
            # the kernel takes no factor but one in float32
            patch.setattr(torch.Tensor, "float", FLOAT)
            scaler.unscale_(optimizer)
        values.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() == 2.0**16  # no step was left out
    return values, parameters(model)


CONFIG = streambp.StreamConfig(chunk_size=7, saves=("attn_out",), offload="cpu")


def test_a_gradient_scaler_in_half_precision(device):
    ours, theirs = scaled(device, CONFIG, use_float16=True), scaled(device, None, use_float16=True)
    torch.testing.assert_close(ours[0], theirs[0], rtol=2e-3, atol=0)


@pytest.mark.usefixtures("float64_oracle")
def test_a_gradient_scaler_is_exact(device):
    ours, truth = (
        scaled(device, CONFIG, use_float16=False),
        scaled(torch.device("cpu"), None, use_float16=False),
    )
    torch.testing.assert_close(ours[0], truth[0], rtol=MAX_FLOAT64_ERROR, atol=0)
    torch.testing.assert_close(ours[1], truth[1], **PARAMETERS)
