"""Block attention of a chunk over its causal prefix: spans, masks, kernels, prefix, interface (in this order)."""
