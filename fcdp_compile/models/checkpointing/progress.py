"""A progress bar that counts bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fcdp_compile.extras import require


def need_bar(*, shown: bool) -> None:
    """Make sure that a bar can be shown, if one is to be.

    Raises: MissingExtraError if tqdm is not installed.
    """
    if shown:
        require("tqdm", "progress=True")


@contextmanager
def bar(text: str, total_bytes: int, *, shown: bool) -> Iterator[Callable[[int], object]]:
    """Show a bar on stderr until the block ends, if `shown`; yields what counts more bytes."""
    if not shown:
        yield lambda count: None
        return
    tqdm = require("tqdm", "progress=True").tqdm
    with tqdm(desc=text, total=total_bytes, unit="B", unit_scale=True, unit_divisor=1024) as made:
        yield made.update
