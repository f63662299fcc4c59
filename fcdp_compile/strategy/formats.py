"""Formats of values that are sent between nodes, or wait on the host: sizes only (`quantize` encodes).

[Note: encoded rows]
A row has the slots of some parameters one after the other.  Each slot is cut in blocks of 256 values; its
last block may be shorter.  So no parameter is rounded to the scale of another, and a parameter has the same
values whichever parameters are sent with it.  A block has one scale, its largest magnitude divided by the
largest level, and each value is a level: 8 bits, -127 to 127, or 4 bits, -7 to 7.

    | scales: fp32, one a block | levels: 1 byte a value, or two values in a byte |

Sources: ZeRO++ (Wang et al., 2023), sections 3.1 (block-based quantisation of weights) and 3.3 (gradients).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

BLOCK = 256
"""Values that share a scale: its 4 bytes add 1/64 to the levels of 8 bits."""

_SCALE_BYTES = 4


class Format(Enum):
    """The format in which values are sent; full: unchanged."""

    FULL = "full"
    INT8 = "int8"
    INT4 = "int4"


BITS = {Format.INT8: 8, Format.INT4: 4}
"""Bits of a value, without its block's scale, in a format that quantises."""

LEVELS = {wire: 2 ** (bits - 1) - 1 for wire, bits in BITS.items()}
"""The largest level of a format that quantises."""


def blocks_of(slots: Sequence[int]) -> list[int]:
    """The number of values of each block of a row."""
    return [min(BLOCK, slot - start) for slot in slots for start in range(0, slot, BLOCK)]


def scale_bytes(slots: Sequence[int]) -> int:
    """Bytes of a row's scales, which come first."""
    return _SCALE_BYTES * sum(-(-slot // BLOCK) for slot in slots)


def row_bytes(slots: Sequence[int], wire: Format, itemsize: int) -> int:
    """Bytes of one row; slots: elements of each parameter.  itemsize: of the values before encoding."""
    elements = sum(slots)
    if wire is Format.FULL:
        return elements * itemsize
    return scale_bytes(slots) + -(-elements * BITS[wire] // 8)
