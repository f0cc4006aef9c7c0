"""Integration with verl: a module for its workers to import.

    STREAMBP_LAUNCH='{"chunk_size": 8192}' python -m verl.trainer.main_ppo \
        actor_rollout_ref.model.external_lib=streambp.integrations.verl \
        actor_rollout_ref.actor.strategy=fsdp2 ...

Importing the module makes verl's FSDP engine patch the models that it trains, and reference models.
Without settings, the defaults apply. A model is patched after verl's own changes and adapters,
right before FSDP wraps the model.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from streambp.admission.stacks import find_stacks
from streambp.errors import UnsupportedModelError
from streambp.known_names import VERLS_OFFLOAD, VERLS_STRATEGY
from streambp.launch.hook import read
from streambp.launch.process import LaunchedProcess
from streambp.launch.settings import settings_from_fields
from streambp.libraries import require_library

with require_library("verl"):
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine


@functools.cache
def launched_process() -> LaunchedProcess:
    """Return the object that patches this process's models (`LaunchedProcess`), with the settings
    in the environment variable STREAMBP_LAUNCH. The first call creates the object.

    Raises:
        ConfigError: the settings are invalid.
    """
    return LaunchedProcess(settings_from_fields(read()).config)


def check(engine: Any) -> None:
    """Raise an error if the settings of verl's engine are not among those for which a patched model
    computes the same as the unpatched model.

    Args:
        engine: a new engine of verl (`FSDPEngine`).

    Raises:
        UnsupportedModelError: a setting would change the results, or is untested.
    """
    config = engine.engine_config
    if config.strategy != VERLS_STRATEGY:
        raise UnsupportedModelError(
            f"verl's engine has strategy={config.strategy!r}, with which streamed layers have not "
            f"been tried or do not find their parameters. Set strategy={VERLS_STRATEGY}."
        )
    if config.ulysses_sequence_parallel_size > 1:
        raise UnsupportedModelError(
            f"verl splits each sequence over {config.ulysses_sequence_parallel_size} ranks inside "
            "of FlashAttention, which streamed layers do not call: they would attend within a "
            "rank's shard only. Set ulysses_sequence_parallel_size=1."
        )
    if getattr(engine.model_config, VERLS_OFFLOAD, False):
        raise UnsupportedModelError(
            "verl's enable_activation_offload wraps layers that stream. Set it to False, and "
            "offload to cpu in streambp's "
            'settings: STREAMBP_LAUNCH=\'{"offload": "cpu"}\'.'
        )


def patch_engines(engine_class: Any) -> None:
    """Change a class of verl's engines: each new engine runs `check` at the end of its `__init__`,
    and patches its model before FSDP wraps the model."""
    make = engine_class.__init__
    wrap = engine_class._build_fsdp_module

    @functools.wraps(make)
    def __init__(engine: Any, /, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        make(engine, *args, **kwargs)
        check(engine)

    @functools.wraps(wrap)
    def _build_fsdp_module(engine: Any, module: nn.Module) -> Any:
        find_stacks(module)
        launched_process().training(module)
        return wrap(engine, module)

    engine_class.__init__ = __init__
    engine_class._build_fsdp_module = _build_fsdp_module


patch_engines(FSDPEngine)
