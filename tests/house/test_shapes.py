"""Limits on the sizes of files, functions and classes, and unique class names, checked in the source.

All lines count, docstrings too, as a reader of a function reads them as well.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("fcdp_compile", "passes", "runtime", "benchmarks", "examples")

FUNCTION_LINES = 60
CLASS_METHODS = 25
"""Properties and dunders are methods, too."""
FILE_LINES = 600

TOO_LARGE: set[str] = set()
"""Exceptions that are still too large."""

SHARED_NAMES = {"Collectives", "Entry", "Slot", "Source", "Step"}
"""Names that several classes still have."""


def definitions(tree: ast.AST, within: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Every function and class, by its name within the file."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield f"{within}{node.name}", node
            yield from definitions(node, f"{within}{node.name}.")
        else:
            yield from definitions(node, within)


def too_large(source: str) -> list[str]:
    """The functions and classes of a file that are too large, and "" for the file itself."""
    tree = ast.parse(source)
    found = [""] if len(source.splitlines()) > FILE_LINES else []
    for name, node in definitions(tree):
        if isinstance(node, ast.ClassDef):
            if sum(isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) for n in node.body) > (
                CLASS_METHODS
            ):
                found.append(name)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            if node.end_lineno - node.lineno + 1 > FUNCTION_LINES:
                found.append(name)
    return found


def sources() -> list[Path]:
    """Every file that the limits hold for."""
    return [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def test_nothing_is_too_large() -> None:
    found = {
        f"{path.relative_to(ROOT)} {name}".strip()
        for path in sources()
        for name in too_large(path.read_text())
    }
    assert sorted(found - TOO_LARGE) == []
    assert sorted(TOO_LARGE - found) == [], "no longer too large: take it out of TOO_LARGE"


def test_no_two_classes_share_a_name() -> None:
    """So that a name in a message, a traceback or a page identifies the class."""
    names = Counter(
        node.name
        for path in sources()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    )
    shared = {name for name, count in names.items() if count > 1}
    assert sorted(shared - SHARED_NAMES) == []
    assert sorted(SHARED_NAMES - shared) == [], "no longer shared: take it out of SHARED_NAMES"


# Controls: each limit is one, and what is at the limit passes.


def _function(lines: int, indent: str = "") -> str:
    return f"{indent}def f():\n" + f"{indent}    pass\n" * (lines - 1)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        (_function(60), []),
        (_function(61), ["f"]),
        (f"async {_function(61)}", ["f"]),
        (f"class A:\n{_function(61, '    ')}", ["A.f"]),
        (f"if True:\n{_function(61, '    ')}", ["f"]),
        ("class A:\n" + "    def f(self): ...\n" * 25, []),
        ("class A:\n" + "    @property\n    def f(self): ...\n" * 26, ["A"]),
        ("x = 0\n" * 600, []),
        ("x = 0\n" * 601, [""]),
    ],
)
def test_what_is_too_large_is_found(source: str, found: list[str]) -> None:
    assert too_large(source) == found
