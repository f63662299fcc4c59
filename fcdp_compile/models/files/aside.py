"""Files that other processes see either whole or not at all, and that survive a crash of the machine."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """Yield a file beside `path` to write; it replaces `path` when the block ends, unless the block fails."""
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        yield aside
        aside.replace(path)
    except BaseException:
        with suppress(OSError):  # its parent may not be a folder
            aside.unlink()
        raise


def sync(path: Path) -> None:
    """Sync a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
