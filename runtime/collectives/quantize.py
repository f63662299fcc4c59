"""Encode rows of values in a format of `formats` and decode them: tensor arithmetic only.

The error of a value in a block whose largest magnitude is m:

    |decode(encode(x)) - x| <= m / (2 * 127) with int8, 0.108 m with int4, 0.153 m with nf4 (half of the
    widest gap between two levels, and the rounding of m to bf16), and half a unit of the dtype

A block of zeros stays zeros.  A block with an infinity or NaN has no finite value left, so that code that
looks for overflow (a gradient scaler) finds it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fcdp_compile.strategy.formats import CODINGS, Coding, Format, blocks_of, row_bytes

_SMALLEST = 2.0**-126  # normal fp32, the least scale: no division by zero, smaller values become 0
_LARGEST = torch.finfo(torch.float32).max
_SCALES = {4: torch.float32, 2: torch.bfloat16}

Kernel = Callable[[list[Any]], Sequence[Tensor]]
"""A compiled function of a list of tensors, which it empties."""

Sized = tuple[int, torch.dtype]
"""The number of rows, and the dtype of their values."""

Book = tuple[Tensor, ...]
"""The levels of a code book and the borders between them, fp32 [16] and [15]; empty for whole levels."""


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
        self.coding = CODINGS[wire]
        self.is_packed = self.coding.bits == 4
        self._lengths = blocks_of(slots, wire)
        self.blocks = len(self._lengths)
        self.is_regular = all(n == self.coding.block for n in self._lengths[:-1])
        self._numbers: dict[torch.device, Tensor] = {}
        self._books: dict[torch.device, Book] = {}

    def encode(self, values: Tensor) -> Tensor:
        """Encode each row: [rows, n] floating point -> [rows, bytes] uint8."""
        rows, block, book = len(values), self.coding.block, self.book(values.device)
        if not self.is_regular:
            numbers = self._number_of_each(values.device)
            wide = values.float()
            found = wide.new_zeros(rows, self.blocks)
            found.scatter_reduce_(1, numbers.expand_as(wide), wide.abs(), "amax")
            scales = scales_of(found, self.coding, values.dtype)
            levels = levels_of(wide, scales.index_select(1, numbers), self.coding, book)
            even = self.elements + self.elements % 2
            data = pack(_padded(levels, even)) if self.is_packed else levels
        else:
            blocks = _padded(values, self.blocks * block).view(rows, self.blocks, block)
            kernel = self.encoders.get((rows, values.dtype))
            scales, data = (
                encode_blocks(self, blocks, *book) if kernel is None else kernel([blocks, *book])
            )
        flat = data.flatten(1).view(torch.uint8)[:, : self.bytes - self._scale_bytes]
        return torch.cat([scales.view(torch.uint8), flat], 1)

    def decode(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Decode each row: [rows, bytes] uint8 -> [rows, n] in `dtype`."""
        count, start, book = len(rows), self._scale_bytes, self.book(rows.device)
        # A copy is aligned, wherever a row begins.
        scales = rows[:, :start].flatten().clone().view(_SCALES[self.coding.scale_bytes])
        scales, data = scales.view(count, self.blocks), rows[:, start:]
        if not self.is_regular:
            levels = unpack(data)[:, : self.elements] if self.is_packed else data.view(torch.int8)
            spread = scales.index_select(1, self._number_of_each(rows.device))
            return values_of(levels, spread, self.coding, book).to(dtype)
        block = self.coding.block * self.coding.bits // 8
        data = _padded(data, self.blocks * block).contiguous()
        data = data.view(count, self.blocks, block)
        kernel = self.decoders.get((count, dtype))
        blocks: Tensor = (
            decode_blocks(self, scales, data, *book, dtype=dtype)
            if kernel is None
            else kernel([scales, data, *book])[0]
        )
        return blocks.flatten(1)[:, : self.elements]

    @property
    def _scale_bytes(self) -> int:
        return self.coding.scale_bytes * self.blocks

    def book(self, device: torch.device) -> Book:
        """The code book, and the borders between its levels; nothing if levels are whole numbers."""
        if device not in self._books:
            levels = self.coding.book
            borders = [(low + high) / 2 for low, high in itertools.pairwise(levels)]
            with torch.inference_mode(False):
                self._books[device] = tuple(
                    torch.tensor(x, dtype=torch.float32, device=device)
                    for x in (levels, borders)
                    if x
                )
        return self._books[device]

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


def encode_blocks(codec: Codec, values: Tensor, *book: Tensor) -> tuple[Tensor, Tensor]:
    """Whole blocks [rows, blocks, values] -> scales [rows, blocks] and data [rows, blocks, bytes of one]."""
    wide = values.float()
    scales = scales_of(wide.abs().amax(-1), codec.coding, values.dtype)
    levels = levels_of(wide, scales.unsqueeze(-1), codec.coding, book)
    return scales, pack(levels) if codec.is_packed else levels.view(torch.uint8)


def decode_blocks(
    codec: Codec, scales: Tensor, data: Tensor, *book: Tensor, dtype: torch.dtype
) -> Tensor:
    """Scales [rows, blocks] and data [rows, blocks, bytes of one] -> whole blocks [rows, blocks, values]."""
    levels = unpack(data) if codec.is_packed else data.view(torch.int8)
    return values_of(levels, scales.unsqueeze(-1), codec.coding, book).to(dtype)


def scales_of(largest: Tensor, coding: Coding, dtype: torch.dtype) -> Tensor:
    """The scale of each block whose largest magnitude is given; dtype: of the values."""
    stored = _SCALES[coding.scale_bytes]
    scales = (largest / coding.largest).clamp_min_(_SMALLEST)
    # With a scale that was rounded up, the largest numbers would be decoded as infinite.
    limit = min(torch.finfo(dtype).max, _LARGEST) / coding.largest * (1 - torch.finfo(stored).eps)
    return scales.where(scales.isinf(), scales.clamp(max=limit)).to(stored)


def levels_of(wide: Tensor, scales: Tensor, coding: Coding, book: Book) -> Tensor:
    """The number k of the level next to each value, int8; its place in the code book less 8."""
    units = wide / scales
    if book:
        _, borders = book
        return (torch.bucketize(units, borders, out_int32=True) - 8).to(torch.int8)
    steps = coding.steps
    if coding.is_curved:  # rounding k, not the level, moves borders by 1 / 8 steps^2
        roots = units.abs().mul_(8).add_(1).sqrt_().mul_(steps)
        units = roots.sub_(steps).div_(2).copysign_(units)
    return units.round_().clamp_(-steps, steps).to(torch.int8)


def values_of(levels: Tensor, scales: Tensor, coding: Coding, book: Book) -> Tensor:
    """Undo `levels_of`, in fp32."""
    if book:
        return book[0][levels.to(torch.int32) + 8].mul_(scales)
    wide = levels.to(torch.float32)
    if coding.is_curved:
        wide *= (wide.abs() + coding.steps) / (2 * coding.steps**2)
    return wide.mul_(scales)


def pack(levels: Tensor) -> Tensor:
    """Levels of 4 bits, two in a byte: [..., 2 k] int8 -> [..., k] uint8."""
    pairs: Tensor = (levels + 8).view(torch.uint8).unflatten(-1, (-1, 2))
    return pairs[..., 0] | pairs[..., 1] << 4


def unpack(data: Tensor) -> Tensor:
    """Undo `pack`."""
    return torch.stack([data & 15, data >> 4], -1).flatten(-2).to(torch.int8) - 8
