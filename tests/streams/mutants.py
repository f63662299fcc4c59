"""Remove one wait, event, hold or dependence from the runtime at a time: each must be noticed.

    python -m tests.streams.mutants [--list] [--late] [NUMBER ...]

The check of streams must notice each at once, and so must numbers on the simulated device (--late), whose
streams are late at random: there a mutant is noticed if a loss or a parameter differs.

A mutant is a function of the runtime, compiled from a changed syntax tree, that replaces the real function
while the programs of `programs` run.  The places to change are found in the source, so waits that are added
later are tried, too:

    statement   x.order(), x.wait_event(e), x.synchronize(), x.passed(), x.wait()   left out
    value       x.wait()                                                            x.tensor
    argument    done=x                                                              done=None
    element     reads=[a, b], held = [a, b]                                         each left out in turn
"""

from __future__ import annotations

import ast
import faulthandler
import gc
import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor

from tests.device.checked import CheckedDevice
from tests.runtime.test_lanes_on_streams import run as random_tasks
from tests.streams.cached import use_on_the_way
from tests.streams.programs import PROGRAMS, Job, Late, Program, checked, four_ranks, late

MODULES = (
    "runtime.lanes.task_lanes",
    "plan.lane_clocks",
    "runtime.lanes.tasks",
    "runtime.lanes.lanes",
    "runtime.collectives.channel",
    "runtime.collectives.collectives",
    "runtime.buckets.bucket_cache",
    "runtime.optimizers.gradients",
    "runtime.buckets.bound_bucket",
    "runtime.outside",
    "runtime.program",
    "runtime.drains",
)
"""The modules of the runtime that order work."""

_ORDERING = ("order", "wait_event", "synchronize", "passed", "wait")
_LISTS = ("reads", "held", "after")


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change in a function of a module.  what: the change.  code: the changed function's code."""

    module: str
    function: str
    line: int
    what: str
    code: CodeType

    def __str__(self) -> str:
        return f"{self.module}.{self.function}:{self.line} {self.what}"


class _Change(ast.NodeTransformer):
    """Makes the change with one number; counts all possible changes."""

    def __init__(self, number: int) -> None:
        self._number = number
        self.count = 0
        self.made: tuple[str, int, str] | None = None
        self._inside: list[str] = []

    def _is_it(self, node: ast.AST, what: str) -> bool:
        is_it = self.count == self._number
        self.count += 1
        if is_it:
            line: int = getattr(node, "lineno", 0)
            self.made = ".".join(self._inside), line, what
        return is_it

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return self._within(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._within(node)

    def _within(self, node: ast.ClassDef | ast.FunctionDef) -> ast.AST:
        # A function within a function is part of the outer function's code.
        outermost = (
            not self._inside
            or self._inside[-1][:1].isupper()
            or self._inside[-1][:2] in _OF_CLASSES
        )
        if outermost:
            self._inside.append(node.name)
        self.generic_visit(node)
        if outermost:
            self._inside.pop()
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        if (name := _called(node.value)) in _ORDERING and self._is_it(node, f"no {name}()"):
            return ast.copy_location(ast.Pass(), node)
        if _called(node.value) in _ORDERING:
            assert isinstance(node.value, ast.Call)
            self.generic_visit(node.value)
            return node
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if _called(node) == "wait" and not node.args and self._is_it(node, "wait() is .tensor"):
            assert isinstance(node.func, ast.Attribute)
            tensor = ast.Attribute(value=node.func.value, attr="tensor", ctx=ast.Load())
            return ast.copy_location(tensor, node)
        for keyword in node.keywords:
            is_none = isinstance(keyword.value, ast.Constant)
            if keyword.arg == "done" and not is_none and self._is_it(node, "done=None"):
                keyword.value = ast.copy_location(ast.Constant(None), keyword.value)
            if keyword.arg in _LISTS and isinstance(keyword.value, ast.List):
                self._shorten(keyword.value, keyword.arg)
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        self.generic_visit(node)
        if isinstance(target := node.targets[0], ast.Name):
            self._shorten_all(target.id, node.value)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.target, ast.Name) and node.value is not None:
            self._shorten_all(node.target.id, node.value)
        return node

    def _shorten_all(self, name: str, value: ast.AST) -> None:
        if name in _LISTS:
            for each in ast.walk(value):
                if isinstance(each, ast.List):
                    self._shorten(each, name)

    def _shorten(self, of: ast.List, name: str) -> None:
        for element in list(of.elts):
            if self._is_it(element, f"{name} without {ast.unparse(element)}"):
                of.elts.remove(element)


_OF_CLASSES = tuple(f"_{letter}" for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ")


def _called(node: ast.AST) -> str:
    is_method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    return node.func.attr if is_method else ""  # type: ignore[attr-defined]


def mutants() -> Iterator[Mutant]:
    """Yields every change of every module, in the order of the source."""
    for name in MODULES:
        module = importlib.import_module(f"fcdp_compile.{name}")
        assert module.__file__ is not None
        source = Path(module.__file__).read_text()
        number, count = 0, 1
        while number < count:
            change = _Change(number)
            tree = ast.fix_missing_locations(change.visit(ast.parse(source)))
            number, count = number + 1, change.count
            if change.made is None:
                continue
            function, line, what = change.made
            code = next(_find(compile(tree, module.__file__, "exec"), function))
            yield Mutant(name, function, line, what, code)


def _find(code: CodeType, name: str) -> Iterator[CodeType]:
    if code.co_qualname == name:
        yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _find(constant, name)


@contextmanager
def applied(mutant: Mutant) -> Iterator[None]:
    """Changes the runtime within the block."""
    found: Any = importlib.import_module(f"fcdp_compile.runtime.{mutant.module}")
    for part in mutant.function.split("."):
        found = vars(found)[part] if isinstance(found, type) else getattr(found, part)
    found = getattr(found, "fget", None) or getattr(found, "__func__", None) or found
    function: FunctionType = getattr(found, "__wrapped__", found)
    before, function.__code__ = function.__code__, mutant.code
    try:
        yield
    finally:
        function.__code__ = before


def run_random_tasks() -> None:
    """Runs random tasks on lanes that are streams, and on lanes that are threads.

    Raises: AssertionError, and the error of a task.
    """
    for is_blocking, seed in product((False, True), range(20)):
        seen = random_tasks(seed, is_blocking=is_blocking)
        assert all(found == expected for found, expected in seen), (
            f"{seed}: reads what is not there"
        )


PARTS = (run_random_tasks, use_on_the_way)
"""Parts of the runtime that run without a program, in less than a second."""


class Trial:
    """Runs parts of the runtime and then programs; builds a program's job again only if it has failed.

    make: makes the device of a job.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        parts: Sequence[Callable[[], None]] = PARTS,
        make: Callable[[Program], CheckedDevice | Late] = checked,
    ) -> None:
        self.names = tuple(names)
        self._parts = parts
        self._make = make
        self._ready: dict[str, tuple[Job, list[Tensor], Outcome]] = {}

    def _job(self, name: str) -> tuple[Job, list[Tensor], Outcome]:
        if name not in self._ready:
            job = Job(PROGRAMS[name], self._make)
            for _ in range(2):
                PROGRAMS[name].once(job)
            start = job.parameters()
            self._ready[name] = job, start, _outcome(name, job, start)
        return self._ready[name]

    def caught(self, mutant: Mutant) -> str:
        """The part or program that notices a mutant, and its message; empty if none notices it."""
        for part in self._parts:
            try:
                with applied(mutant):
                    part()
            except Exception as error:
                return f"{part.__name__}: {type(error).__name__}: {error}"
        for name in self.names:
            job, start, expected = self._job(name)
            try:
                with applied(mutant):
                    found = _outcome(name, job, start)
            except Exception as error:
                said = f"{name}: {type(error).__name__}: {error}"
            else:
                said = f"{name}: {found.unlike(expected)}" if found.unlike(expected) else ""
            if said:
                del self._ready[name], job
                gc.collect()
                return said
        return ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What two rounds of a program leave.

    alive_bytes: the job's device memory; 0 on a late device, which counts the memory of all jobs together.
    values: losses, what else the steps computed, and parameters.
    """

    alive_bytes: int
    values: list[Tensor]

    def unlike(self, expected: Outcome) -> str:
        """The first difference, or nothing."""
        for i, (here, there) in enumerate(zip(self.values, expected.values, strict=True)):
            if not torch.equal(here, there):
                return f"value {i} of {len(self.values)} differs"
        is_more = self.alive_bytes != expected.alive_bytes
        return f"{self.alive_bytes} bytes alive, not {expected.alive_bytes}" if is_more else ""


def _outcome(name: str, job: Job, start: Sequence[Tensor]) -> Outcome:
    """Runs a program twice from given parameters."""
    job.start_from(start)
    for _ in range(2):
        PROGRAMS[name].once(job)
    alive = job.alive_bytes()  # waits for the device
    return Outcome(alive if job.device.is_checked else 0, [*job.seen, *job.parameters()])


def _try_on_late_streams(numbers: Sequence[int]) -> None:
    from tests.device import sim

    with sim.as_default(), four_ranks(sim.KIND):
        trial = Trial(list(PROGRAMS), parts=(), make=late)
        for number, mutant in enumerate(mutants()):
            if number in numbers:
                faulthandler.dump_traceback_later(3000, exit=True)
                said = " ".join(trial.caught(mutant).split())  # one line, for `_caught_late`
                sys.stdout.write(f"{number} {said[:160]}\n")
                sys.stdout.flush()
                faulthandler.cancel_dump_traceback_later()


def _caught_late(numbers: Sequence[int]) -> Iterator[tuple[int, str]]:
    """Yields what notices each mutant, tried in other processes, which a mutant may end or stop."""
    left = list(numbers)
    while left:
        child = subprocess.Popen(
            [sys.executable, "-m", "tests.streams.mutants", "--here", *map(str, left)],
            env={"FCDP_SIM_DELAY_US": "2000"} | os.environ,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdout is not None
        for line in child.stdout:
            number, _, said = line.rstrip().partition(" ")
            left.remove(int(number))
            yield int(number), said
        if code := child.wait():
            yield left.pop(0), f"the process ends with {code}"


def main(arguments: Sequence[str]) -> int:
    chosen = {int(a) for a in arguments if not a.startswith("-")}
    tried = [n for n in enumerate(mutants()) if not chosen or n[0] in chosen]
    if "--here" in arguments:
        _try_on_late_streams([n for n, _ in tried])
        return 0
    names = dict(tried)
    survivors = 0

    def say(number: int, said: str) -> None:
        sys.stdout.write(f"{number:3} {names[number]}\n      {said[:160] or 'NOT CAUGHT'}\n")
        sys.stdout.flush()

    if "--late" in arguments:
        for number, said in _caught_late(list(names)):
            survivors += not said
            say(number, said)
        return survivors
    with four_ranks():
        trial = Trial(list(PROGRAMS))
        for number, mutant in tried:
            said = "" if "--list" in arguments else trial.caught(mutant)
            survivors += not said
            say(number, said)
    return survivors


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
