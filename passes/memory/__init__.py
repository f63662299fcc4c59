"""Predict the device memory of a step, and choose what stays on the device."""
