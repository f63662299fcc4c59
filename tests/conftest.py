"""Settings for every test of this process."""

from __future__ import annotations

import gc
from contextlib import suppress

with suppress(ImportError):  # a machine with a card may lack it; `make gpu` installs nothing
    import hypothesis

    # No deadlines: a loaded machine must not make a test fail.
    hypothesis.settings.register_profile("untimed", deadline=None)
    hypothesis.settings.load_profile("untimed")


def pytest_collection_finish() -> None:
    """Keep the half a million objects that imports made, which stay for good, out of later collections."""
    gc.collect()
    gc.freeze()
