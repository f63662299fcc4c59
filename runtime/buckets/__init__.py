"""The buckets of a model at run time: their copies, what moves them, and whether copies are valid."""
