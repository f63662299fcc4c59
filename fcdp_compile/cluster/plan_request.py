"""What `fcdp plan` and `fcdp simulate` are asked for; without torch, for the command."""

from __future__ import annotations

from dataclasses import dataclass

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""Names of dtypes, and what torch calls them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Values of "nodes" or of "bandwidth" (bytes per second of a node's card), and how they were written."""

    of: str
    values: tuple[float, ...]
    texts: tuple[str, ...]
