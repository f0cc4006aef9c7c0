"""Snapshots of a layer's structure: detect changes between calls, and between forward and backward."""
