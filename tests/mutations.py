"""Change one small thing of the passes or the runtime at a time: the fast layer of the tests must notice.

    python -m tests.mutations [--list] [--only NUMBER ...] [--own] [--again] [--jobs 2]

Sixty mutations, one of each of sixty modules (`chosen`): a flipped comparison, a swapped sign, an
off-by-one, a swapped argument, a dropped call, `and` for `or`.  Each is applied to a copy of the checkout.
Then tests without process groups run with -x: those of the files that import the module, and then all that
execute the line (`tests.reach`).  A run that takes too long counts as caught.
Results are kept in build/mutations.json, so that a run goes on where the last run stopped; a mutation of a
module that has changed since is tried again.

Which tests execute a line is recorded once for a state of passes and runtime, in build/reach-….  That takes
as long as the tests, and needs coverage (pip install coverage).  Delete the file once there are new tests.

Not part of CI: an hour.  EXPLAINED says why the fast layer need not notice some.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "build" / "mutations.json"
COUNT = 60
LIMIT_S = 1800
FAST = "not distributed and not cluster and not slow and not rare and not gpu"
_NOT_ASKED = ("docs", "benchmarks", "examples", "cluster", "house")
"""Tests of documents, packaging, examples and the text of the source, which check no numbers."""


EXPLAINED = {
    "passes/graph/repetition.py: begin = end = 1  # the match that reaches furthest": (
        "the first item with a match behind it sets both anew: no position is before 1"
    ),
    "runtime/cache/pinned.py: slab_bytes = -(-max(size, 2) // mmap.PAGESIZE) * mmap.PAGESIZE": (
        "one byte and two bytes take one page"
    ),
    "runtime/collectives/channel.py: out.copy_(arrived, non_blocking=False)": (
        "the lane's own thread waits for the copy, the last work of its task; no result can differ"
    ),
    "passes/partition.py: pass": "an assertion of what the passes before it do",
    "passes/planning/placement.py: left_bytes = max(1, limit_bytes - chosen.peak_bytes)": (
        "no gradient has room in one byte"
    ),
    "runtime/buckets/bound_bucket.py: "
    "if (self.bucket.frozen or any((home.data_ptr() == s.data_ptr() for s in shards))):": (
        "one more copy of what is gathered; no value differs"
    ),
    "runtime/recorder.py: _DECIMALS = 10": "one more digit of a time",
    "runtime/run.py: self._accumulates = True  # whether the last forward's backward will": (
        "no backward runs before a forward, which sets it"
    ),
    "runtime/program.py: first = self._place[node.args[0]] "
    "if node.args and isinstance(node.args[0], Node) else -2": (
        "the number stands for no place, and the only steps without one, stamp and load, do not read it"
    ),
}
"""Why the tests need not notice a mutation, by its file and the line as changed."""

_FLIPPED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
_SIGNS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Mult: ast.Add,
    ast.BitOr: ast.BitAnd,
}
_TYPED = ("getattr", "hasattr", "isinstance", "issubclass", "setattr")
"""Calls that refuse swapped arguments at once."""
_NOT_TRIED = (ast.Raise, ast.Assert, ast.JoinedStr, ast.AnnAssign, ast.arguments, ast.ImportFrom)
"""Syntax in which a change would only affect a message, a type, a default or an assertion; so would zip's
`strict`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """A replacement of a part of a file; line and columns are those of ast (UTF-8 bytes)."""

    file: str
    kind: str
    line: int
    column: int
    end_line: int
    end_column: int
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.file}: {' '.join(self.before.split())} → {' '.join(self.after.split())}"

    def applied(self, source: str) -> str:
        """The file's text with the change."""
        lines = source.encode().splitlines(keepends=True)
        head, tail = (
            lines[self.line - 1][: self.column],
            lines[self.end_line - 1][self.end_column :],
        )
        lines[self.line - 1 : self.end_line] = [head + self.after.encode() + tail]
        return b"".join(lines).decode()


def mutations(file: str, source: str) -> list[Mutation]:
    """Every mutation of a file."""
    found: list[Mutation] = []

    def add(kind: str, node: ast.expr | ast.stmt, after: str) -> None:
        before = ast.get_source_segment(source, node)
        assert before is not None
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        found.append(
            Mutation(
                file=file,
                kind=kind,
                line=node.lineno,
                column=node.col_offset,
                end_line=node.end_lineno,
                end_column=node.end_col_offset,
                before=before,
                after=after,
            )
        )

    def visit(node: ast.AST) -> None:
        if isinstance(node, _NOT_TRIED) or (isinstance(node, ast.keyword) and node.arg == "strict"):
            return
        if isinstance(node, ast.expr | ast.stmt):
            for kind, after in _changes(node):
                add(kind, node, after)
        for name, value in ast.iter_fields(node):
            if name in ("decorator_list", "returns", "annotation"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    visit(child)

    visit(ast.parse(source))
    return found


def _changes(node: ast.expr | ast.stmt) -> Iterator[tuple[str, str]]:
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _FLIPPED:
            flipped = ast.Compare(left=left, ops=[_FLIPPED[type(op)]()], comparators=[right])
            yield "comparison", f"({ast.unparse(flipped)})"
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _SIGNS:
            other = ast.BinOp(left=left, op=_SIGNS[type(op)](), right=right)
            yield "sign", f"({ast.unparse(other)})"
        case ast.BoolOp(op=op, values=values):
            swapped = ast.Or() if isinstance(op, ast.And) else ast.And()
            yield "and, or", f"({ast.unparse(ast.BoolOp(op=swapped, values=values))})"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "not", f"bool({ast.unparse(operand)})"
        case ast.Constant(value=bool()):
            yield "constant", str(not node.value)
        case ast.Constant(value=int()):
            yield "off by one", str(node.value + 1)
        case ast.Expr(value=ast.Call(func=func)) if not ast.unparse(func).startswith("log."):
            yield "dropped", "pass"
        case ast.Call(func=func, args=[ast.Name() as first, ast.Name() as second, *rest]) if (
            ast.unparse(func) not in _TYPED
        ):
            call = ast.Call(func=func, args=[second, first, *rest], keywords=node.keywords)
            yield "swapped arguments", ast.unparse(call)
        case _:
            return


def sources() -> dict[str, str]:
    """The text of every module of passes and runtime."""
    return {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
        for folder in ("passes", "runtime")
        for path in sorted((ROOT / folder).rglob("*.py"))
    }


def chosen() -> list[Mutation]:
    """One mutation of each of the modules with the most code; equal sources give equal mutations."""
    of = {file: mutations(file, text) for file, text in sources().items()}
    rich = sorted((f for f in of if of[f]), key=lambda file: -len(of[file]))
    picks = []
    number = 0
    while len(picks) < COUNT:  # one of each module, then more of the largest
        file = rich[number % len(rich)]
        draw = random.Random(f"{number} {file}")
        kind = draw.choice(sorted({m.kind for m in of[file]}))
        picks.append(draw.choice([m for m in of[file] if m.kind == kind]))
        number += 1
    return picks


def name_of(file: str) -> str:
    """The name of the module that a file is installed as."""
    dotted = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return f"fcdp_compile.{dotted}"


def own_tests(root: Path, module: str) -> list[str]:
    """Test files that import a module."""
    package, _, name = module.rpartition(".")
    uses = re.compile(
        rf"\b{re.escape(module)}\b|from {re.escape(package)} import .*\b{re.escape(name)}\b"
    )
    return [
        str(path.relative_to(root))
        for path in sorted((root / "tests").rglob("test_*.py"))
        if uses.search(path.read_text(encoding="utf-8"))
    ]


class Copy:
    """A copy of the checkout, with the folders of passes and runtime inside fcdp_compile, as installed."""

    def __init__(self, folder: Path) -> None:
        self.root = folder
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.check_output(listed, cwd=ROOT, text=True)
        for name in filter(None, names.split("\0")):
            top = name.partition("/")[0]
            target = folder / ("fcdp_compile" if top in ("passes", "runtime") else "") / name
            if (ROOT / name).exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, target)
        for top in ("passes", "runtime"):
            (folder / top).symlink_to(folder / "fcdp_compile" / top)

    def test(self, *arguments: str, limit_s: float | None = LIMIT_S) -> tuple[int, str]:
        """Run pytest; return its exit code (5: no tests, 124: out of time) and the end of its output."""
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        try:
            done = subprocess.run(
                [*command, "-p", "tests.reach", "-m", FAST, *arguments],
                cwd=self.root,
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
                capture_output=True,
                text=True,
                timeout=limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return 124, "it takes too long"
        return done.returncode, (done.stdout + done.stderr)[-4000:]

    def record(self, to: Path) -> None:
        """Run all tests that are asked, and write which lines each of them executes."""
        ignored = [f"--ignore=tests/{name}" for name in _NOT_ASKED]
        part = to.with_suffix(".part")
        code, text = self.test("--record", str(part), *ignored, "tests", limit_s=None)
        if code:
            sys.exit(f"the tests fail without a mutation, too, or do not run:\n{text}")
        part.rename(to)

    def caught(self, mutation: Mutation, reaching: Sequence[str]) -> str:
        """The name of the test that notices a mutation; empty if no test does.

        reaching: tests that are asked besides those of files that import the module.
        """
        path = self.root / mutation.file
        source = path.read_text(encoding="utf-8")
        own = own_tests(self.root, name_of(mutation.file))
        asked = dict.fromkeys([*own, *(name.partition("::")[0] for name in reaching)])
        files = [file for file in asked if (self.root / file).exists()]
        these = self.root / "these.txt"
        these.write_text("\n".join([*own, *reaching]), encoding="utf-8")
        path.write_text(mutation.applied(source), encoding="utf-8")
        try:
            code, text = self.test("-x", "--these", str(these), *files) if files else (5, "")
        finally:
            path.write_text(source, encoding="utf-8")
        if code in (0, 5):
            return ""
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)
        return str(failed[0]) if failed else text.strip().splitlines()[-1][:200]


class Reach:
    """Which test executes which line, from the file that `Copy.record` writes."""

    def __init__(self, file: Path) -> None:
        try:
            from coverage import CoverageData
        except ImportError:
            sys.exit("what tests execute is recorded by coverage: pip install coverage")
        self._data = CoverageData(str(file))
        self._data.read()
        self._size = Counter(
            name
            for path in self._data.measured_files()
            for names in self._data.contexts_by_lineno(path).values()
            for name in names
        )

    def reaching(self, mutation: Mutation) -> list[str]:
        """The tests that execute a mutation's statement, those first that execute the fewest lines.

        Every test that executes anything of the module, if the statement runs on import.
        """
        tree = ast.parse((ROOT / mutation.file).read_text(encoding="utf-8"))
        statements = [n for n in ast.walk(tree) if isinstance(n, ast.stmt)]
        starts = [n.lineno for n in statements if n.lineno <= mutation.line <= (n.end_lineno or 0)]
        by_line = {}
        for path in self._data.measured_files():
            if path.endswith(f"/fcdp_compile/{mutation.file}"):
                by_line = self._data.contexts_by_lineno(path)
        of_it = [by_line.get(n, []) for n in range(max(starts), mutation.end_line + 1)]
        names = {name for line in of_it for name in line}
        if "" in names:
            names = {name for line in by_line.values() for name in line}
        return sorted(names - {""}, key=lambda name: (self._size[name], name))


def digest(*texts: str) -> str:
    """Names files and results by what they were made of."""
    return hashlib.sha256("".join(texts).encode()).hexdigest()[:16]


def key_of(mutation: Mutation) -> str:
    """The key of a result: the change, and a digest of the module's text."""
    return digest((ROOT / mutation.file).read_text(encoding="utf-8"), json.dumps(asdict(mutation)))


def changed_line(mutation: Mutation) -> str:
    """A mutation's file, and its line after the change."""
    text = mutation.applied((ROOT / mutation.file).read_text(encoding="utf-8"))
    return f"{mutation.file}: {text.splitlines()[mutation.line - 1].strip()}"


def say(text: str) -> None:
    """Print and flush, so that a log file has the line at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(arguments: Sequence[str]) -> int:
    """Try the mutations without a result; returns 1 if a mutation is neither caught nor explained."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("--list", action="store_true", help="only print them")
    parser.add_argument("--only", type=int, nargs="+", metavar="NUMBER")
    parser.add_argument("--again", action="store_true", help="also those that have a result")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--own", action="store_true", help="only tests that import the module")
    options = parser.parse_args(arguments)
    picks = dict(enumerate(chosen()))
    if options.only:
        picks = {n: picks[n] for n in options.only}
    if options.list:
        for number, mutation in picks.items():
            say(f"{number:2} {mutation.kind:18} {mutation}")
        return 0
    RESULTS.parent.mkdir(exist_ok=True)
    results: dict[str, str] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    lock = Lock()
    with TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        copies = [Copy(Path(folder) / str(n)) for n in range(options.jobs)]
        if not options.own:
            record = RESULTS.parent / f"reach-{digest(*sources().values())}"
            if not record.exists():
                say("recording which tests execute which lines")
                copies[0].record(record)
            reach = Reach(record)

        def one(number: int) -> None:
            mutation = picks[number]
            if options.again or key_of(mutation) not in results:
                with lock:
                    copy = copies.pop()
                said = copy.caught(mutation, [] if options.own else reach.reaching(mutation))
                with lock:
                    copies.append(copy)
                    if said or not options.own:  # other tests may notice what the own tests do not
                        results[key_of(mutation)] = said
                    RESULTS.write_text(json.dumps(results, indent=1))
            said = results.get(key_of(mutation)) or EXPLAINED.get(
                changed_line(mutation), "NOT CAUGHT"
            )
            say(f"{number:2} {mutation.kind:18} {mutation}\n      {said}")

        list(pool.map(one, picks))
    survivors = [m for m in picks.values() if not results.get(key_of(m))]
    say(f"{len(picks) - len(survivors)} of {len(picks)} are caught")
    return int(any(changed_line(m) not in EXPLAINED for m in survivors))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
