"""The strategies differ in where a parameter waits, not in a single bit of the result."""

from __future__ import annotations

import pytest
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tests.distributed.parity import Sharded, Trial, check_equal, gradients, values
from tests.distributed.ranks import run

pytestmark = pytest.mark.distributed

STRATEGIES = ["zero3", "zero2", "zero++", "paro-igg", "fcdp"]


def _history(mesh: DeviceMesh | None, trial: Trial) -> dict[str, Tensor]:
    """Everything a run computes: losses and gradients of every step, and the last parameters."""
    mine = Sharded(mesh, trial)
    found: dict[str, Tensor] = {}
    for step in range(trial.steps):
        loss = mine.loss(mine.batches(step)[mine.rank])
        loss.backward()
        found[f"loss {step}"] = loss.detach()
        found |= {f"gradient {step} of {n}": g for n, g in gradients(mine.model).items()}
        mine.step()
    return found | values(mine.model)


def _compare(mesh: DeviceMesh | None, cases: list[str], steps: int) -> None:
    for name in cases:
        first, *others = (
            _history(mesh, Trial(case=name, strategy=strategy, steps=steps))
            for strategy in STRATEGIES
        )
        assert len(first) > steps + 1, "gradients and parameters are compared too"
        for other, strategy in zip(others, STRATEGIES[1:], strict=True):
            check_equal(f"{name}: {STRATEGIES[0]} and {strategy}", other, first)


def test_two_nodes_of_two() -> None:
    run(_compare, ["odd", "odd-lora"], 4, nodes=2, ranks_per_node=2)


def test_two_nodes_of_one() -> None:
    run(_compare, ["broken", "llama-lora"], 4, nodes=2, ranks_per_node=1)
