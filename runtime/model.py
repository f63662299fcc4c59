"""A sharded model at run time: it owns the parameters, cache, groups, gradients and counters."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fcdp_compile.core.params.registry import ParamSpec
from fcdp_compile.devices import Device
from fcdp_compile.plan import Plan
from fcdp_compile.plan.whole_step import of_one_step, whole_step
from fcdp_compile.runtime.buckets.bound_bucket import BoundBucket
from fcdp_compile.runtime.buckets.model_buckets import ModelBuckets
from fcdp_compile.runtime.buckets.references import References
from fcdp_compile.runtime.buckets.transport import Transport
from fcdp_compile.runtime.buckets.validity import Validity
from fcdp_compile.runtime.cache.host_budget import HostMemory
from fcdp_compile.runtime.drains import Drains
from fcdp_compile.runtime.lanes.marks import Exposure
from fcdp_compile.runtime.optimizers.gradients import Accumulation
from fcdp_compile.runtime.optimizers.hooks import OptimizerHooks, WholeParameter
from fcdp_compile.runtime.outside import OutsideReads
from fcdp_compile.runtime.parameters.record import Generations, ParamRecord, Records
from fcdp_compile.runtime.parameters.unset import Unset
from fcdp_compile.runtime.progress import CompileProgress
from fcdp_compile.runtime.seams import Seams
from fcdp_compile.runtime.shared_batches import SharedBatches
from fcdp_compile.strategy.formats import Format

log = logging.getLogger(__name__)


class ShardedModel:
    """The state that all compiled graphs of one model share."""

    def __init__(
        self,
        number: int,
        transport: Transport,
        records: Iterable[ParamRecord],
        device: Device,
        unset: Iterable[str] = (),
        unset_buffers: Iterable[str] = (),
        *,
        gpu_bytes: int | None = None,
        accumulates_elsewhere: bool = False,
    ) -> None:
        self.number = number
        self.topology = transport.topology
        self.device = device
        self.records = Records(records)
        self.strategies = tuple(dict.fromkeys(r.spec.strategy for r in self.records.values()))
        self.accumulates = any(strategy.accumulates_on for strategy in self.strategies)
        self.transport = transport
        self.counters = self.transport.counters
        self.lanes = self.transport.lanes
        self.collectives = self.transport.collectives
        self.pool = self.transport.pool
        self.home_transfers = self.transport.home_transfers
        names = {key: self.records[key].spec.name for key in unset}
        self.unset = Unset(names, unset_buffers, self.collectives)
        self.host_memory = HostMemory(self.topology)
        weakref.finalize(self, self.host_memory.end)
        generations = Generations(self.records)
        self.buckets = ModelBuckets(self.records, generations, self.transport)
        self.references = References(self.buckets, generations, self.collectives)
        self.validity = Validity(
            self.records, self.unset, generations, self.collectives, self.references
        )
        self.accumulation = Accumulation(self.records.by_name, self.transport)
        self.outside = OutsideReads(
            self.records, self.buckets, self.validity, self.host_memory, self.accumulation
        )
        self.seams = Seams(self.validity, self.counters, self.lanes)
        self.batches = SharedBatches(self.topology, self.collectives)
        self.drains = Drains(device)
        self.exposure = Exposure(device)
        self.whole: dict[str, WholeParameter] = {}
        self.optimizer_hooks = OptimizerHooks(
            self.transport,
            self.records,
            self.unset,
            self.whole,
            self.accumulation,
            self.validity,
            accumulates_elsewhere=accumulates_elsewhere and not self.accumulates,
        )
        self.gpu_bytes = gpu_bytes  # of the smallest GPU of all ranks
        self.plans: dict[int, Plan] = {}  # by the number of the graph
        self.bound: dict[int, dict[int, BoundBucket]] = {}  # the buckets of each plan, by number
        is_first = not dist.is_initialized() or dist.get_rank() == 0
        self.progress = CompileProgress(len(self.records), is_shown=is_first)
        self._has_warned_of_given = self._has_warned_of_wide = False

    # --- what the traced ops need (registry.Owner) -------------------------------------------------------

    def spec(self, key: str) -> ParamSpec:
        """The parameter's spec."""
        return self.records[key].spec

    def gather_eagerly(self, key: str, shard: Tensor) -> Tensor:
        """Gather one parameter now, outside of graphs; a kept copy serves if it is valid."""
        self.unset.refuse("a forward")
        self.records[key].living()  # raises if it was replaced by a tensor with other rows
        return self.outside.use(key, shard)

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
        self.bound[plan.graph] = self.buckets.bind(plan)
        self.outside.note_graphs()
        self._warn_of_wide(plan)

    def _warn_of_wide(self, plan: Plan) -> None:
        """Warn once of a graph whose weights are too wide for differences."""
        wanted = [
            b for b in plan.buckets if b.strategy.weight_format is Format.DELTA and not b.frozen
        ]
        if wanted and all(b.itemsize > 2 for b in wanted) and not self._has_warned_of_wide:
            self._has_warned_of_wide = True
            log.warning(
                "strategy %r sends differences of weights in bf16 and fp16, but gathers all that graph %d "
                "trains (%r, …) in %s, as they are; use torch.autocast or shard(param_dtype=torch.bfloat16), "
                "or leave 'delta' out",
                wanted[0].strategy.name,
                plan.graph,
                wanted[0].params[0].name,
                wanted[0].dtype,
            )

    @property
    def predicted_peak_bytes(self) -> int | None:
        """The most device memory that a step of any graph, or of all together, is predicted to take."""
        plans = [self.plans[number] for number in sorted(self.plans)]
        if parts := of_one_step(plans):
            plans.append(whole_step(parts))
        return max((plan.peak_bytes or 0 for plan in plans), default=None)

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
