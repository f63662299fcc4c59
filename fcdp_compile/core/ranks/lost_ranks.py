"""Wait for blocking collectives, and find out, after one has failed, which ranks are missing.

    a wait fails ─▶ close the groups ─▶ write down what it was for ─▶ read what others wrote ─▶ LostRankError

Every rank whose wait failed writes one line into the rendezvous store, which every rank of the job can reach.
The missing ranks are those that wrote nothing.  A successful step writes and reads nothing.  A lost rank,
Ctrl-C or the end of the interpreter ends a wait."""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from threading import Event, Lock, Thread

import torch
import torch.distributed as dist

from fcdp_compile.errors import FcdpError, LostRankError
from fcdp_compile.torch_compat.distributed import (
    comes_from_peers,
    gloo_context_count,
    rendezvous_store,
)

_ANSWER_S = 1.5
"""How long to wait for the other ranks' notes; the user sees the error after 2 s in all."""

_LOOK_S = 0.1
_AT_ONCE = timedelta(milliseconds=1)
_NOBODYS_TAG = 1 << 20  # above the tags of all real messages


class RollCall:
    """Finds the missing ranks among the ranks of a job that share some groups; finds them only once.

    [Note: closed groups] Gloo cannot abort a collective, and destroying a process group waits for collectives
    under way, so a process would hang at its end.  But a receive that times out closes all connections of a
    group: every collective under way in it fails, here and on peers that wait for this rank.  So after a
    failure all groups are closed, which also informs the other ranks at once.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = tuple(ranks)
        self._groups: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
        self._lock = Lock()
        self._answer: str | None = None

    def covers(self, groups: Iterable[dist.ProcessGroup | None]) -> None:
        """Use this roll call for failures in these groups from now on."""
        for group in groups:
            if group is not None:
                self._groups.add(group)
                _roll_calls[group] = self

    def begin(self) -> None:
        """Delete the note of an earlier job of this process; call this before groups are made."""
        if dist.get_backend() != "fake":
            rendezvous_store().delete_key(_key(dist.get_rank()))

    def error(self, doing: str, cause: BaseException) -> LostRankError:
        """The error to raise after a collective has failed.  doing: what the collective was for."""
        # Threads whose collectives fail at about the same time get the same answer.
        with self._lock:
            if self._answer is None:
                for group in list(self._groups):
                    close(group)
                self._answer = self._ask(doing)
        return LostRankError(
            f"{doing}: {self._answer}; find the cause in the logs of the ranks, then restart the job from "
            f"its last checkpoint ({cause})"
        )

    def _ask(self, doing: str) -> str:
        me = dist.get_rank()
        others = [rank for rank in self._ranks if rank != me]
        notes = _Notes(me, others, doing)
        # A store whose host is gone may never answer, and nothing can interrupt a call to it.
        Thread(target=notes.exchange, name="fcdp roll call", daemon=True).start()
        notes.is_done.wait(_ANSWER_S + 0.2)
        if not notes.is_answered or notes.is_cut_off:
            return f"{_host_of_the_store()} cannot be reached, so fcdp cannot tell which other ranks are lost"
        found = dict(notes.found)
        missing = [rank for rank in others if rank not in found]
        waits = [f"rank {r} waits for {t}" for r, t in sorted(found.items()) if t != doing]
        lost = (
            f"{ranks_named(missing)} did not join"
            if missing
            else "every rank joined, but some gave up before others joined, or ranks cannot reach each other"
        )
        return "; ".join([lost, *waits[:3]])


class _Notes:
    """The notes of the other ranks that were read so far; a separate thread fills them in.

    is_answered: whether the store has answered at all.  is_cut_off: whether its connection broke.
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
"""The roll call of each live group."""


def lost_rank_error(
    group: dist.ProcessGroup | None, doing: str, cause: BaseException
) -> LostRankError:
    """The error to raise after a collective in a group has failed; it names the missing ranks."""
    group = group or world()
    if (roll_call := _roll_calls.get(group)) is None:
        roll_call = RollCall(dist.get_process_group_ranks(group))
        roll_call.covers([group])
    return roll_call.error(doing, cause)


@contextlib.contextmanager
def naming_lost_ranks(group: dist.ProcessGroup | None, doing: str) -> Iterator[None]:
    """Turn a failure of a call to torch.distributed in this block into a `LostRankError`.

    An error of this rank alone, such as one of a dtype, a shape or memory, stays as it is.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, FcdpError) or not comes_from_peers(error):
            raise
        raise lost_rank_error(group, doing, error) from error


def world() -> dist.ProcessGroup:
    """The default group."""
    group = dist.group.WORLD
    assert group is not None, "torch.distributed is initialised"
    return group


def close(group: dist.ProcessGroup) -> None:
    """Make all collectives in a Gloo group fail, now and later ([Note: closed groups])."""
    contexts = gloo_context_count(group)
    if group.size() == 1:
        return
    peer = (group.rank() + 1) % group.size()
    for context in range(contexts):
        # The receive must time out; any other failure means that the group was already closed.
        with contextlib.suppress(RuntimeError):
            nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
            group.recv([nothing], peer, _NOBODYS_TAG + context).wait(_AT_ONCE)


def ranks_named(ranks: Sequence[int]) -> str:
    """Ranks in a message: "rank 3", "ranks 0, 2, …"."""
    shown = ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def _key(rank: int) -> str:
    return f"fcdp/waits in vain/{rank}"


def _host_of_the_store() -> str:
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return "the first node's torchrun" if by_agent else "rank 0"


_LOOK = timedelta(seconds=0.25)
"""How often a blocked wait returns to Python, to run signal handlers and to check `exiting`."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Why a rank waits for a collective, and when it stops waiting.

    doing: returns what the collective is for; called only if the collective fails.
    exiting: set when the interpreter ends; None on the main thread.
    """

    doing: Callable[[], str]
    exiting: Event | None = None

    @property
    def is_over(self) -> bool:
        """Whether the interpreter is ending."""
        return self.exiting is not None and self.exiting.is_set()


def finish(work: dist.Work, group: dist.ProcessGroup | None, wait: Wait) -> None:
    """Wait for a blocking collective.

    Raises: LostRankError if it fails because of other ranks; an error of this rank alone as it is.  If the
    interpreter ends or the wait is interrupted first, the group is closed: otherwise the process would wait
    for the collective when it exits.
    """
    try:
        while not work.is_completed():
            try:
                work.wait(_LOOK)
            except RuntimeError:
                # The collective took longer, failed, or was done just after: only `work` itself can tell.
                if wait.is_over:
                    raise
        work.wait()
    except RuntimeError as error:
        if not wait.is_over:
            if not comes_from_peers(error):
                raise
            raise lost_rank_error(group, wait.doing(), error) from error
        close(group or world())
        raise
    except BaseException as interrupt:
        close(group or world())
        raise interrupt from None  # without "during handling of" a wait that only timed out
