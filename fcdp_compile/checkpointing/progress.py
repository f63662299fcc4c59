"""A bar that fills with bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from fcdp_compile.extras import require


class Bar(Protocol):
    """What `tqdm` gives."""

    def update(self, n: int) -> object:
        """So many more bytes."""


class _NoBar:
    def update(self, n: int) -> None:
        pass


def need_bar(*, shown: bool) -> None:
    """Make sure that a bar can be shown, where one shall be.

    Raises: MissingExtraError if tqdm is not installed.
    """
    if shown:
        require("tqdm", "progress=True")


@contextmanager
def bar(text: str, total_bytes: int, *, shown: bool) -> Iterator[Bar]:
    """A bar on stderr until the block ends, if it is to be shown."""
    if not shown:
        yield _NoBar()
        return
    tqdm = require("tqdm", "progress=True").tqdm
    with tqdm(
        desc=text, total=total_bytes, unit="B", unit_scale=True, unit_divisor=1024
    ) as shown_bar:
        yield shown_bar
