"""Optimizers that know how a sharded model's parameters are cut."""
