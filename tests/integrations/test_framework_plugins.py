"""The plugins for axolotl and ms-swift, against stand-ins of the interfaces that they are written for."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType, SimpleNamespace

import pytest
from transformers import Trainer, TrainerCallback

from streambp import StreamConfig
from streambp.errors import ConfigError, UnsupportedModelError
from streambp.launch import process
from streambp.patching import is_patched
from tests.launch.programs import arguments, model_of, right, rows
from tests.launch.test_process import bert, settings


@pytest.fixture
def modules(monkeypatch):
    """Puts stand-ins of modules where imports find them, and takes ours that were made with them away again."""
    monkeypatch.setattr(process.atexit, "register", lambda function: None)

    def place(name, **members):
        for at in range(name.count(".") + 1):
            part = ".".join(name.split(".")[: at + 1])
            if part not in sys.modules or at == name.count("."):
                monkeypatch.setitem(sys.modules, part, ModuleType(part))
        vars(sys.modules[name]).update(members)

    yield place
    for name in ("streambp.integrations.axolotl", "streambp.integrations.ms_swift"):
        sys.modules.pop(name, None)


@pytest.fixture
def axolotl(modules):
    pytest.importorskip("pydantic", reason="pydantic, of axolotl, is not installed")
    modules("axolotl.integrations.base", BasePlugin=type("BasePlugin", (), {}))
    return importlib.import_module("streambp.integrations.axolotl")


def trainer(tmp_path, model=None, **more):
    return Trainer(model_of() if model is None else model, arguments(tmp_path / "out"), train_dataset=rows(), **more)


def test_axolotls_section_patches_the_trainers_model_and_reference(axolotl, tmp_path, capsys):
    made = trainer(tmp_path)
    axolotl.StreamPlugin().post_trainer_create(SimpleNamespace(streambp={"chunk_size": 5, "saves": ["kv"]}), made)
    assert settings(made.model) == StreamConfig(chunk_size=5, saves=("kv",))
    made.ref_model = model_of(7).eval()
    made.train()
    assert is_patched(made.ref_model)
    assert "blockwise loss, no logits\n" in capsys.readouterr().err
    measured = trainer(tmp_path, compute_metrics=right)
    axolotl.StreamPlugin().post_trainer_create(SimpleNamespace(streambp={}), measured)
    assert settings(measured.model) == StreamConfig(eval_logits=True)


def test_axolotl_without_the_section_trains_as_ever(axolotl, tmp_path):
    made = trainer(tmp_path)
    axolotl.StreamPlugin().post_trainer_create(SimpleNamespace(streambp=None), made)
    assert not is_patched(made.model)


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
        axolotl.StreamPlugin().post_trainer_create(SimpleNamespace(streambp={}), trainer(tmp_path, bert()))


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
            super().__init__(model, args, callbacks=[names["streambp"](args, self)], train_dataset=rows())

    monkeypatch.setenv("STREAMBP_LAUNCH", '{"chunk_size": 5}')
    made = Trainers(model_of(), arguments(tmp_path / "out"))
    assert settings(made.model) == StreamConfig(chunk_size=5)
    monkeypatch.setenv("STREAMBP_LAUNCH", '{"chunk_size": -5}')
    with pytest.raises(ConfigError):
        Trainers(model_of(), arguments(tmp_path / "out"))
    monkeypatch.delenv("STREAMBP_LAUNCH")
    assert settings(Trainers(model_of(), arguments(tmp_path / "out")).model) == StreamConfig()
