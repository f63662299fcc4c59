"""Settings for every test of this process."""

from __future__ import annotations

import gc
import zlib
from contextlib import suppress

import pytest

with suppress(ImportError):  # a machine with a card may lack it; `make gpu` installs nothing
    import hypothesis

    # No deadlines: a loaded machine must not make a test fail.
    hypothesis.settings.register_profile("untimed", deadline=None)
    hypothesis.settings.load_profile("untimed")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--part`."""
    parser.addoption(
        "--part", help="K/N: the K-th of N parts of the tests, from 0; N runs cover all"
    )


@pytest.hookimpl(trylast=True)  # after -m, so that fixtures see the tests that run
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of one part: the same ones in every run, whichever others there are."""
    if (asked := config.getoption("--part")) is None:
        return
    part, parts = map(int, asked.split("/"))
    chosen = [item for item in items if zlib.crc32(item.nodeid.encode()) % parts == part]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


def pytest_collection_finish() -> None:
    """Keep the half a million objects that imports made, which stay for good, out of later collections."""
    gc.collect()
    gc.freeze()
