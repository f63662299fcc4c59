"""The states of this process' random number generators: torch's, Python's, numpy's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def rng_state(device: torch.device) -> dict[str, Any]:
    """The state of every generator, as a value that a checkpoint holds.

    device: the model's; the generator of a GPU belongs to it if it is one.
    """
    version, words, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        # Python's is 625 numbers, which are shorter as an array.
        "python": {"version": version, "words": np.array(words, np.uint32), "gauss": gauss},
        "numpy": np.random.get_state(legacy=False),
    }


def set_rng_state(saved: dict[str, Any], device: torch.device) -> None:
    """Continue as `rng_state` was; a GPU's generator only where there was one and is one."""
    torch.set_rng_state(saved["torch"])
    if device.type == "cuda" and saved["cuda"] is not None:
        torch.cuda.set_rng_state(saved["cuda"], device)
    python = saved["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    np.random.set_state(saved["numpy"])
