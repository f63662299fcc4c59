"""bf16 and fp16 gradients are summed in fp32.

[Note: narrow sums] Gradients in bf16 or fp16 travel in their own dtype: every rank receives the parts of all
others (an all-to-all, as many bytes as a reduce-scatter), sums them in fp32 and rounds once.  So each of the
two levels of a reduction rounds once, however many ranks there are.  With unit roundoff u of the dtype (2^-8
for bf16, 2^-11 for fp16), the error of an averaged gradient is at most (2u + u^2) times the average of the
ranks' magnitudes, plus fp32's own rounding.
"""

from __future__ import annotations

import torch


def is_narrow(dtype: torch.dtype) -> bool:
    """Whether fp32 sums are more precise than sums in a dtype: true for bf16 and fp16."""
    return dtype.is_floating_point and torch.promote_types(dtype, torch.float32) != dtype


def narrow_sum_bytes(dtype: torch.dtype, elements: int, size: int) -> int:
    """Extra bytes that a rank needs to reduce elements over `size` ranks: others' parts, and the sum."""
    return elements * dtype.itemsize + -(-elements // size) * 4 if is_narrow(dtype) else 0
