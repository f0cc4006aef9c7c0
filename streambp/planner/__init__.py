"""What a step costs before it is run: bytes by phase and by module, FLOPs, and what fits."""
