"""The benchmark's command line."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.running.matrix import ACCUMULATIONS, MODES
from benchmarks.running.network import NETWORKS
from benchmarks.systems.names import SYSTEMS
from benchmarks.systems.shape import QUICK, Shape

_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The parsed command line."""

    systems: list[str]
    modes: list[str]
    accumulations: list[int]
    networks: list[str]
    shape: Shape
    minutes: float
    rounds: int
    out: Path
    resume: bool
    redo: list[str]
    action: str


def parse(argv: Sequence[str] | None = None) -> Arguments:
    """Read the command line; exits with 2 and a sentence if it makes no sense."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Train one small GPT with fcdp and its peers on two simulated nodes, and write a report.",
    )
    default = Shape()
    names = [s.name for s in SYSTEMS]
    add = parser.add_argument
    add("--only", type=_list(names), default=names, metavar="SYSTEM,...", help=", ".join(names))
    add("--modes", type=_list(MODES), default=list(MODES), metavar="MODE,...")
    add("--accumulations", type=_numbers, default=list(ACCUMULATIONS), metavar="K,...")
    add("--networks", type=_list(NETWORKS), default=list(NETWORKS), metavar="NET,...")
    add("--minutes", type=float, help="time for everything (default 60; with --quick 10)")
    add("--rounds", type=int, default=2, help="passes over all systems, if time allows")
    add("--quick", action="store_true", help="a tiny model, to try things out")
    for name in ("layers", "width", "batch", "length", "vocabulary"):
        add(f"--{name}", type=int, help=f"default {getattr(default, name)}")
    add("--out", type=Path, help="folder (default docs; with --quick build/benchmark-quick)")
    add("--resume", action="store_true", help="keep the rows of --out, measure what is missing")
    add(
        "--redo",
        type=_list(names),
        default=[],
        metavar="SYSTEM,...",
        help="measure these systems again, and keep the rows of all others",
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--plan", action="store_true", help="print what would run, and its price")
    action.add_argument("--report", action="store_true", help="only write the report again")
    given = parser.parse_args(argv)
    try:
        shape = _shape(given, QUICK if given.quick else default)
        minutes = given.minutes if given.minutes is not None else (10.0 if given.quick else 60.0)
        if minutes <= 0 or given.rounds < 1:
            raise ValueError("--minutes must be positive and --rounds at least 1")
    except ValueError as error:
        parser.error(str(error))
    out = given.out or _ROOT / ("build/benchmark-quick" if given.quick else "docs")
    return Arguments(
        systems=given.redo or given.only,
        modes=given.modes,
        accumulations=given.accumulations,
        networks=given.networks,
        shape=shape,
        minutes=minutes,
        rounds=given.rounds,
        out=out,
        resume=given.resume or bool(given.redo),
        redo=given.redo,
        action="plan" if given.plan else "report" if given.report else "run",
    )


def _shape(given: argparse.Namespace, default: Shape) -> Shape:
    def size(name: str) -> int:
        value: int | None = getattr(given, name)
        return getattr(default, name) if value is None else value

    return Shape(
        layers=size("layers"),
        width=size("width"),
        vocabulary=size("vocabulary"),
        batch=size("batch"),
        length=size("length"),
    )


class _list:
    """The argparse type of an option that takes known names, separated by commas."""

    def __init__(self, known: Iterable[str]) -> None:
        self._known = list(known)

    def __call__(self, text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in self._known:
                known = ", ".join(self._known)
                raise argparse.ArgumentTypeError(f"unknown name {name!r}; choose from {known}")
        return names


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of positive numbers such as 1,8")
    return numbers
