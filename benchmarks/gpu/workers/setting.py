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

    is_quick: run the smallest form of the part, as a trial.  until_s: time of `time.monotonic` after which
    the part skips optional work.  folder: for files besides the JSON.  write: saves the findings so far.
    """

    device: torch.device
    is_quick: bool
    until_s: float
    folder: Path
    write: Callable[[Found], None]

    @property
    def is_cuda(self) -> bool:
        """Whether there is a GPU to measure."""
        return self.device.type == "cuda"

    def has_time(self, seconds: float = 0.0) -> bool:
        """Whether this many seconds are left."""
        return time.monotonic() + seconds < self.until_s
