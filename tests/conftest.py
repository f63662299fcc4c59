"""Settings for every test of this process."""

from __future__ import annotations

import gc
import zlib
from collections import Counter
from contextlib import suppress

import pytest

from tests.device.choice import device_kind

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
    """Keep the tests of the device and of one part: the same in every run, whichever others there are."""
    part, parts = map(int, (config.getoption("--part") or "0/1").split("/"))
    kept: list[pytest.Item] = []
    dropped: list[pytest.Item] = []
    for item in items:
        is_here = device_kind() == "cpu" or item.get_closest_marker("cpu") is None
        stays = is_here and zlib.crc32(_together(item).encode()) % parts == part
        (kept if stays else dropped).append(item)
    config.hook.pytest_deselected(items=dropped)
    items[:] = kept


def _together(item: pytest.Item) -> str:
    """A name that tests have in common if they share what a fixture of their file makes; else the test's own.

    Such a fixture often trains a model, which each part of these tests would do again.
    """
    made = getattr(item, "_fixtureinfo", None)  # pytest has no public name for it
    found = {} if made is None else made.name2fixturedefs
    shared = [name for name, ways in found.items() if ways[-1].scope == "module"]
    values = item.callspec.indices if hasattr(item, "callspec") else {}
    return f"{item.path.name} {[(n, values.get(n)) for n in shared]}" if shared else item.nodeid


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A part of a few tests may be empty."""
    if session.config.getoption("--part") and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK


def pytest_collection_finish() -> None:
    """Keep the half a million objects that imports made, which stay for good, out of later collections."""
    gc.collect()
    gc.freeze()


_SHOWN_FILES = 10


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show the files that took longest: a new test that is long replaces or joins one of these."""
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.partition("::")[0]] += report.duration
    if not seconds:
        return
    terminalreporter.section(f"slowest {_SHOWN_FILES} of {len(seconds)} files")
    for file, taken_s in seconds.most_common(_SHOWN_FILES):
        terminalreporter.write_line(f"{taken_s:8.1f} s  {file}")
    terminalreporter.write_line(f"{seconds.total():8.1f} s  in all")
