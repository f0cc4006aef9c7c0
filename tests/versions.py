"""What older transformers in range do not have of what tests ask for: marks that skip, each with its reason."""

from __future__ import annotations

import inspect

import pytest
import transformers
from packaging import version
from transformers.models.aria import modeling_aria

NOW = version.parse(transformers.__version__)
STATES_IN_CHUNKS = version.parse("5.15") <= NOW
needs_states = pytest.mark.skipif(
    not STATES_IN_CHUNKS,
    reason="before transformers 5.15 mixers go on from a state with a single token only: their layers run whole",
)
needs_diffllamas_calls = pytest.mark.skipif(
    version.parse("5.15") > NOW, reason="before transformers 5.15 DiffLlama attends by itself, not through the interface"
)
NOT_IN_FLOAT64 = ("phimoe",) if version.parse("5.23") > NOW else ()  # its rotary embedding gives float32, unpatched as well
# Its experts asked the host how many tokens each of them got.
ROUTING_LOOKED_AT = ("aria_text",) if "tokens_per_expert.cpu()" in inspect.getsource(modeling_aria) else ()
