"""The `fcdp` command, called in this process."""

from __future__ import annotations

import pytest

from fcdp_compile.cli import main


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that must end with 2 and print nothing on stdout; returns its only line on stderr."""
    try:
        code: object = main(arguments)
    except SystemExit as end:
        code = end.code
    out, err = capsys.readouterr()
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    return err


def cells(text: str, start: str) -> list[str]:
    """The columns of the first line that starts with a word."""
    line = next(line for line in text.splitlines() if line.split()[:1] == [start])
    return line.split()
