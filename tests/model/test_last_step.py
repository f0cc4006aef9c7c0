"""What a step did, told thrice: by `describe`, by a line of the log, by a Trainer's logs. Each text
stands here in full.

covers: integrations/__init__.py, model/trainer_logs.py, model/describe.py, model/last_step.py,
model/record.py, model/steps.py
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
import pickle
import queue
import re
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
from transformers import Trainer, TrainerCallback

import streambp
from streambp import integrations
from streambp.integrations import StreamCallback
from streambp.launch import process
from streambp.launch.hook import SETTINGS_VARIABLE, ImportHook
from streambp.model import record as wording
from streambp.model import trainer_logs, unpatched
from streambp.model.record import (
    NOT_TRIED,
    HostTraffic,
    SavedTensors,
    StepMemory,
    StepRecord,
    share_text,
    size_text,
)
from streambp.offload import free_memory
from streambp.prefixes import calls
from streambp.prefixes.tree import find_tree
from tests.families import LENGTH, build, make_batch, mix_neighbours
from tests.launch.programs import STEPS, arguments, model_of, rows
from tests.offload.runs import step
from tests.prefixes import batches

GIB = 2**30


class Machine:
    """A CPU of which a step may have so many bytes."""

    def __init__(self, monkeypatch):
        self.free = 8.0 * GIB
        monkeypatch.setattr(free_memory.FreeMemory, "__call__", lambda _, device: self.free)


@pytest.fixture
def machine(monkeypatch):
    return Machine(monkeypatch)


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, logger="streambp")
    return lambda: [
        r.getMessage()
        for r in caplog.records
        if r.name.startswith("streambp") and r.levelno == logging.INFO
    ]


def patched(model=None, **settings):
    model = build("llama") if model is None else model
    return streambp.patch(
        model, streambp.StreamConfig(**{"chunk_size": 5, "rows": "as_given", **settings})
    )


def fields(model, callback=None):
    """What the callback adds to a Trainer's logs, and to their copy in its history."""
    logs, history = {"loss": 1.0, "epoch": 2.0}, {"loss": 1.0, "epoch": 2.0, "step": 3}
    state = SimpleNamespace(log_history=[history])
    (callback or StreamCallback()).on_log(None, state, None, logs=logs, model=model)
    assert history == {**logs, "step": 3}
    assert (logs.pop("loss"), logs.pop("epoch")) == (1.0, 2.0)
    return logs


def numbers(**extra):
    """Those of the batch that most tests here train on."""
    return {
        "stream_tokens": 2 * LENGTH, "stream_chunks": 5, "stream_chunk_size": 5, "stream_kept_gib": 0.0,
        "stream_whole_layers": 0, "stream_unpatched": 0.0, "stream_let_go": 0.0, **extra,
    }  # fmt: skip


UNPATCHED_TEXT = "as the unpatched model"
LINES = {  # by what the sentence says of a step: what lines must say, and may not
    "streamed": (
        {"layers": "streams"},
        (UNPATCHED_TEXT, "ran unpatched", "checkpoints", NOT_TRIED),
    ),
    "kept its graph": (
        {"layers": "streams", "saves": "the graph"},
        (UNPATCHED_TEXT, "ran unpatched", "checkpoints"),
    ),
    "ran unpatched": (
        {
            "layers": "ran unpatched",
            "saves": UNPATCHED_TEXT,
            "head": UNPATCHED_TEXT,
            "attention": "the model's own",
        },
        ("streams: ", "blockwise", "checkpoints", "nothing ("),
    ),
    "ran whole": (
        {"layers": "checkpoints", "saves": "nothing"},
        ("streams: ", UNPATCHED_TEXT, "of 2 layers ("),
    ),
    NOT_TRIED: (
        {"layers": NOT_TRIED, "saves": NOT_TRIED, "head": "no call yet"},
        ("streams: ", "ran ", "(GiB"),
    ),
}


def contradictions(described):
    """Lines of a description that do not go with its sentence."""
    first, *other_lines = described.strip("\n").splitlines()
    way = next(way for way in LINES if way in first)
    words, excluded = LINES[way]
    text = "\n".join(other_lines).replace("\n" + " " * 12, "; ")
    lines = {line.partition(" ")[0]: line.partition(" ")[2].strip() for line in text.splitlines()}
    excluded = tuple(
        word for word in excluded if not (word == "checkpoints" and "layers ran whole" in first)
    )
    wrong_lines = [name for name, word in words.items() if word not in lines[name]]
    wrong_lines += [line for line in lines.values() if any(word in line for word in excluded)]
    inputs_alone = "layer inputs alone" in first
    wrong_lines += (
        ["saves"]
        if way == "streamed" and inputs_alone != lines["saves"].startswith("nothing")
        else []
    )
    wrong_lines += ["let go"] if ("let go" in first) != ("let go" in lines["saves"]) else []
    chunks, size = (
        re.search(r"chunks of (\d[\d,]*)\b", first),
        lines["chunk_size"].partition(" (")[0],
    )
    cut_otherwise = (
        size != chunks[1] if chunks is not None else size.isdigit() and way == "ran whole"
    )
    return wrong_lines + (["chunk_size"] if cut_otherwise else [])


def check(model, described, added):
    assert contradictions(described) == []
    assert str(streambp.describe(model)) == described.strip("\n")
    record = streambp.last_step(model) or NOT_TRIED
    assert described.strip("\n").startswith(f"last step: {record}\n")
    assert fields(model) == pytest.approx(added, abs=1e-3)


UNTRIED_TEXT = """
last step: not tried yet
layers      not tried yet: 2 x LlamaDecoderLayer (model.layers.0 .. model.layers.1)
chunk_size  5
saves       not tried yet (auto)
offload     nothing leaves the device
attention   auto
head        blockwise loss, no logits when labels are given; no call yet in training or with labels
"""
FIRST_STEP_TEXT = """
last step: 46 tokens (2 rows) in 5 chunks of 5 a row, streamed: saved layer inputs alone
layers      streams: 2 x LlamaDecoderLayer (model.layers.0 .. model.layers.1)
chunk_size  5
saves       nothing (auto: the first step counts what there is to save)
offload     nothing leaves the device
attention   auto; cpu flash in 2 layers
head        blockwise loss, no logits
"""
ITEMS = """
saves       kv of 2 layers (11.5 KiB)
            self_attn.q_proj of 2 layers (11.5 KiB)
            self_attn.k_proj of 2 layers (5.8 KiB)
            self_attn.v_proj of 2 layers (5.8 KiB)
            self_attn.o_proj of 2 layers (11.5 KiB)
            mlp.gate_proj of 2 layers (14.4 KiB)
            mlp.up_proj of 2 layers (14.4 KiB)
            attn_out of 2 layers (12.9 KiB)
            auto: a step without saves leaves 8.0 GiB free"""
LONG_STEP_TEXT = f"""
last step: 46 tokens (2 rows) in 5 chunks of 5 a row, streamed: saved 87.7 KiB of 8.0 GiB free
layers      streams: 2 x LlamaDecoderLayer (model.layers.0 .. model.layers.1)
chunk_size  5{ITEMS}; at least 8.0 GiB stayed free
offload     nothing leaves the device
attention   auto; cpu flash in 2 layers
head        blockwise loss, no logits
"""
NAMES = (
    "kv, self_attn.q_proj, self_attn.k_proj, self_attn.v_proj, self_attn.o_proj, mlp.gate_proj, "
    "mlp.up_proj, attn_out"
)
DROPPED_SAVES_TEXT = f"""
last step: 46 tokens (2 rows) in 5 chunks of 5 a row, streamed: saved 87.7 KiB of 8.0 GiB free, and let go of it: less \
memory was free than a chunk takes
layers      streams: 2 x LlamaDecoderLayer (model.layers.0 .. model.layers.1)
chunk_size  5{ITEMS}; at least 1000 B stayed free; less memory was free than a chunk takes, so all of it was let go of \
and recomputed
offload     nothing leaves the device
attention   auto; cpu flash in 2 layers
head        blockwise loss, no logits
"""
UNPATCHED = """
last step: 46 tokens (2 rows) in one chunk, ran unpatched: it needs 198.0 KiB of 8.0 GiB free
layers      ran unpatched: 2 x LlamaDecoderLayer (model.layers.0 .. model.layers.1), longer steps stream
chunk_size  the whole sequence (auto: an 8th of the sequence, at least 2,048 and at most 8,192 tokens over all rows of the \
batch, rounded down to a power of two in each row)
saves       all activations and the logits, as the unpatched model does (auto)
offload     nothing leaves the device
attention   the model's own; where layers stream: auto; cpu flash in 2 layers
head        as the unpatched model computes it, from logits [B, T, V]: they fit many times over
"""
GRAPH = """
last step: 46 tokens (2 rows) in one chunk, kept its graph: backward recomputed nothing, the graph took 151.7 KiB of 8.0 \
GiB free
layers      streams: 2 x LlamaDecoderLayer (model.layers.0 .. model.layers.1)
chunk_size  23
saves       the graph of 2 layers (151.7 KiB)
            auto: a step without saves leaves 8.0 GiB free; at least 8.0 GiB stayed free
offload     nothing leaves the device
attention   auto; cpu flash in 2 layers
head        blockwise loss, no logits
"""
REASON_MIXES_TOKENS = "it mixes tokens outside of its attention (a convolution, a recurrence?)"
UNCHUNKED_TEXT = f"""
last step: 46 tokens (2 rows), ran whole under gradient checkpointing: {REASON_MIXES_TOKENS}
layers      checkpoints: 2 x LlamaDecoderLayer (model.layers.0 .. model.layers.1), {REASON_MIXES_TOKENS}
chunk_size  5 where layers stream
saves       nothing (auto: layers that run whole keep their inputs alone)
offload     nothing leaves the device
attention   auto
head        blockwise loss, no logits
"""
ONE_WHOLE = f"""
last step: 46 tokens (2 rows) in 5 chunks of 5 a row, streamed, but 1 of 2 layers ran whole under gradient checkpointing: \
saved layer inputs alone
layers      streams: 1 x LlamaDecoderLayer (model.layers.0)
            checkpoints: 1 x LlamaDecoderLayer (model.layers.1), {REASON_MIXES_TOKENS}
chunk_size  5
saves       nothing (auto: the first step counts what there is to save)
offload     nothing leaves the device
attention   auto; cpu flash in 1 layer
head        blockwise loss, no logits
"""
SHARED_ROWS_TEXT = """
last step: 104 tokens (4 rows, computed as 53 tokens) in 8 chunks of 7, streamed: saved layer inputs alone
layers      streams: 2 x LlamaDecoderLayer (model.layers.0 .. model.layers.1)
chunk_size  7
saves       nothing (auto: the first step counts what there is to save)
offload     nothing leaves the device
attention   auto; cpu flash in 2 layers
head        blockwise loss, no logits
note        rows: the last call's 4 rows of 104 tokens were computed as 53
"""


HEAD = "; head: blockwise loss, no logits"
CHUNKED_LINE = "46 tokens (2 rows) in 5 chunks of 5 a row, streamed: saved"
ONE_CHUNK_LINE = "46 tokens (2 rows) in one chunk"


def logged(*texts):
    return [f"LlamaForCausalLM: step {text}" for text in texts]


def test_steps_that_stream(machine, lines):
    """Two in chunks, one of which saves what fits, and one whose saves are let go of; evaluations
    are no steps."""
    model = patched()
    check(model, UNTRIED_TEXT, {})
    with torch.no_grad():
        model.eval()(**make_batch("plain"))
    assert "last step: none with gradients yet\n" in str(streambp.describe(model)) + "\n"
    step(model.train())
    check(model, FIRST_STEP_TEXT, numbers())
    step(model)
    with torch.no_grad():
        model.eval()(**make_batch("plain", length=9), use_cache=False)
    check(model.train(), LONG_STEP_TEXT, numbers(stream_free_gib=8.0))
    step(model)
    record = streambp.last_step(model)
    handle = model.model.layers[1].register_forward_pre_hook(
        lambda *_: setattr(machine, "free", 1000.0)
    )
    step(model)
    handle.remove()
    check(model, DROPPED_SAVES_TEXT, numbers(stream_free_gib=8.0, stream_let_go=1.0))
    assert (record.number, record.let_go, len(record.saved), record.saved_bytes) == (
        3,
        None,
        8,
        89792,
    )
    assert lines() == logged(
        f"1: {CHUNKED_LINE} layer inputs alone{HEAD}",
        f"2: {CHUNKED_LINE} 87.7 KiB of 8.0 GiB free ({NAMES}){HEAD}",
        f"4: {CHUNKED_LINE} 87.7 KiB of 8.0 GiB free, and let go of it: less memory was free than "
        "a chunk "
        f"takes ({NAMES}){HEAD}",
    )


def test_short_steps(machine, lines, monkeypatch):
    model = patched(chunk_size=LENGTH)
    step(model)
    step(model)
    check(model, GRAPH, numbers(stream_chunks=1, stream_chunk_size=LENGTH, stream_free_gib=8.0))
    monkeypatch.setattr(unpatched, "MAX_SHARE_OF_FREE_MEMORY", 0.25)
    model = patched(chunk_size="auto")
    callback = StreamCallback()
    for _ in range(3):
        step(model)
    check(
        model,
        UNPATCHED,
        numbers(
            stream_chunks=1, stream_chunk_size=LENGTH, stream_free_gib=8.0, stream_unpatched=2 / 3
        ),
    )
    assert fields(model, callback)["stream_unpatched"] == pytest.approx(2 / 3)
    assert fields(model, callback) == {}, "a step is told of once"
    step(model)
    assert fields(model, callback)["stream_unpatched"] == 1.0
    assert lines() == logged(
        f"1: {ONE_CHUNK_LINE}, streamed: saved layer inputs alone{HEAD}",
        f"2: {ONE_CHUNK_LINE}, kept its graph: backward recomputed nothing, the graph took 151.7 "
        "KiB of 8.0 "
        f"GiB free{HEAD}",
        f"1: {ONE_CHUNK_LINE}, streamed: saved layer inputs alone{HEAD}",
        f"2: {ONE_CHUNK_LINE}, ran unpatched: it needs 198.0 KiB of 8.0 GiB free; head: as the "
        "unpatched "
        "model computes it, from logits [B, T, V]: they fit many times over",
    )


def test_layers_that_run_whole(machine, lines, monkeypatch):
    model = build("llama")
    mix_neighbours(monkeypatch, model)
    step(patched(model))
    check(
        model,
        UNCHUNKED_TEXT,
        numbers(stream_chunks=1, stream_chunk_size=LENGTH, stream_whole_layers=2),
    )
    assert streambp.last_step(model).whole == (
        ("model.layers.0", REASON_MIXES_TOKENS),
        ("model.layers.1", REASON_MIXES_TOKENS),
    )
    assert lines() == logged(
        "1: 46 tokens (2 rows), ran whole under gradient checkpointing: "
        f"{REASON_MIXES_TOKENS}{HEAD}"
    )


def test_one_layer_that_runs_whole(machine, lines, monkeypatch):
    model = build("llama")
    mixes, real = model.model.layers[1].mlp, type(model.model.layers[1].mlp).forward
    shift = lambda x: x + 0.5 * torch.roll(x, 1, 1)  # noqa: E731
    monkeypatch.setattr(
        type(mixes), "forward", lambda self, x: real(self, shift(x) if self is mixes else x)
    )
    step(patched(model))
    check(model, ONE_WHOLE, numbers(stream_whole_layers=1))
    assert lines() == logged(
        "1: 46 tokens (2 rows) in 5 chunks of 5 a row, streamed, but 1 of 2 layers ran whole under "
        f"gradient checkpointing: saved layer inputs alone{HEAD}"
    )


@pytest.mark.parametrize(
    ("text", "old_words", "new_words"),
    [
        (UNPATCHED, "ran unpatched: 2 x", "streams: 2 x"),
        (
            UNPATCHED,
            "as the unpatched model computes it, from logits [B, T, V]: they fit many times over",
            "blockwise loss, no logits",
        ),
        (LONG_STEP_TEXT, "in 5 chunks of 5", "in 3 chunks of 8"),
        (DROPPED_SAVES_TEXT, ", so all of it was let go of and recomputed", ""),
        (UNCHUNKED_TEXT, "5 where layers stream", "5"),
        (GRAPH, "the graph of 2 layers (151.7 KiB)", "kv of 2 layers (11.5 KiB)"),
        (UNTRIED_TEXT, "not tried yet: 2 x", "streams: 2 x"),
        (
            ONE_WHOLE,
            "saves       nothing (auto: the first step counts what there is to save)",
            "saves       kv",
        ),
    ],
)
def test_lines_that_contradict_are_seen(text, old_words, new_words):
    assert contradictions(text) == []
    assert old_words in text
    assert contradictions(text.replace(old_words, new_words)) != []


def test_rows_that_begin_alike(machine, lines, monkeypatch):
    monkeypatch.setattr(calls, "find_tree", functools.partial(find_tree, min_prefix=8))
    model = patched(chunk_size=7, rows="packed")
    step(model, **batches.make_batch("plain"))
    shared = {
        "stream_tokens": 104,
        "stream_chunks": 8,
        "stream_chunk_size": 7,
        "stream_shared_tokens": 53,
    }
    check(model, SHARED_ROWS_TEXT, numbers(**shared))
    assert lines() == logged(
        "1: 104 tokens (4 rows, computed as 53 tokens) in 8 chunks of 7, streamed: saved layer "
        f"inputs alone{HEAD}"
    )
    step(model, **batches.make_batch("nothing shared"))
    assert streambp.last_step(model).shared is None


class Reports(TrainerCallback):
    """As wandb's, trackio's and TensorBoard's: before what a Trainer's user passes."""

    def __init__(self):
        self.logs = []

    def on_log(self, *args, logs=None, **kwargs):
        self.logs.append(dict(logs))


LAUNCHED_TEXT = """
last step: 42 tokens (2 rows) in 5 chunks of 5 a row, streamed: saved kv
layers      streams: 2 x Qwen3DecoderLayer (model.layers.0 .. model.layers.1)
chunk_size  5
saves       kv
offload     nothing leaves the device
attention   auto; cpu flash in 2 layers
head        blockwise loss, no logits
"""
TRAINING_NUMBERS = numbers(stream_tokens=42)


def check_trained(trainer, reports, lines, epochs=3):
    """The text, the line, and the fields in each of the logs of training, in none of the others."""
    assert contradictions(LAUNCHED_TEXT) == []
    assert str(streambp.describe(trainer.model)) == LAUNCHED_TEXT.strip("\n")
    assert lines() == [
        "Qwen3ForCausalLM: step 1: 42 tokens (2 rows) in 5 chunks of 5 a row, streamed: saved "
        f"kv{HEAD}"
    ]
    expected = {
        name: value for name, value in TRAINING_NUMBERS.items() if name != "stream_kept_gib"
    }
    for entries in (trainer.state.log_history, reports.logs):
        added = [
            {name: entry[name] for name in entry if name.startswith("stream_")} for entry in entries
        ]
        assert added == [expected] * epochs + [{}]


@pytest.fixture
def launched(monkeypatch):
    """A Trainer as it is in a launched process."""
    monkeypatch.setattr(process.atexit, "register", lambda function, **kwargs: None)
    monkeypatch.delenv("STREAMBP_LAUNCH_REPORT", raising=False)
    monkeypatch.setenv(SETTINGS_VARIABLE, '{"chunk_size": 5, "saves": ["kv"], "rows": "as_given"}')
    module = SimpleNamespace(Trainer=type("Trainer", (Trainer,), {}))
    ImportHook().change_trainer(module)
    return module.Trainer


@pytest.mark.full
def test_under_launch(launched, lines, tmp_path, capsys):
    reports = Reports()
    trainer = launched(
        model_of(), arguments(tmp_path / "out"), train_dataset=rows(), callbacks=[reports]
    )
    trainer.train()
    check_trained(trainer, reports, lines)
    assert (
        "\n".join(f"streambp:   {line}" for line in LAUNCHED_TEXT.strip("\n").splitlines())
        in capsys.readouterr().err
    )


def test_a_trainer_of_transformers(lines, tmp_path):
    """With it in the first place all who report hear of it, and no other field of the logs
    changes."""
    reports, plain = Reports(), Reports()
    model = streambp.patch(
        model_of(), streambp.StreamConfig(chunk_size=5, saves=("kv",), rows="as_given")
    )
    options = {"train_dataset": rows(), "args": arguments(tmp_path / "out")}
    trainer = Trainer(model, **options, callbacks=[reports])
    StreamCallback.add_to(trainer)
    trainer.train()
    check_trained(trainer, reports, lines)
    Trainer(model_of(), **options, callbacks=[plain]).train()
    ours = [
        {name: entry[name] for name in entry if not name.startswith("stream_")}
        for entry in reports.logs
    ]
    assert [entry.keys() for entry in ours] == [entry.keys() for entry in plain.logs]
    assert [entry["loss"] for entry in ours[:-1]] == pytest.approx(
        [entry["loss"] for entry in plain.logs[:-1]], rel=1e-4
    )


class Tracker(Reports):
    """Stands for wandb, trackio and TensorBoard, which a Trainer calls before a user's
    callbacks."""

    instances = queue.SimpleQueue()

    def __init__(self):
        super().__init__()
        self.instances.put(self)


@pytest.mark.parametrize("patched_before", [True, False])
@pytest.mark.parametrize("passed", ["nothing", "an instance"])
def test_trackers_hear_of_a_patched_models_steps(patched_before, passed, tmp_path, monkeypatch):
    """Whether a user passes the callback or not; its default instance stands before them."""
    module = sys.modules[Trainer.__module__]
    monkeypatch.setattr(module, "DEFAULT_CALLBACKS", [module.DefaultFlowCallback])
    monkeypatch.setattr(module, "get_reporting_integration_callbacks", lambda _: [Tracker])
    model = model_of()
    if patched_before:
        streambp.patch(model, streambp.StreamConfig(chunk_size=5))
    callbacks = [] if passed == "nothing" else [StreamCallback()]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        trainer = Trainer(
            model, arguments(tmp_path / "out"), train_dataset=rows(), callbacks=callbacks
        )
    streambp.patch(model, streambp.StreamConfig(chunk_size=5))
    trainer.train()
    heard = [entry for entry in Tracker.instances.get(timeout=1).logs if "loss" in entry]
    hears = patched_before or passed == "an instance"
    assert [entry.get("stream_chunk_size") for entry in heard] == [5.0 if hears else None] * STEPS
    count = sum(isinstance(callback, trainer_logs.DefaultStreamCallback) for callback in
               trainer.callback_handler.callbacks)  # fmt: skip
    assert count == hears


def test_real_tensorboard_files_have_the_fields(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    model = streambp.patch(model_of(), streambp.StreamConfig(chunk_size=5))
    training_args = arguments(tmp_path / "out")
    training_args.report_to = ["tensorboard"]
    Trainer(model, training_args, train_dataset=rows()).train()
    (file,) = tmp_path.rglob("events.out.tfevents.*")
    events = EventAccumulator(str(file))
    events.Reload()
    assert "train/stream_chunk_size" in events.Tags()["scalars"]
    assert events.Scalars("train/stream_chunk_size")[-1].value == 5.0


def test_one_that_a_user_passes_is_moved():
    passed, reports = StreamCallback(), Reports()
    trainer = SimpleNamespace(callback_handler=SimpleNamespace(callbacks=[reports, passed]))
    for _ in range(2):
        StreamCallback.add_to(trainer)
        assert trainer.callback_handler.callbacks == [passed, reports]


def trained_by_trl(tmp_path, reports, **settings):
    pytest.importorskip("trl", reason="TRL is not installed")
    from streambp.integrations.trl import StreamSFTConfig, StreamSFTTrainer
    from tests.integrations.test_trl import texts, tokenizer

    training_args = StreamSFTConfig(
        output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=2, optim="sgd", report_to=[], use_cpu=True,
        logging_steps=1, disable_tqdm=True, bf16=False, save_strategy="no", max_length=5, stream_chunk_size="5",
        stream_rows="as_given", **settings,
    )  # fmt: skip
    trainer = StreamSFTTrainer(
        model=model_of(),
        args=training_args,
        train_dataset=texts(),
        processing_class=tokenizer(),
        callbacks=[reports],
    )
    trainer.train()
    return trainer


def test_trls_trainer(machine, lines, tmp_path):
    trainer = trained_by_trl(tmp_path, reports := Reports(), stream_saves=["kv"])
    one_chunk = (("42 tokens", "10 tokens"), ("5 chunks of 5 a row", "one chunk"))
    expected = LAUNCHED_TEXT.strip("\n")
    for old_words, new_words in one_chunk:
        expected = expected.replace(old_words, new_words)
    assert str(streambp.describe(trainer.model)) == expected
    assert lines() == [
        f"Qwen3ForCausalLM: step 1: 10 tokens (2 rows) in one chunk, streamed: saved kv{HEAD}"
    ]
    for entry in (*trainer.state.log_history[:2], *reports.logs[:2]):
        assert {"loss", "entropy"} < entry.keys()
        added = {name: entry[name] for name in entry if name.startswith("stream_")}
        assert added == {
            name: {"stream_tokens": 10, "stream_chunks": 1}.get(name, value)
            for name, value in TRAINING_NUMBERS.items()
            if name != "stream_kept_gib"
        }


SAVED_BY_DEFAULT = {
    "kv": "5.2", "attn_out": "5.9", "self_attn.q_proj": "5.2", "self_attn.k_proj": "2.6", "self_attn.v_proj": "2.6",
    "self_attn.o_proj": "5.2", "mlp.gate_proj": "7.9", "mlp.up_proj": "7.9",
}  # fmt: skip
DEFAULT_TEXT = LAUNCHED_TEXT.replace(
    "streamed: saved kv", "streamed: saved 42.7 KiB of 8.0 GiB free"
).replace(
    "saves       kv",
    "saves       "
    + "".join(
        f"{name} of 2 layers ({size} KiB)\n            " for name, size in SAVED_BY_DEFAULT.items()
    )
    + "auto: a step without saves leaves 8.0 GiB free; at least 8.0 GiB stayed free",
)


def test_the_default_under_launch(machine, launched, lines, tmp_path, monkeypatch):
    """Its first step counts, the others save what was counted; each is told in the same words
    thrice."""
    monkeypatch.setenv(SETTINGS_VARIABLE, '{"chunk_size": 5, "rows": "as_given"}')
    module = SimpleNamespace(Trainer=type("Trainer", (Trainer,), {}))
    ImportHook().change_trainer(module)
    reports = Reports()
    trainer = module.Trainer(
        model_of(), arguments(tmp_path / "out"), train_dataset=rows(), callbacks=[reports]
    )
    trainer.train()
    assert contradictions(DEFAULT_TEXT) == []
    assert str(streambp.describe(trainer.model)) == DEFAULT_TEXT.strip("\n")
    line = (
        "Qwen3ForCausalLM: step {}: 42 tokens (2 rows) in 5 chunks of 5 a row, streamed: saved {}"
    )
    names = ", ".join(SAVED_BY_DEFAULT)
    assert lines() == [
        line.format(1, f"layer inputs alone{HEAD}"),
        line.format(2, f"42.7 KiB of 8.0 GiB free ({names}){HEAD}"),
    ]
    for entries in (trainer.state.log_history, reports.logs):
        added = [
            {name: entry[name] for name in entry if name.startswith("stream_")}
            for entry in entries[:3]
        ]
        assert added[0] == TRAINING_NUMBERS
        assert (
            added[1]
            == added[2]
            == pytest.approx({**TRAINING_NUMBERS, "stream_free_gib": 8.0}, abs=1e-3)
        )
        assert added[1]["stream_kept_gib"] * GIB == 42.65625 * 1024


def test_the_default_of_trls_trainer(machine, lines, tmp_path):
    trainer = trained_by_trl(tmp_path, Reports())
    text, record = str(streambp.describe(trainer.model)), streambp.last_step(trainer.model)
    assert contradictions(text) == []
    assert text.startswith(
        "last step: 10 tokens (2 rows) in one chunk, kept its graph: backward recomputed nothing, "
        "the "
    )
    assert lines()[1:] == [f"Qwen3ForCausalLM: step 2: {record}{HEAD}"]
    assert trainer.state.log_history[1]["stream_kept_gib"] * GIB == record.saved_bytes > 0


def test_what_is_not_known_is_not_told():
    """A model that is not patched, a log that is none of training's, and one that cannot be
    written."""
    assert fields(build("llama")) == {}
    model = patched()
    step(model)
    for logs in ({"eval_loss": 1.0}, {"train_loss": 1.0}, None, ()):
        logs_before = copy.deepcopy(logs)
        StreamCallback().on_log(None, SimpleNamespace(log_history=[]), None, logs=logs, model=model)
        assert logs == logs_before
    StreamCallback().on_log(None, None, None, logs={"loss": 1.0}, model=model)


def test_a_record_that_fails_stops_no_step(caplog, monkeypatch):
    caplog.set_level(logging.INFO, logger="streambp")
    model = patched()

    def fails():
        raise ZeroDivisionError("of a test")

    model._streambp.steps.tell = fails
    step(model)
    assert "the step's record could not be made" in caplog.text
    monkeypatch.setattr(wording.StepRecord, "numbers", lambda self: fails())
    assert fields(model) == {}
    assert "could not be added to the logs" in caplog.text


def test_copies_have_made_no_step():
    model = patched()
    step(model)
    assert streambp.last_step(model).number == 1
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert streambp.last_step(twin) is None
        step(twin)
        assert streambp.last_step(twin).number == 1
    step(model)
    assert streambp.last_step(model).number == 2


def test_frozen_layers_and_two_micro_batches():
    """Where the first layers have no backward, and where two forwards come before the first
    backward."""
    model = patched()
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    step(model)
    step(model)
    assert (streambp.last_step(model).number, model._streambp.steps.last.over) == (2, True)
    first, second = (model(**make_batch("plain"), use_cache=False).loss for _ in range(2))
    assert not model._streambp.steps.last.over
    first.backward()
    second.backward()
    assert (streambp.last_step(model).number, model._streambp.steps.last.over) == (4, True)


def test_offloaded_steps(lines):
    model = patched(offload="cpu", saves=("attn_out",))
    step(model)
    step(model)
    record = streambp.last_step(model)
    inputs, attended = 2 * 2 * LENGTH * 64, 2 * 2 * LENGTH * (64 + 4)
    assert record.host.out > attended - inputs > 0
    assert record.host.out == pytest.approx(model._streambp.offloader.transfers.bytes["out"] / 2)
    assert record.saved == (SavedTensors("attn_out", 2),)
    assert (
        str(record) == "46 tokens (2 rows) in 5 chunks of 5 a row, streamed: moved "
        f"{size_text(record.host.out)} to the host"
    )
    assert len(lines()) == 1
    assert {"stream_host_gib", "stream_stall_s"} < fields(model).keys()


RECORD = StepRecord(
    1, 1048, 1, "ran unpatched", 1048, 1, 36, "a head", memory=StepMemory(0.03 * GIB, 7.8 * GIB)
)
SAVED_TENSORS = (SavedTensors("kv", 3, 2.0**30), SavedTensors("attn_out", 2, 2.0**29))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "in one chunk, ran unpatched: it needs 0.03 of 7.8 GiB free"),
        ({"memory": StepMemory(0.03 * GIB)}, "in one chunk, ran unpatched: it needs 30.7 MiB"),
        (
            {"way": "streamed", "chunks": 4, "chunk_size": 300},
            "in 4 chunks of 300, streamed: saved layer inputs alone",
        ),
        (
            {"way": "streamed", "saved": SAVED_TENSORS, "whole": (("a", "b"),)},
            "in one chunk, streamed, but 1 of 36 layers ran whole under gradient checkpointing: "
            "saved 1.5 of 7.8 GiB free",
        ),
    ],
)
def test_sentences(changes, expected):
    assert str(dataclasses.replace(RECORD, **changes)) == f"1,048 tokens {expected}"


FIELDS = (
    "number", "tokens", "rows", "way", "chunk_size", "chunks", "layers", "head", "saved", "needed", "free", "least_free",
    "peak", "let_go", "host", "shared", "whole", "split_by", "unpatched_steps", "short_steps",
)  # fmt: skip


def test_parts_of_a_record_are_read_by_their_own_names():
    """Programs read `last_step(model).free`, wherever the record holds it."""
    memory = StepMemory(needed=1.0, free=2.0, least_free=3.0, peak=4, let_go="a chunk")
    record = dataclasses.replace(RECORD, memory=memory)
    values = {name: getattr(record, name) for name in FIELDS}
    assert {name: values[name] for name in vars(memory)} == vars(memory)
    assert len({id(value) for name, value in values.items() if name in vars(memory)}) == 5


def test_sizes():
    sizes = {
        0: "0 B",
        1023: "1023 B",
        1024: "1.0 KiB",
        1.5 * 2**20: "1.5 MiB",
        139 * GIB: "139.0 GiB",
    }
    assert {size: size_text(size) for size in sizes} == sizes
    parts = {0.005: "5.1 MiB of 7.8 GiB", 0.03: "0.03 of 7.8 GiB", 2.54: "2.5 of 7.8 GiB"}
    assert {part: share_text(part * GIB, 7.8 * GIB) for part in parts} == parts
    assert share_text(10, 500) == "10 B of 500 B"


def test_numbers_of_a_device_that_tells():
    record = dataclasses.replace(
        RECORD, memory=StepMemory(peak=3 * GIB), host=HostTraffic(2.0 * GIB, 0.0, 1.0, 0.5, 0)
    )
    assert record.numbers()["stream_peak_gib"] == 3.0
    assert record.numbers()["stream_host_gib"] == 2.0
    described = dataclasses.replace(streambp.describe(patched()), last_step=record)
    assert "memory      3.0 GiB at the peak so far\n" in str(described)


def test_the_logger_and_the_lazy_name():
    """Nothing is printed unless a program asks for it; the callback is imported when it is asked
    for."""
    assert any(
        isinstance(handler, logging.NullHandler)
        for handler in logging.getLogger("streambp").handlers
    )
    assert "StreamCallback" not in vars(integrations)
    assert integrations.StreamCallback is trainer_logs.StreamCallback
    with pytest.raises(AttributeError, match="no attribute 'Other'"):
        _ = integrations.Other
