"""Everything that runs in a training step."""
