"""Tensors that public functions take: each refuses what does not fit by the argument's name, before
torch does.

covers: tensors.py, head/log_probs.py, integrations/token_batches.py, losses/masked.py,
losses/ppo.py
"""

from __future__ import annotations

import inspect

import pytest
import torch

import streambp
from streambp import tensors
from streambp.head import token_log_probs
from streambp.integrations import TokenBatchSampler
from streambp.losses import gae, ppo_loss, whiten
from tests.seeds import seeded

ROWS, LENGTH, WIDTH, VOCABULARY = 2, 5, 8, 11


def tokens(*shape):
    return torch.randn(*shape, generator=seeded(0))


def mask_of_ones():
    return torch.ones(ROWS, LENGTH, dtype=torch.bool)


def of_ppo(*names):
    return {name: tokens(ROWS, LENGTH) for name in names} | {"mask": mask_of_ones()}


# Each function, and arguments that it takes; those that end in "mask" may be of any kind.
FUNCTIONS = {
    token_log_probs: lambda: {
        "hidden_states": tokens(ROWS, LENGTH, WIDTH),
        "weight": tokens(VOCABULARY, WIDTH),
        "labels": torch.randint(VOCABULARY, (ROWS, LENGTH), generator=seeded(1)),
        "bias": tokens(VOCABULARY),
    },
    ppo_loss: lambda: of_ppo(
        "log_probs", "old_log_probs", "advantages", "values", "old_values", "returns", "entropy"
    ),
    gae: lambda: of_ppo("rewards", "values"),
    whiten: lambda: of_ppo("values"),
}
ARGUMENTS = [(function, name) for function, make in FUNCTIONS.items() for name in make()]


def wrong(name, good):
    """Values that an argument may not have."""
    yield "no tensor", good.tolist()
    yield "dimensions", good[None]
    yield "dimensions", good[0]
    if good.dim() > 1:
        yield "a size", good[:, :-1]
    if not name.endswith("mask"):
        yield "a kind", good.long() if good.is_floating_point() else good.float()
        yield "a kind", good > 0


@pytest.mark.parametrize(("function", "name"), ARGUMENTS)
def test_what_does_not_fit_is_refused_by_name(function, name):
    arguments = FUNCTIONS[function]()
    function(**arguments)
    for aspect, value in wrong(name, arguments[name]):
        # "..." fits by itself; then labels do not
        fitting = name == "hidden_states" and aspect == "dimensions"
        with pytest.raises(streambp.StreamBPError) as error:
            function(**{**arguments, name: value})
        text = str(error.value)
        assert any(text.startswith(f"{argument} ") for argument in arguments), text
        assert fitting or f"{name} " in text, (aspect, text)
        assert "must be" in text


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_table_has_all_tensors(function):
    """So that an argument that comes is tried, too."""
    annotated = inspect.signature(function).parameters.items()
    assert {name for name, parameter in annotated if "Tensor" in str(parameter.annotation)} == set(
        FUNCTIONS[function]()
    )


def test_the_table_has_all_functions():
    public = [
        getattr(module, name)
        for module in (streambp.head, streambp.losses)
        for name in module.__all__
    ]
    functions = [function for function in public if inspect.isfunction(function)]
    takes_tensors = {
        function
        for function in functions
        if "Tensor" in str([*inspect.signature(function).parameters.values()])
    }
    assert takes_tensors == set(FUNCTIONS)


WRONG_LENGTHS = [
    torch.tensor([[3, 4]]),
    torch.tensor(3),
    torch.tensor([3.0]),
    [3.5, 2],
    ["a"],
    [[3], [4]],
    None,
    5,
]


@pytest.mark.parametrize("lengths", WRONG_LENGTHS, ids=str)
def test_lengths_that_are_none_are_refused(lengths):
    with pytest.raises(
        streambp.errors.ConfigError, match=r"lengths is .*one whole number for each row"
    ):
        TokenBatchSampler(lengths, 10)


@pytest.mark.parametrize(
    "numbers", [{"tokens": 10.5}, {"tokens": "10"}, {"window": 2.0}, {"num_replicas": None}]
)
def test_numbers_of_a_sampler_are_whole(numbers):
    with pytest.raises(streambp.errors.ConfigError, match="must be whole numbers from 1"):
        TokenBatchSampler([3], **{"tokens": 10, **numbers})


def test_lengths_may_be_a_tensor_or_an_array():
    batches = [list(TokenBatchSampler(make([3, 4, 5]), 9)) for make in (list, torch.tensor, array)]
    assert batches[0] == batches[1] == batches[2]


def array(numbers):
    return torch.tensor(numbers).numpy()


def test_a_check_that_lets_kinds_through_is_found(monkeypatch):
    monkeypatch.setattr(tensors, "_is_dtype_kind", lambda dtype, kind: True)
    with pytest.raises((AssertionError, RuntimeError, pytest.fail.Exception)):
        test_what_does_not_fit_is_refused_by_name(token_log_probs, "labels")
