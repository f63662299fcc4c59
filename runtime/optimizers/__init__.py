"""Gradients that wait for an optimizer's step, and hooks before and after the step."""
