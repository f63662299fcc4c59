"""What moves the parameters of one model: its groups, lanes, memory and counters."""

from __future__ import annotations

from fcdp_compile.core.params.mesh import Topology
from fcdp_compile.devices import Device
from fcdp_compile.runtime.cache.device_memory import DeviceMemory
from fcdp_compile.runtime.cache.home_transfers import HomeTransfers
from fcdp_compile.runtime.cache.pinned import PinnedPool
from fcdp_compile.runtime.cache.row_sources import RowSources
from fcdp_compile.runtime.collectives.collectives import Collectives, are_blocking
from fcdp_compile.runtime.collectives.counters import Counters
from fcdp_compile.runtime.lanes.lanes import Lanes


class Transport:
    """The means by which all buckets of one model move.

    row_sources: where rows of other nodes can be read.  device_memory: asked before a copy stays on the
    device, if its strategy leaves that choice; None if no strategy does.
    """

    def __init__(self, topology: Topology, device: Device) -> None:
        self.topology = topology
        self.counters = Counters()
        self.lanes = Lanes.shared(topology, device, is_blocking=are_blocking(topology, device))
        self.collectives = Collectives(topology, self.counters, self.lanes)
        self.pool = PinnedPool(device)
        self.home_transfers = HomeTransfers(self.counters, self.lanes, topology.node)
        self.row_sources = RowSources()
        self.device_memory: DeviceMemory | None = None
