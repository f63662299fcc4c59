"""A mark of a parameter's values that does not depend on the layout: the sum of one hash per element.

Ranks add up their own rows; the sum of the ranks' sums is the mark of the whole parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from fcdp_compile.core.params.layout import Box
from fcdp_compile.core.params.packing import block_of
from fcdp_compile.core.params.seals.fingerprint import mixed

_BLOCK_ELEMENTS = 2**18  # so that a block stays in a core's cache
_GOLDEN = -7046029254386353131  # 2**64 over the golden ratio, odd
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def mark_of(part: Tensor, whole_shape: Sequence[int], boxes: Iterable[Box]) -> int:
    """Return what a part of a parameter contributes to the mark; between 0 and 2**63.

    whole_shape: of the parameter.  boxes: where the part's elements are in it.
    A changed bit changes the hash of its element.  Each element is hashed with its place in the whole
    parameter, so exchanged elements change the mark too.
    """
    total = torch.zeros((), dtype=torch.int64, device=part.device)
    for box in boxes:
        block = block_of(part.detach(), box.inside, box.shape).contiguous()
        flat = block.view(-1).view(_WORDS[part.element_size()])
        for begin in range(0, flat.numel(), _BLOCK_ELEMENTS):
            words = flat[begin : begin + _BLOCK_ELEMENTS].to(torch.int64)
            here = torch.arange(begin, begin + len(words), device=part.device)
            total += mixed(mixed(_places(here, whole_shape, box) * _GOLDEN) ^ words).sum()
    return int(total) & (2**63 - 1)


def mark_of_all(parts: Iterable[int]) -> int:
    """Return the mark of a parameter from its ranks' parts."""
    return sum(parts) & (2**63 - 1)


def _places(here: Tensor, whole_shape: Sequence[int], box: Box) -> Tensor:
    """Return the places in the whole parameter of the elements at places `here` of a block."""
    begin, stride = 0, 1
    runs = [(1, 1)]  # lengths and strides; dimensions that are in a row in memory count as one
    for size, at, count in reversed(list(zip(whole_shape, box.at, box.shape, strict=True))):
        length, of = runs[-1]
        if length * of == stride or length == 1:
            runs[-1] = (length * count, of if length > 1 else stride)
        elif count > 1:
            runs.append((count, stride))
        begin += at * stride
        stride *= size
    places = torch.full_like(here, begin)
    for length, of in runs[:-1]:
        places += here % length * of
        here = here // length
    return places + here * runs[-1][1]
