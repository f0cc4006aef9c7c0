"""The walks of docs/walks.md name functions that exist, in the order in which a step enters them.

covers: layer/function.py, layer/saved_tensors.py, model/wrappers.py
"""

from __future__ import annotations

import ast
import re
import sys
import threading
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import streambp
from tests.docs.pages import ROOT

PACKAGE = Path(streambp.__file__).parent
PAGE = ROOT / "docs" / "walks.md"
SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def steps_of(text):
    """Pairs of a file and a function or class: a name stands behind its file, and a method that has
    no file in front of it is one of the file named last."""
    steps, file = [], ""
    spans = re.finditer(r"`([\w/]+\.py)`(?:\s+`(\w+(?:\.\w+)?)`)?|`([A-Z]\w+\.\w+)`", text)
    for span in spans:
        file = span[1] or file
        name = span[2] or span[3]
        if name:
            steps.append((file, name))
    return steps


def definitions(source):
    """First lines of a module's functions, classes and methods, by their names."""
    lines = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            lines[node.name] = {line_of(node)}
        if isinstance(node, ast.ClassDef):
            methods = [child for child in node.body if isinstance(child, ast.FunctionDef)]
            lines[node.name] = {line_of(method) for method in methods}
            lines |= {f"{node.name}.{method.name}": {line_of(method)} for method in methods}
    return lines


def line_of(function):
    """The first line of a function's code object: that of its first decorator, if it has one."""
    return min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])


def entered(run):
    """Result of `run`, and the functions of the package that it enters: file and first line."""
    calls = []
    root = f"{PACKAGE}/"

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(root):
            file = frame.f_code.co_filename.removeprefix(root)
            calls.append((file, frame.f_code.co_firstlineno))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        result = run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return result, calls


def not_in_order(steps, calls):
    """The first step that is not entered after the step before; None: all are."""
    at = 0
    for file, name in steps:
        lines = definitions((PACKAGE / file).read_text("utf-8"))[name]
        lines_of_step = {(file, line) for line in lines}
        later = [number for number in range(at, len(calls)) if calls[number] in lines_of_step]
        if not later:
            return file, name
        at = later[0] + 1
    return None


@pytest.fixture(scope="module")
def step():
    """Calls of a warm step, forward and backward."""
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES))
    streambp.patch(model, streambp.StreamConfig(chunk_size=5, saves=("attn_out",)))
    input_ids = torch.randint(50, (1, 16))
    model(input_ids, labels=input_ids).loss.backward()
    loss, forward = entered(lambda: model(input_ids, labels=input_ids).loss)
    _, backward = entered(loss.backward)
    return forward, backward


def parts():
    """The walk of hidden_states, forward and backward, and the walk of saves."""
    first, _, saves = PAGE.read_text("utf-8").partition("## `saves`")
    forward, _, backward = first.partition("\nBackward")
    return tuple(map(steps_of, (forward, backward, saves)))


def test_walks_name_functions_that_exist():
    steps = [step for part in parts() for step in part]
    assert len(steps) > 30
    missing_functions = [
        f"{file} {name}"
        for file, name in steps
        if name not in definitions((PACKAGE / file).read_text("utf-8"))
    ]
    assert missing_functions == []


def test_a_step_enters_the_functions_in_the_order_of_the_walk(step):
    forward, backward, _ = parts()
    assert len(forward) > 10
    assert len(backward) > 5
    assert not_in_order(forward, step[0]) is None
    assert not_in_order(backward, step[1]) is None


def test_a_wrong_order_and_a_function_that_is_not_entered_are_found(step):
    swapped = [
        ("layer/saved_tensors.py", "SavedForBackward.keep"),
        ("admission/entry.py", "admit"),
    ] * 2
    assert not_in_order(swapped[:3], step[0]) is None  # a model of two layers
    assert not_in_order(swapped, step[0]) == ("admission/entry.py", "admit")
    unused = [("head/log_probs.py", "token_log_probs")]
    assert not_in_order(unused, step[0]) == unused[0]
