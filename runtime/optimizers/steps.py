"""Let optimizers use `foreach` for sharded parameters, and warn of steps that send many bytes.

torch chooses its list implementation (`foreach`) by the exact class of the parameters, and steps parameters
of other classes one by one, at three times the cost.  If the user has chosen nothing, fcdp sets
`foreach=True` in the parameter groups while the optimizer steps; afterwards a group, and its saved state, is
as before.

The results have the bits of a model that is not sharded.  torch uses lists for plain CUDA parameters, too.
It steps plain CPU parameters one by one, but most optimizers compute the same bits with lists.  `fused=True`
is faster still, but rounds in another way, so only users choose it.
"""

from __future__ import annotations

import logging
from typing import Any

from torch import Tensor
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

from fcdp_compile.params.home_shard import HomeShard
from fcdp_compile.params.mesh import Topology
from fcdp_compile.ranks.flat_meshes import all_ranks_of

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
        stepped = sum(p.nbytes for g in optimizer.param_groups for p in g["params"])
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
