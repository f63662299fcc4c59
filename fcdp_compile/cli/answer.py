"""The result that a subcommand returns to `main`."""

from __future__ import annotations

from typing import NamedTuple


class Answer(NamedTuple):
    """The text for stdout, if any, and the exit code: 0 fine, 1 the answer is "no", 2 another rank says."""

    text: str
    code: int = 0
