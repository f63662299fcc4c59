"""Guess the name that a misspelt name was meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: `; did you mean 'fcdp'?`, or nothing if none is near.

    Names that share most letters are near; the guess is the near name with the fewest typing mistakes.
    """
    near = difflib.get_close_matches(name, list(known), n=5)
    if not near:
        return ""
    return f"; did you mean {min(near, key=lambda other: _mistakes(name, other))!r}?"


def _mistakes(a: str, b: str) -> int:
    """Letters that were left out, added, mistaken for others, or swapped with their neighbour.

    Source: the optimal string alignment distance.
    """
    rows = [list(range(len(b) + 1))]
    for i, x in enumerate(a, 1):
        row = [i]
        for j, y in enumerate(b, 1):
            best = min(rows[-1][j] + 1, row[-1] + 1, rows[-1][j - 1] + (x != y))
            if i > 1 and j > 1 and (x, y) == (b[j - 2], a[i - 2]):
                best = min(best, rows[-2][j - 2] + 1)
            row.append(best)
        rows.append(row)
    return rows[-1][-1]
