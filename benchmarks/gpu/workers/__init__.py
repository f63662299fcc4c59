"""What one process of one part of `make gpu` measures."""
