"""Parameters by key: each parameter's spec, which the two traced ops need, and its owner.

A key is `m<model number>:<qualified name>`, unique in the process.  It is a string and not a number
because Dynamo turns numbers that differ between two models of one class into symbols.  The registry holds
owners weakly: it forgets a model when the model dies.
"""

from __future__ import annotations

import itertools
import math
import weakref
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from fcdp_compile.core.params.inner_cut import InnerCut
from fcdp_compile.core.params.layout import Box, ParamLayout, boxes
from fcdp_compile.errors import FcdpError
from fcdp_compile.strategy import Strategy

STATE_BYTES = 8
"""Optimizer states of each trainable element, as far as plans know: Adam's two moments in fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSpec:
    """The facts about one sharded parameter that every part of fcdp may use.

    home_dtype: of the shard that the optimizer steps.  gather_dtype: of all-gathers and the full parameter.
    reduce_dtype: of reduce-scatters.  local_shape: of this rank's shard.  strategy: that of
    this parameter on this mesh (`core.params.spec`).
    is_packed: whether it is a part of a quantised weight, whose bytes nothing may change (`quantised`).
    computes_on: the device of gathered parameters if home shards and gradients are in host memory, else None.
    inner: how the whole parameter is cut over the ranks of a "tp" group; `layout` is then that of this rank's
    part.  None without such a group.
    """

    key: str
    name: str
    layout: ParamLayout
    home_dtype: torch.dtype
    gather_dtype: torch.dtype
    reduce_dtype: torch.dtype
    local_shape: tuple[int, ...]
    strategy: Strategy
    is_packed: bool = False
    computes_on: torch.device | None = None
    inner: InnerCut | None = None

    @property
    def facts(self) -> ParamSpec:
        """All but its names: equal for alike parameters (`passes.planning.alike`)."""
        return replace(self, key="", name="")

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The parameter's shape in the model as the user built it."""
        return self.layout.shape if self.inner is None else self.inner.shape

    def part_layout(self, index: int) -> ParamLayout:
        """The layout of the part that a rank of the "tp" group has; `layout` without such a group."""
        if self.inner is None:
            return self.layout
        return replace(self.layout, shape=self.inner.part_shape(index))

    def boxes(self, node: int, place: int, index: int | None = None) -> list[Box]:
        """The blocks of the whole parameter that a rank's home shard is.

        node, place: as for `layout`.  index: the rank's number in its "tp" group; by default this rank's.
        """
        if self.inner is None:
            layout, within = self.layout, None
        else:
            index = self.inner.index if index is None else index
            layout, within = self.part_layout(index), self.inner.within(index)
        return boxes(layout.shape, layout.dim, layout.local_rows(node, place), within)

    def home_device(self, device: torch.device) -> torch.device:
        """Where home shards and their gradients are on a rank that computes on this device."""
        return device if self.computes_on is None else torch.device("cpu")

    @property
    def home_bytes(self) -> int:
        """Bytes of this rank's home shard."""
        return math.prod(self.local_shape) * self.home_dtype.itemsize

    @property
    def mean_elements(self) -> int:
        """Elements of a home shard with its padding; the mean of all ranks if nodes own unequal parts."""
        return self.layout.slot_elements * self.layout.slots // self.layout.ranks

    def taken_bytes(self, *, is_frozen: bool) -> int:
        """Bytes of a home shard, and if it is trained, of its gradient and its optimizer's states."""
        size = self.home_dtype.itemsize
        return self.mean_elements * (size if is_frozen else 2 * size + STATE_BYTES)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot in the home dtype, which all ranks count for a copy of their home shard."""
        return self.layout.slot_elements * self.home_dtype.itemsize


class Owner(Protocol):
    """The part of a sharded model that the traced ops call when they run eagerly."""

    def spec(self, key: str) -> ParamSpec:
        """The parameter's spec."""

    def gather_eagerly(self, key: str, shard: torch.Tensor) -> torch.Tensor:
        """Gather one parameter now."""

    def gather(self, key: str, shard: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Gather any value of one parameter now, in a dtype."""

    def reduce_eagerly(self, key: str, grad: torch.Tensor) -> torch.Tensor:
        """Reduce one gradient now."""

    def accumulates_eagerly(self, key: str) -> bool:
        """Whether the backward of a forward that runs now accumulates this parameter's gradient."""

    def accumulate_eagerly(self, key: str, grad: torch.Tensor) -> torch.Tensor:
        """Let one gradient wait for the next micro-batch's."""


_owners: weakref.WeakValueDictionary[str, Owner] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def new_model_number() -> int:
    """The number of a new sharded model; equal on all ranks if they shard models in the same order."""
    return next(_numbers)


def register(key: str, owner: Owner) -> None:
    """Make `owner` the owner of `key` for as long as `owner` lives."""
    _owners[key] = owner


def owner_of(key: str) -> Owner:
    """The owner of `key`.

    Raises: FcdpError if the sharded model is gone.
    """
    owner = _owners.get(key)
    if owner is None:
        raise FcdpError(
            f"parameter {key!r} belongs to a sharded model that no longer exists; compile the current model"
        )
    return owner


def spec_of(key: str) -> ParamSpec:
    """The spec of the parameter with that key; FcdpError if its model is gone."""
    return owner_of(key).spec(key)


def check_shard(spec: ParamSpec, shard: torch.Tensor) -> None:
    """Refuse a shard that was converted, replaced or reshaped since `shard` made it.

    Raises: FcdpError.
    """
    if tuple(shard.shape) == spec.layout.shape != spec.local_shape:
        raise whole_error(spec.name, shard)
    if shard.dtype != spec.home_dtype or tuple(shard.shape) != spec.local_shape:
        raise FcdpError(
            f"parameter {spec.name!r} is now {shard.dtype} {tuple(shard.shape)} on this rank, but was "
            f"sharded as {spec.home_dtype} {spec.local_shape}; convert the model before fcdp_compile.shard"
        )


def whole_error(name: str, found: torch.Tensor) -> FcdpError:
    """The error for a plain tensor in the place of a home shard."""
    return FcdpError(
        f"parameter {name!r} is now {found.dtype} {tuple(found.shape)}, a whole tensor instead of its "
        "home shard; do not replace the parameter, compute the values for torch.func.functional_call from "
        "the model's parameters, and within fcdp_compile.gathered call the whole model, not a part that was "
        "compiled separately"
    )


def lost_write(key: str, line: str) -> FcdpError:
    """The error for a write to a gathered parameter.  line: which code writes."""
    return FcdpError(
        f"forward writes to parameter {key.partition(':')[2]!r} ({line}), which is a gathered copy "
        "there, so the write would be lost; write to it outside of forward, or compute with a new tensor "
        "instead"
    )
