"""Every code block of README and docs/ runs, or a hidden comment says why it does not (`blocks`)."""

from __future__ import annotations

import itertools
import linecache
import multiprocessing
import os
import shlex
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.run import get_args_parser

from fcdp_compile.cli import _parse
from tests.distributed.ranks import run
from tests.docs.blocks import ROOT, BadMark, Block, Page, pages, read_page

PAGES = pages()
LIMIT_S = 900
_QUICK = ("README.md", "docs/quickstart.md", "docs/loop.md", "docs/coming-from.md")
"""Pages that new users read first; `make test` runs their blocks."""
SHIMS = {"python": "", "fcdp": "-m fcdp_compile.cli", "torchrun": "-m torch.distributed.run"}
"""Commands that readers have on PATH, and that may be missing on the tests' PATH."""


def execute(page: Page, folder: Path) -> None:
    """Run a page's Python as one program in a folder of its own."""
    os.chdir(folder)
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in page.python:
        # Line numbers as on the page, and a source that can be read, as Dynamo does.
        source = "\n" * (block.line - 1) + block.code
        linecache.cache[block.where] = (len(source), None, source.splitlines(True), block.where)
        exec(compile(source, block.where, "exec", dont_inherit=True), names)


def on_every_rank(mesh: DeviceMesh, page: Page, folder: Path) -> None:
    """Run a page's Python on this rank; make_mesh() gives the mesh that the page asks for."""
    execute(page, folder)


def alone(pipe: Connection, page: Page, folder: Path) -> None:
    """Run a page's Python in this process and send what it raised."""
    try:
        execute(page, folder)
        pipe.send(None)
    except BaseException:
        pipe.send(traceback.format_exc())


def _python(page: Page) -> Any:
    """Pages about one feature train as its own tests do."""
    marks = () if page.name in _QUICK else pytest.mark.rare
    return pytest.param(page, id=page.name, marks=marks)


@pytest.mark.distributed
@pytest.mark.parametrize("page", [_python(p) for p in PAGES if p.python])
def test_python_of_a_page_runs(page: Page, tmp_path: Path) -> None:
    if page.ranks is not None:
        nodes, ranks_per_node = page.ranks
        run(on_every_rank, page, tmp_path, nodes=nodes, ranks_per_node=ranks_per_node)
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.distributed.preload"])
    ours, theirs = context.Pipe()
    process = context.Process(target=alone, args=(theirs, page, tmp_path), daemon=True)
    process.start()
    theirs.close()
    try:
        assert ours.poll(LIMIT_S), f"{page.name} took more than {LIMIT_S} s"
        problem = ours.recv()
    finally:
        process.kill()
        process.join(10)
    assert problem is None, problem


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reader's working folder: the checkout's folders, a place to write to, the commands on PATH."""
    folder = tmp_path_factory.mktemp("workplace")
    for name in ("examples", "benchmarks", "docs", "tests", "Makefile"):
        (folder / name).symlink_to(ROOT / name)
    (folder / ".bin").mkdir()
    for name, arguments in SHIMS.items():
        shim = folder / ".bin" / name
        shim.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {arguments} "$@"\n')
        shim.chmod(0o755)
    return folder


SHELL_BLOCKS = [b for page in PAGES for b in page.shell if b.not_run is None]


def _row(block: Block) -> Any:
    """Blocks of the quickstart train as the demo does, which `.ci/run` runs as well."""
    marks = () if block.where.startswith("README.md") else pytest.mark.rare
    return pytest.param(block, id=block.where, marks=marks)


@pytest.mark.distributed
@pytest.mark.parametrize("block", [_row(b) for b in SHELL_BLOCKS])
def test_shell_block_runs(block: Block, workplace: Path) -> None:
    environment = {
        **os.environ,
        "PATH": f"{workplace / '.bin'}{os.pathsep}{os.environ['PATH']}",
        "NO_COLOR": "1",
        "OMP_NUM_THREADS": "1",
        "FCDP_CACHE": str(workplace / ".cache"),
    }
    script = f"set -e\n{block.prepare}\n{block.code.rstrip()} {block.append}\n"
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=workplace,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, (
        f"{block.where}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    )


def _lines_of(command: str) -> list[Any]:
    """Command lines of all pages, run or not, that begin with a command."""
    return [
        pytest.param(line, id=block.where)
        for page in PAGES
        for block in page.shell
        for line in block.code.replace("\\\n", " ").splitlines()
        if line.split()[:1] == [command]
    ]


@pytest.mark.parametrize("line", _lines_of("fcdp"))
def test_fcdp_takes_the_line(line: str) -> None:
    words = list(itertools.takewhile(lambda word: word != ">", shlex.split(line, comments=True)))
    _parse(words[1:])  # exits where an option does not exist


@pytest.mark.parametrize("line", _lines_of("torchrun"))
def test_torchrun_takes_the_line(line: str) -> None:
    options = get_args_parser().parse_args(shlex.split(line, comments=True)[1:])
    if not options.module:
        assert (ROOT / options.training_script).is_file(), f"{options.training_script} is not there"


def test_every_page_with_code_is_found() -> None:
    names = {page.name for page in PAGES}
    assert {"README.md", "docs/quickstart.md", "docs/benchmarks/gathering.md"} <= names


@pytest.mark.parametrize("page", [pytest.param(p, id=p.name) for p in PAGES])
def test_what_is_not_run_has_a_reason(page: Page) -> None:
    for block in page.blocks:
        assert block.not_run is None or len(block.not_run.split()) >= 3, block.where


@contextmanager
def _refused(part: str) -> Iterator[None]:
    with pytest.raises(BadMark, match=part):
        yield


def test_a_page_is_read_with_its_marks() -> None:
    page = read_page(
        "p.md",
        "<!-- test: ranks 2 x 3 -->\n<!-- test: setup\na = 1\n-->\n"
        "```python\nb = a\n```\n```\nno code\n```\n"
        "* item\n\n  ```sh\n  fcdp a\n  ```\n"
        "<!-- test: not run: there is no GPU -->\n```python\nc\n```\n"
        "<!-- test: append --steps 2 -->\n```bash\nrun \\\n  --x\n```\n",
    )
    assert page.ranks == (2, 3)
    assert [(b.line, b.code) for b in page.python] == [(3, "a = 1"), (6, "b = a\n")]
    assert [b.code for b in page.shell] == ["fcdp a\n", "run \\\n  --x\n"]
    assert page.shell[1].append == "--steps 2"
    assert page.blocks[2].not_run == "there is no GPU"


def test_a_mark_that_nobody_reads_is_an_error() -> None:
    with _refused("unknown mark 'skip'"):
        read_page("p.md", "<!-- test: skip -->\n```python\n1\n```\n")
    with _refused("is about no Python or shell block"):
        read_page("p.md", "<!-- test: append -x -->\n```json\n1\n```\n")
    with _refused("stands before no block"):
        read_page("p.md", "<!-- test: not run: because it is long -->\nthe end\n")
