"""Weights that a library has quantised, as plain tensors: the packed values, the scales, the code books."""
