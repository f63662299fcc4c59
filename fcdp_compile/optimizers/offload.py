"""An optimizer whose states wait in host memory between its steps, and come to the device bucket by bucket.

    compute   │ step 0 │ step 1 │ step 2 │
    load      0 │  1      2    │
    store              0      1      2

At most two buckets of states are on the device, and nothing of them is there outside of `step`.
Source: ZeRO-Offload (Ren et al., 2021) for states on the host.  The steps stay on the device, so no number
changes.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fcdp_compile.errors import ArgumentError, FcdpError
from fcdp_compile.optimizers.combine import Combined
from fcdp_compile.optimizers.state_buckets import StateBucket
from fcdp_compile.optimizers.state_bytes import in_pages
from fcdp_compile.optimizers.state_kinds import KindsOfStates, StateKinds, unhooked_step
from fcdp_compile.params.home_shard import key_of
from fcdp_compile.params.registry import owner_of
from fcdp_compile.ranks.all_or_none import together
from fcdp_compile.runtime.cache.host_budget import HostMemory
from fcdp_compile.runtime.cache.pinned import PinnedPool
from fcdp_compile.runtime.collectives.agreement import same_act
from fcdp_compile.runtime.lanes.pending import Pending
from fcdp_compile.runtime.model import ShardedModel

_BUCKET_BYTES = 64 << 20
"""Large enough that the bus is at its full speed, and small beside a model."""


def offload(optimizer: Optimizer, *, bucket_mb: float = _BUCKET_BYTES / 2**20) -> Optimizer:
    """Let an optimizer's states wait in host memory; it steps on the device, with the same results.

    All ranks must call it, for the optimizer of one sharded model, before or after its first step.  Use the
    result in the optimizer's place; the parameter groups are the same objects.

    bucket_mb: MiB of states that are on the device together; a parameter with more is a bucket of its own.

    Raises: ArgumentError for anything but an optimizer that can step some of its parameters at a time, and
    for parameters of no sharded model or of several; FcdpError on every rank if host memory has no room.
    """
    if not isinstance(optimizer, Optimizer):
        raise ArgumentError(
            f"offload takes a torch optimizer, not {type(optimizer).__name__}; give it a built optimizer"
        )
    if isinstance(optimizer, Combined):
        raise ArgumentError(
            f"offload takes one optimizer that has states itself, not {type(optimizer).__name__}; offload "
            "each optimizer, once, before fcdp_compile.combine"
        )
    return Offloaded(optimizer, int(bucket_mb * 2**20))


class Offloaded(Combined):
    """See `offload`.

    optimizer: the optimizer that steps.  buckets: its states.
    """

    def __init__(self, optimizer: Optimizer, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes
        self._is_stored = True
        self.buckets: list[StateBucket] = []
        super().__init__([optimizer])
        self._share_groups()
        model = self._model()
        if model is None:
            raise ArgumentError(
                f"{type(optimizer).__name__} has no trainable parameter of a sharded model, and its states "
                "cannot be offloaded; call fcdp_compile.shard first, which also works in a single process"
            )
        self._device, self._lanes, self._counters = model.device, model.lanes, model.counters
        self._lease = _Lease(model.pool, model.host_memory)
        weakref.finalize(self, self._lease.end)
        self._plan(model)

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer that steps."""
        return self.optimizers[0]

    @property
    def state(self) -> Any:
        """The states of all parameters, whose values are on the host and complete."""
        if not self._is_stored:
            self._device.synchronize()  # the reader is the Python thread, not a stream
            self._is_stored = True
        return super().state

    @state.setter
    def state(self, states: Mapping[Any, Any]) -> None:
        if states:
            super().state.replace(states)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parameters, as the optimizer does; all ranks must call it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._unplanned():
            model = self._model()
            assert model is not None, "its parameters are alive"
            self._plan(model)
        Optimizer.profile_hook_step(self._step_buckets)(self.optimizer)
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the optimizer; all ranks must call it."""
        if len(self.param_groups) < self._count:  # torch builds this optimizer
            super().add_param_group(param_group)
            return
        self.optimizer.add_param_group(param_group)
        self._count = len(self.param_groups)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load states, which go to the host without passing the device."""
        states = state_dict["state"].items()
        held = {k: _held_back(v) if isinstance(v, dict) else v for k, v in states}
        super().load_state_dict({**state_dict, "state": held})
        for bucket in self.buckets:
            bucket.absorb(self.optimizer.state)

    def __getstate__(self) -> dict[str, Any]:
        raise FcdpError(
            f"an offloaded {type(self.optimizer).__name__} cannot be copied or pickled, because its states "
            "are in memory of its own; copy its state_dict()"
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        for parameter, of_one in state.get("state", {}).items():
            for key, value in of_one.items() if isinstance(of_one, dict) else ():
                if isinstance(value, _Given):
                    of_one[key] = self._put(parameter, key, value.tensor)
        super().__setstate__(state)
        self._share_groups()

    def _put(self, parameter: Tensor, key: str, value: Tensor) -> Tensor:
        """A loaded state, on the device if no bucket takes it."""
        dtype = parameter.dtype if parameter.is_floating_point() else value.dtype
        if any(bucket.wants(parameter, key) for bucket in self.buckets):
            return value.detach().to(dtype)  # a tensor of its own: its memory will be another
        return value.to(parameter.device, dtype)

    def _share_groups(self) -> None:
        self.param_groups = self.optimizer.param_groups

    # --- buckets ------------------------------------------------------------------------------------------

    def _unplanned(self) -> list[tuple[Tensor, dict[str, Any]]]:
        """The trainable parameters of a sharded model that are in no bucket yet, with their groups."""
        known = {id(p) for bucket in self.buckets for p in bucket.parameters}
        return [
            (p, group)
            for group in self.param_groups
            for p in group["params"]
            if p.requires_grad and id(p) not in known and key_of(p) is not None
        ]

    def _model(self) -> ShardedModel | None:
        """The model of all parameters that have states in buckets, or are to have."""
        found: dict[int, ShardedModel] = {}
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.requires_grad and (key := key_of(p)) is not None:
                owner = owner_of(key)
                assert isinstance(owner, ShardedModel), owner
                found[id(owner)] = owner
        if len(found) > 1:
            raise ArgumentError(
                f"{type(self.optimizer).__name__} steps parameters of {len(found)} sharded models; give each "
                "model an optimizer, offload each, and put them together with fcdp_compile.combine"
            )
        return next(iter(found.values()), None)

    def _plan(self, model: ShardedModel) -> None:
        """Make buckets for parameters that have none; all ranks must call it."""
        new = self._unplanned()
        name = type(self.optimizer).__name__
        kinds_of = KindsOfStates(self.optimizer)
        kinds = [kinds_of.of(p, group) for p, group in new]
        facts = [f"{key_of(p)} {dict(k)}" for (p, _), k in zip(new, kinds, strict=True)]
        digest = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:8]
        act = f"offloads the states of {name} for {len(new)} parameters ({digest})"
        same_act(model.collectives, act)
        buckets = self._grouped(model, [p for p, _ in new], kinds)
        size = sum(in_pages(b.size_bytes) for b in buckets)
        self._lease.booked_bytes += model.host_memory.book(
            f"the states of {name}",
            size,
            model.collectives,
            model.pool,
            is_pinned=model.device.registers,
        )
        together(
            model.topology.control,
            lambda: self._lease.take(buckets),
            FcdpError,
            f"the memory for the states of {name}",
        )
        self.buckets += buckets
        for bucket in buckets:
            bucket.absorb(self.optimizer.state)

    def _grouped(
        self, model: ShardedModel, parameters: Sequence[Tensor], kinds: Sequence[StateKinds]
    ) -> list[StateBucket]:
        """Buckets of parameters in their order, the same on all ranks."""
        groups: list[list[int]] = []
        full = True
        size = 0
        for i, (p, of_one) in enumerate(zip(parameters, kinds, strict=True)):
            key = key_of(p)
            assert key is not None, "planned parameters have keys"
            x = model.spec(key).layout
            elements = x.slot_elements * x.slots_per_node_shard // x.nodes
            own = elements * sum(dtype.itemsize for dtype in of_one.values())
            if full or size + own > self._bucket_bytes:
                groups.append([])
                full, size = False, 0
            groups[-1].append(i)
            size += own
        first = len(self.buckets)
        return [
            StateBucket(first + n, [parameters[i] for i in members], [kinds[i] for i in members])
            for n, members in enumerate(groups)
        ]

    # --- a step -------------------------------------------------------------------------------------------

    def _step_buckets(self, optimizer: Optimizer) -> None:
        """Step bucket by bucket: while one is stepped, the next one is loaded and the one before stored."""
        step, states = unhooked_step(optimizer), optimizer.state
        active = [b for b in self.buckets if any(p.grad is not None for p in b.parameters)]
        with torch.no_grad():
            loading = self._load(active[0], states) if active else None
            storing: Pending | None = None
            try:
                for bucket, following in zip(active, [*active[1:], None], strict=True):
                    memory, loading = loading, None
                    if storing is not None:
                        # Its memory is free before that of the bucket after this one is taken.
                        storing.wait()
                    storing = None
                    loading = self._load(following, states) if following is not None else None
                    storing = self._step_one(bucket, None if memory is None else memory.wait())
                    del memory
            finally:
                for pending in (loading, storing):
                    if pending is not None:
                        pending.wait()
        planned = {id(p) for bucket in self.buckets for p in bucket.parameters}
        with _only(optimizer, lambda p: id(p) not in planned) as has_any:
            if has_any:
                step(optimizer)

    def _load(self, bucket: StateBucket, states: Any) -> Pending | None:
        return bucket.load(states, self._lanes, self._counters)

    def _step_one(self, bucket: StateBucket, memory: Tensor | None) -> Pending | None:
        """Step the parameters of one bucket and start to store its states."""
        optimizer = self.optimizer
        mine = {id(p) for p in bucket.parameters}
        if memory is not None:
            bucket.enter(optimizer.state, memory)
        try:
            with _only(optimizer, lambda p: id(p) in mine):
                unhooked_step(optimizer)(optimizer)
        finally:
            left = bucket.leave(optimizer.state)
            self._is_stored = False
            stored = bucket.store(left, memory, self._lanes, self._counters)
        return stored


class _Given:
    """A tensor of a state dict that torch must not copy to the device."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def _held_back(of_one: dict[str, Any]) -> dict[str, Any]:
    return {k: _Given(v) if isinstance(v, Tensor) and v.dim() else v for k, v in of_one.items()}


class _Lease:
    """The host memory of one optimizer's states."""

    def __init__(self, pool: PinnedPool, memory: HostMemory) -> None:
        self._pool = pool
        self._memory = memory
        self._slabs: list[Tensor] = []
        self.booked_bytes = 0

    def take(self, buckets: Sequence[StateBucket]) -> None:
        """Give each bucket a slab."""
        for bucket in buckets:
            if bucket.size_bytes:
                slab = self._pool.take(bucket.size_bytes, torch.uint8)
                self._slabs.append(slab)
                bucket.put_on(slab)

    def end(self) -> None:
        """Give the memory back, because the optimizer is gone."""
        for slab in self._slabs:
            self._pool.give_back(slab)
        self._slabs.clear()
        self._memory.freed_bytes += self.booked_bytes


@contextmanager
def _only(optimizer: Optimizer, chosen: Callable[[Tensor], bool]) -> Iterator[bool]:
    """Let an optimizer have only some of its parameters within the block; yields whether it has any."""
    groups = optimizer.param_groups
    everything = [group["params"] for group in groups]
    try:
        for group in groups:
            group["params"] = [p for p in group["params"] if chosen(p)]
        optimizer.param_groups = [group for group in groups if group["params"]]
        yield bool(optimizer.param_groups)
    finally:
        for group, parameters in zip(groups, everything, strict=True):
            group["params"] = parameters
        optimizer.param_groups = groups
