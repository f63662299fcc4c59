"""Marks for tests with many parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def quick(values: Iterable[Any], *chosen: Any) -> list[Any]:
    """Values for `pytest.mark.parametrize`, of which `make test` runs the chosen ones; others are slow.

    A tuple holds the values of several parameters.
    """
    values = list(values)
    assert all(c in values for c in chosen), f"{chosen} are not all in {values}"
    several = [v if isinstance(v, tuple) else (v,) for v in values]
    return [
        v if v in chosen else pytest.param(*each, marks=pytest.mark.slow)
        for v, each in zip(values, several, strict=True)
    ]
