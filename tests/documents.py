"""JSON documents with one mistake."""

from __future__ import annotations

import copy
from typing import Any

Path = tuple[str | int, ...]
"""Keys and positions from the document to one place in it."""

REMOVED = object()


def damaged(document: Any, path: Path, value: object) -> Any:
    """A copy of a document with another value at one place, or without that place (REMOVED)."""
    if not path:
        return value
    document = copy.deepcopy(document)
    holder: Any = document
    for key in path[:-1]:
        holder = holder[key]
    if value is REMOVED:
        del holder[path[-1]]
    else:
        holder[path[-1]] = value
    return document
