"""Compile the simulated device once into the environment: a minute, and then not again until it changes."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import torch

_NAME = "fcdp_sim"
_SOURCES = [Path(__file__).with_name(name) for name in ("sim.cpp", "collectives.cpp")]
_READ = [*_SOURCES, Path(__file__).with_name("sim.h")]


@functools.cache
def extension() -> ModuleType:
    """The compiled module."""
    text = b"".join(file.read_bytes() for file in _READ) + torch.__version__.encode()
    folder = Path(sys.prefix, "share", "fcdp-device", hashlib.sha256(text).hexdigest()[:16])
    file = folder / f"{_NAME}.so"
    if not file.exists():
        return _compiled(folder)
    spec = importlib.util.spec_from_file_location(_NAME, file)
    assert spec is not None, file
    assert spec.loader is not None, file
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _compiled(folder: Path) -> ModuleType:
    """Build aside, since torch waits for ever for the lock that a killed build leaves in its folder."""
    from torch.utils import cpp_extension  # needs setuptools

    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, ignore_cleanup_errors=True) as aside:
        module: ModuleType = cpp_extension.load(
            _NAME,
            [str(file) for file in _SOURCES],
            build_directory=aside,
            extra_cflags=["-std=c++20", "-O0", "-w"],
        )
        with contextlib.suppress(OSError):  # another process was first
            Path(aside).rename(folder)
    return module
