"""Exact differences of 16-bit floating point values: tensor arithmetic only.

The bits of a value are read as a whole number in the order of the values, so that neighbours differ by 1.
Numbers are subtracted modulo 2^16, and signs are folded in, so that small differences are small numbers z:

    order(x) = x ^ 0x7fff if x < 0 else x
    order(new) - order(old) = 0, -1, 1, -2, 2, …    ->    z = 0, 1, 2, 3, 4, …

The code has stages of 1, 2, 4, 8 and 16 bits.  A stage of b bits says what z is if z is less than 2^b - 1.
Else it says 2^b - 1, and the next stage takes z - (2^b - 1); the last stage takes all that is left:

    1 bit for each | 2 for each z >= 1 | 4 for each z >= 4 | 8 for each z >= 19 | 16 for each z >= 274

So an unchanged value takes one bit, and a value that moved to a neighbour takes three.  In bf16, a small
Llama in fine-tuning with AdamW needs 1.3 bits a value at a learning rate of 1e-5, 1.9 at 5e-5 and 3.4 at
3e-4 (docs/benchmarks/bits.md, also about other stages).  NaN and infinities are bits like others.

A message ends with a checksum of the new values: whoever adds a difference to another copy notices it.

Receivers must know how many values each stage has.  Ranks agree on it before (`runtime.buckets.references`),
so all messages of a bucket have one size; a rank with fewer values in a stage fills it with zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

_STAGES = (1, 2, 4, 8, 16)
"""Bits of each stage."""

_LEAST = [sum(2**b - 1 for b in _STAGES[:i]) for i in range(len(_STAGES))]
"""The least z of the values in each stage."""

_ZERO = -(2**15)
"""Where z begins: it is kept as a signed number of 16 bits, less 2^15."""


def counts(new: Tensor, old: Tensor) -> Tensor:
    """How many values each stage after the first has: int64 [stages - 1], on their device."""
    z = _folded(new, old)
    return torch.stack([torch.count_nonzero(z >= least + _ZERO) for least in _LEAST[1:]])


STAGES_COUNTED = len(_STAGES) - 1
"""How many numbers `counts` has."""


@dataclass(frozen=True)
class Code:
    """A code of differences; rooms: for how many values each stage has room, the first for all of a rank."""

    rooms: tuple[int, ...]

    @cached_property
    def _sizes(self) -> list[int]:
        return [-(-n * b // 8) for n, b in zip(self.rooms, _STAGES, strict=True)]

    @property
    def bytes(self) -> int:
        """Bytes of an encoded difference."""
        return sum(self._sizes) + _CHECKSUM_BYTES

    def encode(self, new: Tensor, old: Tensor) -> Tensor:
        """The difference of values [n] from old values [n]: uint8 [bytes]."""
        missing, parts = self.rooms[0] - len(new), []
        z = torch.nn.functional.pad(_folded(new, old), (0, missing), value=_ZERO)
        for bits, room in zip(_STAGES[:-1], self.rooms[1:], strict=True):
            top = 2**bits - 1 + _ZERO
            parts.append(_pack((z.clamp(max=top) - _ZERO).to(torch.uint8), bits))
            goes_on = z >= top
            at = torch.nonzero_static(goes_on, size=room, fill_value=0).view(-1)
            is_used = torch.arange(room, device=z.device) < torch.count_nonzero(goes_on)
            z = torch.where(is_used, z[at] - (2**bits - 1), _ZERO)
        parts += [z.view(torch.uint8), _checksum(new).view(torch.uint8)]
        return torch.cat(parts)

    def decode(self, code: Tensor, old: Tensor) -> tuple[Tensor, Tensor]:
        """Undo `encode`: uint8 [bytes] and old values [n] -> new values [n], and bool [1]: are they wrong.

        They are if the old values were others, or the rooms too small.
        """
        *parts, last, checksum = code.split([*self._sizes, _CHECKSUM_BYTES])
        z = last.clone().view(torch.int16)
        for bits, room, part in reversed(list(zip(_STAGES, self.rooms, parts, strict=False))):
            said = _unpack(part, bits)[:room]
            here = said.to(torch.int16).add_(_ZERO)
            left = torch.nn.functional.pad(z + (2**bits - 1), (0, room - len(z)))
            z = here.masked_scatter_(said == 2**bits - 1, left)
        z = z[: len(old)] ^ _ZERO
        difference = ((z >> 1) & 0x7FFF) ^ -(z & 1)
        new = _order(difference.add_(_order(old.view(torch.int16)))).view(old.dtype)
        return new, _checksum(new) != checksum.clone().view(torch.int64)


_CHECKSUM_BYTES = 8


def _checksum(values: Tensor) -> Tensor:
    """A number that depends on each value and on its place: int64 [1]."""
    words = values.new_zeros(-(-len(values) // 4) * 4)
    words[: len(values)] = values
    # Odd weights lose no bit.
    weights = torch.arange(len(words) // 4, device=values.device).mul_(2).add_(1)
    return (words.view(torch.int64) * weights).sum(0, keepdim=True)


def _order(bits: Tensor) -> Tensor:
    """The number of a value in the order of the values, from its bits, int16; undoes itself."""
    return (bits >> 15).bitwise_and_(0x7FFF).bitwise_xor_(bits)


def _folded(new: Tensor, old: Tensor) -> Tensor:
    """The z of each value, plus `_ZERO`: int16."""
    difference = _order(new.view(torch.int16)).sub_(_order(old.view(torch.int16)))
    sign = difference >> 15
    return difference.bitwise_left_shift_(1).bitwise_xor_(sign).bitwise_xor_(_ZERO)


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
