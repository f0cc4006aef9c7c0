"""The plugins for axolotl, ms-swift and verl, against stand-ins of the interfaces that they are
written for.

covers: integrations/axolotl.py, integrations/ms_swift.py, integrations/verl.py, launch/process.py,
model/patching.py
"""

from __future__ import annotations

import copy
import importlib.util
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from transformers import Trainer, TrainerCallback

from streambp import StreamConfig
from streambp.errors import ConfigError, UnsupportedModelError
from streambp.launch import process
from streambp.model.installed_patch import is_patched
from tests.launch.programs import arguments, model_of, right, rows
from tests.launch.test_process import settings, without_streams


@pytest.fixture
def modules(monkeypatch):
    """Puts stand-ins of modules where imports find them, and takes ours that were made with them
    away again."""
    monkeypatch.setattr(process.atexit, "register", lambda function, **kwargs: None)

    def add_module(name, **members):
        for at in range(name.count(".") + 1):
            part = ".".join(name.split(".")[: at + 1])
            if part not in sys.modules or at == name.count("."):
                monkeypatch.setitem(sys.modules, part, ModuleType(part))
        vars(sys.modules[name]).update(members)

    yield add_module
    for name in ("axolotl", "ms_swift", "verl"):
        sys.modules.pop(f"streambp.integrations.{name}", None)


@pytest.fixture
def axolotl(modules):
    pytest.importorskip("pydantic", reason="pydantic, of axolotl, is not installed")
    modules("axolotl.integrations.base", BasePlugin=type("BasePlugin", (), {}))
    return importlib.import_module("streambp.integrations.axolotl")


def trainer(tmp_path, model=None, **settings_of_trainer):
    return Trainer(
        model_of() if model is None else model,
        arguments(tmp_path / "out"),
        train_dataset=rows(),
        **settings_of_trainer,
    )


def test_axolotls_section_patches_the_trainers_model_and_reference(axolotl, tmp_path, capsys):
    axolotl_trainer = trainer(tmp_path)
    axolotl.StreamPlugin().post_trainer_create(
        SimpleNamespace(streambp={"chunk_size": 5, "saves": ["kv"], "rows": "packed"}),
        axolotl_trainer,
    )
    assert settings(axolotl_trainer.model) == StreamConfig(
        chunk_size=5, saves=("kv",), lazy_logits=True, rows="packed"
    )
    axolotl_trainer.ref_model = model_of(7).eval()
    axolotl_trainer.train()
    assert is_patched(axolotl_trainer.ref_model)
    assert "blockwise loss, no logits\n" in capsys.readouterr().err
    measured = trainer(tmp_path, compute_metrics=right)
    axolotl.StreamPlugin().post_trainer_create(SimpleNamespace(streambp={}), measured)
    assert settings(measured.model) == StreamConfig(eval_logits=True, lazy_logits=True, rows="auto")
    real = trainer(tmp_path)
    axolotl.StreamPlugin().post_trainer_create(
        SimpleNamespace(streambp={"lazy_logits": False}), real
    )
    assert settings(real.model) == StreamConfig(rows="auto")


def test_axolotl_without_the_section_trains_as_ever(axolotl, tmp_path):
    axolotl_trainer = trainer(tmp_path)
    axolotl.StreamPlugin().post_trainer_create(SimpleNamespace(streambp=None), axolotl_trainer)
    assert not is_patched(axolotl_trainer.model)


def test_axolotl_checks_the_section_before_a_model_is_loaded(axolotl):
    home, _, name = axolotl.StreamPlugin().get_input_args().rpartition(".")
    section = getattr(importlib.import_module(home), name)
    assert section(streambp={"chunk_size": 5}).streambp == {"chunk_size": 5}
    assert section().streambp is None
    for wrong in ({"chunksize": 5}, {"chunk_size": 0}, {"at": "train"}, 5):
        with pytest.raises(ValueError, match=r"chunk|at|dict"):
            section(streambp=wrong)


def test_a_model_that_cannot_be_streamed_stops_axolotl(axolotl, tmp_path):
    with pytest.raises(UnsupportedModelError):
        axolotl.StreamPlugin().post_trainer_create(
            SimpleNamespace(streambp={}), trainer(tmp_path, without_streams())
        )


def test_ms_swifts_callback(modules, tmp_path, monkeypatch):
    """It makes callbacks with its arguments and the trainer, which then is not finished."""

    class Callback(TrainerCallback):
        def __init__(self, args, trainer):
            self.args, self.trainer = args, trainer

    names = {}
    modules("swift.callbacks", callbacks_map=names)
    modules("swift.callbacks.base", TrainerCallback=Callback)
    importlib.import_module("streambp.integrations.ms_swift")
    spec = importlib.util.spec_from_file_location(
        "_swift_external_1", sys.modules["streambp.integrations.ms_swift"].__file__
    )
    with pytest.raises(ImportError, match="name a file that imports"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))

    class Trainers(Trainer):
        def __init__(self, model, args):
            super().__init__(
                model, args, callbacks=[names["streambp"](args, self)], train_dataset=rows()
            )

    monkeypatch.setenv("STREAMBP_LAUNCH", '{"chunk_size": 5, "rows": "packed"}')
    trainers = Trainers(model_of(), arguments(tmp_path / "out"))
    assert settings(trainers.model) == StreamConfig(chunk_size=5, lazy_logits=True, rows="packed")
    monkeypatch.setenv("STREAMBP_LAUNCH", '{"chunk_size": 5, "lazy_logits": false}')
    assert settings(Trainers(model_of(), arguments(tmp_path / "out")).model) == StreamConfig(
        chunk_size=5, rows="auto"
    )
    monkeypatch.setenv("STREAMBP_LAUNCH", '{"chunk_size": -5}')
    with pytest.raises(ConfigError):
        Trainers(model_of(), arguments(tmp_path / "out"))
    monkeypatch.delenv("STREAMBP_LAUNCH")
    assert settings(Trainers(model_of(), arguments(tmp_path / "out")).model) == StreamConfig(
        lazy_logits=True, rows="auto"
    )


class Engine:
    """verl 0.9's FSDP engine: settings, a model with its own changes and adapters, FSDP around it,
    then training mode."""

    def __init__(self, model, strategy="fsdp2", ranks=1, offload=False):
        self.engine_config = SimpleNamespace(
            strategy=strategy, ulysses_sequence_parallel_size=ranks
        )
        self.model_config = SimpleNamespace(enable_activation_offload=offload)
        self.original_model = model

    def _build_fsdp_module(self, module):
        module.wrapped = True
        return module

    def initialize(self):
        self.module = self._build_fsdp_module(self.original_model)

    def gradients(self, ids):
        """A policy's loss from logits, with which verl computes its log-probabilities; without
        padding, two documents."""
        self.module.train()
        positions = torch.cat([torch.arange(8), torch.arange(ids.shape[1] - 8)])[None]
        logits = self.module(
            input_ids=ids, attention_mask=None, position_ids=positions, use_cache=False
        ).logits
        logits.log_softmax(-1).gather(-1, ids.roll(-1, 1)[..., None]).sum().backward()
        return {name: parameter.grad for name, parameter in self.module.named_parameters()}


@pytest.fixture
def engines(modules, monkeypatch):
    """A class of the engine, and of one that wraps models in its own way, of a verl that has
    imported ours."""
    monkeypatch.setenv("STREAMBP_LAUNCH", '{"chunk_size": 5, "rows": "packed"}')
    engine = type("FSDPEngine", (Engine,), {})
    turbo = type("FSDPTurboEngine", (engine,), {"_build_fsdp_module": lambda self, module: module})
    modules("verl.workers.engine.fsdp.transformer_impl", FSDPEngine=engine)
    importlib.import_module("streambp.integrations.verl")
    return engine, turbo


def test_verls_engine_streams_what_it_trains(engines, attended_chunks, capsys):
    stock = Engine(model_of())
    ours = engines[0](copy.deepcopy(stock.original_model))
    ids = rows(1)[0]["input_ids"][None]
    for engine in (stock, ours):
        engine.initialize()
    expected = stock.gradients(ids)
    assert not attended_chunks
    our_gradients = ours.gradients(ids)
    assert settings(ours.module) == StreamConfig(chunk_size=5, lazy_logits=True, rows="packed")
    assert ours.module.wrapped
    assert 5 in attended_chunks
    assert ids.shape[1] not in attended_chunks
    # after the first forward
    assert capsys.readouterr().err.count("streams: 2 x Qwen3DecoderLayer") == 1
    assert our_gradients.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(our_gradients[name], expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("engine", "changes", "message"),
    [
        (0, {"strategy": "fsdp"}, "strategy=fsdp2"),
        (1, {"strategy": "fsdp_turbo"}, "strategy=fsdp2"),
        (0, {"ranks": 2}, "ulysses_sequence_parallel_size=1"),
        (0, {"offload": True}, "enable_activation_offload"),
    ],
)
def test_verls_engines_that_would_not_be_exact_are_refused(engines, engine, changes, message):
    with pytest.raises(UnsupportedModelError, match=message):
        engines[engine](model_of(), **changes)


def test_a_model_that_cannot_be_streamed_stops_verl(engines, monkeypatch):
    with pytest.raises(UnsupportedModelError):
        engines[0](without_streams()).initialize()
    monkeypatch.setenv("STREAMBP_LAUNCH", '{"chunk_size": -5}')
    sys.modules["streambp.integrations.verl"].launched_process.cache_clear()
    with pytest.raises(ConfigError):
        engines[0](model_of()).initialize()
