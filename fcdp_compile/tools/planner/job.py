"""A training job on a cluster, to be planned."""

from __future__ import annotations

from dataclasses import dataclass

from fcdp_compile.cluster.profile import ClusterProfile
from fcdp_compile.core.params.spec import Home
from fcdp_compile.errors import FcdpError
from fcdp_compile.strategy.formats import DELTA_BITS

USABLE = 0.9
"""The part of a device's memory that tensors may take; contexts, workspaces and fragments take the rest."""

HOST_USABLE = 0.9
"""The part of a node's memory that caches may take, as in `host_memory.detect`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A training job: a cluster, the nodes and ranks of it that are used, and the size of a step.

    batch: samples of one rank's micro-batch.  accumulate: micro-batches of an optimizer step.
    cp, tp: how many ranks of a node share each sequence and each parameter (`make_mesh`).
    delta_bits: bits that a weight takes which crosses between nodes as a difference (`+delta`).

    Raises: FcdpError for more ranks than a node of the cluster has, sizes below 1, or ranks of a node that cp
    and tp do not divide.
    """

    profile: ClusterProfile
    nodes: int
    ranks_per_node: int
    batch: int
    accumulate: int = 1
    cp: int = 1
    tp: int = 1
    delta_bits: float = DELTA_BITS

    def __post_init__(self) -> None:
        for name in ("nodes", "ranks_per_node", "batch", "accumulate", "cp", "tp"):
            if getattr(self, name) < 1:
                raise FcdpError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.ranks_per_node > self.profile.ranks_per_node:
            raise FcdpError(
                f"{self.ranks_per_node} ranks per node are more than the {self.profile.ranks_per_node} of a "
                f"node of cluster {self.profile.name!r}; use fewer ranks per node, or another profile"
            )

        if self.ranks_per_node % (self.cp * self.tp):
            raise FcdpError(
                f"cp={self.cp} x tp={self.tp} does not divide the {self.ranks_per_node} ranks of a node; "
                "ranks that share sequences or parameters must be on one node"
            )

    @property
    def mesh(self) -> Home:
        """The place of the first rank in the data mesh, over which home shards are cut."""
        return Home(
            nodes=self.nodes, ranks_per_node=self.ranks_per_node // self.tp, node=0, place=0
        )

    @property
    def data_profile(self) -> ClusterProfile:
        """The cluster as the ranks of one data mesh see it: ranks of "tp" share a node's card."""
        return self.profile.with_card(self.profile.machine.inter.bytes_per_s / self.tp)

    @property
    def inner(self) -> str:
        """The dimensions within a node, for people; empty without any."""
        sizes = {"cp": self.cp, "tp": self.tp}
        return "".join(f" {name}={size}" for name, size in sizes.items() if size > 1)

    @property
    def samples(self) -> int:
        """Samples of an optimizer step."""
        ranks = self.nodes * self.ranks_per_node // (self.cp * self.tp)
        return ranks * self.batch * self.accumulate

    @property
    def device_bytes(self) -> int:
        """Bytes of one device that tensors may take."""
        return int(USABLE * self.profile.device_memory_bytes)

    @property
    def host_bytes_per_rank(self) -> int:
        """Bytes of a node's memory that caches may take, for each of its ranks; 0 if GPUs have it all."""
        if self.profile.shares_memory:
            return 0
        return int(HOST_USABLE * self.profile.host_memory_bytes) // self.ranks_per_node
