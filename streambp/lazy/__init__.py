"""Logits without storage, with rules that compute a program's results block by block."""
