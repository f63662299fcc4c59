"""Format tables as text: numbers are right-aligned, and lines have no trailing spaces."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from tabulate import tabulate

_MIB = 2**20


WIDTH = 120
"""Characters in a line, unless a word is longer; equal everywhere, so that dumps can be compared."""
_LEAST = 24


def table(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    align: Sequence[str],
    *,
    flexible: int | None = None,
) -> str:
    """Return a table; align: "left" or "right" for each column.

    flexible: the column whose texts are broken into lines, so that the table is at most WIDTH wide.
    """
    if flexible is not None:
        columns = zip(headers, *rows, strict=True)
        # tabulate makes a column two characters wider than its header.
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
    """Wrap a paragraph to WIDTH characters a line, indented after the first."""
    return textwrap.fill(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def _broken(cell: str, width: int) -> str:
    """Wrap a cell to `width` characters a line."""
    return textwrap.fill(cell, width, break_on_hyphens=False)


def mib(size_bytes: int) -> str:
    """Format MiB with three decimals; sizes above 0 are never shown as 0."""
    return "<0.001" if 0 < size_bytes < _MIB / 2000 else f"{size_bytes / _MIB:.3f}"


def ms(seconds: float) -> str:
    """Format milliseconds with three decimals, so microseconds."""
    return f"{1e3 * seconds:.3f}"
