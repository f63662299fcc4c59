"""A benchmark of fcdp on one CUDA GPU: `make gpu`, or `python -m benchmarks.gpu`.

__main__ ── driver ──▶ one process (or one for each rank) a part: worker ──▶ copies, lanes, parity, …
               │                                                               │
               └── report ──▶ gpu.md  ◀── benchmarks/gpu/PART.json ◀───────────┘
"""
