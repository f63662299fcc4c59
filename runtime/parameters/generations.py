"""Generations: numbers that grow when parameters change."""

from __future__ import annotations

from collections.abc import Iterable


class Generations:
    """Generations of a model's parameters; every rank makes the same calls and has the same numbers."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._clock = 0
        self._of = dict.fromkeys(keys, 0)

    def change(self, keys: Iterable[str]) -> None:
        """Note that the values of these parameters have changed."""
        self._clock += 1
        for key in keys:
            self._of[key] = self._clock

    def of(self, keys: Iterable[str]) -> int:
        """The generation of a bucket of these parameters."""
        return max((self._of[key] for key in keys), default=0)
