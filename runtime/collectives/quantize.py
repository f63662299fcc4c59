"""Encode rows of values in a format of `formats` and decode them: tensor arithmetic only.

The error of a value in a block whose largest magnitude is m:

    |decode(encode(x)) - x| <= m / (2 * 127) with int8, m / (2 * 7) with int4, and half a unit of the dtype

A block of zeros stays zeros.  A block with an infinity or NaN has no finite value left, so that code that
looks for overflow (a gradient scaler) finds it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fcdp_compile.strategy.formats import BLOCK, LEVELS, Format, blocks_of, row_bytes

_SMALLEST = 2.0**-126  # normal fp32, the least scale: no division by zero, smaller values become 0
_LARGEST = torch.finfo(torch.float32).max

Kernel = Callable[[list[Any]], Sequence[Tensor]]
"""A compiled function of a list of tensors, which it empties."""

Sized = tuple[int, torch.dtype]
"""The number of rows, and the dtype of their values."""


class Codec:
    """Encodes rows of the same slots in one format (`formats`, [Note: encoded rows]).

    elements: the elements of a row, n.  bytes: the bytes of an encoded row.  blocks: the blocks of a row.
    is_regular: whether all blocks but the last one are whole.  encoders, decoders: compiled `encode_blocks`
    and `decode_blocks`, for regular rows.
    """

    def __init__(self, wire: Format, slots: Sequence[int]) -> None:
        self.elements = sum(slots)
        self.bytes = row_bytes(slots, wire, 0)
        self.encoders: dict[Sized, Kernel] = {}
        self.decoders: dict[Sized, Kernel] = {}
        self.is_packed = wire is Format.INT4
        self.levels = LEVELS[wire]
        self._lengths = blocks_of(slots)
        self.blocks = len(self._lengths)
        self.is_regular = all(n == BLOCK for n in self._lengths[:-1])
        self._numbers: dict[torch.device, Tensor] = {}

    def encode(self, values: Tensor) -> Tensor:
        """Encode each row: [rows, n] floating point -> [rows, bytes] uint8."""
        rows = len(values)
        if not self.is_regular:
            numbers = self._number_of_each(values.device)
            wide = values.float()
            found = wide.new_zeros(rows, self.blocks)
            found.scatter_reduce_(1, numbers.expand_as(wide), wide.abs(), "amax")
            scales = scales_of(found, self.levels)
            levels = levels_of(wide, scales.index_select(1, numbers), self.levels)
            even = self.elements + self.elements % 2
            data = pack(_padded(levels, even)) if self.is_packed else levels
        else:
            whole = _padded(values, self.blocks * BLOCK)
            blocks = whole.view(rows, self.blocks, BLOCK)
            kernel = self.encoders.get((rows, values.dtype))
            scales, data = encode_blocks(self, blocks) if kernel is None else kernel([blocks])
        flat = data.flatten(1).view(torch.uint8)[:, : self.bytes - 4 * self.blocks]
        return torch.cat([scales.view(torch.uint8), flat], 1)

    def decode(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Decode each row: [rows, bytes] uint8 -> [rows, n] in `dtype`."""
        count, start = len(rows), 4 * self.blocks
        # A copy is aligned, wherever a row begins.
        scales = rows[:, :start].flatten().clone().view(torch.float32).view(count, self.blocks)
        data = rows[:, start:]
        if not self.is_regular:
            levels = unpack(data)[:, : self.elements] if self.is_packed else data.view(torch.int8)
            spread = scales.index_select(1, self._number_of_each(rows.device))
            return levels.to(torch.float32).mul_(spread).to(dtype)
        block = BLOCK // 2 if self.is_packed else BLOCK
        data = _padded(data, self.blocks * block).contiguous()
        data = data.view(count, self.blocks, block)
        kernel = self.decoders.get((count, dtype))
        blocks: Tensor = (
            decode_blocks(self, scales, data, dtype)
            if kernel is None
            else kernel([scales, data])[0]
        )
        return blocks.flatten(1)[:, : self.elements]

    def _number_of_each(self, device: torch.device) -> Tensor:
        """The block of each value of a row, int64 [n]."""
        if device not in self._numbers:
            with torch.inference_mode(False):
                lengths = torch.tensor(self._lengths, device="cpu")
                numbers = torch.arange(len(lengths), device="cpu").repeat_interleave(lengths)
                self._numbers[device] = numbers.to(device)
        return self._numbers[device]


def _padded(rows: Tensor, length: int) -> Tensor:
    """Rows with zeros at their ends; the same tensor if nothing is missing."""
    missing = length - rows.shape[1]
    return torch.nn.functional.pad(rows, (0, missing)) if missing else rows


def encode_blocks(codec: Codec, values: Tensor) -> tuple[Tensor, Tensor]:
    """Whole blocks [rows, blocks, BLOCK] -> scales [rows, blocks] and data [rows, blocks, bytes of one]."""
    wide = values.float()
    scales = scales_of(wide.abs().amax(-1), codec.levels)
    levels = levels_of(wide, scales.unsqueeze(-1), codec.levels)
    return scales, pack(levels) if codec.is_packed else levels.view(torch.uint8)


def decode_blocks(codec: Codec, scales: Tensor, data: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales [rows, blocks] and data [rows, blocks, bytes of one] -> whole blocks [rows, blocks, BLOCK]."""
    levels = unpack(data) if codec.is_packed else data.view(torch.int8)
    return levels.to(torch.float32).mul_(scales.unsqueeze(-1)).to(dtype)


def scales_of(largest: Tensor, levels: int) -> Tensor:
    """The scale of each block whose largest magnitude is given."""
    scales = (largest / levels).clamp_min_(_SMALLEST)
    # With a scale that was rounded up, the largest numbers would be decoded as infinite.
    return scales.where(scales.isinf(), scales.clamp(max=_LARGEST / levels * (1 - 2.0**-23)))


def levels_of(wide: Tensor, scales: Tensor, levels: int) -> Tensor:
    """Values in units of their scales, int8."""
    return (wide / scales).round_().clamp_(-levels, levels).to(torch.int8)


def pack(levels: Tensor) -> Tensor:
    """Levels of 4 bits, two in a byte: [..., 2 k] int8 -> [..., k] uint8."""
    pairs: Tensor = (levels + 8).view(torch.uint8).unflatten(-1, (-1, 2))
    return pairs[..., 0] | pairs[..., 1] << 4


def unpack(data: Tensor) -> Tensor:
    """Undo `pack`."""
    return torch.stack([data & 15, data >> 4], -1).flatten(-2).to(torch.int8) - 8
