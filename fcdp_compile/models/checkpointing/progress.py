"""A progress bar that counts bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from fcdp_compile.extras import require


class Bar(Protocol):
    """The part of a `tqdm` bar that is used."""

    def update(self, n: int) -> object:
        """Count n more bytes."""


class _NoBar:
    def update(self, n: int) -> None:
        pass


def need_bar(*, shown: bool) -> None:
    """Make sure that a bar can be shown, if one is to be.

    Raises: MissingExtraError if tqdm is not installed.
    """
    if shown:
        require("tqdm", "progress=True")


@contextmanager
def bar(text: str, total_bytes: int, *, shown: bool) -> Iterator[Bar]:
    """Show a bar on stderr until the block ends, if `shown`."""
    if not shown:
        yield _NoBar()
        return
    tqdm = require("tqdm", "progress=True").tqdm
    with tqdm(
        desc=text, total=total_bytes, unit="B", unit_scale=True, unit_divisor=1024
    ) as shown_bar:
        yield shown_bar
