"""Tasks for lanes, and a short way to start them."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor

from fcdp_compile.plan import Lane
from fcdp_compile.runtime.lanes.lanes import Lanes
from fcdp_compile.runtime.lanes.tasks import Pending

LONG_S = 30.0  # far longer than any task of the tests


class Gate:
    """A task that begins and then waits until `open` is called."""

    def __init__(self) -> None:
        self._begun = threading.Event()
        self._may_go = threading.Event()

    def __call__(self) -> None:
        self._begun.set()
        assert self._may_go.wait(LONG_S)

    def wait_until_begun(self) -> None:
        assert self._begun.wait(LONG_S)

    def open(self) -> None:
        self._may_go.set()


def start(
    lanes: Lanes,
    lane: Lane,
    run: Callable[[], object],
    *reads: Tensor | Pending,
    out: Tensor | None = None,
) -> Pending:
    return lanes.start(
        lane, run, out=torch.zeros(2) if out is None else out, reads=reads, name="test"
    )
