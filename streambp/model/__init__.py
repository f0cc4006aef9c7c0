"""What `patch` puts in place of a model's forwards, and takes off again."""
