"""Engines (DDP, DeepSpeed, FSDP, Ulysses): their effect on parameters, hooks and host memory."""
