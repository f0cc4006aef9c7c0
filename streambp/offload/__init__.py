"""Moves what forward saves to host memory behind the compute, and brings it back a chunk ahead of its use."""
