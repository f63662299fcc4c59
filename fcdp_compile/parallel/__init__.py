"""Parallelism within a node, beside which fcdp shards."""
