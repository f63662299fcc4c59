"""One environment for each pair of a Python and a torch, and one copy of the packages that they share.

    FOLDER/libraries                 NVIDIA's libraries, without which a CUDA build of torch does not load
    FOLDER/python3.12                what the tests need besides torch
    FOLDER/python3.12-torch2.15.0    torch, Triton and fcdp; borrows the two above

A CUDA build of torch also runs on a machine without a card.  Its libraries take gigabytes.  The libraries of
one CUDA major version serve every torch built for that version, so the newest of each is installed once.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.versions.torch_build import cpu_builds
from fcdp_compile.models.files.aside import written_aside

ROOT = Path(__file__).resolve().parents[2]
_OWN = ("torch", "triton")
_SHARED = ("nvidia-", "cuda-")


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonAndTorch:
    """A Python and a torch."""

    python: str
    """The interpreter, such as python3.12."""
    torch: str
    """A public version, such as 2.15.0."""

    @property
    def version(self) -> str:
        """The Python's version, such as 3.12.1."""
        code = "import platform; print(platform.python_version())"
        return subprocess.check_output([self.python, "-c", code], text=True).strip()

    @property
    def name(self) -> str:
        """The name of its environment's folder."""
        return f"{Path(self.python).name}-torch{self.torch}"


def make(cell: PythonAndTorch, newest: str, folder: Path) -> Path:
    """Make a cell's environment unless it exists; returns the path of its Python.

    newest: the newest torch of all cells.
    """
    folder.mkdir(parents=True, exist_ok=True)
    mine = folder / cell.name
    python = mine / "bin" / "python"
    if (mine / "complete").exists():
        return python
    base = _base(cell.python, newest, folder)
    shutil.rmtree(mine, ignore_errors=True)
    subprocess.run([cell.python, "-m", "venv", str(mine)], check=True)
    site = _site(mine)
    (site / "borrowed.pth").write_text(f"{_site(base)}\n", encoding="utf-8")
    build = _torch(cell)
    pins = _resolve(cell.python, f"torch=={build}", folder)
    if "+" not in build:
        libraries = _libraries(cell.python, (build, newest), folder)
        (site / "nvidia").symlink_to(libraries / "nvidia")
    _pip(python, "--no-cache-dir", *_pins({name: pins[name] for name in _OWN if name in pins}))
    _pip(python, "setuptools>=77")  # else Python 3.11's own older setuptools hides the borrowed one
    _pip(python, "--no-build-isolation", "--editable", str(ROOT))
    (mine / "complete").touch()
    return python


def _torch(cell: PythonAndTorch) -> str:
    """Return the version to install: a CPU build if pip sees one."""
    builds = [b for b in cpu_builds(cell.python) if b.partition("+")[0] == cell.torch]
    return builds[0] if builds else cell.torch


def _base(python: str, newest: str, folder: Path) -> Path:
    """Make the environment of a Python with everything but torch, unless it exists."""
    base = folder / Path(python).name
    if not (base / "complete").exists():
        pins = _resolve(python, f"torch=={newest}", folder, f"{ROOT}[test]")
        shutil.rmtree(base, ignore_errors=True)
        subprocess.run([python, "-m", "venv", str(base)], check=True)
        wanted = {
            n: v for n, v in pins.items() if n not in (*_OWN, "fcdp") and not n.startswith(_SHARED)
        }
        _pip(base / "bin" / "python", *_pins(wanted))
        (base / "complete").touch()
    return base


def _libraries(python: str, builds: tuple[str, ...], folder: Path) -> Path:
    """Install the NVIDIA libraries that these builds of torch need; returns their folder."""
    libraries = folder / "libraries"
    wanted: dict[str, str] = {}
    for build in builds:
        pins = _resolve(python, f"torch=={build}", folder)
        wanted |= {name: version for name, version in pins.items() if name.startswith("nvidia-")}
    listed = libraries / "installed.json"
    have = json.loads(listed.read_text(encoding="utf-8")) if listed.exists() else {}
    if missing := {name: version for name, version in wanted.items() if name not in have}:
        # pip does not add to the folder of an earlier install, so the files are moved there one by one.
        fresh = folder / "fresh"
        _pip(
            python,
            "--no-cache-dir",
            "--target",
            str(fresh),
            *_pins(missing),
        )
        shutil.copytree(fresh, libraries, dirs_exist_ok=True, copy_function=shutil.move)
        shutil.rmtree(fresh)
        listed.write_text(json.dumps(have | missing, indent=1), encoding="utf-8")
    return libraries


def _resolve(python: str, requirement: str, folder: Path, *more: str) -> dict[str, str]:
    """Ask pip which packages a requirement installs: version by name.  A file keeps the answer."""
    kept = (
        folder / f"{Path(python).name}-{requirement.replace('==', '')}{'-test' * bool(more)}.json"
    )
    if not kept.exists():
        print(f"pip resolves {requirement} for {python}", file=sys.stderr)
        report = ["--dry-run", "--ignore-installed", "--report"]
        with written_aside(kept) as aside:
            _pip(python, *report, str(aside), requirement, *more, deps=True)
    found = json.loads(kept.read_text(encoding="utf-8"))["install"]
    return {i["metadata"]["name"].lower(): i["metadata"]["version"] for i in found}


def _pins(versions: dict[str, str]) -> list[str]:
    return [f"{name}=={version}" for name, version in versions.items()]


def _pip(python: Path | str, *arguments: str, deps: bool = False) -> None:
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*command, *([] if deps else ["--no-deps"]), *arguments], check=True, cwd=ROOT)


def _site(environment: Path) -> Path:
    (site,) = environment.glob("lib/python*/site-packages")
    return site
