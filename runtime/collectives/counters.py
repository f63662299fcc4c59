"""Bytes of all lanes by kind, counted when a transfer is issued; cheap enough to be always on."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

from fcdp_compile.plan import Kind

AGREE = "agree"
"""Counter of the small messages of the plan check; not a plan step."""

EXCHANGE = "exchange"
"""Counter of the all-to-alls within a node by which an optimizer gets whole matrices; not a plan step."""

LOAD_STATES, STORE_STATES = "load_states", "store_states"
"""Counters of the states of an optimizer that wait in host memory between steps; not plan steps."""

_OF_OPTIMIZERS = {EXCHANGE, LOAD_STATES, STORE_STATES}


@dataclass(slots=True)
class Counters:
    """Running totals of one model on this rank.

    sent: bytes, by kind, that this rank sends to others or copies over its own bus.
    calls: how often each kind was issued.
    """

    sent: dict[str, int] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    last_step: dict[str, int] = field(default_factory=dict)
    steps: int = 0
    _mark: dict[str, int] = field(default_factory=dict)
    _stepped: weakref.WeakSet[object] = field(default_factory=weakref.WeakSet)

    def add(self, kind: Kind | str, sent_bytes: int) -> None:
        """Count one issue of `kind`."""
        name = kind if isinstance(kind, str) else kind.value
        self.sent[name] = self.sent.get(name, 0) + sent_bytes
        self.calls[name] = self.calls.get(name, 0) + 1

    def end_step(self, optimizer: object) -> None:
        """End a step, after an optimizer has stepped: the counts since the previous end are its counts.

        A second optimizer that steps right after the first one ends no step: what it moved itself is added to
        the step.
        """
        moved = {k: n - self._mark.get(k, 0) for k, n in self.sent.items()}
        self._mark = dict(self.sent)
        is_alone = all(k in _OF_OPTIMIZERS for k, n in moved.items() if n)
        if self.steps and is_alone and optimizer not in self._stepped:
            self._stepped.add(optimizer)
            self.last_step = {k: n + self.last_step.get(k, 0) for k, n in moved.items()}
            return
        self.last_step = moved
        self._stepped = weakref.WeakSet([optimizer])
        self.steps += 1
