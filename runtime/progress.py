"""Say how far the compilation of a model is, if it takes long."""

from __future__ import annotations

import importlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

log = logging.getLogger(__name__)

_SHORT_S = 2.0
_BETWEEN_LINES_S = 10.0
_BETWEEN_LOOKS_S = 0.5  # at a bar


class CompileProgress:
    """How far Dynamo and the backend are with a model's graphs.

    Once a compilation takes longer than 2 s, rank 0 shows it: in a bar on stderr if tqdm is installed, else
    in a warning every 10 s.  `FCDP_PROGRESS=0` shows nothing.

    parameters: how many the model has.  is_shown: whether this rank shows anything.  clock: seconds.
    """

    def __init__(
        self, parameters: int, *, is_shown: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._parameters = parameters
        self.is_shown = is_shown and os.environ.get("FCDP_PROGRESS") != "0"
        self._clock = clock
        self._forget()

    def _forget(self) -> None:
        self._began_s: float | None = None
        self._shown_s = -_BETWEEN_LINES_S
        self._read: set[str] = set()
        self._compiled = self._segments = 0
        self._bar: Any = None

    def traces(self, key: str) -> None:
        """Note that Dynamo traces a read of a parameter."""
        self._read.add(key)
        self._show("tracing the model, parameter", len(self._read), self._parameters)

    def plans(self) -> None:
        """Note that the backend has got a graph, and differentiates, plans and schedules it."""
        self._show("planning the graph of parameters", len(self._read), self._parameters)

    @contextmanager
    def compiling(self, segments: int) -> Iterator[Callable[[], None]]:
        """Count segments that the block compiles; yields what the block calls after each.

        A block that no trace of a forward led to, such as the first backward's, is a compilation of its own.
        """
        is_own = self._began_s is None
        self._segments += segments

        def compiled() -> None:
            self._compiled += 1
            self._show("compiling segment", self._compiled, self._segments)

        try:
            self._show("compiling segment", self._compiled, self._segments)
            yield compiled
        finally:
            if is_own:
                self.end()

    def end(self) -> None:
        """Note that the graph is compiled."""
        if self._bar is not None:
            self._bar.close()
        self._forget()

    def _show(self, what: str, done: int, of: int) -> None:
        now_s = self._clock()
        if self._began_s is None:
            self._began_s = now_s
        took_s = now_s - self._began_s
        if not self.is_shown or took_s < _SHORT_S:
            return
        if self._bar is None:
            self._bar = _bar(took_s)
        if took_s - self._shown_s < (_BETWEEN_LINES_S if self._bar is None else _BETWEEN_LOOKS_S):
            return
        self._shown_s = took_s
        if self._bar is None:
            log.warning("%s %d of %d, after %.0f s", what, done, of, took_s)
            return
        self._bar.set_description_str(f"fcdp: {what}", refresh=False)
        self._bar.n, self._bar.total = done, of
        self._bar.refresh()


def _bar(took_s: float) -> Any:
    """A bar that vanishes at its end; None if tqdm is not installed."""
    try:
        tqdm = importlib.import_module("tqdm").tqdm
    except ImportError:
        return None
    bar = tqdm(bar_format="{desc} {n_fmt}/{total_fmt} [{elapsed}]", leave=False)
    bar.start_t -= took_s
    return bar
