"""Passes over FX graphs: each changes a graph, and none communicates or runs the model."""
