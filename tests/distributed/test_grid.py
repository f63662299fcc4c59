"""Every preset in every size: bytes as the formulas say, and numbers as plain training's.

Sizes differ only in arithmetic that other tests cover.  The whole grid takes a quarter of an hour, so it runs
only with FCDP_GRID=1.
"""

from __future__ import annotations

import os
from contextlib import nullcontext

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import fcdp_compile
from fcdp_compile.strategy import PRESETS
from tests import formulas
from tests.distributed.beside import Beside
from tests.distributed.models import CASES
from tests.distributed.ranks import run
from tests.distributed.test_bytes import MOVING, formula_model

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.rare,
    pytest.mark.skipif(
        not os.environ.get("FCDP_GRID"), reason="takes a quarter of an hour; set FCDP_GRID=1"
    ),
    pytest.mark.timeout(1500),
]

MICRO_BATCHES = 4


def _check(mesh: DeviceMesh, case: str, strategy: str) -> None:
    nodes, g = mesh.mesh.shape
    model = formula_model(case, together=False)
    options = {"bucket_mb": 0.1 / 2**20}
    pair = Beside(mesh, CASES[case], strategy=strategy, options=options)
    for step, micro_batches in enumerate((1, 1, MICRO_BATCHES)):
        before = dict(pair.counters.sent)
        for i in range(micro_batches):
            last = i == micro_batches - 1
            with nullcontext() if last else fcdp_compile.no_sync(pair.net):
                pair.case.loss(pair.net, pair.data(step + i)).backward()
            pair.plain_backward(step + i)
        sent = {k: n - before.get(k, 0) for k, n in pair.counters.sent.items() if k in MOVING}
        expected = formulas.training_step(
            model, strategy, nodes, g, first=step == 0, micro_batches=micro_batches
        )
        where = f"{case}, {strategy}, {nodes} x {g}, step {step}"
        assert {k: n for k, n in sent.items() if n} == expected.bytes, where
        pair.compare_gradients()
        pair.optimize()
    pair.compare_parameters()


def _check_all(mesh: DeviceMesh, case: str, strategies: list[str]) -> None:
    torch._dynamo.config.recompile_limit = 64
    for strategy in strategies:
        _check(mesh, case, strategy)


@pytest.mark.parametrize("size", [(2, 2), (4, 1), (2, 3), (4, 2)], ids="{0[0]}x{0[1]}".format)
@pytest.mark.parametrize("case", ["odd", "odd-lora"])
def test_every_preset(case: str, size: tuple[int, int]) -> None:
    nodes, g = size
    run(_check_all, case, list(PRESETS), nodes=nodes, ranks_per_node=g, timeout_s=1400)
