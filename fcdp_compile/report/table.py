"""Print figures as a table."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any


def table(rows: Sequence[Sequence[Any]], headers: Sequence[str]) -> str:
    """Return a table as text.  Figures are there without tabulate, so tabulate is imported here."""
    text: str = importlib.import_module("tabulate").tabulate(
        rows, headers=headers, tablefmt="simple"
    )
    return text
