"""The torch that the Makefile installs, tested with the real pip and a folder of empty wheels as registry."""

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

import pytest

from benchmarks.versions import torch_build

ROOT = Path(__file__).resolve().parents[2]
CUDA = ("2.10.0", "2.13.0", "2.15.0", "2.16.0")
CPU = ("2.10.0+cpu", "2.12.1+cpu", "2.13.0+cpu", "2.16.0+cpu")


def fake_torch(folder: Path, version: str) -> Path:
    """A wheel that installs nothing but its name and version."""
    info = f"torch-{version}.dist-info"
    wheel = folder / f"torch-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", f"{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    return wheel


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with only our pip."""
    folder = tmp_path_factory.mktemp("environment") / "venv"
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    # Importing or merely finding pip here would keep later tests from importing setuptools.
    (site / "pip").symlink_to(Path(str(distribution("pip").locate_file("pip"))))
    return folder


@pytest.fixture
def python(environment: Path) -> Iterator[str]:
    """The Python of an environment without torch."""
    yield str(environment / "bin" / "python")
    for left in environment.glob("lib/python*/site-packages/torch-*"):
        shutil.rmtree(left)


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place where pip looks, with CUDA builds."""
    for name in [n for n in os.environ if n.startswith("PIP_")]:
        monkeypatch.delenv(name)
    folder = tmp_path / "registry"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    for version in CUDA:
        fake_torch(folder, version)
    return folder


def installed(python: str) -> str:
    return torch_build._installed(python)


@pytest.mark.parametrize(
    ("card", "visible", "arrives"),
    [(True, CPU, "2.15.0"), (False, CPU, "2.13.0+cpu"), (False, (), "2.15.0")],
    ids=["card", "cpu-build", "none-visible"],
)
def test_a_cpu_build_where_there_is_no_card(
    card: bool, visible: tuple[str, ...], arrives: str, python: str, registry: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    for version in visible:
        fake_torch(registry, version)
    assert torch_build.install(python, card=card) == 0
    assert installed(python) == arrives
    printed = capfd.readouterr()
    assert printed.out.count("Processing ") == 1, "no second build is fetched on the way"
    said = [line for line in printed.err.splitlines() if "CPU build" in line]
    assert len(said) == (0 if card or visible else 1)
    assert all("make TORCH=" in line for line in said)


def test_a_quiet_pip_hides_no_cpu_build(
    python: str, registry: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_torch(registry, "2.13.0+cpu")
    monkeypatch.setenv("PIP_QUIET", "1")
    assert torch_build.cpu_builds(python) == ["2.13.0+cpu"]


def test_one_out_of_range_is_refused_and_replaced(
    python: str, registry: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert torch_build.install(python, "torch==2.10.0", card=True) != 0
    assert "torch==2.10.0" in capfd.readouterr().err
    assert installed(python) == "0"
    (old,) = registry.glob("torch-2.10.0-*")
    (site,) = Path(python).parents[1].glob("lib/python*/site-packages")
    zipfile.ZipFile(old).extractall(site)
    fake_torch(registry, "2.11.0+cpu")
    assert torch_build.install(python, card=False) == 0
    assert installed(python) == "2.11.0+cpu"


def test_what_counts_as_a_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    monkeypatch.setenv("PATH", str(bare))
    monkeypatch.setattr(torch_build.ctypes, "CDLL", no_library)
    assert not torch_build.has_card(bare)
    for place in ("proc/driver/nvidia", "opt/rocm"):
        root = tmp_path / place.replace("/", "-")
        (root / place).mkdir(parents=True)
        assert torch_build.has_card(root)
    for tool in ("nvidia-smi", "rocminfo"):
        folder = tmp_path / tool
        folder.mkdir()
        (folder / tool).write_text("#!/bin/sh\n")
        (folder / tool).chmod(0o755)
        monkeypatch.setenv("PATH", str(folder))
        assert torch_build.has_card(bare)
    monkeypatch.setenv("PATH", str(bare))
    monkeypatch.setattr(torch_build.ctypes, "CDLL", lambda name: name)
    assert torch_build.has_card(bare), "a driver's library is there"


def no_library(name: str) -> None:
    raise OSError(name)


@pytest.mark.parametrize("target", ["demo", "test", "test-all", "lint", "format", "types", "docs"])
def test_every_target_chooses_torch_before_it_installs(target: str, tmp_path: Path) -> None:
    """`make -n` lists the commands of a machine where nothing is installed."""
    lines = commands(target, tmp_path)
    installs = [line for line in lines if "torch_build" in line or "pip install" in line]
    assert "torch_build ''" in installs[0], lines
    assert len(installs) > 1
    (chosen,) = [line for line in commands(target, tmp_path, "TORCH=a b") if "torch_build" in line]
    assert chosen.endswith("torch_build 'a b'")


def commands(target: str, folder: Path, *more: str) -> list[str]:
    command = ["make", "-n", "--no-print-directory", f"VENV={folder / 'none'}", target]
    done = subprocess.run([*command, *more], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_make_asks_again_when_another_torch_is_named(
    environment: Path, python: str, registry: Path
) -> None:
    """The stamps of `make` know which torch was asked for: a version, then a wheel, then none."""
    make = ["make", "-s", f"VENV={environment}"]
    stamps = environment / ".fcdp"

    def run(*more: str) -> None:
        listed = subprocess.run(
            [*make, "-p", "-n", "help", *more], cwd=ROOT, capture_output=True, text=True, check=True
        )
        (stamp,) = [
            line.partition(":= ")[2]
            for line in listed.stdout.splitlines()
            if line.startswith("CHOSEN")
        ]
        subprocess.run(
            [*make, stamp.replace("$(STAMPS)", str(stamps)), *more], cwd=ROOT, check=True
        )

    fake_torch(registry, "2.15.0+cpu")
    elsewhere = registry.parent / "elsewhere"
    elsewhere.mkdir()
    try:
        run("TORCH=torch==2.13.0")
        assert installed(python) == "2.13.0"
        first = list(stamps.glob("torch-*"))
        run(f"TORCH={fake_torch(elsewhere, '2.12.1+mine')}")
        assert installed(python) == "2.12.1+mine"
        run()
        assert installed(python) == "2.12.1+mine", "what is installed stays"
        assert len(first) == len(list(stamps.glob("torch-*"))) == 1
        assert first != list(stamps.glob("torch-*"))
    finally:
        shutil.rmtree(stamps, ignore_errors=True)


def test_the_range_is_that_of_the_project() -> None:
    supported = torch_build.supported_range()
    assert supported == "torch>=2.11,<2.16"
    inside = ("2.11.0", "2.15.0", "2.15.3+cpu")
    assert all(torch_build.in_range(v, supported) for v in inside)
    assert not any(torch_build.in_range(v, supported) for v in ("0", "2.10.1", "2.16.0+cpu"))
    assert torch_build.in_range(installed(sys.executable), supported)
