"""What a subcommand hands to `main`."""

from __future__ import annotations

from typing import NamedTuple


class Answer(NamedTuple):
    """The result for stdout, and the exit code: 0 fine, 1 the answer is "no"."""

    text: str
    code: int = 0
