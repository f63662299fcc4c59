"""Modules that suites import at their top and that none of our cases uses."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType


class _Stub(ModuleType):
    """Any name is an empty class."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def stub(*names: str) -> None:
    """Let each module be imported, if it is not installed."""
    for name in names:
        if name not in sys.modules and importlib.util.find_spec(name) is None:
            sys.modules[name] = _Stub(name)
