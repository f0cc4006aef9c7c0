"""Snapshots of a layer's structure: detect changes between calls, forward and backward."""
