"""Collect everything to save of a job: cut tensors, of which this rank writes its rows, and values."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fcdp_compile.core.params.layout import Box
from fcdp_compile.core.params.packing import block_of
from fcdp_compile.core.params.registry import ParamSpec
from fcdp_compile.core.params.seals import mixed
from fcdp_compile.devices import Device, device_of
from fcdp_compile.errors import CheckpointError
from fcdp_compile.models.checkpointing.format.record import CutTensor, LeftOut, cut
from fcdp_compile.models.checkpointing.format.tree import Encoded, encode
from fcdp_compile.models.checkpointing.optimizers import Moment, parts_of
from fcdp_compile.models.quantised.weight import quantised_weights
from fcdp_compile.runtime.cache.pinned import PinnedPool
from fcdp_compile.runtime.model import ShardedModel

_ALIGNED = 64
"""Bytes: copies start at multiples of it, so any dtype can view them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobObjects:
    """The objects that a user gives to `save` and `load` besides the model; None: not given."""

    optimizer: Optimizer | None
    scheduler: Any
    scaler: Any
    extra: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class JobContents:
    """Everything to save of a job, on this rank.

    tensors: all cut tensors, equal on every rank.  parts: the rows that this rank writes, by tensor.
    left_out: frozen parameters, with this rank's part of each mark.
    values: this rank's, by names that all ranks share.
    """

    tensors: list[CutTensor]
    left_out: list[LeftOut]
    parts: dict[str, Tensor]
    values: dict[str, Encoded]

    def description(self) -> list[str]:
        """One line for each thing that must be the same on every rank."""
        cuts = [
            f"{t.name}: {t.dtype} {t.shape} by {t.rows} of {t.dim}"
            + ("" if t.part_of is None else f", {t.part_of}")
            for t in self.tensors
        ]
        frozen = [f"{t.name}: {t.dtype} {t.shape}, left out" for t in self.left_out]
        return [*cuts, *frozen, *(f"{name}, a value" for name in self.values)]


class HostCopies:
    """Pinned host memory for copies of a model's tensors, kept from one save to the next.

    New memory would double the cost of a copy: the system clears each page at its first use.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._pool = PinnedPool(device)
        self._slab: Tensor | None = None

    def of(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return copies of the tensors, valid until the next call."""
        sizes = [-(-tensor.nbytes // _ALIGNED) * _ALIGNED for tensor in tensors.values()]
        slab = self._slab
        if slab is None or slab.numel() != sum(sizes):
            if slab is not None:
                self._pool.give_back(slab)
            slab = self._slab = self._pool.take(sum(sizes), torch.uint8)
        copies = {}
        for (name, tensor), room in zip(tensors.items(), slab.split(sizes), strict=True):
            copy = room[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            copies[name] = copy.copy_(tensor, non_blocking=True)
        self._device.synchronize()
        return copies


Marking = Callable[[ShardedModel, int, ParamSpec, Tensor], int]
"""Returns this rank's part of the mark of a parameter: `own_mark`, or another function with its arguments."""


def contents_of(
    state: ShardedModel,
    root: nn.Module,
    job: JobObjects,
    step: int | None,
    copies: HostCopies | None,
    *,
    frozen: bool = True,
    mark: Marking | None = None,
) -> JobContents:
    """Collect everything that a checkpoint holds.

    frozen: whether to include the values of frozen parameters.  mark: what tells other values of those that
    are left out; None: `own_mark`.
    copies: where tensors are copied to, so that later changes do not reach the checkpoint; None: no copies.

    Raises: CheckpointError for anything that cannot be saved, naming it.
    """
    moments: list[Moment] = []
    left_out = []
    for index, record in enumerate(state.records.values()):
        spec, local, name = record.spec, record.peek(), parameter_name(record.spec.name)
        if frozen or record.parameter().requires_grad:
            moments.append(Moment(name=name, spec=spec, local=local))
        else:
            shape, of_rank = spec.whole_shape, (mark or own_mark)(state, index, spec, local)
            left_out.append(LeftOut(name=name, dtype=_dtype(local), shape=shape, mark=of_rank))
    whole = plain_tensors(root, state)
    values: dict[str, Any] = {name: tensor.detach() for name, tensor in whole.items()}
    values |= {name: module.get_extra_state() for name, module in extra_states(root)}
    values["meanings"] = {name: weight.meaning for name, weight in quantised_weights(root)}
    if job.optimizer is not None:
        specs = {r.spec.name: r.spec for r in state.records.values()}
        parts, of_optimizer = parts_of(job.optimizer, parameter_names(root, state), specs)
        values |= parts
        moments += of_optimizer
    for name, owner in (("scheduler", job.scheduler), ("scaler", job.scaler)):
        if owner is not None:
            values[name] = owner.state_dict()
    values |= {"step": step, "extra": job.extra, "rng": rng_state(state.device.torch)}
    tensors, parts = _cut(state, moments)
    if copies is not None:
        parts = copies.of(parts)
    encoded = {n: encode(value, n, copy=copies is not None) for n, value in values.items()}
    return JobContents(tensors=tensors, left_out=left_out, parts=parts, values=encoded)


def own_mark(state: ShardedModel, index: int, spec: ParamSpec, local: Tensor) -> int:
    """Return this rank's part of the mark of a parameter; 0 if another rank counts these rows."""
    topology = state.topology
    parts = cut(spec.name, "", spec, topology.position, topology.sharers, index)
    if not any(topology.number in part.files for part in parts):
        return 0
    home = topology.home(spec.strategy.home)
    return mark_of(local, spec.whole_shape, spec.boxes(home.node, home.place))


def _cut(state: ShardedModel, moments: list[Moment]) -> tuple[list[CutTensor], dict[str, Tensor]]:
    """Return how tensors are cut, and the rows that this rank writes."""
    mesh, sharers = state.topology.position, state.topology.sharers
    tensors: list[CutTensor] = []
    parts = {}
    for index, one in enumerate(moments):
        name, spec, shape = one.name, one.spec, tuple(one.local.shape)
        if shape != spec.local_shape:
            raise CheckpointError(f"{name} is {shape} here, not {spec.local_shape}")
        made = cut(name, _dtype(one.local), spec, mesh, sharers, index)
        tensors += made
        if any(state.topology.number in tensor.files for tensor in made):
            parts[name] = one.local
    return tensors, parts


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def parameter_name(name: str) -> str:
    """A parameter's name in a checkpoint."""
    return f"model.{name}"


def parameter_names(root: nn.Module, state: ShardedModel) -> dict[int, str]:
    """Return the names of the model's parameters by id; the first name of a tied one.

    Sharded parameters have the names from the time of `shard`: compiling a layer by itself renames them.
    """
    named = {id(p): name for name, p in root.named_parameters()}
    return named | {id(r.parameter()): r.spec.name for r in state.records.values()}


def plain_tensors(root: nn.Module, state: ShardedModel) -> dict[str, Tensor]:
    """Persistent buffers, and parameters that are not sharded, by their names in a checkpoint."""
    sharded = {id(r.parameter()) for r in state.records.values()}
    found = {parameter_name(name): p for name, p in root.named_parameters() if id(p) not in sharded}
    return found | {f"model.{name} (buffer)": b for name, b in persistent_buffers(root)}


def persistent_buffers(root: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers of a state dict, by name; a buffer that several modules share once."""
    dropped = {
        f"{prefix}.{name}".removeprefix(".")
        for prefix, module in root.named_modules()
        for name in module._non_persistent_buffers_set
    }
    yield from ((name, b) for name, b in root.named_buffers() if name not in dropped)


def extra_states(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that define an extra state besides tensors."""
    for name, module in root.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield f"model.{name} (extra state)", module


def rng_state(device: torch.device) -> dict[str, Any]:
    """Return the state of every generator, as a value that a checkpoint can hold.

    device: the model's; if it is a GPU, its generator is included.
    """
    version, words, gauss = random.getstate()
    own = device_of(device)
    return {
        "torch": torch.get_rng_state(),
        own.kind: own.rng_state(),
        # Python's state is 625 numbers, which take less room as an array.
        "python": {"version": version, "words": np.array(words, np.uint32), "gauss": gauss},
        "numpy": np.random.get_state(legacy=False),
    }


def set_rng_state(saved: dict[str, Any], device: torch.device) -> None:
    """Set the generators to states of `rng_state`; a GPU's only if one was saved and the model is on one."""
    torch.set_rng_state(saved["torch"])
    own = device_of(device)
    if (state := saved.get(own.kind)) is not None:
        own.set_rng_state(state)
    python = saved["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    np.random.set_state(saved["numpy"])


# --- marks ------------------------------------------------------------------------------------------------
#
# A mark of a parameter's values does not depend on the layout: it is the sum of one hash per element.  Ranks
# add up their own rows; the sum of the ranks' sums is the mark of the whole parameter.

_BLOCK_ELEMENTS = 2**18  # so that a block stays in a core's cache
_GOLDEN = -7046029254386353131  # 2**64 over the golden ratio, odd
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def mark_of(part: Tensor, whole_shape: Sequence[int], boxes: Iterable[Box]) -> int:
    """Return what a part of a parameter contributes to the mark; between 0 and 2**63.

    whole_shape: of the parameter.  boxes: where the part's elements are in it.
    A changed bit changes the hash of its element.  Each element is hashed with its place in the whole
    parameter, so exchanged elements change the mark too.
    """
    total = torch.zeros((), dtype=torch.int64, device=part.device)
    for box in boxes:
        block = block_of(part.detach(), box.inside, box.shape).contiguous()
        flat = block.view(-1).view(_WORDS[part.element_size()])
        for begin in range(0, flat.numel(), _BLOCK_ELEMENTS):
            words = flat[begin : begin + _BLOCK_ELEMENTS].to(torch.int64)
            here = torch.arange(begin, begin + len(words), device=part.device)
            total += mixed(mixed(_places(here, whole_shape, box) * _GOLDEN) ^ words).sum()
    return int(total) & (2**63 - 1)


def mark_of_all(parts: Iterable[int]) -> int:
    """Return the mark of a parameter from its ranks' parts."""
    return sum(parts) & (2**63 - 1)


def _places(here: Tensor, whole_shape: Sequence[int], box: Box) -> Tensor:
    """Return the places in the whole parameter of the elements at places `here` of a block."""
    places, stride = torch.zeros_like(here), 1
    for size, at, count in reversed(list(zip(whole_shape, box.at, box.shape, strict=True))):
        places += (here % count + at) * stride
        here = here // count
        stride *= size
    return places
