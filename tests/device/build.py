"""Compile the simulated device once into the environment: a minute, and then not again until it changes."""

from __future__ import annotations

import functools
import hashlib
import sys
from pathlib import Path
from types import ModuleType

import torch
from torch.utils import cpp_extension

_SOURCES = [Path(__file__).with_name(name) for name in ("sim.cpp", "collectives.cpp")]
_READ = [*_SOURCES, Path(__file__).with_name("sim.h")]


@functools.cache
def extension() -> ModuleType:
    """The compiled module."""
    text = b"".join(file.read_bytes() for file in _READ) + torch.__version__.encode()
    folder = Path(sys.prefix, "share", "fcdp-device", hashlib.sha256(text).hexdigest()[:16])
    folder.mkdir(parents=True, exist_ok=True)
    return cpp_extension.load(
        "fcdp_sim",
        [str(file) for file in _SOURCES],
        build_directory=str(folder),
        extra_cflags=["-std=c++20", "-O0", "-w"],
    )
