"""Compare, in a model's first passes, the batches of ranks that share each parameter ("tp")."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fcdp_compile.core.params.mesh import Topology
from fcdp_compile.core.params.seals import fingerprint
from fcdp_compile.core.ranks.lost_ranks import ranks_named
from fcdp_compile.errors import ArgumentError
from fcdp_compile.plan import Direction
from fcdp_compile.runtime.collectives.collectives import Collectives
from fcdp_compile.torch_compat.graphs import is_static_input


class SharedBatches:
    """Makes sure that ranks that share each parameter compute with the same batches.

    Only the first pass of each direction is compared, because a comparison waits for the device; a sampler
    that gives the ranks different batches does so from the first batch on.
    """

    def __init__(self, topology: Topology, collectives: Collectives) -> None:
        self._topology = topology
        self._collectives = collectives
        self._compared: set[Direction] = set()

    def compare(self, direction: Direction, inputs: Sequence[Any]) -> None:
        """Compare a graph's inputs of whole numbers, such as token ids, with those of the other ranks.

        All ranks that share parameters must call it.

        Raises: ArgumentError on every rank if they differ.
        """
        group = self._topology.everyone
        if self._topology.tp is None or group is None or direction in self._compared:
            return
        self._compared.add(direction)
        mark = int(fingerprint(given)) if (given := [t for t in inputs if _is_given(t)]) else 0
        told = self._collectives.agree([mark], "the comparison of batches", group=group)
        for ranks, marks in self._topology.among_sharers(told):
            if any(other != marks[0] for other in marks):
                raise ArgumentError(
                    f'{ranks_named(ranks)} share parameters ("tp") but got different batches; give all ranks '
                    "of a group the same batches, for example: use rank // tp as the sampler's rank"
                )


def _is_given(value: Any) -> bool:
    """Whether an input comes from the caller and has whole numbers."""
    if not isinstance(value, Tensor) or is_static_input(value):
        return False
    return not (value.is_floating_point() or value.is_complex())
