"""Attention of a chunk over its causal prefix: spans, blocks, kernels, and the prefix's keys and
values."""
