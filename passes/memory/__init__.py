"""How much device memory a step takes, and what may therefore stay on the device."""
