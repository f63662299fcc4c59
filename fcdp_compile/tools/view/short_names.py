"""Short forms of long regular lists: names of identical layers, runs of numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from fcdp_compile.plan import BucketParam


def fold_params(params: Iterable[BucketParam]) -> list[str]:
    """Write parameters that differ only in layer numbers, of one shape, as one line.

        layers.0.q_proj.weight, layers.1.q_proj.weight  ->  layers.{0-1}.q_proj.weight  x2

    The lines are in the order of each line's first parameter.
    """
    groups: dict[tuple[tuple[str | None, ...], tuple[int, ...]], list[tuple[int, ...]]] = {}
    for param in params:
        parts = param.name.split(".")
        pattern = tuple(None if _is_number(part) else part for part in parts)
        numbers = tuple(int(part) for part in parts if _is_number(part))
        groups.setdefault((pattern, param.layout.shape), []).append(numbers)
    return [line for (pattern, _), found in groups.items() for line in _fold(pattern, found)]


def fold_numbers(numbers: Sequence[int]) -> str:
    """Write ascending numbers with runs shortened: 1, 2, 3, 7 is "1-3,7"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("-".join(str(end) for end in run) for run in runs)


def _is_number(part: str) -> bool:
    """Whether a part of a name is a number that prints as the same text."""
    return part.isascii() and part.isdigit() and len(part) < 10 and str(int(part)) == part


def _fold(pattern: tuple[str | None, ...], found: list[tuple[int, ...]]) -> list[str]:
    columns = [sorted(set(column)) for column in zip(*found, strict=True)]
    if math.prod(len(column) for column in columns) == len(found):
        return [_line(pattern, columns, len(found))]
    # Not every combination exists: split by the values of the first number that varies.
    split = next(i for i, column in enumerate(columns) if len(column) > 1)
    return [
        line
        for value in columns[split]
        for line in _fold(pattern, [numbers for numbers in found if numbers[split] == value])
    ]


def _line(pattern: tuple[str | None, ...], columns: list[list[int]], count: int) -> str:
    numbers = iter(columns)
    parts = [_braces(next(numbers)) if part is None else part for part in pattern]
    return ".".join(parts) + (f"  x{count}" if count > 1 else "")


def _braces(column: list[int]) -> str:
    return f"{{{fold_numbers(column)}}}" if len(column) > 1 else str(column[0])
