"""Make torch recompute random operators on a CPU as it does on a GPU: with generators as graph inputs.

A GPU's generator can be pointed at another generator's state, and AOTAutograd gives graphs such states as
inputs.  A CPU's generator cannot, so stand-ins do.  Torch stays changed: use it only in separate processes.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch._functorch import partitioners
from torch._functorch._aot_autograd import utils
from torch._prims import rng_prims


class State(torch.Generator):
    """A generator's state, at which other generators can be pointed."""

    # With an index, like a GPU's.
    device: Any = SimpleNamespace(type="cpu", index=0)

    def clone_state(self) -> State:
        return State.of(self)

    @staticmethod
    def of(generator: torch.Generator) -> State:
        made = State()
        made.set_state(generator.get_state())
        return made


class Default:
    """torch's default generator, and the state that it is pointed at."""

    def __init__(self) -> None:
        self._at = State.of(torch.default_generator)
        self.switches = 0

    def clone_state(self) -> State:
        return State.of(torch.default_generator)

    def graphsafe_get_state(self) -> State:
        return self._at

    def graphsafe_set_state(self, state: State) -> None:
        self._at.set_state(torch.get_rng_state())
        self._at = state
        torch.set_rng_state(state.get_state())
        self.switches += 1


def is_possible() -> bool:
    """Whether this torch allows it for devices other than CUDA's (2.13 does)."""
    return hasattr(rng_prims, "register_graphsafe_rng_dispatch")


def enable() -> Default:
    """Enable it for the rest of the process; the returned object counts the recomputed operators."""
    default = Default()
    cpu: Any = torch.cpu
    cpu.default_generators = [default]
    cpu._get_generator = lambda device: default
    rng_prims.register_graphsafe_rng_dispatch(torch._C.DispatchKey.CPU)
    utils._GRAPHSAFE_RNG_DEVICE_TYPES.add("cpu")
    original = partitioners.apply_graphsafe_rng_functionalization

    def apply(fw: Any, bw: Any, fw_node: Any, bw_node: Any, device: Any, *more: Any) -> Any:
        return original(fw, bw, fw_node, bw_node, State.device, *more)

    partitioners.apply_graphsafe_rng_functionalization = apply
    return default
