"""The measurements of the parts of `make gpu`; each runs in one process of its part."""
