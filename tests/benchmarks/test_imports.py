"""Every module of the benchmarks can be imported: most run only on a GPU or as root."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

import benchmarks

MODULES = [m.name for m in pkgutil.walk_packages(benchmarks.__path__, "benchmarks.")]


@pytest.mark.parametrize("name", [m for m in MODULES if not m.endswith("__main__")])
def test_it_can_be_imported(name: str) -> None:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith(("benchmarks", "fcdp_compile")):
            raise
        pytest.skip(f"needs {error.name}")
