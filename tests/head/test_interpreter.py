"""Every Triton kernel against torch in Triton's interpreter; the modules named here say what is
compared.

covers: attention/triton_merge.py, head/triton_fold.py, head/triton_gradient.py
"""

from __future__ import annotations

import pytest

from tests.head.interpreter import interpreted, needs_triton

CHECKS = {
    "tests.attention.test_merge": ["compare"],
    "tests.head.test_triton_fold": ["compare", "compare_hard_rows"],
    "tests.head.test_triton_gradient": [
        "compare",
        "compare_hard_rows",
        "compare_mutants",
        "compare_heads",
    ],
}


@pytest.mark.fast("tests.attention.test_merge")
@needs_triton
@pytest.mark.parametrize("module", CHECKS)
def test_in_the_interpreter(module):
    interpreted({module: CHECKS[module]})
