"""A decoder layer as one autograd Function: shadows, recomputation, the call, the Function (in this order)."""
