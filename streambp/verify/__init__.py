"""Test if streaming is exact for a given model: `verify` compares gradients with the unpatched
model.
"""

from streambp.verify.compare import verify

__all__ = ["verify"]
