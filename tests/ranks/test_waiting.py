"""Waiting for a collective that blocks: polling must never change its result."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fcdp_compile.core.ranks import lost_ranks
from fcdp_compile.core.ranks.lost_ranks import Wait, finish
from fcdp_compile.errors import LostRankError
from fcdp_compile.runtime.collectives.collectives import Telling


class Work:
    """A collective that is done after some polls, during a poll or right after it."""

    def __init__(self, looks: int, error: str | None = None, on_look: Callable[[], object] = int):
        self._left = looks
        self._error = error
        self._on_look = on_look

    def is_completed(self) -> bool:
        return self._left <= 0

    def wait(self, timeout: timedelta | None = None) -> None:
        self._on_look()
        if self._left > 0:
            assert timeout is not None, "it would block"
            self._left -= 1  # done right after this poll, which times out
            raise RuntimeError("Operation timed out!")
        if self._error is not None:
            raise RuntimeError(self._error)


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The groups that were closed; this group's failures name no other rank."""
    groups: list[str] = []
    monkeypatch.setattr(lost_ranks, "close", groups.append)
    monkeypatch.setattr(
        lost_ranks, "lost_rank_error", lambda _, doing, cause: LostRankError(f"{doing}: {cause}")
    )
    return groups


GROUP: Any = "the group"
WAIT = Wait(lambda: "a gather")


@pytest.mark.parametrize("looks", [0, 1, 3])
def test_a_collective_that_is_done_right_after_a_look_has_not_failed(
    looks: int, closed: list[str]
) -> None:
    finish(Work(looks), GROUP, WAIT)  # type: ignore[arg-type]
    assert closed == []


@pytest.mark.parametrize("looks", [0, 1, 3])
def test_a_failure_is_told_with_what_the_collective_was_for(looks: int, closed: list[str]) -> None:
    told = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer"
    with pytest.raises(LostRankError, match=r"a gather: .*closed by peer"):
        finish(Work(looks, told), GROUP, WAIT)  # type: ignore[arg-type]
    assert closed == [], "whoever finds out which ranks are lost closes more than this group"


def test_an_error_of_this_rank_alone_stays_as_it_is(closed: list[str]) -> None:
    with pytest.raises(RuntimeError, match=r"^Invalid scalar type$"):
        finish(Work(1, "Invalid scalar type"), GROUP, WAIT)  # type: ignore[arg-type]
    assert closed == []


def test_it_gives_up_and_closes_the_group_when_the_interpreter_ends(closed: list[str]) -> None:
    exiting = Event()
    with pytest.raises(RuntimeError, match="timed out"):
        finish(Work(1000, on_look=exiting.set), GROUP, Wait(lambda: "", exiting))  # type: ignore[arg-type]
    assert closed == [GROUP]


def test_ctrl_c_ends_the_wait_and_closes_the_group(closed: list[str]) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        finish(Work(1000, on_look=interrupt), GROUP, WAIT)  # type: ignore[arg-type]
    assert closed == [GROUP]


def test_words_of_all_ranks_travel_until_they_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Work] = []

    def gather(own: Tensor, everyone: list[Tensor], *, async_op: bool, **_: object) -> Work:
        def arrive() -> None:
            for words, said in zip(everyone, ([1, 0], [4, 2]), strict=True):
                words.copy_(torch.tensor(said))

        assert async_op, "it would block"
        begun.append(Work(1, on_look=arrive))
        return begun[0]

    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(dist, "gather", gather)
    monkeypatch.setattr(dist, "broadcast", lambda *args, **more: Work(0))
    group: Any = SimpleNamespace(size=lambda: 2)
    telling = Telling([1, 0], group, str)
    assert not begun[0].is_completed()
    assert telling.finish() == [5, 2]
