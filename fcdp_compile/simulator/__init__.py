"""Training steps on simulated clusters: schedules of a plan, without running or communicating anything.

Arithmetic only: no torch, no process group, no clock.
"""
