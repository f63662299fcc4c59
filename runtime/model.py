"""A sharded model at run time: it owns the parameters, cache, groups, gradients and counters."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from fcdp_compile.devices import Device
from fcdp_compile.errors import StaleParameterError
from fcdp_compile.params.mesh import Topology
from fcdp_compile.params.registry import ParamSpec
from fcdp_compile.plan import Bucket, Placement, Plan
from fcdp_compile.plan.whole_step import of_one_step, whole_step
from fcdp_compile.runtime.cache.codecs import Codecs
from fcdp_compile.runtime.cache.home_transfers import HomeTransfers
from fcdp_compile.runtime.cache.host_budget import HostMemory
from fcdp_compile.runtime.cache.host_cache import NodeShardCache
from fcdp_compile.runtime.cache.pinned import PinnedPool
from fcdp_compile.runtime.collectives.collectives import Collectives, are_blocking
from fcdp_compile.runtime.collectives.counters import Counters
from fcdp_compile.runtime.drains import Drains
from fcdp_compile.runtime.exposure import Exposure
from fcdp_compile.runtime.lanes.lanes import Lanes
from fcdp_compile.runtime.optimizers.gradients import Accumulation
from fcdp_compile.runtime.optimizers.hooks import OptimizerHooks, WholeParameter
from fcdp_compile.runtime.outside import OutsideReads
from fcdp_compile.runtime.parameters.buckets import GraphBuckets
from fcdp_compile.runtime.parameters.record import ParamRecord, Records
from fcdp_compile.runtime.parameters.unset import Unset
from fcdp_compile.runtime.parameters.upkeep import CacheUpkeep
from fcdp_compile.runtime.parameters.validity import Validity
from fcdp_compile.runtime.seams import Seams
from fcdp_compile.runtime.shared_batches import SharedBatches
from fcdp_compile.torch_compat import backward_number

log = logging.getLogger(__name__)


class ShardedModel:
    """The state that all compiled graphs of one model share."""

    def __init__(
        self,
        number: int,
        topology: Topology,
        records: Iterable[ParamRecord],
        device: Device,
        unset: Iterable[str] = (),
        unset_buffers: Iterable[str] = (),
        *,
        accumulates_elsewhere: bool = False,
    ) -> None:
        self.number = number
        self.topology = topology
        self.device = device
        self.records = Records(records)
        self.strategies = tuple(dict.fromkeys(r.spec.strategy for r in self.records.values()))
        self.accumulates = any(strategy.accumulates_on for strategy in self.strategies)
        self.counters = Counters()
        self.lanes = Lanes.shared(topology, device, is_blocking=are_blocking(topology, device))
        self.collectives = Collectives(topology, self.counters, self.lanes)
        names = {key: self.records[key].spec.name for key in unset}
        self.unset = Unset(names, unset_buffers, self.collectives)
        self.pool = PinnedPool(device)
        self.host_memory = HostMemory(topology)
        weakref.finalize(self, self.host_memory.end)
        self.home_transfers = HomeTransfers(self.counters, self.lanes, topology.node)
        self.codecs = Codecs()
        self.placements: dict[int, Placement] = {}  # of the plan that runs, or ran last
        self.cache = NodeShardCache(
            self.counters, self.pool, self.lanes, self.placements, self.codecs
        )
        self.validity = Validity(topology, self.records, self.unset, self.cache, self.collectives)
        self.upkeep = CacheUpkeep(
            topology, self.records, self.validity, self.cache, self.collectives, self.codecs
        )
        self.buckets = GraphBuckets(self.records)
        self.accumulation = self._accumulation()
        self.outside = self._outside_reads()
        self.seams = self._seams()
        self.batches = SharedBatches(topology, self.collectives)
        # Keys of parameters that an optimizer has stepped although their backward may still run.
        self.stepped: set[str] = set()
        self.drains = Drains(device)
        self.exposure = Exposure(device)
        self.whole: dict[str, WholeParameter] = {}
        self.optimizer_hooks = OptimizerHooks(
            topology,
            self.collectives,
            self.counters,
            self.records,
            self.unset,
            self.whole,
            self.accumulation,
            self.validity,
            accumulates_elsewhere=accumulates_elsewhere and not self.accumulates,
        )
        self.gpu_bytes: int | None = None  # of the smallest GPU of all ranks
        self.plans: dict[int, Plan] = {}  # by the number of the graph, for people
        self._has_warned_of_given = False

    def _accumulation(self) -> Accumulation:
        return Accumulation(
            self.records.by_name,
            self.counters,
            self.pool,
            self.lanes,
            self.collectives,
            self.codecs,
            self.placements,
        )

    def _seams(self) -> Seams:
        return Seams(
            self.records,
            self.validity,
            self.cache,
            self.collectives,
            self.codecs,
            self.counters,
            self.lanes,
        )

    def _outside_reads(self) -> OutsideReads:
        return OutsideReads(
            self.topology,
            self.records,
            self.validity,
            self.cache,
            self.upkeep,
            self.collectives,
            self.host_memory,
            self.counters,
            self.placements,
            self.buckets,
            self.accumulation,
        )

    # --- what the traced ops need (registry.Owner) -------------------------------------------------------

    def spec(self, key: str) -> ParamSpec:
        """The parameter's spec."""
        return self.records[key].spec

    def gather_eagerly(self, key: str, shard: Tensor) -> Tensor:
        """Gather one parameter now, outside of graphs; a kept copy serves if it is valid."""
        self.unset.refuse("a forward")
        self.refuse_stepped([key])
        self.records[key].living()  # raises if it was replaced by a tensor with other rows
        return self.outside.use(key, shard)

    def refuse_stepped(self, keys: Iterable[str]) -> None:
        """Refuse to use parameters again in a backward that has stepped them.

        Raises: StaleParameterError.
        """
        if self.stepped and backward_number() != -1:
            for key in self.stepped.intersection(keys):
                raise StaleParameterError(
                    f"this backward uses parameter {self.records[key].spec.name!r} again after it was "
                    "stepped in the backward; offload without in_backward=True"
                )

    def gather(self, key: str, shard: Tensor, dtype: torch.dtype) -> Tensor:
        """Gather one parameter in a dtype from this rank's `shard`, into new memory."""
        return self.outside.gather(key, shard, dtype)

    def reduce_eagerly(self, key: str, grad: Tensor) -> Tensor:
        """Average one full gradient over all ranks now and return this rank's shard of it."""
        return self.outside.reduce(key, grad)

    def accumulates_eagerly(self, key: str) -> bool:
        """Whether the backward of a forward that runs now accumulates this parameter's gradient."""
        return self.accumulation.is_on and self.outside.may_accumulate(key)

    def accumulate_eagerly(self, key: str, grad: Tensor) -> Tensor:
        """Let one full gradient wait for the next micro-batch's; negative zeros for autograd."""
        return self.outside.accumulate(key, grad)

    # --- host memory --------------------------------------------------------------------------------------

    def agree_on_host_memory(self) -> None:
        """Find the budget of a cache on the host; all ranks of the mesh must call it."""
        if any(strategy.uses_host for strategy in self.strategies):
            is_pinned = self.device.registers
            self.host_memory.agree(self.collectives, self.pool, is_pinned=is_pinned)

    # --- buckets ------------------------------------------------------------------------------------------

    def add_plan(self, plan: Plan) -> None:
        """Note the plan of a compiled graph, and its buckets."""
        self.plans[plan.graph] = plan
        self.outside.note_graphs()
        self.buckets.add(plan)

    @property
    def predicted_peak_bytes(self) -> int | None:
        """The most device memory that a step of any graph, or of all together, is predicted to take."""
        plans = [self.plans[number] for number in sorted(self.plans)]
        if parts := of_one_step(plans):
            plans.append(whole_step(parts))
        return max((plan.peak_bytes or 0 for plan in plans), default=None)

    def release_rivals(self, bucket: Bucket) -> None:
        """Release copies of buckets that this bucket replaces because parameters were frozen or unfrozen."""
        for other in self.buckets.rivals(bucket):
            self.upkeep.give_up(other)

    def warn_of_given(self, names: Sequence[str]) -> None:
        """Warn once that a compiled function runs on other values than the model's own."""
        if self._has_warned_of_given or not names:
            return
        self._has_warned_of_given = True
        log.warning(
            "a compiled function was given other values than the model's own for %r (one of %d parameters), "
            "as torch.func.functional_call does: every parameter is then gathered by itself, between nodes "
            "too, at every use; for a fixed second set of values, such as a teacher, shard a second model",
            names[0],
            len(names),
        )
