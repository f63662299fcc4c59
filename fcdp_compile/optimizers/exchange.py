"""Bring the rows of matrices together within a node, each matrix on one rank, and back again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fcdp_compile.params.layout import ParamLayout, chunk_rows
from fcdp_compile.params.packing import rows_back, rows_first
from fcdp_compile.runtime.collectives.collectives import Collectives
from fcdp_compile.strategy.home_nodes import balanced, newton_schulz_flops


class Exchange:
    """Spreads the work on matrices that are cut over the ranks of a node over these ranks.

    All ranks of the node make one with the same layouts, in the same order.

    layouts: of the matrices; None for a matrix that every rank has whole, which every rank then works on.
    mine: the numbers of the matrices that this rank works on.
    """

    def __init__(
        self, collectives: Collectives | None, layouts: Sequence[ParamLayout | None]
    ) -> None:
        self._collectives = collectives
        self._cut = {i: x for i, x in enumerate(layouts) if x is not None and x.ranks_per_node > 1}
        self._owners: dict[int, int] = {}
        if collectives is not None and self._cut:
            # The largest first: the small ones then even out what is left.
            costs = {i: float(newton_schulz_flops(x.shape)) for i, x in self._cut.items()}
            order = sorted(costs, key=lambda i: -costs[i])
            owners = balanced([(costs[i],) for i in order], collectives.ranks_per_node)
            self._owners = dict(zip(order, owners, strict=True))
        me = None if collectives is None else collectives.place
        self.mine = [i for i in range(len(layouts)) if self._owners.get(i, me) == me]

    def gather(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """This rank's rows of all matrices -> the whole matrices of `mine`."""
        if not self._cut:
            return list(rows)
        sent = {i: rows_first(rows[i], x).reshape(-1) for i, x in self._cut.items()}
        places = range(self._places)
        arrived = self._moved(
            [[sent[i] for i in self._of(place)] for place in places],
            [[self._elements(i, place) for i in self._of(self._me)] for place in places],
            rows[0],
        )
        wholes = {
            i: self._assembled(i, [arrived[place][n] for place in places])
            for n, i in enumerate(self._of(self._me))
        }
        return [wholes.get(i, rows[i]) for i in self.mine]

    def scatter(self, wholes: Sequence[Tensor], like: Tensor) -> list[Tensor]:
        """The whole matrices of `mine` -> this rank's rows of all matrices, of the dtype of `like`."""
        done = dict(zip(self.mine, wholes, strict=True))
        if not self._cut:
            return list(wholes)
        places = range(self._places)
        parts = {i: self._parts(i, done[i]) for i in self._of(self._me)}
        arrived = self._moved(
            [[parts[i][place] for i in self._of(self._me)] for place in places],
            [[self._elements(i, self._me) for i in self._of(place)] for place in places],
            like,
        )
        for place in places:
            for n, i in enumerate(self._of(place)):
                done[i] = self._rows(i, arrived[place][n])
        return [done[i] for i in sorted(done)]

    @property
    def _places(self) -> int:
        assert self._collectives is not None
        return self._collectives.ranks_per_node

    @property
    def _me(self) -> int:
        assert self._collectives is not None
        return self._collectives.place

    def _of(self, place: int) -> list[int]:
        """The numbers of the cut matrices that the rank at this place works on."""
        return [i for i in self._cut if self._owners[i] == place]

    def _elements(self, i: int, place: int) -> int:
        layout = self._cut[i]
        assert layout.dim is not None
        rows = chunk_rows(layout.shape[layout.dim], layout.ranks_per_node)[place]
        return rows * layout.row_elements

    def _assembled(self, i: int, parts: Sequence[Tensor]) -> Tensor:
        layout = self._cut[i]
        assert layout.dim is not None
        return rows_back(torch.cat(list(parts)), layout, layout.shape[layout.dim])

    def _parts(self, i: int, whole: Tensor) -> Sequence[Tensor]:
        layout = self._cut[i]
        sizes = [self._elements(i, place) for place in range(self._places)]
        parts: Sequence[Tensor] = rows_first(whole, layout).reshape(-1).split(sizes)
        return parts

    def _rows(self, i: int, flat: Tensor) -> Tensor:
        layout = self._cut[i]
        return rows_back(flat, layout, flat.numel() // layout.row_elements)

    def _moved(
        self, send: Sequence[Sequence[Tensor]], sizes: Sequence[Sequence[int]], like: Tensor
    ) -> list[Sequence[Tensor]]:
        """What each place of the node sends to this rank.

        send: the tensors for each place.  sizes: elements of the tensors from each place.
        """
        assert self._collectives is not None
        parts = [t for tensors in send for t in tensors]
        arrived = self._collectives.exchange(
            torch.cat([like.new_empty(0), *parts]),
            received=[sum(of_place) for of_place in sizes],
            sent=[sum(t.numel() for t in tensors) for tensors in send],
            name="fcdp::exchange of matrices",
        ).wait()
        from_places = arrived.split([sum(of_place) for of_place in sizes])
        return [part.split(list(n)) for part, n in zip(from_places, sizes, strict=True)]
