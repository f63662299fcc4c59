from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.running.arguments import parse
from benchmarks.systems.names import SYSTEMS
from benchmarks.systems.shape import QUICK, Shape


def test_defaults_are_the_full_matrix() -> None:
    args = parse([])
    assert args.systems == [s.name for s in SYSTEMS]
    assert (args.modes, args.accumulations) == (["lora", "full"], [1, 8])
    assert args.networks == ["unlimited", "1gbit", "100mbit"]
    assert args.shape == Shape()
    assert args.out.name == "docs"
    assert (args.action, args.resume) == ("run", False)


def test_quick_is_tiny_and_keeps_away_from_the_docs() -> None:
    args = parse(["--quick"])
    assert args.shape == QUICK
    assert args.out.parts[-2:] == ("build", "benchmark-quick")
    assert args.minutes < parse([]).minutes


def test_choices_and_sizes() -> None:
    line = "--only fcdp,ddp --modes lora --accumulations 4 --networks 1gbit --minutes 5 --rounds 1"
    args = parse([*line.split(), "--quick", "--layers", "3", "--out", "/tmp/x"])
    assert (args.systems, args.modes, args.accumulations) == (["fcdp", "ddp"], ["lora"], [4])
    assert (args.networks, args.minutes, args.rounds) == (["1gbit"], 5.0, 1)
    assert (args.shape.layers, args.shape.width) == (3, QUICK.width)
    assert args.out == Path("/tmp/x")


def test_redo_keeps_the_rest() -> None:
    args = parse(["--redo", "fcdp"])
    assert (args.systems, args.redo, args.resume) == (["fcdp"], ["fcdp"], True)


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        ("--only fdcp", "unknown name 'fdcp'; choose from"),
        ("--networks 10gbit", "unknown name '10gbit'"),
        ("--accumulations 0", "no list of positive numbers"),
        ("--accumulations x", "no list of positive numbers"),
        ("--width 100", "width 100 cannot be split into heads of 64"),
        ("--layers 0", "layers must be at least 1"),
        ("--minutes 0", "--minutes must be positive"),
        ("--plan --report", "not allowed with"),
    ],
)
def test_bad_input_is_refused_with_a_sentence(
    argv: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse(argv.split())
    assert stopped.value.code == 2
    assert text in capsys.readouterr().err
