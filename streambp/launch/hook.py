"""The import hook that `streambp launch` installs in every Python process of a program.

This file runs at interpreter start and is loaded by its path. An import of streambp would import
torch into processes that do not use torch. Therefore nothing is imported until a program creates a
Trainer or trains a model. This includes the standard library: `typing` and `json` would be most of
the hook's cost at every start. A finder on sys.meta_path waits for the modules of interest and
changes each after its import. The settings are read from the environment on first use.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any

    from streambp.launch.process import LaunchedProcess

SETTINGS_VARIABLE = "STREAMBP_LAUNCH"
TRL_HEAD_TRAINERS = ("sft", "dpo", "grpo", "rloo", "kto")


class ImportHook:
    """Import finder (an entry of `sys.meta_path`) that changes modules of transformers and TRL
    right after their import, so that trainers patch their models."""

    streambp_launch = True  # marks the finder for other copies of this file

    def __init__(self) -> None:
        self.actions: dict[str, Callable[[ModuleType], None]] = {
            "transformers.trainer": self.change_trainer,
            "transformers.modeling_utils": self.change_models,
            **{f"trl.trainer.{kind}_trainer": self.change_trls_head for kind in TRL_HEAD_TRAINERS},
        }
        self._launched: LaunchedProcess | None = None

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the import spec of a module that this hook changes; None for all other modules,
        which other finders then import. The spec's loader executes the module and then changes it.

        The spec has its usual loader, of which only the method `exec_module` is replaced. The
        arguments are those of `importlib.abc.MetaPathFinder.find_spec`.
        """
        action = self.actions.get(name)
        if action is None:
            return None
        finders = []
        for finder in sys.meta_path:
            if finder is not self and hasattr(finder, "find_spec"):
                finders.append(finder.find_spec)
        spec = next(filter(None, (find(name, path, target) for find in finders)), None)
        loader: Any = getattr(spec, "loader", None)
        load = getattr(loader, "exec_module", None)
        if load is not None:

            def exec_module(module: ModuleType) -> None:
                """Run the code of the imported module, then change the module. Replaces the
                loader's `exec_module`."""
                load(module)
                action(module)

            loader.exec_module = exec_module
        return spec

    @property
    def launched(self) -> LaunchedProcess:
        """Return the object that patches the models of this process; the first access creates it,
        from the settings in the environment variable STREAMBP_LAUNCH.

        Raises:
            ImportError: the interpreter that runs this program cannot import streambp.
            ConfigError: a setting is unknown, or its value is invalid.
        """
        if self._launched is None:
            try:
                from streambp.launch.process import LaunchedProcess
                from streambp.launch.settings import settings_from_fields
            except ImportError as error:
                raise ImportError(
                    f"{SETTINGS_VARIABLE} asks for streambp, but {sys.executable} cannot import it "
                    f"({error}). Install streambp and its requirements for this interpreter, or "
                    f"run the program without `streambp launch` and {SETTINGS_VARIABLE}."
                ) from error
            self._launched = LaunchedProcess(settings_from_fields(read()).config)
        return self._launched

    def change_trainer(self, module: ModuleType) -> None:
        """Replace `Trainer.__init__` of transformers by a function that also patches the trainer's
        model, at its end.

        The `__init__` of a subclass has the patched model after `super().__init__()`.

        Args:
            module: the imported `transformers.trainer`.
        """
        from functools import wraps

        original = module.Trainer.__init__

        @wraps(original)  # other libraries read its signature
        def __init__(trainer: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            original(trainer, *args, **kwargs)
            self.launched.patch_trainer(trainer)

        module.Trainer.__init__ = __init__  # type: ignore[attr-defined]

    def change_trls_head(self, module: ModuleType) -> None:
        """Replace TRL's `add_fused_lm_head` by a function that adds streambp's fused head to a
        patched model. Do nothing if the module has no such function (before TRL 1.16).

        Args:
            module: an imported module of a TRL trainer, such as `trl.trainer.sft_trainer`.
        """
        from functools import wraps

        original = getattr(module, "add_fused_lm_head", None)
        if original is None:  # before TRL 1.16
            return

        @wraps(original)
        def add_fused_lm_head(model: Any, *args: Any, **kwargs: Any) -> None:
            self.launched.add_head(original, model, *args, **kwargs)

        module.add_fused_lm_head = add_fused_lm_head  # type: ignore[attr-defined]

    def change_models(self, module: ModuleType) -> None:
        """Replace `PreTrainedModel.train` by a function that patches the model before it sets
        training mode. Do nothing unless the setting of `streambp launch` is at="train", for
        programs with their own training loop.

        The model is also patched if `train()` is called on a module that contains the model.

        Args:
            module: the imported `transformers.modeling_utils`.
        """
        from functools import wraps

        if read().get("at") != "train":
            return
        original = module.PreTrainedModel.train

        @wraps(original)
        def train(model: Any, mode: bool = True) -> Any:
            if mode:
                self.launched.training(model)
            return original(model, mode)

        module.PreTrainedModel.train = train  # type: ignore[attr-defined]


def read() -> dict[str, Any]:
    """Return the settings of `streambp launch` as a dict by name, parsed as JSON from the
    environment variable STREAMBP_LAUNCH. Return {}, the defaults, if the variable is not set.

    Raises:
        ValueError: the variable's value is no JSON object.
    """
    import json

    text = os.environ.get(SETTINGS_VARIABLE, "{}")
    try:
        settings = json.loads(text)
    except (ValueError, RecursionError):
        settings = None
    if not isinstance(settings, dict):
        raise ValueError(
            f"{SETTINGS_VARIABLE} is {text!r}; it must be a JSON object with the settings, such as "
            '{"chunk_size": 8192, "saves": ["attn_out"]}, or {} for the defaults.'
        )
    return settings


def install() -> Any:
    """Return the import finder (`ImportHook`) that makes trainers in this process patch their
    models; the first call installs the finder.

    Modules that are already imported are changed immediately.
    """
    present = next(
        (finder for finder in sys.meta_path if getattr(finder, "streambp_launch", False)), None
    )
    if present is not None:
        return present
    hook = ImportHook()
    sys.meta_path.insert(0, hook)  # type: ignore[arg-type]
    for name, action in hook.actions.items():
        if name in sys.modules:
            action(sys.modules[name])
    return hook
