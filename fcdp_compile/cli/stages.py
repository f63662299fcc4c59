"""`fcdp dump --passes`, `--stages`, `--stage`, `--stage-diff`: the passes, and their changes to graphs."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from inspect import cleandoc
from pathlib import Path

from fcdp_compile.cli.command import Answer
from fcdp_compile.errors import FcdpError, did_you_mean
from fcdp_compile.models.files.json_records import one_line
from fcdp_compile.models.files.text_diff import text_diff
from fcdp_compile.plan.stages import SUFFIX, Stage, read_stages
from fcdp_compile.tools.view.table import ms, table

Stages = Mapping[str, Sequence[Stage]]
"""The stages of each compilation, by its name in the folder, such as graph-000."""

_OPS_SHOWN = 4


def passes_text() -> str:
    """Return the passes in their order, each with its docstring."""
    found = passes()
    return "\n\n".join(f"{i}. {name}\n\n{doc}" for i, (name, doc) in enumerate(found.items(), 1))


def passes() -> dict[str, str]:
    """Return the docstring of each pass, in order: read from the source, because importing torch is slow."""
    pipeline = _parsed("fcdp_compile.passes.pipeline")
    modules = {
        alias.name: str(node.module)
        for node in pipeline.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    lists = {
        node.target.id: node.value.elts
        for node in pipeline.body
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and isinstance(node.value, ast.Tuple)
    }

    def names(of: str) -> Iterator[str]:
        for element in lists[of]:
            if isinstance(element, ast.Name):
                yield element.id
            elif isinstance(element, ast.Starred) and isinstance(element.value, ast.Name):
                yield from names(element.value.id)

    return {name: _docstring(modules[name], name) for name in names("PASSES")}


def _docstring(module: str, name: str) -> str:
    (function,) = (
        node
        for node in _parsed(module).body
        if isinstance(node, ast.FunctionDef) and node.name == name
    )
    return cleandoc(ast.get_docstring(function) or "")


def _parsed(module: str) -> ast.Module:
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return ast.parse(Path(spec.origin).read_text(encoding="utf-8"))


def read(folder: str, names: Sequence[str], *, of: Sequence[str]) -> Stages:
    """Return the stages of a folder's compilations, only of graphs whose titles have all words of `of`.

    Raises: FcdpError if there is none; PlanFormatError for a damaged file; OSError if one cannot be read.
    """
    paths = {name: Path(folder) / f"{name}{SUFFIX}" for name in names}
    found = {name: read_stages(path) for name, path in paths.items() if path.exists()}
    chosen = {
        name: [s for s in stages if set(of) <= set(s.graph.split())]
        for name, stages in found.items()
    }
    if not any(chosen.values()):
        what = f" of a graph {' '.join(of)!r}" if of and found else ""
        raise FcdpError(f"{folder}: holds no stages{what}; compile again with the option dump")
    return chosen


def listed(stages: Stages) -> str:
    """Return a table of the stages of each compilation."""
    return "\n\n\n".join(
        f"{one_line(name)}\n\n"
        + table(
            ("stage", "graph", "ms", "change of op counts"),
            [(s.name, s.graph, ms(s.time_s), one_line(_changes(s))) for s in of],
            ("left", "left", "right", "left"),
            flexible=3,
        )
        for name, of in stages.items()
    )


def shown(stages: Stages, wanted: str) -> str:
    """Return the text of each graph at a stage.

    Raises: FcdpError for a stage that does not exist.
    """
    _check(stages, wanted)
    parts = [
        f"# {one_line(name)}: {stage.graph} after {stage.name}\n\n{stage.text}"
        for name, of in stages.items()
        for stage in of
        if stage.name == wanted
    ]
    return "\n\n".join(parts)


def compared(stages: Stages, wanted: tuple[str, str]) -> Answer:
    """Return the differences of each graph between two stages; exit code 1 if there are any.

    Raises: FcdpError for a stage that does not exist, or if no graph has both.
    """
    for stage in wanted:
        _check(stages, stage)
    pairs = [(name, *pair) for name, of in stages.items() for pair in _pairs(of, wanted)]
    if not pairs:
        raise FcdpError(f"no graph has both the stages {wanted[0]!r} and {wanted[1]!r}")
    parts = []
    for name, a, b in pairs:
        titles = (f"{name}: {a.graph} after {a.name}", f"{name}: {b.graph} after {b.name}")
        parts += text_diff(a.text, b.text, titles, context=3)
    return Answer("\n".join(parts), 1) if parts else Answer("no difference")


def _pairs(of: Sequence[Stage], wanted: tuple[str, str]) -> Iterator[tuple[Stage, Stage]]:
    """Yield each graph at both stages: "forward" at one stage becomes "forward cold" at the other."""
    for b in (s for s in of if s.name == wanted[1]):
        for a in (s for s in of if s.name == wanted[0]):
            shorter, longer = sorted((a.graph.split(), b.graph.split()), key=len)
            if longer[: len(shorter)] == shorter or shorter == ["joint"]:
                yield a, b


def _check(stages: Stages, wanted: str) -> None:
    known = list(dict.fromkeys(s.name for of in stages.values() for s in of))
    if wanted not in known:
        raise FcdpError(
            f"there is no stage {wanted!r}; the stages are {', '.join(known)}"
            f"{did_you_mean(wanted, known)}"
        )


def _changes(stage: Stage) -> str:
    if not stage.ops:
        return "-"
    more = len(stage.ops) - _OPS_SHOWN
    shown_ops = [str(change) for change in stage.ops[:_OPS_SHOWN]]
    return ", ".join([*shown_ops, f"and {more} more ops"] if more > 0 else shown_ops)
