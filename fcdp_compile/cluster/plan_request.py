"""The arguments of `fcdp plan` and `fcdp simulate`; without torch, so that the command can import it."""

from __future__ import annotations

from dataclasses import dataclass

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""Names of dtypes, and torch's names for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Values of "nodes" or "bandwidth" (bytes per second of a node's network card), and the user's texts."""

    of: str
    values: tuple[float, ...]
    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedFormat:
    """How a library quantises a weight: bits of a value, and values that share a scale in fp32.

    block: None: a row of the weight.
    """

    bits: int
    block: int | None


PACKED_FORMATS = {
    "nf4": PackedFormat(bits=4, block=64),
    "fp4": PackedFormat(bits=4, block=64),
    "int8": PackedFormat(bits=8, block=None),
}
"""What `--quantise` knows: bitsandbytes' formats without double quantisation."""
