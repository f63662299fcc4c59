"""Tables as texts: numbers on the right, no space at the end of a line."""

from __future__ import annotations

from collections.abc import Sequence

from tabulate import tabulate

_MIB = 2**20


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], align: Sequence[str]) -> str:
    """A table; align: "left" or "right" for each column."""
    text = tabulate(
        rows,
        headers=headers,
        colalign=align,
        tablefmt="simple",
        disable_numparse=True,
    )
    return "\n".join(line.rstrip() for line in text.splitlines())


def mib(size_bytes: int) -> str:
    """Three decimals, and never a zero for something."""
    return "<0.001" if 0 < size_bytes < _MIB / 2000 else f"{size_bytes / _MIB:.3f}"


def ms(seconds: float) -> str:
    """Three decimals, so microseconds."""
    return f"{1e3 * seconds:.3f}"
