"""Formats of values that are sent between nodes, or wait on the host: sizes only (`quantize` encodes).

[Note: encoded rows]
A row has the slots of some parameters one after the other.  Each slot is cut in blocks; its last block may be
shorter.  So no parameter is rounded to the scale of another, and a parameter has the same values whichever
parameters are sent with it.  A block has one scale, its largest magnitude divided by the largest level, and
each value is the nearest level times the scale.  Levels are whole numbers, the entries of a code book, or
curved whole numbers k (|k| + n) / 2 n^2, from -1 to 1: denser near zero, as gradients are.

    | scales: one a block | levels: 1 byte a value, or two values in a byte |

    int8   whole levels -127 to 127   blocks of 256 values   scales in fp32
    int4   curved, k from -7 to 7     blocks of 64 values    scales in bf16: exact, if the values are bf16
    nf4    16 quantiles of a normal   blocks of 64 values    scales in bf16
           distribution, -1 to 1

[Note: differences]
`DELTA` sends weights of 16 bits as exact differences from the copy that every rank has kept since the last
gather, and all of their bits without such a copy (`runtime.collectives.difference`).  How many bytes this
takes depends on the values; plans count what the values themselves take, which is the most.

Sources: ZeRO++ (Wang et al., 2023), sections 3.1 (block-based quantisation of weights) and 3.3 (gradients);
QLoRA (Dettmers et al., 2023), section 3 and appendix E (NF4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction


class Format(Enum):
    """The format in which values are sent; full: unchanged, delta: [Note: differences]."""

    FULL = "full"
    DELTA = "delta"
    INT8 = "int8"
    INT4 = "int4"
    NF4 = "nf4"

    @property
    def is_exact(self) -> bool:
        """Whether values arrive with all of their bits."""
        return self in (Format.FULL, Format.DELTA)


DELTA_BITS = 1.9
"""Bits of a difference in bf16: AdamW, fine-tuning with a learning rate of 5e-5 (docs/benchmarks/bits.md)."""

DIFFERENCE_SCRATCH_BYTES = 12
"""Bytes of memory for each value, at most, that taking a difference needs beside its result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coding:
    """How a format quantises.

    bits: of a value, without its block's scale; 4 or 8 (`runtime.collectives.quantize`).  block: values that
    share a scale.  scale_bytes: 4 (fp32) or 2 (bf16).  steps: levels above zero, if they have no code book.
    is_curved: whether level k is k (|k| + steps) / 2 steps^2, not k.  book: the levels from the lowest to the
    highest.
    """

    bits: int
    block: int
    scale_bytes: int
    steps: int = 1
    is_curved: bool = False
    book: tuple[float, ...] = ()

    @property
    def largest(self) -> int:
        """The largest level."""
        return 1 if self.is_curved else self.steps

    @property
    def value_bytes(self) -> Fraction:
        """Bytes of a value of a whole block, with its part of the scale."""
        return Fraction(self.bits, 8) + Fraction(self.scale_bytes, self.block)


_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)

CODINGS = {
    Format.INT8: Coding(bits=8, block=256, scale_bytes=4, steps=127),
    Format.INT4: Coding(bits=4, block=64, scale_bytes=2, steps=7, is_curved=True),
    Format.NF4: Coding(bits=4, block=64, scale_bytes=2, book=_NF4),
}
"""The formats that quantise."""


def blocks_of(slots: Sequence[int], wire: Format) -> list[int]:
    """The number of values of each block of a row."""
    block = CODINGS[wire].block
    return [min(block, slot - start) for slot in slots for start in range(0, slot, block)]


def row_bytes(slots: Sequence[int], wire: Format, itemsize: int) -> int:
    """Bytes of one row, at most; slots: elements of each parameter.  itemsize: of values before encoding."""
    elements = sum(slots)
    if wire.is_exact:
        return elements * itemsize
    coding = CODINGS[wire]
    scales = sum(-(-slot // coding.block) for slot in slots)
    return coding.scale_bytes * scales + -(-elements * coding.bits // 8)
