"""Exact differences of 16-bit floating point values: tensor arithmetic only.

The bits of a value are read as a whole number in the order of the values, so that neighbours differ by 1.
Numbers are subtracted modulo 2^16, and signs are folded in, so that small differences are small numbers z:

    order(x) = x ^ 0x7fff if x < 0 else x
    order(new) - order(old) = 0, -1, 1, -2, 2, …    ->    z = 0, 1, 2, 3, 4, …

The code has stages of more and more bits.  A stage of b bits says what z is if z is less than 2^b - 1.  Else
it says 2^b - 1, and the next stage takes z - (2^b - 1).  The last stage has 16 bits.  With stages of 1, 2, 4,
8 and 16 bits, an unchanged value takes one bit, and a value that moved to a neighbour takes three:

    1 bit for each | 2 for each z >= 1 | 4 for each z >= 4 | 8 for each z >= 19 | 16 for each z >= 274

In bf16, a small Llama in fine-tuning with AdamW needs 1.4 bits a value at a learning rate of 1e-5 and 2.4 at
5e-5; the entropy of z is 0.9 and 2.1.  NaN, infinities and denormals are bits like others.

Receivers must know how many values each stage has.  Ranks agree on it before (`runtime.buckets.references`),
so all messages of a bucket have one size; a rank with fewer values in a stage fills it with zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

_LAST = 16
LADDERS = ((1, 2, 4, 8, _LAST), (2, 4, 8, _LAST), (4, 8, _LAST))
"""Bits of the stages, for few, some and many changes; more changes than that are sent as values."""


def _limits(ladder: Sequence[int]) -> list[int]:
    """The least z of the values in each stage."""
    return [sum(2**b - 1 for b in ladder[:i]) for i in range(len(ladder))]


LIMITS = sorted({z for ladder in LADDERS for z in _limits(ladder)[1:]})
"""What `counts` counts."""


def counts(new: Tensor, old: Tensor) -> Tensor:
    """How many values have a z of at least each of `LIMITS`: int64 [limits], on their device."""
    z = _folded(new, old)
    return torch.stack([torch.count_nonzero(z >= limit) for limit in LIMITS])


def choose(elements: int, found: Sequence[int]) -> Code | None:
    """The shortest code; None if the values themselves are as short.

    elements: of the values.  found: at least what `counts` says on each rank.
    """
    at_least = dict(zip(LIMITS, found, strict=True))
    codes = [
        Code(ladder, (elements, *(at_least[z] for z in _limits(ladder)[1:]))) for ladder in LADDERS
    ]
    best = min(codes, key=lambda code: code.bytes)
    return best if best.bytes < 2 * elements else None


@dataclass(frozen=True)
class Code:
    """One code of differences.

    ladder: the bits of each stage.  rooms: for how many values each stage has room.
    """

    ladder: tuple[int, ...]
    rooms: tuple[int, ...]

    @cached_property
    def _sizes(self) -> list[int]:
        return [-(-n * b // 8) for n, b in zip(self.rooms, self.ladder, strict=True)]

    @property
    def bytes(self) -> int:
        """Bytes of an encoded difference."""
        return sum(self._sizes)

    def encode(self, new: Tensor, old: Tensor) -> Tensor:
        """The difference of values [n] from old values [n]: uint8 [bytes]."""
        z, parts = _folded(new, old), []
        for bits, room in zip(self.ladder[:-1], self.rooms[1:], strict=True):
            top = 2**bits - 1
            parts.append(_pack(z.clamp(max=top).to(torch.uint8), bits))
            goes_on = z >= top
            at = torch.nonzero_static(goes_on, size=room, fill_value=0).view(-1)
            is_used = torch.arange(room, device=z.device) < torch.count_nonzero(goes_on)
            z = torch.where(is_used, z[at] - top, 0)
        parts.append(z.to(torch.int16).view(torch.uint8))
        return torch.cat(parts)

    def decode(self, code: Tensor, old: Tensor) -> Tensor:
        """Undo `encode`: uint8 [bytes] and the old values [n] -> the new values [n]."""
        *parts, last = code.split(self._sizes)
        z = last.clone().view(torch.int16).to(torch.int32) & 0xFFFF
        for bits, room, part in reversed(list(zip(self.ladder, self.rooms, parts, strict=False))):
            top = 2**bits - 1
            here = _unpack(part, bits)[:room].to(torch.int32)
            z = here.masked_scatter_(here == top, z + top)
        difference = (z >> 1) ^ -(z & 1)
        bits_of = _order(old.view(torch.int16)) + difference.to(torch.int16)
        return _order(bits_of).view(old.dtype)


def _order(bits: Tensor) -> Tensor:
    """The number of a value in the order of the values, from its bits, int16; undoes itself."""
    return bits ^ ((bits >> 15) & 0x7FFF)


def _folded(new: Tensor, old: Tensor) -> Tensor:
    """Z for each value: int32, less than 2^16."""
    difference = _order(new.view(torch.int16)) - _order(old.view(torch.int16))
    wide = difference.to(torch.int32)
    return (wide << 1) ^ (wide >> 31)


def _pack(levels: Tensor, bits: int) -> Tensor:
    """Numbers of so many bits, uint8 [n] -> uint8 [n * bits / 8], rounded up.

    Number i of byte k is element i * bytes + k, so that neighbours stay neighbours.
    """
    of_a_byte = 8 // bits
    missing = -len(levels) % of_a_byte
    rows = torch.nn.functional.pad(levels, (0, missing)).view(of_a_byte, -1)
    packed = rows[0].clone()
    for i in range(1, of_a_byte):
        packed |= rows[i] << (i * bits)
    return packed


def _unpack(packed: Tensor, bits: int) -> Tensor:
    """Undo `_pack`, with what it added."""
    mask = 2**bits - 1
    return torch.cat([(packed >> shift) & mask for shift in range(0, 8, bits)])
