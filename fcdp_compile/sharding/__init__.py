"""`shard`, and what users do to a sharded model."""
