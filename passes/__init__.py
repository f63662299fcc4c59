"""Passes change FX graphs or decide something about them; none communicates or runs the model."""
