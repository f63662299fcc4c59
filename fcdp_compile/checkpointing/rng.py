"""The states of this process' random number generators: torch's, Python's, numpy's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from fcdp_compile.devices import device_of


def rng_state(device: torch.device) -> dict[str, Any]:
    """The state of every generator, as a value that a checkpoint holds.

    device: the model's; the generator of a GPU belongs to it if it is one.
    """
    version, words, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": device_of(device).rng_state(),
        # Python's is 625 numbers, which are shorter as an array.
        "python": {"version": version, "words": np.array(words, np.uint32), "gauss": gauss},
        "numpy": np.random.get_state(legacy=False),
    }


def set_rng_state(saved: dict[str, Any], device: torch.device) -> None:
    """Continue as `rng_state` was; a GPU's generator only where there was one and is one."""
    torch.set_rng_state(saved["torch"])
    of_card = device_of(device)
    if saved["cuda"] is not None and of_card.rng_state() is not None:
        of_card.set_rng_state(saved["cuda"])
    python = saved["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    np.random.set_state(saved["numpy"])
