"""Is streaming exact on *this* model? `verify` compares its gradients with the unpatched model's."""

from streambp.verify.compare import verify

__all__ = ["verify"]
