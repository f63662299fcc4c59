"""What any rank says, told to all: the bitwise or of words, by messages from rank to rank (`dissemination`).

A thread sends and receives, so that the Python thread can do other things meanwhile.  It also is why Ctrl-C
works: a receive of Gloo cannot be asked whether it is done, and one that is given less time than its group
has closes the group.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch import Tensor

from fcdp_compile.dissemination import rounds
from fcdp_compile.lost_ranks import close, lost_rank_error
from fcdp_compile.mesh import Topology, control_ranks

_FIRST_TAG = 0xFC00
_END_S = 5.0  # for a thread whose group was closed


class Telling:
    """Words on their way to all ranks."""

    def __init__(
        self, words: Future[list[int]], group: dist.ProcessGroup | None, doing: Callable[[], str]
    ) -> None:
        self._words = words
        self._group = group
        self._doing = doing

    def finish(self) -> list[int]:
        """The bitwise or of all ranks' words.

        Raises: LostRankError.  If the wait is interrupted, the group is closed.
        """
        try:
            return self._words.result()
        except RuntimeError as error:
            raise lost_rank_error(self._group, self._doing(), error) from error
        except BaseException as interrupt:
            if self._group is not None:
                close(self._group)
                self._words.exception(_END_S)
            raise interrupt from None


def told_here(words: list[int]) -> Telling:
    """What a single rank tells itself."""
    done: Future[list[int]] = Future()
    done.set_result(list(words))
    return Telling(done, None, str)


class Teller:
    """Tells all ranks of a mesh; one for the models of a mesh, as its messages must not be mixed up."""

    def __init__(self, topology: Topology) -> None:
        assert topology.control is not None, "several processes have one"
        self._group = topology.control
        of, t = control_ranks(topology), topology
        hops = rounds(t.nodes, t.ranks_per_node, t.node, t.place)
        self._peers = [(of[hop.to], of[hop.source]) for hop in hops]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="fcdp agreement")

    @staticmethod
    def shared(topology: Topology) -> Teller:
        """The one of a topology."""
        if topology not in _shared:
            _shared[topology] = Teller(topology)
        return _shared[topology]

    @property
    def hops(self) -> int:
        """How many messages one after the other it takes until every rank knows."""
        return len(self._peers)

    def tell(self, words: list[int], doing: Callable[[], str]) -> Telling:
        """Start to tell; all ranks must, with as many words, in one order.  doing: what for."""
        return Telling(self._thread.submit(self._exchange, words), self._group, doing)

    def _exchange(self, words: list[int]) -> list[int]:
        known = torch.tensor(words, dtype=torch.int64, device="cpu")
        for number, (to, source) in enumerate(self._peers):
            known |= self._pass_on(known, to, source, _FIRST_TAG + number)
        found: list[int] = known.tolist()
        return found

    def _pass_on(self, known: Tensor, to: int, source: int, tag: int) -> Tensor:
        more = torch.empty_like(known)
        coming = self._group.recv([more], source, tag)
        going = self._group.send([known], to, tag)
        going.wait()
        coming.wait()
        return more


_shared: weakref.WeakKeyDictionary[Topology, Teller] = weakref.WeakKeyDictionary()
