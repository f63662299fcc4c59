"""Tell all ranks the bitwise or of every rank's words: one rank gathers them and broadcasts the result.

Gloo broadcasts along a tree, so all ranks know after 1 + log2(G) hops (`cost.agreement_hops`); its all-gather
is a ring of G - 1 hops.  The gather runs beside the Python thread from `tell` to `finish`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce

import torch
import torch.distributed as dist

from fcdp_compile.ranks.messages import broadcast_first
from fcdp_compile.ranks.waiting import Wait, finish


class Telling:
    """Words on their way to all ranks.

    All ranks of the group must make it, with equally many words, and call `finish` in the same place among
    the group's collectives.  doing: says what the words are for, for the error if a rank does not join.
    """

    def __init__(
        self, words: Sequence[int], group: dist.ProcessGroup | None, doing: Callable[[], str]
    ) -> None:
        # Not on the default device: a user may be building another model on meta.
        self._words = torch.tensor(words, dtype=torch.int64, device="cpu")
        self._group = group
        self._doing = doing
        self._everyone: list[torch.Tensor] | None = None
        self._gathering: dist.Work | None = None
        if group is None:  # a single rank
            return
        if dist.get_rank(group) == 0:
            self._everyone = [torch.empty_like(self._words) for _ in range(group.size())]
        self._gathering = dist.gather(
            self._words, self._everyone, group=group, group_dst=0, async_op=True
        )

    def finish(self) -> list[int]:
        """The bitwise or of all ranks' words.

        Raises: LostRankError.
        """
        if self._group is not None and self._gathering is not None:
            finish(self._gathering, self._group, Wait(self._doing))
            if self._everyone is not None:
                self._words = reduce(torch.bitwise_or, self._everyone)
            broadcast_first(self._words, self._group, self._doing())
        found: list[int] = self._words.tolist()
        return found
