"""`shard`, and the functions that users call on a sharded model."""
