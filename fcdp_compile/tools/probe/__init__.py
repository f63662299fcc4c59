"""Measure the cluster that a process is a rank of."""
