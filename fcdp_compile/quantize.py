"""Encode rows of values in a format of `wire` and decode them: tensor arithmetic only.

The error of a value in a block whose largest magnitude is m:

    |decode(encode(x)) - x| <= m / (2 * 127) with int8, m / (2 * 7) with int4, and half a unit of the dtype

A block of zeros stays zeros.  A block with an infinity or NaN has no finite value left, so that whoever
looks for overflow (a gradient scaler) finds it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fcdp_compile.wire import BLOCK, LEVELS, Format, blocks_of, row_bytes, scale_bytes

_SMALLEST = 2.0**-126  # normal fp32: what is below vanishes, and nothing is divided by zero
_LARGEST = torch.finfo(torch.float32).max


class Codec:
    """One format for rows of the same slots (`wire`, [Note: encoded rows]).

    elements: n, of a row.  bytes: of an encoded row.
    """

    def __init__(self, wire: Format, slots: Sequence[int]) -> None:
        self.elements = sum(slots)
        self.bytes = row_bytes(slots, wire, 0)
        self._is_packed = wire is Format.INT4
        self._levels = LEVELS[wire]
        # A scale rounded up would make the largest numbers infinite once decoded.
        self._largest_scale = _LARGEST / self._levels * (1 - 2.0**-23)
        self._scale_bytes = scale_bytes(slots)
        self._lengths = blocks_of(slots)
        self._is_regular = all(n == BLOCK for n in self._lengths[:-1])
        self._numbers: dict[torch.device, Tensor] = {}

    def encode(self, values: Tensor) -> Tensor:
        """Encode each row: [rows, n] floating point -> [rows, bytes] uint8."""
        wide = values.float()
        scales = (self._largest(wide.abs()) / self._levels).clamp_min_(_SMALLEST)
        scales = scales.where(scales.isinf(), scales.clamp(max=self._largest_scale))
        levels = (wide / self._spread(scales)).round_().clamp_(-self._levels, self._levels)
        data = levels.to(torch.int8)
        if self._is_packed:
            data = torch.nn.functional.pad(data, (0, self.elements % 2)) + 8
            pairs = data.view(torch.uint8).view(len(data), -1, 2)
            data = pairs[..., 0] | pairs[..., 1] << 4
        return torch.cat([scales.view(torch.uint8), data.view(torch.uint8)], 1)

    def decode(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Decode each row: [rows, bytes] uint8 -> [rows, n] in `dtype`."""
        start = self._scale_bytes
        # A copy is aligned, whatever a row begins at.
        scales = rows[:, :start].flatten().clone().view(torch.float32).view(len(rows), -1)
        data = rows[:, start:]
        if self._is_packed:
            pairs = torch.stack([data & 15, data >> 4], -1).view(len(rows), -1)
            levels = pairs[:, : self.elements].to(torch.float32) - 8
        else:
            levels = data.view(torch.int8).to(torch.float32)
        return levels.mul_(self._spread(scales)).to(dtype)

    def _largest(self, magnitudes: Tensor) -> Tensor:
        """The largest of each block: [rows, n] -> [rows, blocks]."""
        if self._is_regular:
            missing = len(self._lengths) * BLOCK - self.elements
            padded = torch.nn.functional.pad(magnitudes, (0, missing))
            return padded.view(len(magnitudes), -1, BLOCK).amax(-1) if self.elements else padded
        found = magnitudes.new_zeros(len(magnitudes), len(self._lengths))
        numbers = self._number_of_each(magnitudes.device).expand_as(magnitudes)
        return found.scatter_reduce_(1, numbers, magnitudes, "amax")

    def _spread(self, scales: Tensor) -> Tensor:
        """Each value's scale: [rows, blocks] -> [rows, n]."""
        if self._is_regular:
            wide = scales.unsqueeze(-1).expand(-1, -1, BLOCK)
            return wide.reshape(len(scales), -1)[:, : self.elements]
        return scales.index_select(1, self._number_of_each(scales.device))

    def _number_of_each(self, device: torch.device) -> Tensor:
        """The block of each value of a row, int64 [n]."""
        if device not in self._numbers:
            with torch.inference_mode(False):
                lengths = torch.tensor(self._lengths)
                numbers = torch.arange(len(self._lengths)).repeat_interleave(lengths)
                self._numbers[device] = numbers.to(device)
        return self._numbers[device]
