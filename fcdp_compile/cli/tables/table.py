"""Tables as texts: numbers on the right, no space at the end of a line."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from tabulate import tabulate

_MIB = 2**20


WIDTH = 120
"""Letters in a line, if what cannot be broken is not longer; the same everywhere, so that dumps diff."""
_LEAST = 24


def table(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    align: Sequence[str],
    *,
    flexible: int | None = None,
) -> str:
    """A table; align: "left" or "right" for each column.

    flexible: the column whose texts are broken into lines, so that the table is at most WIDTH wide.
    """
    if flexible is not None:
        columns = zip(headers, *rows, strict=True)
        # tabulate makes a column two letters wider than its header.
        widths = [max(len(column[0]) + 2, *map(len, column[1:])) for column in columns]
        room = WIDTH - sum(widths) - 2 * (len(widths) - 1) + widths[flexible]
        rows = [
            [
                _broken(cell, max(room, _LEAST)) if i == flexible else cell
                for i, cell in enumerate(r)
            ]
            for r in rows
        ]
    text = tabulate(
        rows,
        headers=headers,
        colalign=align,
        tablefmt="simple",
        disable_numparse=True,
    )
    return "\n".join(line.rstrip() for line in text.splitlines())


def wrapped(text: str) -> str:
    """A paragraph of at most WIDTH letters a line, indented after the first."""
    return textwrap.fill(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def _broken(cell: str, width: int) -> str:
    """Lines of at most so many letters."""
    return textwrap.fill(cell, width, break_on_hyphens=False)


def mib(size_bytes: int) -> str:
    """Three decimals, and never a zero for something."""
    return "<0.001" if 0 < size_bytes < _MIB / 2000 else f"{size_bytes / _MIB:.3f}"


def ms(seconds: float) -> str:
    """Three decimals, so microseconds."""
    return f"{1e3 * seconds:.3f}"
