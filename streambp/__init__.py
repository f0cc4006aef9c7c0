"""Train HuggingFace models on sequences many times longer than gradient checkpointing allows, with exact gradients.

import streambp
streambp.patch(model)
"""

import logging

from streambp.config import StreamConfig
from streambp.errors import StreamBPError
from streambp.model.describe import describe
from streambp.model.last_step import last_step
from streambp.model.patching import unpatch
from streambp.model.warming import warm_up
from streambp.planner.auto import patch

__all__ = ["StreamBPError", "StreamConfig", "describe", "last_step", "patch", "unpatch", "warm_up"]

logging.getLogger(__name__).addHandler(logging.NullHandler())  # who wants the lines sets a handler and the level INFO
