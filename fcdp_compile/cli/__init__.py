"""The `fcdp` command: results on stdout, everything else on stderr.

Exit codes: 0 fine, 1 the answer is "no", 2 bad input, reported in one line.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from typing import NoReturn, Protocol

import fcdp_compile
from fcdp_compile.cli import clean, dump, plan, probe, simulate, strategies
from fcdp_compile.cli.command import Answer
from fcdp_compile.errors import FcdpError, did_you_mean
from fcdp_compile.models.files.json_records import one_line


class _Command(Protocol):
    """The interface of a subcommand's module."""

    SUMMARY: str
    DESCRIPTION: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the arguments."""

    def run(self, options: argparse.Namespace) -> Answer:
        """Return the answer; raise FcdpError or OSError for bad input."""


_COMMANDS: dict[str, _Command] = {
    "dump": dump,
    "strategies": strategies,
    "probe": probe,
    "plan": plan,
    "simulate": simulate,
    "clean": clean,
}

_ON_EVERY_RANK = ("probe",)
"""Commands that torchrun starts once for each rank, with the same arguments."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Raises: SystemExit if argparse ends the process (help, bad usage).
    """
    try:
        options = _parse(sys.argv[1:] if argv is None else argv)
        answer = _COMMANDS[options.command].run(options)
        return _print(answer)
    except (FcdpError, OSError) as error:
        print(f"fcdp: {one_line(_explain(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


class _Parser(argparse.ArgumentParser):
    """Reports bad usage in one line; argparse would also print the usage.

    is_silent: whether another rank reports this error.
    """

    is_silent = False

    def error(self, message: str) -> NoReturn:
        """End the process with exit code 2."""
        text = one_line(f"{self.prog}: {message} (see {self.prog} --help)") + "\n"
        self.exit(2, None if self.is_silent else text)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(
        prog="fcdp",
        description="Look at what the fcdp backend compiled, what it can do, and at your cluster.",
        epilog='Exit codes: 0 fine, 1 the answer is "no", 2 bad input.',
        allow_abbrev=False,
    )
    version = f"fcdp {fcdp_compile.__version__}"
    parser.add_argument("--version", action="version", version=version, help="print the version")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, command in _COMMANDS.items():
        sub = subparsers.add_parser(
            name, help=command.SUMMARY, description=command.DESCRIPTION, allow_abbrev=False
        )
        command.add_arguments(sub)
        sub.is_silent = name in _ON_EVERY_RANK and os.environ.get("RANK", "0") != "0"
    named = next((arg for arg in argv if not arg.startswith("-")), None)
    if named in _ON_EVERY_RANK:
        parser.is_silent = subparsers.choices[named].is_silent
    if named is not None and named not in _COMMANDS:
        hint = did_you_mean(named.lower(), _COMMANDS)
        parser.error(f"unknown command {named!r}; choose one of {', '.join(_COMMANDS)}{hint}")
    options = parser.parse_args(argv)
    if options.command is None:
        parser.error(f"no command given; choose one of {', '.join(_COMMANDS)}")
    return options


def _print(answer: Answer) -> int:
    # The caller has closed stdout and wants only the exit code, or this rank has nothing to print.
    if sys.stdout is None or not answer.text:
        return answer.code
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may lack a character
    try:
        print(answer.text, flush=True)
    except BrokenPipeError:
        _discard_stdout()
    except OSError:
        _discard_stdout()
        raise
    return answer.code


def _discard_stdout() -> None:
    """Send the interpreter's own flush at exit to nowhere, because it would fail once more."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _explain(error: FcdpError | OSError) -> str:
    if isinstance(error, OSError) and error.strerror:
        what = "standard output" if error.filename is None else error.filename
        return f"{what}: {error.strerror}"
    return str(error)
