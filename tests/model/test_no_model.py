"""Public functions that get something other than a model say so.

covers: instance_forward.py, model/installed_patch.py, model/warm_up.py, verify/compare.py
"""

from __future__ import annotations

import pytest

import streambp
from streambp.errors import UnsupportedModelError
from streambp.verify import compare

FUNCTIONS = {
    "patch": streambp.patch,
    "unpatch": streambp.unpatch,
    "describe": streambp.describe,
    "last_step": streambp.last_step,
    "warm_up": streambp.warm_up,
    "verify": compare.verify,
}


@pytest.mark.parametrize("value", ["Qwen/Qwen3-0.6B", None, {"model": 1}])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_value_that_is_no_model_is_named(name, value):
    with pytest.raises(
        UnsupportedModelError, match=f"This is a {type(value).__name__}; pass a model"
    ):
        FUNCTIONS[name](value)


def test_every_public_function_is_here():
    functions = {
        name
        for name in streambp.__all__
        if callable(getattr(streambp, name)) and not isinstance(getattr(streambp, name), type)
    }
    # keep_mxfp4 takes no model: it is a context in which one is loaded.
    assert functions - {"keep_mxfp4"} == FUNCTIONS.keys() - {"verify"}
