"""Parallelism beside which fcdp shards: sequences over the ranks of a node, and stages of pipelines."""
