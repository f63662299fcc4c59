"""A pytest plugin of `tests.mutations`: records which lines each test executes, or runs some tests first.

    python -m pytest -p tests.reach --record FILE     write coverage's data file, a context for each test
    python -m pytest -p tests.reach --first FILE      run the tests named in FILE, one a line, before others

Lines that run on import, while pytest collects, have no context.  Neither have lines that only a child
process or a compiled kernel executes: they are not recorded.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

_TESTS = Path(__file__).resolve().parent
_CACHED = type(cache(len))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", metavar="FILE")
    parser.addoption("--first", metavar="FILE")


def pytest_configure(config: pytest.Config) -> None:
    if file := config.getoption("--record"):
        config.pluginmanager.register(_Recording(file))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if file := config.getoption("--first"):
        named = set(Path(file).read_text(encoding="utf-8").splitlines())
        items.sort(key=lambda item: item.nodeid not in named)


class _Recording:
    """Traces passes and runtime while the tests of this process run."""

    def __init__(self, file: str) -> None:
        try:
            import coverage
        except ImportError as error:
            raise pytest.UsageError("--record needs coverage: pip install coverage") from error
        self._in: Path | None = None
        self._coverage: Any = coverage.Coverage(
            data_file=file,
            config_file=False,
            include=["*/fcdp_compile/passes/*", "*/fcdp_compile/runtime/*"],
            messages=False,
        )
        self._coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        if self._in != item.path:
            # Else a file that reads what another file has built would seem to execute nothing.
            self._in = item.path
            _clear_caches()
        self._coverage.switch_context(item.nodeid)
        return (yield)

    def pytest_sessionfinish(self) -> None:
        self._coverage.stop()
        self._coverage.save()


def _clear_caches() -> None:
    """Empty the caches of functions of the tests."""
    for module in list(sys.modules.values()):
        if _TESTS in Path(getattr(module, "__file__", None) or "/").parents:
            for value in vars(module).values():
                if isinstance(value, _CACHED):
                    value.cache_clear()
