"""The profile of a cluster: speeds and sizes, from `fcdp probe`, a file, or a table of built-in ones.

The scheduler uses a profile's `machine` (`options={"machine": "cluster.json"}`), the planner and the
simulator the whole profile.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path

from fcdp_compile.errors import FcdpError, ProfileError, did_you_mean
from fcdp_compile.models.files.json_records import LATER, RecordFormat, fail
from fcdp_compile.plan.cost import Link, Machine

SCHEMA = "fcdp.cluster/1"

MAX_RANKS_PER_NODE = 1024


class Measured(Enum):
    """The operation that a sample measures; all ranks of the cluster, or of a node, do it at once."""

    INTER_ALL_GATHER = "inter_all_gather"
    INTRA_ALL_GATHER = "intra_all_gather"
    H2D = "h2d"
    D2H = "d2h"
    COPY = "copy"
    MATMUL = "matmul"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One measurement: the median time of an operation on the slowest rank.

    bytes: sent over its network card by one node (inter), sent by one rank (intra), copied by one rank (h2d,
    d2h), read and written by one rank (copy).  flops: of one rank (matmul).
    """

    of: Measured
    bytes: int
    flops: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterProfile:
    """The speeds and sizes of a cluster, for the planner and the simulator.

    device_type: as torch names it, such as "cuda".  nodes: as measured, None for a built-in profile.
    ranks_per_node: the most that a node has.  device_memory_bytes: of one rank.  host_memory_bytes: of one
    node.  ranks_per_host_link: ranks that share one link to host memory (a PCIe switch).
    intra_over_host_link: whether transfers between ranks of a node use that link too (no NVLink between all
    of them).  machine: its h2d and d2h are of one whole host link, which these ranks may all use at once;
    `rank_machine` has a rank's share.  source: where the figures come from, for people.
    shares_memory: whether device and host memory are one memory.
    """

    name: str
    device_type: str
    nodes: int | None
    ranks_per_node: int
    device_memory_bytes: int
    host_memory_bytes: int
    ranks_per_host_link: int
    intra_over_host_link: bool
    machine: Machine
    source: str
    samples: tuple[Sample, ...] = ()
    shares_memory: bool = field(default=False, metadata=LATER)

    @property
    def rank_machine(self) -> Machine:
        """The speeds for one rank while all ranks copy at once, as they do in training."""
        h2d, d2h = (
            replace(link, bytes_per_s=link.bytes_per_s / self.ranks_per_host_link)
            for link in (self.machine.h2d, self.machine.d2h)
        )
        return replace(self.machine, h2d=h2d, d2h=d2h)

    def with_card(self, bytes_per_s: float) -> ClusterProfile:
        """The cluster with another bandwidth of a node's card."""
        inter = replace(self.machine.inter, bytes_per_s=bytes_per_s)
        return replace(self, machine=replace(self.machine, inter=inter))


def _check(profile: ClusterProfile) -> None:
    if not profile.name:
        fail("name", "is empty")
    if not profile.device_type.isidentifier():
        fail("device_type", f"is {profile.device_type!r}, not a device type of torch such as cuda")
    if not 1 <= profile.ranks_per_node <= MAX_RANKS_PER_NODE:
        fail("ranks_per_node", f"is {profile.ranks_per_node}, not 1 to {MAX_RANKS_PER_NODE}")
    if not 1 <= profile.ranks_per_host_link <= profile.ranks_per_node:
        fail(
            "ranks_per_host_link",
            f"is {profile.ranks_per_host_link}, but must be 1 to {profile.ranks_per_node}, the ranks of "
            "a node",
        )
    if profile.nodes is not None and profile.nodes < 1:
        fail("nodes", f"is {profile.nodes}, but must be at least 1")
    for name in ("device_memory_bytes", "host_memory_bytes"):
        if not getattr(profile, name):
            fail(name, "is 0")
    for i, sample in enumerate(profile.samples):
        if sample.seconds <= 0:
            fail(f"samples[{i}].seconds", f"is {sample.seconds}, but must be above 0")


FORMAT = RecordFormat(
    record=ClusterProfile,
    schema=SCHEMA,
    what="cluster profile",
    remedy="measure again with fcdp probe, or correct the field",
    error=ProfileError,
    check=_check,
)


def read_profile(path: str | os.PathLike[str]) -> ClusterProfile:
    """Read a profile from a file.

    Raises: ProfileError with the field and the fault; OSError if the file cannot be read.
    """
    return FORMAT.read(path)


def write_profile(path: str | os.PathLike[str], profile: ClusterProfile) -> None:
    """Write a profile to a file that other processes see either whole or not at all.

    Raises: OSError if the file cannot be written.
    """
    FORMAT.write(path, profile)


def profile_to_json(profile: ClusterProfile) -> str:
    """The text of a profile's file."""
    return FORMAT.to_json(profile)


def find_profile(name: str) -> ClusterProfile:
    """A built-in profile by name, or the profile in a file.

    Raises: ProfileError for a damaged file; FcdpError if `name` is neither a built-in name nor a file.
    """
    if name in CLUSTERS:
        return CLUSTERS[name]
    if os.sep in name or name.endswith(".json") or Path(name).exists():
        return read_profile(name)
    hint = did_you_mean(name, CLUSTERS)
    raise FcdpError(
        f"unknown cluster {name!r}; give a file that fcdp probe wrote, or one of {', '.join(CLUSTERS)}{hint}"
    )


# "FCDP: Fully Cached Data Parallel" (Park et al.), table III: 16 GB in 0.613 s over PCIe 4.0 x16, and between
# nodes in the times below.  Half of the bytes cross in each direction, as in an all-gather of two nodes: then
# 10 GbE carries 9.5 Gbit/s.
_TABLE_III_BYTES = 16e9
_TABLE_III_PCIE_S = 0.613
_TABLE_III_S = {"100g-rdma": 0.949, "100g-ipoib": 3.963, "10gbe": 6.745, "1gbe": 67.66}
_LATENCY_S = {"100g-rdma": 10e-6, "100g-ipoib": 50e-6, "10gbe": 50e-6, "1gbe": 100e-6}


def _a40x8(network: str) -> ClusterProfile:
    bus = Link(latency_s=10e-6, bytes_per_s=_TABLE_III_BYTES / _TABLE_III_PCIE_S)
    crossing = _TABLE_III_BYTES / 2 / _TABLE_III_S[network]
    return ClusterProfile(
        name=f"a40x8-{network}",
        device_type="cuda",
        nodes=None,
        ranks_per_node=8,
        device_memory_bytes=46068 * 2**20,  # nvidia-smi's figure for 48 GB
        host_memory_bytes=1000 * 10**9,
        ranks_per_host_link=1,
        intra_over_host_link=True,  # NVLink joins pairs only; a ring through all eight takes PCIe
        machine=Machine(
            inter=Link(latency_s=_LATENCY_S[network], bytes_per_s=crossing),
            intra=Link(latency_s=20e-6, bytes_per_s=bus.bytes_per_s),
            h2d=bus,
            d2h=bus,
            flops_per_s=0.75 * 149.7e12,  # of the data sheet's fp16 with fp32 sums
            memory_bytes_per_s=0.8 * 696e9,  # of the data sheet's GDDR6
        ),
        source="FCDP (Park et al.), section VI and table III; A40 data sheet",
    )


def _gb10_pair() -> ClusterProfile:
    memory_bytes_per_s = 0.8 * 273e9
    copy = Link(latency_s=10e-6, bytes_per_s=memory_bytes_per_s / 2)  # reads and writes one memory
    return ClusterProfile(
        name="gb10x1-200g",
        device_type="cuda",
        nodes=None,
        ranks_per_node=1,
        device_memory_bytes=128 * 10**9,
        host_memory_bytes=128 * 10**9,
        ranks_per_host_link=1,
        intra_over_host_link=False,
        machine=Machine(
            inter=Link(latency_s=10e-6, bytes_per_s=0.8 * 200e9 / 8),
            intra=copy,
            h2d=copy,
            d2h=copy,
            flops_per_s=0.75 * 125e12,  # an eighth of the data sheet's sparse fp4
            memory_bytes_per_s=memory_bytes_per_s,
        ),
        source="DGX Spark data sheet, nothing measured",
        shares_memory=True,
    )


CLUSTERS: dict[str, ClusterProfile] = {
    profile.name: profile for profile in (*map(_a40x8, _TABLE_III_S), _gb10_pair())
}
"""Built-in profiles by name."""
