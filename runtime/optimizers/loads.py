"""Make what an optimizer has loaded for sharded parameters like what it makes itself.

DTensors become home tensors.  Whole tensors are cut: each rank keeps its part.

`Optimizer.load_state_dict` takes a state of whole tensors and leaves them as they are; the next step would
mix them with DTensors and fail.  torch 2.13's `set_optimizer_state_dict` cuts them itself, except those of
scalar parameters, which it takes for step counts.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fcdp_compile.params.home_shard import HomeShard
from fcdp_compile.params.home_tensor import HomeTensor
from fcdp_compile.runtime.collectives.agreement import same_tensors
from fcdp_compile.runtime.collectives.collectives import Collectives
from fcdp_compile.runtime.parameters.record import Records


class OptimizerLoads:
    """The optimizers that step a model's parameters; each is checked once, and after each load."""

    def __init__(self, collectives: Collectives, records: Records) -> None:
        self._collectives = collectives
        self._records = records
        self._known: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def watch(self, optimizer: Optimizer) -> None:
        """Cut the tensors that the optimizer has loaded, now and after each later load."""
        if optimizer in self._known:
            return
        self._known.add(optimizer)
        me = weakref.ref(self)

        def loaded(optimizer: Optimizer) -> None:
            if (alive := me()) is not None:
                alive._cut(optimizer)

        optimizer.register_load_state_dict_post_hook(loaded)
        self._cut(optimizer)

    def _cut(self, optimizer: Optimizer) -> None:
        """Raises: PlanMismatchError or FcdpError on every rank if ranks have loaded different tensors."""
        mine = self._records.by_parameter()
        for _, parameter, state in _states(optimizer):
            if id(parameter) not in mine:
                continue
            for key, value in state.items():
                # A pickled one has a mesh of its own, and DTensor's own ops know nothing of home nodes.
                if type(value) is DTensor and value.device_mesh == parameter.device_mesh:
                    state[key] = _home_tensor(value.to_local(), value, parameter)
        found = [each for each in _whole(optimizer) if id(each[1]) in mine]
        if not found:
            return
        same_tensors(
            self._collectives,
            "loads whole tensors into an optimizer",
            {f"{key} of parameter {i}": value for i, _, key, value in found},
        )
        for _, parameter, key, value in found:
            part = parameter.part_of(value).clone(memory_format=torch.contiguous_format)
            optimizer.state[parameter][key] = _home_tensor(part, parameter, parameter)


def _home_tensor(local: Tensor, like: DTensor, parameter: HomeShard) -> HomeTensor:
    made = DTensor.from_local(
        local,
        parameter.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
    adopted: HomeTensor = HomeTensor.adopt(made)
    return adopted


def _states(optimizer: Optimizer) -> list[tuple[int, HomeShard, dict[str, Any]]]:
    """The states of sharded parameters: the parameter's number, the parameter, its state."""
    owned = [p for group in optimizer.param_groups for p in group["params"]]
    return [
        (i, p, optimizer.state[p])
        for i, p in enumerate(owned)
        if isinstance(p, HomeShard) and p in optimizer.state
    ]


def _whole(optimizer: Optimizer) -> Iterator[tuple[int, HomeShard, str, Tensor]]:
    """The plain tensors that a sharded parameter's state has whole: number, parameter, key and tensor."""
    states = _states(optimizer)
    # A scalar's step count has the shape of the scalar, too: other parameters tell which keys hold moments.
    moments = {
        key
        for _, p, state in states
        if p.dim()
        for key, value in state.items()
        if isinstance(value, Tensor) and value.shape == p.shape
    }
    for i, p, state in states:
        for key, value in state.items():
            is_moment = key in moments if moments else key != "step"
            if is_moment and type(value) is Tensor and value.shape == p.shape:
                yield i, p, key, value
