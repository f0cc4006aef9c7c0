"""Logits that do not exist: stand-ins that follow what a program does with logits, and compute it block by block."""
