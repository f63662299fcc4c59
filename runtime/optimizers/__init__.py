"""Gradients that wait for their step, and what happens around the step of an optimizer."""
