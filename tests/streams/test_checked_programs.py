"""Every kind of job on a device that checks its streams."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.marks import quick
from tests.streams.cached import use_on_the_way
from tests.streams.programs import PROGRAMS, Job, four_ranks


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Iterator[None]:
    with four_ranks():
        yield


@pytest.mark.parametrize("name", quick(PROGRAMS))
def test_every_access_comes_after_what_it_depends_on(name: str) -> None:
    job = Job(PROGRAMS[name])
    PROGRAMS[name].once(job)
    PROGRAMS[name].once(job)
    alive = job.alive_bytes()
    PROGRAMS[name].once(job)
    assert job.alive_bytes() == alive, "device memory grows from round to round"


def test_what_is_on_its_way_is_stored_and_loaded_in_order() -> None:
    use_on_the_way()
