"""How gradients of few bits are summed: in fp32, whatever they travel in.

[Note: narrow sums] Gradients in bf16 or fp16 travel as they are, and every rank gets the parts of all others
(all-to-all, the bytes of a reduce-scatter), sums them in fp32 and rounds once.  So each of the two levels of
a reduction rounds once, however many ranks there are: with unit roundoff u of the dtype (2^-8 of bf16, 2^-11
of fp16), an averaged gradient is off by at most (2u + u^2) times the average of the ranks' magnitudes,
besides fp32's own rounding.
"""

from __future__ import annotations

import torch


def is_narrow(dtype: torch.dtype) -> bool:
    """Whether sums in a dtype lose to rounding what fp32 would keep: of bf16 and fp16."""
    return dtype.is_floating_point and torch.promote_types(dtype, torch.float32) != dtype


def narrow_sum_bytes(dtype: torch.dtype, elements: int, size: int) -> int:
    """What a rank needs besides to reduce elements over `size` ranks: the parts of others, and their sum."""
    return elements * dtype.itemsize + -(-elements // size) * 4 if is_narrow(dtype) else 0
