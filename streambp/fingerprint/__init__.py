"""Take snapshots of a layer's structure, to detect changes between its calls and between a forward
and its backward."""
