"""A model's weights: how they are read, written, quantised, and cut over ranks of a node."""
