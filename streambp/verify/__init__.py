"""Test if training is exact for a given model: `verify` compares gradients with the unpatched
model's, and `compare_methods` does so for other methods, too.
"""

from streambp.verify.compare import compare_methods, verify

__all__ = ["compare_methods", "verify"]
