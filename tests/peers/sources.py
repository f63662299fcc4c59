"""The sources of suites that are in no wheel: pip downloads the source distribution of the installed version.

Only the folder `tests` is unpacked, as a package of a name of its own: build/peers/peft_tests.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "build" / "peers"


def package(name: str) -> str:
    """The package that has a distribution's tests; it can be imported once this function was called."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    return f"{name}_tests"


def is_fetched(name: str) -> bool:
    """Whether the tests of the installed version are unpacked."""
    stamp = FOLDER / f"{name}_tests" / "VERSION"
    return stamp.exists() and stamp.read_text(encoding="utf-8") == version(name)


def fetch(name: str) -> None:
    """Download and unpack the tests of the installed version, unless they are there."""
    if is_fetched(name):
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    wanted = f"{name}=={version(name)}"
    # pip builds the metadata of what it downloads, for which it may use wheels of the build's own needs.
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", name]
    subprocess.run([*pip, "--dest", str(FOLDER), wanted], check=True)
    folder = FOLDER / f"{name}_tests"
    with tarfile.open(FOLDER / f"{name}-{version(name)}.tar.gz") as archive:
        for member in archive.getmembers():
            _, _, inner = member.name.partition("/")
            if inner.startswith("tests/"):
                member.name = inner.removeprefix("tests/")
                archive.extract(member, folder, filter="data")
    (folder / "VERSION").write_text(version(name), encoding="utf-8")
