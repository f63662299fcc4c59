"""Vector clocks of streams, and the order that they prove between accesses to memory.

Each party, a stream or the Python thread beside it, has a clock: how many works of every party surely come
before its next work (Mattern 1989, "Virtual time and global states of distributed systems").
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field

Party = Hashable
Clock = Mapping[Party, int]


@dataclass(frozen=True, slots=True)
class Access:
    """One use of memory, by the work number `time` of a party; what: its name in messages."""

    party: Party
    time: int
    what: str


@dataclass(slots=True)
class CheckedMemory:
    """One piece of memory.

    owner: the party whose next work may get the memory when it is freed.  written: the last write.  reads:
    the last read of each party since then.
    """

    owner: Party
    bytes: int
    is_of_host: bool = False
    written: Access | None = None
    reads: dict[Party, Access] = field(default_factory=dict)

    def uses(self) -> Iterator[Access]:
        """The accesses that must be done before this memory is overwritten."""
        if self.written is not None:
            yield self.written
        yield from self.reads.values()


class Clocks:
    """The clocks of all parties of one device."""

    def __init__(self) -> None:
        self._clocks: dict[Party, dict[Party, int]] = {}

    def now(self, party: Party) -> Clock:
        """A copy of a party's clock: all work that certainly comes before its next work, its own included."""
        return dict(self._clocks.get(party, {}))

    def wait(self, party: Party, clock: Clock) -> None:
        """Order the next work of a party after all work that a clock counts."""
        mine = self._clocks.setdefault(party, {})
        for other, time in clock.items():
            mine[other] = max(time, mine.get(other, 0))

    def work(self, party: Party) -> int:
        """Count a work of a party; returns the number of this work."""
        mine = self._clocks.setdefault(party, {})
        mine[party] = mine.get(party, 0) + 1
        return mine[party]

    def is_done(self, access: Access, party: Party) -> bool:
        """Whether an access certainly comes before the next work of a party."""
        return self._clocks.get(party, {}).get(access.party, 0) >= access.time

    def read(self, memory: CheckedMemory, access: Access) -> Access | None:
        """Note a read; returns the earlier access that is not certain to come before it, if any."""
        conflict = memory.written
        memory.reads[access.party] = access
        return conflict if conflict and not self.is_done(conflict, access.party) else None

    def write(self, memory: CheckedMemory, access: Access) -> Access | None:
        """Note a write; returns an earlier access that is not certain to come before it, if any."""
        conflict = self.unfinished(memory, access.party)
        memory.written = access
        memory.reads.clear()
        return conflict

    def unfinished(self, memory: CheckedMemory, party: Party) -> Access | None:
        """An access to memory that is not certain to be done when a party works next, if any."""
        return next((use for use in memory.uses() if not self.is_done(use, party)), None)
