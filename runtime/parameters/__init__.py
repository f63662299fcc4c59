"""The parameters of a sharded model: where each is kept, and whether its copies are valid."""
