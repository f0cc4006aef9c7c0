"""Per-token log-probabilities without logits, and recipes for logits that are not computed."""

from streambp.head.log_probs import TokenLogProbs, token_log_probs

__all__ = ["TokenLogProbs", "token_log_probs"]
