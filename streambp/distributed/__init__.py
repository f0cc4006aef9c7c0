"""Find out which engine (DDP, DeepSpeed, FSDP, Ulysses) trains a model, and what the engine does to
parameters, hooks and host memory."""
