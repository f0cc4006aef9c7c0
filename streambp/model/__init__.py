"""Replace a model's forwards with `patch`, and restore them with `unpatch`."""
