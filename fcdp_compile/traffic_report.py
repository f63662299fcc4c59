"""What a sharded model has moved, by link and kind."""

from __future__ import annotations

from dataclasses import dataclass

from tabulate import tabulate
from torch import nn

from fcdp_compile.plan import Kind
from fcdp_compile.runtime.counters import AGREE, FLAT_WITHIN, Counters
from fcdp_compile.sharding import state_of

_KINDS: dict[str, tuple[str, str]] = {
    Kind.INTER_ALL_GATHER.value: ("inter", "all_gather"),
    Kind.FLAT_ALL_GATHER.value: ("inter", "flat_all_gather"),
    Kind.INTER_REDUCE_SCATTER.value: ("inter", "reduce_scatter"),
    Kind.INTER_ALL_REDUCE.value: ("inter", "all_reduce"),
    AGREE: ("inter", "agree"),
    Kind.INTRA_ALL_GATHER.value: ("intra", "all_gather"),
    Kind.INTRA_OWN_ALL_GATHER.value: ("intra", "own_all_gather"),
    Kind.INTRA_REST_ALL_GATHER.value: ("intra", "rest_all_gather"),
    FLAT_WITHIN: ("intra", "flat_all_gather"),
    Kind.INTRA_REDUCE_SCATTER.value: ("intra", "reduce_scatter"),
    Kind.INTRA_GRAD_ALL_GATHER.value: ("intra", "grad_all_gather"),
    Kind.STORE.value: ("d2h", "store"),
    Kind.LOAD.value: ("h2d", "load"),
    Kind.ACCUMULATE.value: ("d2h", "accumulate"),
    Kind.COLLECT.value: ("h2d", "collect"),
}
"""Link and kind of every counter, in the order of the table.  Messages of agreement are counted as inter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """Bytes this rank sent to others (inter, intra) or copied over its bus (h2d, d2h), by link and kind."""

    rows: tuple[tuple[str, str, int], ...]

    def bytes(self, link: str, kind: str | None = None) -> int:
        """Bytes over one link, of one kind or of all.

        Raises: ValueError for a link or kind that does not exist.
        """
        known = [row for row in self.rows if row[0] == link and kind in (None, row[1])]
        if not known:
            pairs = ", ".join(f"{a} {b}" for a, b, _ in self.rows)
            raise ValueError(f"no traffic of link {link!r} and kind {kind!r}; there is {pairs}")
        return sum(row[2] for row in known)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What one rank's part of a model has moved.

    last_step: from the optimizer step before last to the last one.  total: since `shard`.  steps: how many
    optimizer steps there were.
    """

    last_step: Moved
    total: Moved
    steps: int

    def __str__(self) -> str:
        rows = [
            (link, kind, last, total)
            for (link, kind, last), (_, _, total) in zip(
                self.last_step.rows, self.total.rows, strict=True
            )
        ]
        return tabulate(
            rows, headers=["link", "kind", "last step [B]", "total [B]"], tablefmt="simple"
        )


def traffic(model: nn.Module) -> Traffic:
    """The bytes that this rank has sent or copied for `model`, compiled or not.

    Raises: ValueError if the model is not sharded.
    """
    counters: Counters = state_of(model).counters
    return Traffic(
        last_step=_moved(counters.last_step), total=_moved(counters.sent), steps=counters.steps
    )


def _moved(sent: dict[str, int]) -> Moved:
    return Moved(rows=tuple((*_KINDS[name], sent.get(name, 0)) for name in _KINDS))
