"""`--part`: the parts of the tests are apart, cover all of them, and do not change with the other tests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.conftest import pytest_collection_modifyitems


def _part(names: list[str], part: str | None) -> list[str]:
    dropped: list[Any] = []
    items: Any = [SimpleNamespace(nodeid=name) for name in names]
    config: Any = SimpleNamespace(
        getoption=lambda option: part,
        hook=SimpleNamespace(pytest_deselected=lambda items: dropped.extend(items)),
    )
    pytest_collection_modifyitems(config, items)
    assert len(items) + len(dropped) == len(names)
    return [item.nodeid for item in items]


def test_ten_parts_are_all_tests() -> None:
    names = [f"tests/test_some.py::test_{i}" for i in range(200)]
    parts = [_part(names, f"{i}/10") for i in range(10)]
    assert sorted(name for part in parts for name in part) == sorted(names)
    assert all(parts)
    assert _part(names[:100], "3/10") == [name for name in parts[3] if name in names[:100]]
    assert _part(names, None) == names
