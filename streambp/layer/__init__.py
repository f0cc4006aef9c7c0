"""The step of one decoder layer: forward without a graph, backward chunk by chunk. Who may stream is decided elsewhere."""
