"""Compare two texts line by line."""

from __future__ import annotations

import difflib
import itertools


def text_diff(
    a: str, b: str, names: tuple[str, str], *, context: int = 0, most: int | None = None
) -> list[str]:
    """The lines of a unified diff; none for equal texts.

    context: how many equal lines to show around a difference.  most: how many lines to return at most.
    """
    lines = difflib.unified_diff(a.split("\n"), b.split("\n"), *names, "", "", context, "")
    return list(itertools.islice(lines, most))
