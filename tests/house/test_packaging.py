"""A pip install has every module in its place, nothing else, and a backend that torch finds by itself.

The wheel and the editable install are made from a copy of the checkout, so that neither an old build
folder nor the environment that runs the tests can stand in for a missing file.
"""

import configparser
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.release.artifacts import (
    OFFLINE,
    PIP,
    ROOT,
    borrowing_environment,
    build_sdist,
    build_wheel,
    checked_out,
    copy_checkout,
    run,
)
from tests.release.check import newest_entry, project_version

PACKAGES = {
    "fcdp_compile": ROOT / "fcdp_compile",
    "fcdp_compile/passes": ROOT / "passes",
    "fcdp_compile/runtime": ROOT / "runtime",
}
IMPORT_EVERYTHING = """
import importlib, pkgutil, sys
from pathlib import Path
import fcdp_compile
names = [m.name for m in pkgutil.walk_packages(fcdp_compile.__path__, "fcdp_compile.")]
for name in names:
    if not name.endswith("__main__"):
        importlib.import_module(name)
for name, module in sorted(sys.modules.items()):
    if name.partition(".")[0] == "fcdp_compile":
        print(name, Path(module.__file__).resolve())
"""

IMPORT_NAMED = """
import importlib, sys
from pathlib import Path
for name in sys.argv[1:]:
    print(Path(importlib.import_module(name).__file__).resolve())
"""

FIND_BACKEND = """
import sys
from pathlib import Path
from torch._dynamo import list_backends, lookup_backend
assert "fcdp" in list_backends(), list_backends()
assert "fcdp_compile" not in sys.modules, "listing the backends must not import fcdp_compile"
backend = lookup_backend("fcdp")
print(Path(sys.modules[backend.__module__].__file__).resolve())
"""


def python_files() -> list[Path]:
    """Every Python file of the package, by its path in site-packages."""
    return sorted(
        Path(package, file.relative_to(folder))
        for package, folder in PACKAGES.items()
        for file in folder.rglob("*.py")
    )


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout, without old builds."""
    try:
        return copy_checkout(tmp_path_factory.mktemp("checkout"))
    except RuntimeError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(checkout, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel installed, and nothing else."""
    folder = tmp_path_factory.mktemp("installed")
    run(sys.executable, *PIP, "install", *OFFLINE, "--target", str(folder), str(wheel), cwd=folder)
    return folder


@pytest.fixture(scope="module")
def editable(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with an editable install that borrows our dependencies."""
    folder = tmp_path_factory.mktemp("editable")
    python = borrowing_environment(folder)
    run(python, *PIP, "install", *OFFLINE, "--editable", str(checkout), cwd=folder)
    return python


def test_wheel_holds_every_module_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.partition("/")[0] for name in names} == {
        "fcdp_compile",
        f"{wheel.name.partition('-py3')[0]}.dist-info",
    }
    assert sorted(Path(name) for name in names if name.endswith(".py")) == python_files()
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(names)
    page = {
        f"fcdp_compile/tools/view/timeline/{f.name}"
        for f in (ROOT / "fcdp_compile/tools/view/timeline").iterdir()
    }
    assert (
        page
        == {name for name in names if name.startswith("fcdp_compile/tools/view/timeline/")}
        != set()
    )
    assert any(name.endswith("/licenses/LICENSE") for name in names)


def test_sdist_holds_the_checkout(checkout: Path, tmp_path: Path) -> None:
    """So its user can build the wheel, run the tests and read the pages; `make release-check` does."""
    with tarfile.open(build_sdist(checkout, tmp_path)) as archive:
        held = {m.name.partition("/")[2] for m in archive.getmembers() if m.isfile()}
    made = {"PKG-INFO", "setup.cfg"}
    assert sorted(n for n in held - made if not n.startswith("fcdp.egg-info/")) == checked_out()


def test_the_changelog_begins_with_this_version() -> None:
    assert newest_entry() == project_version()


def test_wheel_declares_backend_and_command(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith("/entry_points.txt"))
        points = configparser.ConfigParser()
        points.read_string(archive.read(name).decode())
    assert dict(points["torch_dynamo_backends"]) == {"fcdp": "fcdp_compile.backend:fcdp"}
    assert dict(points["console_scripts"]) == {"fcdp": "fcdp_compile.cli:main"}


@pytest.mark.slow  # `make release-check` does it, too
def test_wheel_imports_from_where_it_is_installed(installed: Path, tmp_path: Path) -> None:
    printed = run(sys.executable, "-c", IMPORT_EVERYTHING, cwd=tmp_path, path=installed)
    files = [Path(line.split(maxsplit=1)[1]) for line in printed.splitlines()]
    expected = {installed / file for file in python_files() if file.name != "__main__.py"}
    assert set(files) == expected


@pytest.mark.slow
def test_torch_finds_the_backend_of_a_wheel(installed: Path, tmp_path: Path) -> None:
    printed = run(sys.executable, "-c", FIND_BACKEND, cwd=tmp_path, path=installed)
    assert Path(printed.strip()) == installed / "fcdp_compile" / "backend" / "compilation.py"


def test_editable_install_runs_the_checkout(editable: Path, checkout: Path, tmp_path: Path) -> None:
    added_later = checkout / "passes" / "added_later.py"
    added_later.write_text('"""A module that did not exist when pip ran."""\n')
    expected = {
        "fcdp_compile": checkout / "fcdp_compile" / "__init__.py",
        "fcdp_compile.runtime": checkout / "runtime" / "__init__.py",
        "fcdp_compile.passes.added_later": added_later,
    }
    # In the checkout, fcdp_compile comes from the current folder; the finder gives only the rest.
    for cwd in (tmp_path, checkout):
        printed = run(editable, "-c", IMPORT_NAMED, *expected, cwd=cwd)
        assert [Path(line) for line in printed.splitlines()] == list(expected.values())
    added_later.unlink()


@pytest.mark.slow
def test_torch_finds_the_backend_of_an_editable_install(
    editable: Path, checkout: Path, tmp_path: Path
) -> None:
    printed = run(editable, "-c", FIND_BACKEND, cwd=tmp_path)
    assert Path(printed.strip()) == checkout / "fcdp_compile" / "backend" / "compilation.py"


def test_command_runs(editable: Path, tmp_path: Path) -> None:
    assert "dump" in run(
        editable.parent / "python", str(editable.parent / "fcdp"), "--help", cwd=tmp_path
    )
