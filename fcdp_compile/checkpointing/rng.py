"""The states of this process' random number generators: torch's, Python's, numpy's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from fcdp_compile.devices import device_of


def rng_state(device: torch.device) -> dict[str, Any]:
    """Return the state of every generator, as a value that a checkpoint can hold.

    device: the model's; if it is a GPU, its generator is included.
    """
    version, words, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": device_of(device).rng_state(),
        # Python's state is 625 numbers, which take less room as an array.
        "python": {"version": version, "words": np.array(words, np.uint32), "gauss": gauss},
        "numpy": np.random.get_state(legacy=False),
    }


def set_rng_state(saved: dict[str, Any], device: torch.device) -> None:
    """Set the generators to states of `rng_state`; a GPU's only if one was saved and the model is on one."""
    torch.set_rng_state(saved["torch"])
    of_card = device_of(device)
    if saved["cuda"] is not None and of_card.rng_state() is not None:
        of_card.set_rng_state(saved["cuda"])
    python = saved["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    np.random.set_state(saved["numpy"])
