"""A pytest plugin of `tests.mutations`: records which lines each test executes, or runs named tests only.

    python -m pytest -p tests.reach --record FILE     write coverage's data file, a context for each test
    python -m pytest -p tests.reach --these FILE      run the tests and files named in FILE, in its order

Lines that run on import, while pytest collects, have no context.  What a shared fixture or a cached function
executes counts for the first test that uses it; what a child process or a compiled kernel executes is not
recorded.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", metavar="FILE")
    parser.addoption("--these", metavar="FILE")


def pytest_configure(config: pytest.Config) -> None:
    if file := config.getoption("--record"):
        config.pluginmanager.register(_Recording(file))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if file := config.getoption("--these"):
        lines = Path(file).read_text(encoding="utf-8").splitlines()
        place = {name: number for number, name in enumerate(lines)}
        found = {
            item: [place[n] for n in (item.nodeid, item.nodeid.partition("::")[0]) if n in place]
            for item in items
        }
        items[:] = sorted((i for i in items if found[i]), key=lambda item: min(found[item]))


class _Recording:
    """Traces passes and runtime while the tests of this process run."""

    def __init__(self, file: str) -> None:
        try:
            import coverage
        except ImportError as error:
            raise pytest.UsageError("--record needs coverage: pip install coverage") from error
        self._coverage: Any = coverage.Coverage(
            data_file=file,
            config_file=False,
            include=["*/fcdp_compile/passes/*", "*/fcdp_compile/runtime/*"],
            messages=False,
        )
        self._coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._coverage.switch_context(item.nodeid)
        return (yield)

    def pytest_sessionfinish(self) -> None:
        self._coverage.stop()
        self._coverage.save()
