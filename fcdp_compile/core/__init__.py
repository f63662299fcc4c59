"""What `shard` makes of a model: its parameters, its ranks."""
