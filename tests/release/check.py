"""`make release-check`: the wheel and the sdist as their users get them, tried outside of the repository.

    checkout ──▶ wheel ──▶ a fresh environment ──▶ import, fcdp, smoke.py on four ranks
        └─▶ sdist ──▶ wheel, which must hold the same bytes

It needs the environment of the tests and downloads nothing.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

from tests.release.artifacts import (
    OFFLINE,
    PIP,
    ROOT,
    borrowing_environment,
    build_sdist,
    build_wheel,
    contents,
    copy_checkout,
    run,
    unpack,
)

_CONFIG = {
    "model_type": "llama",
    "hidden_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
}
_PLAN = ["plan", "--model", "config.json", "--cluster", "a40x8-10gbe", "--nodes", "4"]
_PLAN += ["--batch", "2", "--seq", "2048", "--lora", "16", "--strategy", "fcdp,zero3"]
_TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]


def main() -> int:
    """Check version, wheel and sdist; exit code 1 and one sentence if something is wrong."""
    began = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="fcdp-release-") as folder:
            check(Path(folder))
    except (AssertionError, RuntimeError, subprocess.TimeoutExpired) as error:
        print(f"release-check: {error}", file=sys.stderr)
        return 1
    print(f"release-check: everything passed after {time.monotonic() - began:.0f} s")
    return 0


def check(folder: Path) -> None:
    """Build, install and try, in an empty folder."""
    version = project_version()
    assert newest_entry() == version, (
        f"pyproject.toml has version {version}, and the first entry of CHANGELOG.md is "
        f"{newest_entry()}; write an entry for {version}"
    )
    source = copy_checkout(folder / "source")
    wheel = build_wheel(source, folder / "wheel")
    print(f"built {wheel.name}, {wheel.stat().st_size:,} bytes")
    sdist = build_sdist(source, folder / "sdist")
    print(f"built {sdist.name}, {sdist.stat().st_size:,} bytes")
    unpacked = unpack(sdist, folder / "unpacked")
    compare(wheel, build_wheel(unpacked, folder / "wheel-of-sdist"))
    print("the sdist builds the same wheel, byte by byte")
    try_wheel(wheel, folder, version)


def project_version() -> str:
    """The version that pyproject.toml gives the package."""
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])


def newest_entry() -> str:
    """The version of the first entry of CHANGELOG.md."""
    found = re.search(r"^## ([\w.]+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    return found[1] if found else "missing"


def compare(wheel: Path, other: Path) -> None:
    """Refuse two wheels with different files."""
    first, second = contents(wheel), contents(other)
    names = sorted(
        name for name in first.keys() | second.keys() if first.get(name) != second.get(name)
    )
    assert not names, f"the wheels of the checkout and of the sdist differ in {', '.join(names)}"


def try_wheel(wheel: Path, folder: Path, version: str) -> None:
    """Install a wheel into a fresh environment and use it from an empty folder."""
    python = borrowing_environment(folder / "environment")
    run(python, *PIP, "install", *OFFLINE, str(wheel), cwd=folder)
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    found = run(python, "-c", "import fcdp_compile as f; print(f.__version__)", cwd=elsewhere)
    assert found.strip() == version, f"the installed package says version {found.strip()}"
    command = str(python.parent / "fcdp")
    assert "usage: fcdp" in run(python, command, "--help", cwd=elsewhere)
    (elsewhere / "config.json").write_text(json.dumps(_CONFIG))
    print(run(python, command, *_PLAN, cwd=elsewhere).rstrip())
    shutil.copy(ROOT / "tests" / "release" / "smoke.py", elsewhere)
    print(run(python, *_TORCHRUN, "smoke.py", cwd=elsewhere).rstrip())


if __name__ == "__main__":
    sys.exit(main())
