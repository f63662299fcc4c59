"""The strategies differ in where they keep a parameter, not in a single bit of the result."""

from __future__ import annotations

import pytest
from torch.distributed.device_mesh import DeviceMesh

from tests.distributed.parity import Sharded, Trial, check_equal, history
from tests.distributed.ranks import run
from tests.marks import quick

pytestmark = pytest.mark.distributed

STRATEGIES = ("zero3", "zero2", "zero++", "paro-igg", "fcdp")
_FEW = ("zero3", "zero++", "fcdp")


def _compare(
    mesh: DeviceMesh | None, cases: list[str], steps: int, strategies: tuple[str, ...] = STRATEGIES
) -> None:
    for name in cases:
        first, *others = (
            history(Sharded(mesh, Trial(case=name, strategy=strategy)), steps)
            for strategy in strategies
        )
        assert len(first) > steps + 1, "gradients and parameters are compared too"
        for other, strategy in zip(others, strategies[1:], strict=True):
            check_equal(f"{name}: {strategies[0]} and {strategy}", other, first)


@pytest.mark.parametrize(
    ("case", "strategies"),
    quick([("odd-lora", _FEW), ("odd-lora", STRATEGIES), ("odd", STRATEGIES)], ("odd-lora", _FEW)),
)
def test_two_nodes_of_two(case: str, strategies: tuple[str, ...]) -> None:
    run(_compare, [case], 4, strategies, nodes=2, ranks_per_node=2)


@pytest.mark.rare
def test_two_nodes_of_one() -> None:
    run(_compare, ["broken", "llama-lora"], 4, nodes=2, ranks_per_node=1)
