"""All ranks succeed or all raise."""

from __future__ import annotations

from functools import partial

import pytest
from torch.distributed.device_mesh import DeviceMesh

from fcdp_compile.core.params.mesh import topology_of
from fcdp_compile.core.ranks.messages import together
from fcdp_compile.errors import FcdpError
from tests.distributed.ranks import run

pytestmark = pytest.mark.distributed


def _fails_on(ranks: dict[int, str], rank: int) -> int:
    if rank in ranks:
        raise OSError(ranks[rank])
    return 10 * rank


def _messages(mesh: DeviceMesh, cases: list[dict[int, str]]) -> list[object]:
    topology = topology_of(mesh)
    found: list[object] = []
    for case in cases:
        try:
            found.append(together(topology.control, partial(_fails_on, case, mesh.get_rank())))
        except FcdpError as error:
            found.append(str(error))
    return found


def test_all_ranks_hear_of_it() -> None:
    cases = [{}, {2: "no space"}, {0: "x", 1: "x", 2: "x", 3: "x"}, {1: "a", 3: "a", 0: "b"}]
    results = run(_messages, cases, nodes=2, ranks_per_node=2)
    assert results[0] == [
        [0, 10, 20, 30],
        "rank 2: no space",
        "x",
        "rank 0: b (2 other ranks failed in other ways)",
    ]
    assert all(result == results[0] for result in results)


def test_one_process_has_nobody_to_tell() -> None:
    assert together(None, partial(_fails_on, {}, 3)) == [30]
    with pytest.raises(FcdpError, match=r"^alone$"):
        together(None, partial(_fails_on, {3: "alone"}, 3))
