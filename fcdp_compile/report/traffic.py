"""The bytes that a sharded model has moved, by link and kind."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fcdp_compile.errors import ArgumentError
from fcdp_compile.plan import Kind, Lane
from fcdp_compile.report.table import table
from fcdp_compile.runtime.collectives.counters import (
    AGREE,
    EXCHANGE,
    LOAD_STATES,
    STORE_STATES,
    Counters,
)
from fcdp_compile.sharding.shard import state_of

_OTHERS = {
    AGREE: (Lane.INTER, "ranks agree on a plan and on stale copies"),
    EXCHANGE: (Lane.INTRA, "brings matrices together for Muon, and back"),
    STORE_STATES: (Lane.D2H, "brings states of optimizers into host memory"),
    LOAD_STATES: (Lane.H2D, "takes states of optimizers out of host memory"),
}
"""Counters of what is no step of a plan."""

_KINDS: dict[str, tuple[str, str, str]] = {
    name: (lane.value, name.removeprefix(f"{lane.value}_"), text)
    for lane in Lane
    for name, (of, text) in ({k.value: (k.lane, k.text) for k in Kind if k.flow} | _OTHERS).items()
    if of is lane
}
"""Link, kind and meaning of every counter, in the order of the table.

Messages by which ranks agree count as inter.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """Bytes that this rank sent to others (inter, intra) or copied over its bus (h2d, d2h)."""

    rows: tuple[tuple[str, str, int], ...]

    def bytes(self, link: str, kind: str | None = None) -> int:
        """Bytes over one link, of one kind or of all kinds.

        Raises: ValueError for a link or kind that does not exist.
        """
        known = [row for row in self.rows if row[0] == link and kind in (None, row[1])]
        if not known:
            pairs = ", ".join(f"{a} {b}" for a, b, _ in self.rows)
            raise ArgumentError(f"no traffic of link {link!r} and kind {kind!r}; there is {pairs}")
        return sum(row[2] for row in known)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """The bytes that one rank has moved for a model.

    rank, ranks: the number of this rank, and how many there are.  last_step: bytes moved between the last two
    optimizer steps.  total: bytes moved since `shard`.
    steps: the number of optimizer steps so far.
    """

    rank: int
    ranks: int
    last_step: Moved
    total: Moved
    steps: int

    def __str__(self) -> str:
        one = f"rank {self.rank} of {self.ranks} alone"
        title = f"Sent to others (inter, intra) or copied (d2h, h2d) by {one}"
        counted = zip(_KINDS.values(), self.last_step.rows, self.total.rows, strict=True)
        rows = [
            (link, kind, last, total, meaning)
            for (link, kind, meaning), (_, _, last), (_, _, total) in counted
            if total
        ]
        if not rows:
            return f"{title}: nothing so far"
        headers = ["link", "kind", "last step [B]", "total [B]", "what"]
        return f"{title}:\n\n{table(rows, headers)}"


def traffic(model: nn.Module) -> Traffic:
    """The bytes that this rank has sent or copied for `model`, compiled or not.

    Raises: ValueError if the model is not sharded.
    """
    state = state_of(model)
    counters: Counters = state.counters
    here = state.topology.position
    return Traffic(
        rank=here.rank,
        ranks=here.ranks,
        last_step=_moved(counters.last_step),
        total=_moved(counters.sent),
        steps=counters.steps,
    )


def _moved(sent: dict[str, int]) -> Moved:
    return Moved(rows=tuple((*_KINDS[name][:2], sent.get(name, 0)) for name in _KINDS))
