"""For every test of this process."""

from __future__ import annotations

import gc


def pytest_collection_finish() -> None:
    """Leave what importing made out of every later collection: half a million objects, all here to stay."""
    gc.collect()
    gc.freeze()
