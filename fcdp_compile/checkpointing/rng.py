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
    own = device_of(device)
    return {
        "torch": torch.get_rng_state(),
        own.kind: own.rng_state(),
        # Python's state is 625 numbers, which take less room as an array.
        "python": {"version": version, "words": np.array(words, np.uint32), "gauss": gauss},
        "numpy": np.random.get_state(legacy=False),
    }


def set_rng_state(saved: dict[str, Any], device: torch.device) -> None:
    """Set the generators to states of `rng_state`; a GPU's only if one was saved and the model is on one."""
    torch.set_rng_state(saved["torch"])
    own = device_of(device)
    if (state := saved.get(own.kind)) is not None:
        own.set_rng_state(state)
    python = saved["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    np.random.set_state(saved["numpy"])
