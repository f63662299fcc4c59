"""The parameters of a sharded model: where each is kept, and which values its copies belong to."""
