"""The setting in which a worker runs its part."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.gpu.results import Found


class NotRunError(Exception):
    """A part cannot run here; the sentence says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One part's device and time.

    is_quick: run the smallest form of the part, as a trial.  is_plain: without Inductor, to find the cause of
    a failure.  until_s: time of `time.monotonic` after which the part skips optional work.  folder: for files
    besides the JSON.  write: saves the findings so far.
    """

    device: torch.device
    is_quick: bool
    is_plain: bool
    until_s: float
    folder: Path
    write: Callable[[Found], None]

    @property
    def is_cuda(self) -> bool:
        """Whether there is a GPU to measure."""
        return self.device.type == "cuda"

    @property
    def has_inductor(self) -> bool:
        """Whether Inductor compiles: it knows GPUs; elsewhere a trial need not wait for it."""
        return self.is_cuda and not self.is_plain

    @property
    def dtype(self) -> torch.dtype:
        """Of a large model.  The simulated device has the CPU's kernels, whose norms in bf16 differ."""
        return torch.float32 if self.device.type == "sim" else torch.bfloat16

    @property
    def dropout(self) -> float:
        """Of checkpointed blocks; recomputing, torch repeats random numbers on its own devices alone."""
        return 0.0 if self.device.type == "sim" else 0.1

    @property
    def compute(self) -> str:
        """The option of the backend "fcdp" for this setting."""
        return "inductor" if self.has_inductor else "eager"

    @property
    def backend(self) -> str:
        """The backend of torch that compares with `compute`."""
        return "inductor" if self.has_inductor else "aot_eager"

    def has_time(self, seconds: float = 0.0) -> bool:
        """Whether this many seconds are left."""
        return time.monotonic() + seconds < self.until_s
