"""An optimizer whose states wait in host memory or in files between its steps."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Muon, Optimizer

from fcdp_compile.core.params.home_shard import key_of
from fcdp_compile.core.params.registry import owner_of
from fcdp_compile.core.sharding.folder_argument import refuse_nameless
from fcdp_compile.errors import ArgumentError, FcdpError
from fcdp_compile.optimizers.combine import Combined, loss_of
from fcdp_compile.optimizers.states import (
    Bus,
    StateBucket,
    StateKinds,
    StateMemory,
    kinds_of_states,
    unhooked_step,
)
from fcdp_compile.optimizers.steps import DeviceSteps, HostSteps, stepping
from fcdp_compile.runtime.collectives.agreement import same_act
from fcdp_compile.runtime.lanes.lanes import Lanes
from fcdp_compile.runtime.model import ShardedModel

_BUCKET_BYTES = 64 << 20
"""Large enough that the bus is at its full speed, and small beside a model."""

_STEPS: dict[str, type[DeviceSteps | HostSteps]] = {"gpu": DeviceSteps, "cpu": HostSteps}


def offload(
    optimizer: Optimizer,
    step_on: str = "gpu",
    folder: str | Path | None = None,
    *,
    bucket_mb: float = _BUCKET_BYTES / 2**20,
) -> Optimizer:
    """Let an optimizer's states, such as Adam's moments, wait in host memory or in files between its steps.

    All ranks must call it, for the optimizer of one sharded model, before or after its first step.  Use the
    result in the optimizer's place; the parameter groups are the same objects.

    step_on: "gpu": the states come to the device, bucket by bucket; the results have the same bits.  "cpu":
    gradients go to the host, which steps there by torch's fused kernels; results are equal to rounding.
    folder: on a local disk, for files of the states that are gone with the optimizer; None: host memory.
    bucket_mb: MiB of states that are on the device together; a parameter with more is a bucket of its own.

    Raises: ArgumentError for anything but an optimizer that can step some of its parameters at a time, and
    for parameters of no sharded model or of several; FcdpError on every rank if host memory or the disk has
    no room for the states of any rank.
    """
    _check_optimizer(optimizer, step_on)
    _check_sizes(folder, bucket_mb)
    where = None if folder is None else Path(folder)
    return Offloaded(optimizer, _STEPS[step_on], where, int(bucket_mb * 2**20))


def _check_optimizer(optimizer: object, step_on: object) -> None:
    if not isinstance(optimizer, Optimizer):
        raise ArgumentError(
            f"offload takes a torch optimizer, not {type(optimizer).__name__}; give it a built optimizer"
        )
    if isinstance(optimizer, Combined):
        raise ArgumentError(
            f"offload takes one optimizer that has states itself, not {type(optimizer).__name__}; offload "
            "each optimizer, once, before fcdp_compile.combine"
        )
    if not isinstance(step_on, str) or step_on not in _STEPS:
        raise ArgumentError(f"step_on must be 'gpu' or 'cpu', not {step_on!r}")
    if step_on == "cpu" and isinstance(optimizer, Muon):
        raise ArgumentError(
            "Muon multiplies whole matrices, for which a CPU is too slow; offload it with step_on='gpu'"
        )


def _check_sizes(folder: object, bucket_mb: object) -> None:
    if (
        isinstance(bucket_mb, bool)
        or not isinstance(bucket_mb, int | float)
        or not 0 < bucket_mb < 2**30
    ):
        raise ArgumentError(
            f"bucket_mb must be a number of MiB above 0, not {bucket_mb!r}; leave it out for 64"
        )
    if folder is not None:
        if not isinstance(folder, str | Path):
            raise ArgumentError(
                f"folder must be a path, not {type(folder).__name__}; give it a str or Path"
            )
        refuse_nameless(folder)


class Offloaded(Combined):
    """See `offload`.

    inner: the optimizer that steps.  buckets: its states.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        steps: type[DeviceSteps | HostSteps],
        folder: Path | None,
        bucket_bytes: int,
    ) -> None:
        if any(known.inner is optimizer for known in _offloaded):
            raise ArgumentError(
                f"this {type(optimizer).__name__} is offloaded already; use what the first call returned"
            )
        self._bucket_bytes = bucket_bytes
        self._folder = folder
        self.buckets: list[StateBucket] = []
        self.optimizers = (optimizer,)
        model = self._model()
        if model is None:
            raise ArgumentError(
                f"{type(optimizer).__name__} has no trainable parameter of a sharded model, and its states "
                "cannot be offloaded; call fcdp_compile.shard first, which also works in a single process"
            )
        keys = [key_of(p) for group in self.param_groups for p in group["params"]]
        if any(key is not None and model.spec(key).computes_on is not None for key in keys):
            raise ArgumentError(
                f"{type(optimizer).__name__} steps parameters that were sharded with offload_params=True, "
                "so its states are in host memory already; use the optimizer as it is"
            )
        lanes = model.lanes
        if folder is not None:  # copies from and to files block their caller
            lanes = Lanes(model.device, is_blocking=True)
        self._steps = steps(model.device, Bus(lanes, model.counters))
        super().__init__(self.optimizers)
        self._memory = StateMemory(f"the states of {type(optimizer).__name__}", model, folder)
        weakref.finalize(self, self._memory.end)
        self._plan(model)
        _offloaded.add(self)

    @property
    def inner(self) -> Optimizer:
        """The optimizer that steps."""
        return self.optimizers[0]

    def settle(self) -> None:
        """Wait until the states on the host are complete, before something reads them."""
        self._steps.settle()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parameters, as the optimizer does; all ranks must call it."""
        loss = loss_of(closure)
        if self._unplanned():
            model = self._model()
            assert model is not None, "its parameters are alive"
            self._plan(model)
        with self._steps.choosing(self.inner):
            Optimizer.profile_hook_step(self._step_all)(self.inner)
        return loss

    def _step_all(self, optimizer: Optimizer) -> None:
        """Step the buckets, and the parameters that are in none."""
        with torch.no_grad():
            active = [b for b in self.buckets if any(p.grad is not None for p in b.parameters)]
            self._steps.step(optimizer, active)
        planned = {id(p) for bucket in self.buckets for p in bucket.parameters}
        with stepping(optimizer, lambda p: None if id(p) in planned else p) as has_any:
            if has_any:
                unhooked_step(optimizer)(optimizer)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the optimizer; all ranks must call it.

        Raises: ArgumentError for parameters of another sharded model.
        """
        if not self._is_made:
            return
        self.inner.add_param_group(param_group)
        try:
            self._model()
        except ArgumentError:
            del self.inner.param_groups[-1]
            raise

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load states, which go to the host without passing the device."""
        states = state_dict["state"].items()
        held = {k: _held_back(v) if isinstance(v, dict) else v for k, v in states}
        super().load_state_dict({**state_dict, "state": held})
        for bucket in self.buckets:
            bucket.absorb(self.inner.state)

    def __getstate__(self) -> dict[str, Any]:
        raise FcdpError(
            f"an offloaded {type(self.inner).__name__} cannot be copied or pickled, because its states "
            "are in memory of its own; copy its state_dict()"
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        for parameter, of_one in state.get("state", {}).items():
            for key, value in of_one.items() if isinstance(of_one, dict) else ():
                if isinstance(value, _Given):
                    of_one[key] = self._put(parameter, key, value.tensor)
        super().__setstate__(state)

    def _put(self, parameter: Tensor, key: str, value: Tensor) -> Tensor:
        """A loaded state, on the device if no bucket takes it."""
        dtype = parameter.dtype if parameter.is_floating_point() else value.dtype
        if any(bucket.wants(parameter, key) for bucket in self.buckets):
            return value.detach().to(dtype)  # a tensor of its own: its memory will be another
        return value.to(parameter.device, dtype)

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
                f"{type(self.inner).__name__} steps parameters of {len(found)} sharded models; give each "
                "model an optimizer, offload each, and put them together with fcdp_compile.combine"
            )
        return next(iter(found.values()), None)

    def _plan(self, model: ShardedModel) -> None:
        """Make buckets for parameters that have none; all ranks must call it."""
        new = self._unplanned()
        name = type(self.inner).__name__
        found = kinds_of_states(self.inner, new, self._steps.steps_at)
        kinds = [self._steps.kept(of_one, p) for (p, _), of_one in zip(new, found, strict=True)]
        facts = [f"{key_of(p)} {dict(k)}" for (p, _), k in zip(new, kinds, strict=True)]
        digest = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:8]
        how = f"{'host memory' if self._folder is None else 'files'}, {self._bucket_bytes} bytes a bucket"
        act = f"offloads the states of {name} for {len(new)} parameters to {self._steps.told}"
        same_act(model.collectives, f"{act} ({how}, {digest})")
        buckets = self._grouped(model, [p for p, _ in new], kinds)
        self._memory.take(buckets, model)
        self.buckets += buckets
        for bucket in buckets:
            bucket.absorb(self.inner.state)

    def _grouped(
        self, model: ShardedModel, parameters: Sequence[Tensor], kinds: Sequence[StateKinds]
    ) -> list[StateBucket]:
        """Buckets of parameters in their order, the same on all ranks."""
        groups: list[list[int]] = []
        size = 0
        for i, (p, of_one) in enumerate(zip(parameters, kinds, strict=True)):
            key = key_of(p)
            assert key is not None, "planned parameters have keys"
            x = model.spec(key).layout
            elements = x.slot_elements * x.slots_per_node_shard // x.nodes
            own = elements * sum(dtype.itemsize for dtype in of_one.values())
            if not groups or size + own > self._bucket_bytes:
                groups.append([])
                size = 0
            groups[-1].append(i)
            size += own
        return [
            StateBucket(
                number,
                [parameters[i] for i in group],
                [kinds[i] for i in group],
                self._steps.steps_at,
            )
            for number, group in enumerate(groups, len(self.buckets))
        ]


_offloaded: weakref.WeakSet[Offloaded] = weakref.WeakSet()


class _Given:
    """A tensor of a state dict that torch must not copy to the device."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def _held_back(of_one: dict[str, Any]) -> dict[str, Any]:
    return {k: _Given(v) if isinstance(v, Tensor) and v.dim() else v for k, v in of_one.items()}
