"""Hooks of a sharded model before and after the steps of optimizers that own its parameters."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fcdp_compile.errors import FcdpError, UnsynchronizedGradientError
from fcdp_compile.params.home_shard import REPLACED, HomeShard
from fcdp_compile.params.seals.seal import refuse_capture
from fcdp_compile.runtime.buckets.transport import Transport
from fcdp_compile.runtime.buckets.validity import Validity
from fcdp_compile.runtime.optimizers.gradients import Accumulation
from fcdp_compile.runtime.optimizers.loads import OptimizerLoads
from fcdp_compile.runtime.optimizers.steps import OptimizerSteps
from fcdp_compile.runtime.parameters.record import ParamRecord, Records
from fcdp_compile.runtime.parameters.unset import Unset


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
    accumulates_elsewhere: whether `no_sync` would let gradients wait on several nodes, but does not here.
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
        me = weakref.ref(self)
        for handle in (
            register_optimizer_step_pre_hook(_hook(me, OptimizerHooks.steps)),
            register_optimizer_step_post_hook(_hook(me, OptimizerHooks.stepped)),
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


def _hook(
    hooks: weakref.ref[OptimizerHooks], act: Callable[[OptimizerHooks, Optimizer], None]
) -> Callable[[Optimizer, Any, Any], None]:
    def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if (live := hooks()) is not None:
            act(live, optimizer)

    return hook
