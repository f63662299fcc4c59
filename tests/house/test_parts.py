"""`--part`: the parts of the tests are apart, cover all of them, and do not change with the other tests."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.conftest import pytest_collection_modifyitems


def _part(names: list[str], part: str | None) -> list[str]:
    return _part_of([SimpleNamespace(nodeid=name) for name in names], part)


def _part_of(items: Any, part: str | None) -> list[str]:
    dropped: list[Any] = []
    count = len(items)
    config: Any = SimpleNamespace(
        getoption=lambda option: part,
        hook=SimpleNamespace(pytest_deselected=lambda items: dropped.extend(items)),
    )
    pytest_collection_modifyitems(config, items)
    assert len(items) + len(dropped) == count
    return [item.nodeid for item in items]


def test_ten_parts_are_all_tests() -> None:
    names = [f"tests/test_some.py::test_{i}" for i in range(200)]
    parts = [_part(names, f"{i}/10") for i in range(10)]
    assert sorted(name for part in parts for name in part) == sorted(names)
    assert all(parts)
    assert _part(names[:100], "3/10") == [name for name in parts[3] if name in names[:100]]
    assert _part(names, None) == names


def test_what_shares_a_trained_model_is_in_one_part() -> None:
    def item(mesh: int, name: str) -> Any:
        """A test that uses what its file trains on a mesh."""
        ways = {
            "trained": [SimpleNamespace(scope="module")],
            "tmp": [SimpleNamespace(scope="function")],
        }
        return SimpleNamespace(
            nodeid=f"tests/test_some.py::{name}[{mesh}]",
            path=Path("test_some.py"),
            _fixtureinfo=SimpleNamespace(name2fixturedefs=ways),
            callspec=SimpleNamespace(indices={"trained": mesh, "tmp": 0}),
        )

    items = [item(mesh, name) for mesh in range(20) for name in "abc"]
    parts = [_part_of(list(items), f"{i}/5") for i in range(5)]
    assert sorted(n for part in parts for n in part) == sorted(i.nodeid for i in items)
    for part in parts:
        assert len(part) == 3 * len({name.partition("[")[2] for name in part})
    assert sum(map(bool, parts)) > 1
