"""Builds the wheel and the sdist, and environments that hold a wheel and borrow every other library.

Nothing is downloaded: the environment that runs this has setuptools, torch and the rest.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PIP = ["-m", "pip", "--disable-pip-version-check", "--no-input"]
OFFLINE = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation"]

_BUILD_SDIST = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"


def run(python: str | Path, *arguments: str, cwd: Path, path: Path | None = None) -> str:
    """Run a Python that sees its own environment and `path` only, and return what it printed."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    if path is not None:
        env["PYTHONPATH"] = str(path)
    done = subprocess.run(
        [str(python), *arguments], cwd=cwd, env=env, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, f"{arguments}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def checked_out() -> list[str]:
    """The files of the checkout that git does not ignore, by their paths in it.

    Raises: RuntimeError where the folder is no git checkout.
    """
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        raise RuntimeError(f"not a git checkout: {listed.stderr.strip()}")
    return sorted(name for name in set(listed.stdout.split("\0")) if (ROOT / name).is_file())


def copy_checkout(folder: Path) -> Path:
    """Copy what git does not ignore, so that no old build folder can stand in for a missing file."""
    for name in checked_out():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder


def build_wheel(source: Path, folder: Path) -> Path:
    """Build the wheel of a source tree into an empty folder."""
    folder.mkdir(parents=True, exist_ok=True)
    run(sys.executable, *PIP, "wheel", *OFFLINE, "-w", str(folder), str(source), cwd=folder)
    (file,) = folder.glob("*.whl")
    return file


def build_sdist(source: Path, folder: Path) -> Path:
    """Build the sdist of a source tree into an empty folder."""
    folder.mkdir(parents=True, exist_ok=True)
    run(sys.executable, "-c", _BUILD_SDIST, str(folder), cwd=source)
    (file,) = folder.glob("*.tar.gz")
    return file


def unpack(sdist: Path, folder: Path) -> Path:
    """Unpack an sdist; returns its only folder."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    return source


def contents(wheel: Path) -> dict[str, bytes]:
    """Every file of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in sorted(archive.namelist())}


def borrowing_environment(folder: Path) -> Path:
    """Make an environment without pip that borrows our libraries; returns its Python.

    Their folder is named in a .pth file; .pth files within that folder are not read, so an editable
    install of fcdp in the environment that runs this stays out of sight.
    """
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    ours = [entry for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")]
    (site / "borrowed.pth").write_text("\n".join(ours) + "\n")
    return folder / "bin" / "python"
