"""Hooks of a sharded model before and after the steps of optimizers that own its parameters.

What an optimizer has loaded becomes like what it makes itself: DTensors become home tensors, and whole
tensors are cut.  `Optimizer.load_state_dict` leaves whole tensors as they are; the next step would mix them
with DTensors and fail.  torch 2.13's `set_optimizer_state_dict` cuts them itself, except those of scalar
parameters, which it takes for step counts.

torch chooses its list implementation (`foreach`) by the exact class of the parameters, and steps
parameters of other classes one by one, at three times the cost.  If the user has chosen nothing, fcdp sets
`foreach=True` in the parameter groups while the optimizer steps; afterwards a group, and its saved state,
is as before.  The results have the bits of a model that is not sharded.  torch uses lists for plain CUDA
parameters, too.  It steps plain CPU parameters one by one, but most optimizers compute the same bits with
lists.  `fused=True` is faster still, but rounds in another way, so only users choose it.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    NAdam,
    RAdam,
    RMSprop,
    Rprop,
)
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fcdp_compile.core.params.home_shard import REPLACED, HomeShard
from fcdp_compile.core.params.home_tensor import HomeTensor
from fcdp_compile.core.params.mesh import Topology
from fcdp_compile.core.params.seals import refuse_capture
from fcdp_compile.core.ranks.inner_mesh import all_ranks_of
from fcdp_compile.errors import FcdpError, UnsynchronizedGradientError
from fcdp_compile.runtime.buckets.transport import Transport
from fcdp_compile.runtime.buckets.validity import Validity
from fcdp_compile.runtime.collectives.agreement import same_tensors
from fcdp_compile.runtime.collectives.collectives import Collectives
from fcdp_compile.runtime.optimizers.gradients import Accumulation
from fcdp_compile.runtime.parameters.record import ParamRecord, Records
from fcdp_compile.runtime.parameters.unset import Unset

H = TypeVar("H")


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeParameter:
    """A parameter that is temporarily whole.

    home: its home parameter.  writeback: whether writes to the whole parameter are kept at the end.
    """

    home: nn.Parameter
    writeback: bool


class OptimizerHooks:
    """Checks before a step and notes after it, on every optimizer of the process while this object lives.

    whole: the parameters that are whole for a while, by key.
    accumulates_elsewhere: whether the strategy accumulates, but only on larger meshes.
    """

    def __init__(
        self,
        transport: Transport,
        records: Records,
        unset: Unset,
        whole: Mapping[str, WholeParameter],
        accumulation: Accumulation,
        validity: Validity,
        *,
        accumulates_elsewhere: bool,
    ) -> None:
        self._counters = transport.counters
        self._records = records
        self._unset = unset
        self._whole = whole
        self._accumulation = accumulation
        self._validity = validity
        self._accumulates_elsewhere = accumulates_elsewhere
        self._is_unsynchronised_elsewhere = False
        self._loads = OptimizerLoads(transport.collectives, records)
        self._steps = OptimizerSteps(transport.topology)
        for handle in (
            register_optimizer_step_pre_hook(_hook(self, OptimizerHooks.steps)),
            register_optimizer_step_post_hook(_hook(self, OptimizerHooks.stepped)),
        ):
            weakref.finalize(self, handle.remove)

    def note_backward(self, *, accumulates: bool) -> None:
        """Note that a compiled backward begins, and whether its forward was within `no_sync`."""
        self._is_unsynchronised_elsewhere = accumulates and self._accumulates_elsewhere

    def steps(self, optimizer: Optimizer) -> None:
        """Refuse a step whose gradients lack those that earlier micro-batches accumulated.

        A gradient that is cut otherwise than its parameter is cut anew: if the training loop computes with a
        parameter, DTensor's own backward may leave such a gradient, which torch's optimizers refuse.
        An optimizer that owns no parameter of this model is left alone: only some ranks may step it.

        Raises: UnsynchronizedGradientError; FcdpError for parameters without values, for parameters that are
        whole or that `shard` has replaced, and while a CUDA graph is captured.
        """
        for p in _owned_by(optimizer):
            if (name := getattr(p, REPLACED, None)) is not None:
                raise FcdpError(
                    f"{type(optimizer).__name__} was built before fcdp_compile.shard and holds parameter "
                    f"{name!r} as it was then, so stepping it would train nothing; build the optimizer "
                    "after sharding"
                )
        self._refuse_whole(optimizer)
        mine = self._mine(optimizer)
        if not mine:
            return
        refuse_capture()
        _refuse_torchs_muon(optimizer, mine)
        self._refuse_unsynchronised_elsewhere(mine)
        self._loads.watch(optimizer)
        self._refuse_incomplete({record.spec.key: record.spec.name for record, _ in mine})
        for _, p in mine:
            if not isinstance(p, HomeShard) or p.grad is None:
                continue
            if isinstance(p.grad, DTensor) and p.grad.placements != p.placements:
                p.grad = p.grad.redistribute(placements=p.placements)
            p.seal = None  # its values change; if the step fails, they do not count as the old ones
        self._steps.begin(optimizer)

    def _mine(self, optimizer: Optimizer) -> list[tuple[ParamRecord, nn.Parameter]]:
        """The parameters of this model that an optimizer owns, with their records, in its order."""
        mine = self._records.by_parameter()
        return [(mine[id(p)], p) for p in _owned_by(optimizer) if id(p) in mine]

    def _refuse_whole(self, optimizer: Optimizer) -> None:
        owned = {id(p) for p in _owned_by(optimizer)}
        if within := next((k for k, w in self._whole.items() if id(w.home) in owned), None):
            raise FcdpError(
                f"an optimizer steps parameter {self._records[within].spec.name!r} while it is whole; leave "
                "the block of fcdp_compile.gathered before training goes on"
            )

    def _refuse_incomplete(self, mine: Mapping[str, str]) -> None:
        """mine: names of the optimizer's parameters, by key."""
        if not self._unset.keys.isdisjoint(mine):
            # Without asking other ranks: not every rank has to step this optimizer.
            self._unset.refuse_here("an optimizer step")
        names = [name for name in self._accumulation.concerns() if name in mine.values()]
        left = self._accumulation.settle() if names else []
        if lacking := [name for name in names if name in left]:
            raise _unsynchronised(lacking[0], len(lacking))

    def _refuse_unsynchronised_elsewhere(
        self, mine: Sequence[tuple[ParamRecord, nn.Parameter]]
    ) -> None:
        """Refuse a step right after `no_sync`, as on several nodes, although nothing waits here."""
        if not self._is_unsynchronised_elsewhere:
            return
        for record, p in mine:
            if p.grad is not None and bool(p.grad.any()):
                raise _unsynchronised(record.spec.name, 1)

    def stepped(self, optimizer: Optimizer) -> None:
        """Note which parameters an optimizer has just changed."""
        self._steps.end()
        mine = self._mine(optimizer)
        if stepped := [record.spec.key for record, p in mine if p.grad is not None]:
            self._validity.values_changed(stepped)
        if mine:
            self._steps.report(optimizer)
            self._counters.end_step(optimizer)


def _refuse_torchs_muon(
    optimizer: Optimizer, mine: Sequence[tuple[ParamRecord, nn.Parameter]]
) -> None:
    homed = [record.spec.name for record, _ in mine if record.spec.layout.home_node is not None]
    if homed and type(optimizer) is torch.optim.Muon:
        raise FcdpError(
            f"torch.optim.Muon cannot step parameter {homed[0]!r}, of which one node has all rows; use "
            "fcdp_compile.Muon with the same arguments"
        )


def _owned_by(optimizer: Optimizer) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _unsynchronised(name: str, count: int) -> UnsynchronizedGradientError:
    return UnsynchronizedGradientError(
        f"gradients of parameter {name!r} (one of {count}) were accumulated within fcdp_compile.no_sync, "
        "which leaves them incomplete on several nodes; run the last micro-batch, forward and backward, "
        "outside of no_sync before optimizer.step()"
    )


def _hook(owner: H, act: Callable[[H, Optimizer], None]) -> Callable[..., None]:
    """A hook on optimizers that lets an owner act while the owner lives."""
    reference = weakref.ref(owner)

    def hook(optimizer: Optimizer, *args: Any) -> None:
        if (alive := reference()) is not None:
            act(alive, optimizer)

    return hook


log = logging.getLogger(__name__)

_WITH_LISTS = (Adadelta, Adagrad, Adam, Adamax, ASGD, NAdam, RAdam, RMSprop, Rprop, SGD)
"""The optimizers that use lists by default if they can; AdamW is a subclass of Adam."""

_WITH_OTHER_BITS = (ASGD, NAdam, RAdam)
"""The optimizers whose lists round in another way than their loop."""


class OptimizerSteps:
    """Turns on `foreach` for parameter groups during an optimizer's step, and measures the bytes it sends."""

    def __init__(self, topology: Topology) -> None:
        mesh = topology.home_mesh
        self._all_ranks = None if mesh is None else all_ranks_of(mesh)
        self._is_first = topology.node == topology.place == 0
        self._chosen: list[dict[str, Any]] = []
        self._sent_before = 0
        self._has_warned = False

    def begin(self, optimizer: Optimizer) -> None:
        """Before a step: turn on `foreach` for groups with home shards for which the user has not chosen."""
        self.end()  # after a step that raised
        if isinstance(optimizer, _WITH_LISTS):
            everywhere = not isinstance(optimizer, _WITH_OTHER_BITS)
            self._chosen = [g for g in optimizer.param_groups if _may_choose(g, everywhere)]
            for group in self._chosen:
                group["foreach"] = True
        if self._all_ranks is not None:
            self._sent_before = self._all_ranks.sent_bytes

    def end(self) -> None:
        """After a step: restore the groups."""
        for group in self._chosen:
            group["foreach"] = None
        self._chosen = []

    def report(self, optimizer: Optimizer) -> None:
        """Warn once of a step that sent much between nodes."""
        if self._all_ranks is None or self._has_warned or not self._is_first:
            return
        sent = self._all_ranks.sent_bytes - self._sent_before
        stepped = sum(p.nbytes for p in _owned_by(optimizer))
        if 10 * sent > stepped:
            self._has_warned = True
            log.warning(
                "%s communicates in its step: it sent %d bytes from each node to others, %.1f times the "
                "bytes of its parameters (docs/optimizers.md has a table of optimizers)",
                type(optimizer).__name__,
                sent,
                sent / stepped,
            )


def _may_choose(group: dict[str, Any], everywhere: bool) -> bool:
    if group.get("foreach", False) is not None or group.get("fused"):
        return False
    # With these torch refuses lists.
    settings = [group["lr"], *group.get("betas", ())]
    if group.get("differentiable") or any(isinstance(value, Tensor) for value in settings):
        return False
    homes = [p for p in group["params"] if isinstance(p, HomeShard)]
    return bool(homes) and (everywhere or homes[0].device.type != "cpu")


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
        optimizer.register_load_state_dict_post_hook(_hook(self, OptimizerLoads._cut))
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


def _home_tensor(local: Tensor, like: DTensor, parameter: HomeShard) -> DTensor:
    mesh, shape, stride = parameter.device_mesh, like.shape, like.stride()
    made = DTensor.from_local(
        local, mesh, like.placements, run_check=False, shape=shape, stride=stride
    )
    return HomeTensor.adopt(made)


def _states(optimizer: Optimizer) -> list[tuple[int, HomeShard, dict[str, Any]]]:
    """The states of sharded parameters: the parameter's number, the parameter, its state."""
    return [
        (i, p, optimizer.state[p])
        for i, p in enumerate(_owned_by(optimizer))
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
