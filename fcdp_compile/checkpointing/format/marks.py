"""A mark of a parameter's values that does not depend on the layout: the sum of one hash per element.

Ranks add up their own rows; the sum of the ranks' sums is the mark of the whole parameter.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from fcdp_compile.params.fingerprint import mixed
from fcdp_compile.params.layout import ParamLayout

_BLOCK_ELEMENTS = 2**18  # so that a block stays in a core's cache
_GOLDEN = -7046029254386353131  # 2**64 over the golden ratio, odd
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def mark_of(rows: Tensor, layout: ParamLayout, start: int) -> int:
    """Return the part of the mark that rows of a parameter contribute; between 0 and 2**63.

    rows: a home shard; start: its first row along `layout.dim` (without meaning if that is None).
    A changed bit changes the hash of its element.  Each element is hashed with its place in the whole
    parameter, so exchanged elements change the mark too.
    """
    flat = rows.detach().contiguous().view(-1).view(_WORDS[rows.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=rows.device)
    for begin in range(0, flat.numel(), _BLOCK_ELEMENTS):
        words = flat[begin : begin + _BLOCK_ELEMENTS].to(torch.int64)
        here = torch.arange(begin, begin + len(words), device=rows.device)
        total += mixed(
            mixed(_places(here, layout, tuple(rows.shape), start) * _GOLDEN) ^ words
        ).sum()
    return int(total) & (2**63 - 1)


def mark_of_all(parts: Iterable[int]) -> int:
    """Return the mark of a parameter from its ranks' parts."""
    return sum(parts) & (2**63 - 1)


def _places(here: Tensor, layout: ParamLayout, shape: tuple[int, ...], start: int) -> Tensor:
    """Return the places in the whole parameter of the elements at places `here` of a shard."""
    if layout.dim is None:
        return here
    inner = torch.Size(layout.shape[layout.dim + 1 :]).numel()
    if torch.Size(layout.shape[: layout.dim]).numel() == 1:
        return start * inner + here  # divisions take most of the time
    run, whole_run = shape[layout.dim] * inner, layout.shape[layout.dim] * inner
    return here // run * whole_run + start * inner + here % run
