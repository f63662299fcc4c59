"""What all subcommands share: the answer that they return to `main`, and how they declare their arguments."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

from fcdp_compile.errors import ArgumentError
from fcdp_compile.strategy import Strategy

T = TypeVar("T")


class Answer(NamedTuple):
    """The text for stdout, if any, and the exit code: 0 fine, 1 the answer is "no", 2 another rank says."""

    text: str
    code: int = 0


class Declared:
    """Declares the options of a parser; a default is named at the end of the help."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._add = parser.add_argument

    def value(
        self,
        name: str,
        kind: Callable[[str], Any],
        metavar: str | None,
        text: str,
        default: object = None,
        **more: Any,
    ) -> None:
        """An option with a value.  kind: reads the value.  default: None is not named."""
        text += "" if default is None else f" (default: {default})"
        self._add(name, type=kind, metavar=metavar, help=text, default=default, **more)

    def choice(
        self, name: str, choices: Iterable[str], text: str, default: str | None = None
    ) -> None:
        """An option with one of several values."""
        text += "" if default is None else f" (default: {default})"
        self._add(name, choices=list(choices), help=text, default=default)

    def flag(self, name: str, text: str) -> None:
        """An option without a value."""
        self._add(name, action="store_true", help=text)

    def form(self, **others: str) -> None:
        """The option `--format`.  others: the forms besides a table, with what each is."""
        told = [f"{name}: {text}" for name, text in others.items()]
        text = "; ".join(["table: for reading (default)", *told])
        self._add("--format", choices=("table", *others), default="table", help=text)


def kind(read: Callable[[str], T]) -> Callable[[str], T]:
    """Make argparse report the ValueError of a function that reads a value as it is."""

    def reading(text: str) -> T:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return reading


strategy = kind(Strategy.parse)


@kind
def whole(text: str) -> int:
    """Read a whole number above zero."""
    if not text.isdecimal() or not 0 < int(text) < 2**31:
        raise ArgumentError(f"{text!r} is not a whole number above 0")
    return int(text)


def several(of: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    """Read values separated by commas, each once."""
    return lambda text: tuple(dict.fromkeys(of(part.strip()) for part in text.split(",")))
