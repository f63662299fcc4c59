"""The costs of steps: links and compute; the records of the times of a schedule on its five lanes.

Arithmetic only; speeds come from the user, a measurement or the defaults below.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fcdp_compile.errors import ArgumentError
from fcdp_compile.plan import Kind, Lane, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A link: the latency to start a transfer, and its speed from then on.

    Raises: ValueError for a latency below zero, or a bandwidth of zero or less.
    """

    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        if not (0 <= self.latency_s < math.inf and 0 < self.bytes_per_s < math.inf):
            raise ArgumentError(
                f"a link needs finite latency_s >= 0 and bytes_per_s > 0, not {self.latency_s} and "
                f"{self.bytes_per_s}"
            )

    def time_s(self, sent_bytes: float) -> float:
        """Seconds for a transfer; 0 for no bytes."""
        return self.latency_s + sent_bytes / self.bytes_per_s if sent_bytes else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The speeds of one cluster.

    inter: one node's network card, which its ranks share.  intra: the link from one rank to the others of its
    node.  h2d, d2h: one rank's bus in each direction.  flops_per_s, memory_bytes_per_s: the speeds that one
    rank's compute reaches.

    Raises: ValueError for a speed of compute that is zero or less.
    """

    inter: Link
    intra: Link
    h2d: Link
    d2h: Link
    flops_per_s: float
    memory_bytes_per_s: float

    def __post_init__(self) -> None:
        for name in ("flops_per_s", "memory_bytes_per_s"):
            if not getattr(self, name) > 0:
                raise ArgumentError(
                    f"machine's {name!r} must be above zero, not {getattr(self, name)}"
                )

    def time_s(self, step: Step, ranks_per_node: int) -> float:
        """Seconds that a step keeps its lane busy while nothing else uses its links."""
        working = self.work_s(step)
        if step.kind is Kind.COMPUTE:
            return self.intra.time_s(step.inner_bytes) + working
        links = {Lane.INTRA: self.intra, Lane.H2D: self.h2d, Lane.D2H: self.d2h}
        if step.lane is Lane.INTER:  # the ranks of a node gather at the same time
            return self.inter.time_s(step.bytes * ranks_per_node)
        return working + links[step.lane].time_s(step.bytes) if step.lane in links else 0.0

    def work_s(self, step: Step) -> float:
        """Seconds of a step's own work: operators, or putting gathered parts in order."""
        kernels = step.kernel_bytes / self.memory_bytes_per_s
        accessing = step.accessed_bytes / self.memory_bytes_per_s
        return kernels + max(step.flops / self.flops_per_s, accessing)


def agreement_s(machine: Machine, nodes: int, ranks_per_node: int) -> float:
    """Seconds until all ranks have agreed on what a forward runs; its Python thread waits for that.

    The words are few, so only latency counts.  A device that has work left from the step before goes on with
    it meanwhile.
    """
    link = machine.inter if nodes > 1 else machine.intra
    return agreement_hops(nodes * ranks_per_node) * link.latency_s


def agreement_hops(ranks: int) -> int:
    """Messages one after the other until all ranks have the words of all: to the first, then down a tree."""
    return 1 + math.ceil(math.log2(ranks)) if ranks > 1 else 0


# Round figures.  cuda: data sheets of an A100-class GPU on PCIe 4 and 10 Gbit/s Ethernet, with half of the
# peak if kernels do not reach it.  cpu: two cores of a server on 1 Gbit/s.
MACHINES: Mapping[str, Machine] = {
    "cuda": Machine(
        inter=Link(latency_s=50e-6, bytes_per_s=1.25e9),
        intra=Link(latency_s=20e-6, bytes_per_s=20e9),
        h2d=Link(latency_s=10e-6, bytes_per_s=20e9),
        d2h=Link(latency_s=10e-6, bytes_per_s=20e9),
        flops_per_s=150e12,
        memory_bytes_per_s=1.2e12,
    ),
    "cpu": Machine(
        inter=Link(latency_s=500e-6, bytes_per_s=125e6),
        intra=Link(latency_s=200e-6, bytes_per_s=2e9),
        h2d=Link(latency_s=20e-6, bytes_per_s=5e9),
        d2h=Link(latency_s=20e-6, bytes_per_s=5e9),
        flops_per_s=5e10,
        memory_bytes_per_s=1e10,
    ),
}
"""Speeds that are assumed if nothing was measured."""


def assumed_machine(device_type: str) -> Machine:
    """The machine of `MACHINES` for a device type of torch; that of cuda serves for other accelerators."""
    return MACHINES.get(device_type, MACHINES["cuda"])


def machine_from(description: Mapping[str, Any], base: Machine) -> Machine:
    """A machine from nested numbers, such as `{"inter": {"bytes_per_s": 125e6}}`; the rest is as in `base`.

    Raises: ValueError for an unknown name or an impossible value, TypeError for a value that is not a number.
    """
    values: dict[str, Any] = {name: getattr(base, name) for name in Machine.__slots__}
    for name, value in description.items():
        if name not in values:
            raise ArgumentError(f"a machine has no {name!r}; it has {', '.join(values)}")
        if not isinstance(values[name], Link):
            values[name] = _number(name, value)
            continue
        if not isinstance(value, Mapping):
            raise ArgumentError(f"machine's {name!r} must be a mapping, not {type(value).__name__}")
        parts = {part: getattr(values[name], part) for part in Link.__slots__}
        for part, number in value.items():
            if part not in parts:
                raise ArgumentError(f"a link has no {part!r}; it has {', '.join(parts)}")
            parts[part] = _number(f"{name}.{part}", number)
        values[name] = Link(**parts)
    return Machine(**values)


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ArgumentError(f"machine's {name!r} must be a number, not {type(value).__name__}")
    return float(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """When a step keeps its lane busy; for a wait, when compute is idle."""

    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A schedule in time: a slot for each step, and how long each lane is busy.

    inner: when collectives of the model itself run, by index of their compute step; only predictions have it.
    """

    slots: tuple[Slot, ...]
    busy_s: Mapping[Lane, float]
    total_s: float
    inner: Mapping[int, Slot] = field(default_factory=dict)

    @property
    def exposed_s(self) -> float:
        """How long compute is idle."""
        return self.total_s - self.busy_s[Lane.COMPUTE]

    @property
    def inner_s(self) -> float:
        """How long collectives of the model itself run."""
        return sum(slot.end_s - slot.start_s for slot in self.inner.values())
