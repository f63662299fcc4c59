"""The graphs of one compilation after each pass: a file beside the plan.

Data only; `passes.graph.runner` makes the stages, `fcdp dump FOLDER --stages` shows them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from fcdp_compile.errors import PlanFormatError
from fcdp_compile.models.files.json_records import RecordFormat

SCHEMA = "fcdp.stages/1"
SUFFIX = ".stages.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpChange:
    """How many calls of an op a pass added or took away."""

    op: str
    more: int
    less: int

    def __str__(self) -> str:
        return f"{self.more - self.less:+d} {self.op}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A graph after a pass.

    name: of the pass.  graph: which of the compilation's graphs, such as "forward cold".  time_s: how long
    the pass took; if the pass changes several graphs at once, its time for all of these graphs.  text: the
    printed graph.
    """

    name: str
    graph: str
    time_s: float
    ops: tuple[OpChange, ...]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFile:
    """The stages of one compilation, in the order in which they were made."""

    stages: tuple[Stage, ...]


_FORMAT = RecordFormat(
    record=StageFile,
    schema=SCHEMA,
    what="file of stages",
    remedy="compile again with the option dump to get a good file",
    error=PlanFormatError,
)


def write_stages(path: str | os.PathLike[str], stages: tuple[Stage, ...]) -> None:
    """Write stages to a file that others see either whole or not at all.

    Raises: OSError if the file cannot be written.
    """
    _FORMAT.write(path, StageFile(stages=stages))


def read_stages(path: str | os.PathLike[str]) -> tuple[Stage, ...]:
    """Read stages from a file.

    Raises: PlanFormatError, which names the file, the field and the fault; OSError if the file is missing or
    cannot be read.
    """
    return _FORMAT.read(path).stages
