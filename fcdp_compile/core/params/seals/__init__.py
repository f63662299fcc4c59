"""Whether a tensor may have been written to: seals, and fingerprints of values."""
