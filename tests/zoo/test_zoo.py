"""Every model of the zoo trains sharded and compiled with the same numbers as replicated, on 2 x 2 ranks.

The whole table takes half an hour, so only a few cases that differ the most run by default.  FCDP_ZOO=1 runs
all, FCDP_ZOO=write writes docs/zoo.md besides.
"""

from __future__ import annotations

import os
import re

import pytest

from tests.distributed.parity import RELATIVE
from tests.distributed.ranks import run
from tests.zoo import report
from tests.zoo.cases import ZOO
from tests.zoo.compare import Outcome, train_all

_ASKED = os.environ.get("FCDP_ZOO", "")

_AT_ONCE = 8
"""Number of cases that one group of ranks trains: a case that kills the ranks takes only these along."""

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1500)]


class _Outcomes:
    """Each rank's outcomes, by case; a case is trained when first asked for, together with the next cases."""

    def __init__(self, names: list[str]) -> None:
        self._waiting = names
        self._found: dict[str, list[Outcome]] = {}

    def of(self, name: str) -> list[Outcome]:
        if name not in self._found:
            names = self._waiting[self._waiting.index(name) :][:_AT_ONCE]
            ranks = run(train_all, names, nodes=2, ranks_per_node=2, timeout_s=1400)
            self._found |= {n: [of_rank[n] for of_rank in ranks] for n in names}
            if _ASKED == "write":
                report.record({n: ranks[0][n] for n in names})
        return self._found[name]


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> _Outcomes:
    chosen = [
        str(item.callspec.params["name"])
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.path == request.path
        and not any(mark.args[0] for mark in item.iter_markers("skipif"))
    ]
    return _Outcomes(chosen)


def _row(name: str) -> object:
    if ZOO[name].is_default:
        return pytest.param(name, marks=pytest.mark.rare)
    asked = pytest.mark.skipif(not _ASKED, reason="all take half an hour; set FCDP_ZOO=1")
    return pytest.param(name, marks=[pytest.mark.rare, asked])


@pytest.mark.parametrize("name", [_row(name) for name in ZOO])
def test_it_trains_as_a_replicated_one(name: str, outcomes: _Outcomes) -> None:
    for rank, outcome in enumerate(outcomes.of(name)):
        about = f"{name}, rank {rank}: {outcome}"
        if (refused := ZOO[name].refused) is not None:
            assert re.search(refused, outcome.error), about
            continue
        assert not outcome.error, about
        assert outcome.difference <= RELATIVE, about
        assert outcome.graphs, about
