"""What there is to save of a job: cut tensors, of which this rank writes its rows, and values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from fcdp_compile.checkpointing.cuts import cut
from fcdp_compile.checkpointing.optimizers import parts_of
from fcdp_compile.checkpointing.record import CutTensor
from fcdp_compile.checkpointing.rng import rng_state
from fcdp_compile.checkpointing.tree import Encoded, encode
from fcdp_compile.errors import CheckpointError
from fcdp_compile.registry import ParamSpec
from fcdp_compile.runtime.model import ShardedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a user gives to `save` and `load` besides the model; None: not given."""

    optimizer: Optimizer | None
    scheduler: Any
    scaler: Any
    extra: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """tensors: all, the same on every rank.  parts: of which this rank writes what, by name.

    values: this rank's, by names that all ranks share.
    """

    tensors: list[CutTensor]
    parts: dict[str, Tensor]
    values: dict[str, Encoded]

    def description(self) -> list[str]:
        """One line for each thing that must be the same on every rank."""
        cuts = [f"{t.name}: {t.dtype} {t.shape} by {t.rows} of {t.dim}" for t in self.tensors]
        return [*cuts, *(f"{name}, a value" for name in self.values)]


def contents_of(
    state: ShardedModel, root: nn.Module, job: Job, step: int | None, *, copy: bool
) -> Contents:
    """Look at everything that a checkpoint holds.

    copy: take copies in host memory, which nobody changes afterwards, instead of the tensors themselves.

    Raises: CheckpointError for what cannot be saved, naming it.
    """
    whole = plain_tensors(root, state)
    specs = {r.spec.name: r.spec for r in state.records.values()}
    locals_: list[tuple[str, ParamSpec, Tensor]] = [
        (parameter_name(r.spec.name), r.spec, r.local()) for r in state.records.values()
    ]
    values: dict[str, Any] = {name: tensor.detach() for name, tensor in whole.items()}
    values |= {name: module.get_extra_state() for name, module in extra_states(root)}
    if job.optimizer is not None:
        optimizer = parts_of(job.optimizer, parameter_names(root), specs)
        locals_ += [(m.name, m.spec, m.local) for m in optimizer.moments]
        values["optimizer.groups"] = optimizer.groups
        values["optimizer.state"] = optimizer.state
        values["optimizer.others"] = optimizer.others
    for name, owner in (("scheduler", job.scheduler), ("scaler", job.scaler)):
        if owner is not None:
            values[name] = owner.state_dict()
    values |= {"step": step, "extra": job.extra, "rng": rng_state(state.device)}
    return _cut_and_encoded(state, locals_, values, copy)


def _cut_and_encoded(
    state: ShardedModel,
    locals_: list[tuple[str, ParamSpec, Tensor]],
    values: dict[str, Any],
    copy: bool,
) -> Contents:
    mesh = state.topology.position
    rank = mesh.node * mesh.ranks_per_node + mesh.place
    tensors, parts = [], {}
    for index, (name, spec, local) in enumerate(locals_):
        if tuple(local.shape) != spec.local_shape:
            raise CheckpointError(f"{name} is {tuple(local.shape)} here, not {spec.local_shape}")
        made = cut(name, str(local.dtype).removeprefix("torch."), spec, mesh, index)
        tensors.append(made)
        if rank in made.files:
            parts[name] = local.to("cpu", copy=True) if copy else local
    encoded = {name: encode(value, name, copy=copy) for name, value in values.items()}
    return Contents(tensors=tensors, parts=parts, values=encoded)


def parameter_name(name: str) -> str:
    """A parameter's name in a checkpoint."""
    return f"model.{name}"


def parameter_names(root: nn.Module) -> dict[int, str]:
    """The names of the model's parameters by id, of tied ones the first."""
    return {id(p): name for name, p in root.named_parameters()}


def plain_tensors(root: nn.Module, state: ShardedModel) -> dict[str, Tensor]:
    """Persistent buffers, and parameters that are not sharded, by their names in a checkpoint."""
    sharded = {id(r.parameter()) for r in state.records.values()}
    found = {parameter_name(name): p for name, p in root.named_parameters() if id(p) not in sharded}
    dropped = {
        f"{prefix}.{name}".removeprefix(".")
        for prefix, module in root.named_modules()
        for name in module._non_persistent_buffers_set
    }
    kept = {n: b for n, b in root.named_buffers() if n not in dropped}
    return found | {f"model.{name} (buffer)": b for name, b in kept.items()}


def extra_states(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that have a state of their own besides tensors."""
    for name, module in root.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield f"model.{name} (extra state)", module
