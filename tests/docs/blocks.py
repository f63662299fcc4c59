"""The fenced code blocks of a page, and the page's hidden comments about running them.

    <!-- test: setup            Python that runs before the page's blocks and that readers do not see
    config = tiny()
    -->
    <!-- test: ranks 2 x 2 -->  the page's Python runs on every rank of a mesh of N x g
    <!-- test: append --steps 2 -->   the command below runs with these further arguments
    <!-- test: prepare COMMANDS -->   run in the shell before the block below
    <!-- test: not run: WHY --> the block below is not run, and why

A code host and the site show none of these.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_TOKEN = re.compile(
    r"<!-- test: (?P<mark>.*?)\s*-->"
    r"|^(?P<indent>[ ]*)(?P<fence>`{3,})(?P<language>[\w+-]*)[^\n]*\n"
    r"(?P<code>.*?)^(?P=indent)(?P=fence)[ ]*$",
    re.DOTALL | re.MULTILINE,
)
PYTHON = ("python", "py")
SHELL = ("bash", "sh", "shell", "console")


class BadMark(ValueError):
    """A hidden comment with an unknown mark, or a mark in a wrong place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One fenced block.

    line: number of its first line of code, from 1.  not_run: why it does not run; empty if it runs.
    append: further arguments for its command.  prepare: commands that the shell runs before it.
    """

    page: str
    line: int
    language: str
    code: str
    not_run: str | None = None
    append: str = ""
    prepare: str = ""

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A page's blocks in order, and where its Python runs: on ranks of a mesh, or in one process (None)."""

    name: str
    blocks: tuple[Block, ...]
    setup: tuple[Block, ...]
    ranks: tuple[int, int] | None

    @property
    def python(self) -> list[Block]:
        """The parts of one program: hidden preparations and blocks, in the order of the page."""
        shown = [b for b in self.blocks if b.language in PYTHON and b.not_run is None]
        return sorted([*self.setup, *shown], key=lambda block: block.line) if shown else []

    @property
    def shell(self) -> list[Block]:
        return [b for b in self.blocks if b.language in SHELL]


def pages() -> list[Page]:
    """README and every page of docs/."""
    files = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [read_page(str(f.relative_to(ROOT)), f.read_text(encoding="utf-8")) for f in files]


def read_page(name: str, text: str) -> Page:
    """Find a page's blocks and marks.

    Raises: BadMark for a mark that is unknown, gives no reason, or has no block after it.
    """
    blocks: list[Block] = []
    setup: list[Block] = []
    ranks: tuple[int, int] | None = None
    waiting: dict[str, str] = {}
    for found in _TOKEN.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        if found["mark"] is None:
            code = re.sub(rf"^{found['indent']}", "", found["code"], flags=re.MULTILINE)
            if found["language"] in (*PYTHON, *SHELL):
                block = Block(
                    page=name,
                    line=line + 1,
                    language=found["language"],
                    code=code,
                    not_run=waiting.pop("not run:", None),
                    append=waiting.pop("append", ""),
                    prepare=waiting.pop("prepare", ""),
                )
                blocks.append(block)
            if waiting:
                raise BadMark(f"{name}:{line}: {waiting} is about no Python or shell block")
            continue
        mark = found["mark"]
        if mark.startswith("setup\n"):
            code = mark.removeprefix("setup\n")
            setup.append(Block(page=name, line=line + 1, language="python", code=code))
        elif size := re.fullmatch(r"ranks (\d+) x (\d+)", mark):
            ranks = int(size[1]), int(size[2])
        elif order := re.fullmatch(r"(not run:|append|prepare) (.+)", mark, re.DOTALL):
            waiting[order[1]] = order[2]
        else:
            raise BadMark(f"{name}:{line}: unknown mark {mark!r}")
    if waiting:
        raise BadMark(f"{name}: {waiting} stands before no block")
    return Page(name=name, blocks=tuple(blocks), setup=tuple(setup), ranks=ranks)
