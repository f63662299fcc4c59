"""For every test of this process."""

from __future__ import annotations

import gc
from contextlib import suppress

with suppress(ImportError):  # a machine with a card may lack it; `make gpu` installs nothing
    import hypothesis

    # No test measures time: a loaded machine is no fault.
    hypothesis.settings.register_profile("untimed", deadline=None)
    hypothesis.settings.load_profile("untimed")


def pytest_collection_finish() -> None:
    """Leave what importing made out of every later collection: half a million objects, all here to stay."""
    gc.collect()
    gc.freeze()
