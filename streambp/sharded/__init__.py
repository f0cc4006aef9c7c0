"""Stream a layer when each rank holds one shard of the tokens (Ulysses, context parallelism)."""
