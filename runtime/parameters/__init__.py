"""The parameters of a sharded model: where the model has each, and the generation of its values."""
