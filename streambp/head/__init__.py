"""Per-token log-probabilities without logits, and the tensors that stand for logits that do not exist."""

from streambp.head.log_probs import TokenLogProbs, token_log_probs

__all__ = ["TokenLogProbs", "token_log_probs"]
