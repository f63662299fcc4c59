"""Evaluation between training steps: it uses the cache, and training goes on as if without it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tests import formulas
from tests.distributed.beside import Beside, assert_close
from tests.distributed.models import CASES
from tests.distributed.ranks import run
from tests.distributed.test_bytes import MOVING, formula_model

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

# One strategy for each kind of cache, and one whose home shards are split over a node alone.
STRATEGIES = ("zero2", "zero3", "zero++", "paro-igg", "paro-nii", "fcdp")

MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """The bytes that each of three batches moved, and the number of graphs after them."""

    batches: tuple[formulas.Moved, ...]
    graphs: int


def _evaluate(pair: Beside, mode: str, folder: Path) -> Evaluated:
    batches = []
    for model in pair.both:
        model.eval()
    for step in range(100, 103):
        sent, calls = dict(pair.counters.sent), dict(pair.counters.calls)
        with MODES[mode]():
            loss = pair.case.loss(pair.net, pair.data(step)).item()
            assert_close(loss, pair.case.loss(pair.plain, pair.data(step)).item(), mode)
        batches.append(
            formulas.Moved(
                bytes={
                    k: n - sent.get(k, 0)
                    for k, n in pair.counters.sent.items()
                    if k in MOVING and n != sent.get(k, 0)
                },
                calls={
                    k: n - calls.get(k, 0)
                    for k, n in pair.counters.calls.items()
                    if k in MOVING and n != calls.get(k, 0)
                },
            )
        )
    for model in pair.both:
        model.train()
    dist.barrier()
    return Evaluated(batches=tuple(batches), graphs=len(list(folder.glob("*.plan.json"))))


def _train_and_evaluate(mesh: DeviceMesh, name: str, strategy: str, mode: str) -> Evaluated:
    folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folders)
    options = {"dump": folders[0]}
    pair = Beside(mesh, CASES[name], strategy=strategy, options=options, caches_on_host=True)
    _evaluate(pair, mode, Path(folders[0]))  # before anything is trained: slabs are allocated here
    for _ in range(2):
        pair.train(2)
        evaluated = _evaluate(pair, mode, Path(folders[0]))
    pair.train(2)
    pair.compare_parameters()
    return evaluated


def _all(mesh: DeviceMesh, mode: str) -> dict[tuple[str, str], Evaluated]:
    strategies = STRATEGIES if mode == "no_grad" else ("zero2", "fcdp")
    return {
        (name, strategy): _train_and_evaluate(mesh, name, strategy, mode)
        for i, strategy in enumerate(strategies)
        for name in (("odd", "odd-lora") if strategy == "fcdp" else (("odd", "odd-lora")[i % 2],))
    }


@pytest.fixture(scope="module", params=["no_grad", "inference_mode"])
def evaluated(request: pytest.FixtureRequest) -> list[dict[tuple[str, str], Evaluated]]:
    return run(_all, request.param, nodes=2, ranks_per_node=2)


def test_the_second_batch_moves_nothing_between_nodes(
    evaluated: list[dict[tuple[str, str], Evaluated]],
) -> None:
    """If gathered parameters are kept; the first batch gathers, as training has changed parameters."""
    for rank in evaluated:
        for (_, strategy), found in rank.items():
            first, *others = (b.bytes.get("inter_all_gather", 0) for b in found.batches)
            assert bool(first) == (formulas.POINTS[strategy].home == "g")
            assert all(n == (0 if strategy in formulas.RESIDENT else first) for n in others)


def test_evaluation_moves_what_the_formula_says(
    evaluated: list[dict[tuple[str, str], Evaluated]],
) -> None:
    for rank in evaluated:
        for (name, strategy), found in rank.items():
            model = formula_model(name, together=True)
            for number, batch in enumerate(found.batches):
                expected = formulas.evaluation_batch(model, strategy, 2, 2, first=number == 0)
                assert batch == expected, f"{name}, {strategy}, batch {number}"


def test_evaluation_compiles_one_graph_more(
    evaluated: list[dict[tuple[str, str], Evaluated]],
) -> None:
    for rank in evaluated:
        assert {found.graphs for found in rank.values()} == {2}
