"""Losses that models and users write on logits that do not exist: computed exactly, and without
logits where possible.

covers: lazy/lazy_hidden.py
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import streambp
from tests.families import VOCABULARY, build, make_batch
from tests.oracle import gradients, worst_error

pytestmark = pytest.mark.usefixtures("float64_oracle")


def flat(logits, labels):
    return F.cross_entropy(logits.reshape(-1, VOCABULARY), labels.flatten())


def halved_in_place(logits, labels):
    logits.mul_(0.5)
    return flat(logits, labels)


def forbidden(logits, labels):
    """As Chameleon keeps its image tokens out of the loss."""
    logits = logits / 2.0
    logits[:, :, 7:9] = -9.0
    return flat(logits[:, :-1], labels[:, 1:].clamp(max=6))


BLOCKWISE = {
    "labelled positions": lambda z, y: F.cross_entropy(
        z[:, :-1][y[:, 1:] > 9], y[:, 1:][y[:, 1:] > 9]
    ),
    "last position": lambda z, y: F.cross_entropy(z[:, -1], y[:, -1]),
    "chosen positions": lambda z, y: flat(z[:, torch.tensor([1, 5, 7])], y[:, [2, 6, 8]]),
    "parts of the tokens": lambda z, y: sum(
        F.cross_entropy(part.flatten(0, 1), labels.flatten())
        for part, labels in zip(z.split(4, 1), y.split(4, 1), strict=True)
    ),
    "a narrow part, with a dimension more and less": lambda z, y: flat(
        z.narrow(1, 2, 5).unsqueeze(0).squeeze(0).contiguous(), y[:, 2:7]
    ),
    "each position": lambda z, y: sum(
        F.cross_entropy(row, y[:, i]) for i, row in enumerate(z.unbind(1))
    ),
    "tokens transposed": lambda z, y: flat(z.transpose(0, 1), y.T.contiguous()),
    "squares": lambda z, y: (
        F.cross_entropy(z.view(-1, VOCABULARY), y.flatten(), reduction="none").square().mean()
    ),
    "two losses": lambda z, y: flat(z, y) * flat(z / 2.0, y.roll(1, 1)),
    "a bias": lambda z, y: flat(z + torch.linspace(-1.0, 1.0, VOCABULARY)[None], y),
    "a bias of zeros, and a scale": lambda z, y: flat((z + torch.zeros(VOCABULARY)) * 0.5, y),
    "a scaled bias": lambda z, y: flat((z + torch.linspace(-1.0, 1.0, VOCABULARY)) / 2.0, y),
    "by keyword": lambda z, y: F.cross_entropy(
        input=torch.mul(input=z, other=0.5).view(-1, VOCABULARY), target=y.flatten()
    ),
    "a bias by keyword": lambda z, y: flat(
        torch.add(input=z, other=torch.linspace(-1.0, 1.0, VOCABULARY)), y
    ),
}
COMPLETE_TENSOR_USES = {
    "classes second": lambda z, y: F.cross_entropy(z.transpose(1, 2), y),
    "label smoothing": lambda z, y: F.cross_entropy(
        z.view(-1, VOCABULARY), y.flatten(), label_smoothing=0.1
    ),
    "a part of the vocabulary": lambda z, y: F.cross_entropy(
        z[..., :40].reshape(-1, 40), y.flatten().clamp(max=39)
    ),
    "tokens in the last dimension": lambda z, y: flat(z.view(z.shape[0], -1), y),
    "a shape by keyword": lambda z, y: flat(z.reshape(shape=(-1, VOCABULARY)), y),
    "into a given tensor": lambda z, y: flat(torch.mul(z, 0.5, out=None), y),
    "soft targets": lambda z, y: F.cross_entropy(
        torch.eye(z.shape[1], VOCABULARY, dtype=torch.float64), z[0]
    ),
    "divided by nothing": lambda z, y: flat(z, y) * (z / 0).detach().isinf().double().mean(),
    "a bias after a scale": lambda z, y: flat(z / 2.0 + torch.linspace(-1.0, 1.0, VOCABULARY), y),
    "two biases": lambda z, y: flat(z + torch.ones(VOCABULARY) + torch.ones(VOCABULARY), y),
    "a bias for each token": lambda z, y: flat(
        z + torch.linspace(-1.0, 1.0, z.shape[1] * VOCABULARY).view(-1, VOCABULARY), y
    ),
    "a number is added": lambda z, y: flat(z + 1.0, y),
    "written": halved_in_place,
    "a copy that is written": lambda z, y: (
        flat(z[:, :-1].contiguous().mul_(0.5), y[:, 1:]) * flat(z, y)
    ),
    "forbidden": forbidden,
}


@pytest.mark.fast(4)
@pytest.mark.parametrize(
    ("family", "name"),
    [
        pytest.param(
            family, name, marks=() if family == "qwen3" or number % 3 == 0 else pytest.mark.full
        )
        for family in ("qwen3", "gemma3")
        for number, name in enumerate([*BLOCKWISE, *COMPLETE_TENSOR_USES])
    ],
)
def test_loss_on_logits(family, name):
    loss = {**BLOCKWISE, **COMPLETE_TENSOR_USES}[name]
    runs = []
    for patched in (False, True):
        model = build(family, torch.float64)
        model.loss_function = lambda logits, labels, *_, **__: loss(logits, labels)
        if patched:
            streambp.patch(model, streambp.StreamConfig(chunk_size=5))
        runs.append(gradients(model, **make_batch("plain")))
    (expected_loss, expected), (found_loss, our_gradients) = runs
    assert abs(found_loss - expected_loss) <= 1e-12 * abs(expected_loss)
    assert worst_error(our_gradients, expected) <= 1e-10
    capped = family == "gemma3" and "bias" in name  # no rule adds a bias to capped logits
    blockwise = name in BLOCKWISE and not capped
    assert streambp.describe(model).head.startswith(
        "blockwise" if blockwise else "builds the logits"
    )


def test_writing_through_a_slice_is_refused():
    model = streambp.patch(build("qwen3", torch.float64), streambp.StreamConfig(chunk_size=5))
    model.loss_function = lambda logits, labels, *_, **__: (
        logits[:, 2:].mul_(0.5),
        flat(logits, labels),
    )[1]
    with pytest.raises(streambp.StreamBPError, match=r"mul_.*head=False"):
        model(**make_batch("plain"), use_cache=False)
