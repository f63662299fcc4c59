"""Which ranks did not come: found out after a collective has failed, from what the others write down.

    a wait fails ─▶ close the groups ─▶ write down what it was for ─▶ read what others wrote ─▶ LostRankError

Every rank that waits in vain writes one line into the rendezvous store, which every rank of the job knows.
A rank that wrote nothing is the one that is missing.  A step that goes well writes and reads nothing.
"""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from threading import Event, Lock, Thread

import torch
import torch.distributed as dist

from fcdp_compile.errors import FcdpError, LostRankError
from fcdp_compile.ranks.differences import ranks_named
from fcdp_compile.torch_compat import gloo_context_count, rendezvous_store

_ANSWER_S = 1.5
"""How long to wait for what others write: with the rest of the way to the user's error, 2 s."""

_LOOK_S = 0.1
_AT_ONCE = timedelta(milliseconds=1)
_NOBODYS_TAG = 1 << 20  # above those of anybody's own messages


class RollCall:
    """Says who is missing among the ranks of a job that share some groups; the answer is found once.

    [Note: closed groups] Gloo cannot abort a collective, and a process group waits for those under way when
    it is destroyed, so that a process would hang at its end.  But one receive that is late closes all
    connections of a group: whatever is under way in it fails, here and on peers that wait for this rank.
    So after a failure all groups are closed, which also tells the other ranks without delay.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = tuple(ranks)
        self._groups: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
        self._lock = Lock()
        self._answer: str | None = None

    def covers(self, groups: Iterable[dist.ProcessGroup | None]) -> None:
        """Answer for failures in these groups from now on."""
        for group in groups:
            if group is not None:
                self._groups.add(group)
                _roll_calls[group] = self

    def begin(self) -> None:
        """Take back what an earlier job of this process wrote; before groups are made."""
        if dist.get_backend() != "fake":
            rendezvous_store().delete_key(_key(dist.get_rank()))

    def error(self, doing: str, cause: BaseException) -> LostRankError:
        """The error to raise as a collective has failed; doing: what it was for."""
        # Threads whose collectives fail at about the same time get the same answer.
        with self._lock:
            if self._answer is None:
                for group in list(self._groups):
                    close(group)
                self._answer = self._ask(doing)
        return LostRankError(
            f"{doing}: {self._answer}; see why, and start the job again from its last checkpoint ({cause})"
        )

    def _ask(self, doing: str) -> str:
        me = dist.get_rank()
        others = [rank for rank in self._ranks if rank != me]
        notes = _Notes(me, others, doing)
        # A store whose host is gone may never answer, and nothing can interrupt a call to it.
        Thread(target=notes.exchange, name="fcdp roll call", daemon=True).start()
        notes.is_done.wait(_ANSWER_S + 0.2)
        if not notes.is_answered or notes.is_cut_off:
            return (
                f"{_host_of_the_store()} is gone or out of reach, and without it fcdp cannot know "
                "which other ranks are"
            )
        found = dict(notes.found)
        missing = [rank for rank in others if rank not in found]
        waits = [f"rank {r} waits for {t}" for r, t in sorted(found.items()) if t != doing]
        lost = (
            f"{ranks_named(missing)} did not come"
            if missing
            else "every rank came, but some ranks gave up before the others came, or cannot reach each other"
        )
        return "; ".join([lost, *waits[:3]])


class _Notes:
    """The notes of all ranks as far as they have come; filled by a thread of its own.

    is_answered: whether the store has answered at all.  is_cut_off: whether it broke off.
    """

    def __init__(self, me: int, others: Sequence[int], doing: str) -> None:
        self.found: dict[int, str] = {}
        self.is_answered = False
        self.is_cut_off = False
        self.is_done = Event()
        self._me = me
        self._others = others
        self._doing = doing

    def exchange(self) -> None:
        """Write this rank's note and read the others' until all are there or time is up."""
        until_s = time.monotonic() + _ANSWER_S
        try:
            store = rendezvous_store()
            store.set(_key(self._me), self._doing)
            while len(self.found) < len(self._others):
                for rank in self._others:
                    if rank not in self.found and store.check([_key(rank)]):
                        self.found[rank] = store.get(_key(rank)).decode()
                    self.is_answered = True
                if time.monotonic() > until_s:
                    break
                time.sleep(_LOOK_S)
        except RuntimeError:  # of the store: its host is gone
            self.is_cut_off = True
        self.is_done.set()


_roll_calls: weakref.WeakKeyDictionary[dist.ProcessGroup, RollCall] = weakref.WeakKeyDictionary()
"""By the group, as long as that lives."""


def lost_rank_error(
    group: dist.ProcessGroup | None, doing: str, cause: BaseException
) -> LostRankError:
    """The error to raise as a collective in a group has failed, with the ranks that did not come to it."""
    group = group or world()
    if (roll_call := _roll_calls.get(group)) is None:
        roll_call = RollCall(dist.get_process_group_ranks(group))
        roll_call.covers([group])
    return roll_call.error(doing, cause)


@contextlib.contextmanager
def naming_lost_ranks(group: dist.ProcessGroup | None, doing: str) -> Iterator[None]:
    """Turn what fails in a group within into a `LostRankError`; for calls of torch.distributed alone."""
    try:
        yield
    except FcdpError:
        raise
    except RuntimeError as error:
        raise lost_rank_error(group, doing, error) from error


def world() -> dist.ProcessGroup:
    """The default group."""
    group = dist.group.WORLD
    assert group is not None, "torch.distributed is initialised"
    return group


def close(group: dist.ProcessGroup) -> None:
    """Let all that is under way in a Gloo group fail ([Note: closed groups]); for ever."""
    contexts = gloo_context_count(group)
    if group.size() == 1:
        return
    peer = (group.rank() + 1) % group.size()
    for context in range(contexts):
        # It must fail, and if it fails otherwise the group was closed before.
        with contextlib.suppress(RuntimeError):
            nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
            group.recv([nothing], peer, _NOBODYS_TAG + context).wait(_AT_ONCE)


def _key(rank: int) -> str:
    return f"fcdp/waits in vain/{rank}"


def _host_of_the_store() -> str:
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return "the first node's torchrun" if by_agent else "rank 0"
