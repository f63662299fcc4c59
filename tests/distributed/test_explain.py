"""`explain` tells the plan, which agrees with the bytes moved, and the parameters that no graph has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fcdp_compile
from fcdp_compile import Explanation
from tests.distributed.beside import Beside
from tests.distributed.models import CASES
from tests.distributed.ranks import run

pytestmark = pytest.mark.distributed

_SOURCE = Path(__file__).read_text().splitlines()


class _Partly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside, self.outside, self.unused = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self._eagerly(self.inside(inputs))

    @torch._dynamo.disable
    def _eagerly(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.outside(hidden)


def _explain(mesh: DeviceMesh) -> tuple[Explanation, dict[str, int], Explanation, str]:
    pair = Beside(mesh, CASES["odd"], module_strategies={"first": "zero3"})
    assert "run a step of the compiled model first" in str(fcdp_compile.explain(pair.net))
    for step in range(2):
        pair.case.loss(pair.net, pair.data(step)).backward()
        pair.optimize()
    moved = fcdp_compile.traffic(pair.net).last_step
    sent = {link: moved.bytes(link) for link in ("intra", "h2d", "d2h")}
    sent["inter"] = moved.bytes("inter") - moved.bytes("inter", "agree")
    whole = fcdp_compile.explain(pair.net)
    torch._dynamo.utils.counters.clear()
    model = fcdp_compile.shard(_Partly(), mesh)
    torch.compile(model, backend="fcdp")(torch.ones(2, 8)).sum().backward()
    partly = fcdp_compile.explain(model)
    return whole, sent, partly, str(partly)


def test_what_it_says() -> None:
    for whole, sent, partly, text in run(_explain, nodes=2, ranks_per_node=2):
        assert dict(whole.strategies) == {"fcdp": 7, "zero3": 2}
        assert [p.name for p in whole.passes] == ["forward cold", "forward warm", "backward cold"]
        cold, _, backward = whole.passes
        assert {k: cold.bytes[k] + backward.bytes[k] for k in sent} == sent
        assert whole.uncovered == ()
        assert partly.uncovered == (
            "outside.weight",
            "outside.bias",
            "unused.weight",
            "unused.bias",
        )
        assert sum(count for _, count in partly.graph_breaks) >= 1
        assert (
            "in no compiled graph, so gathered without the cache if they are used: outside" in text
        )
        assert "graph breaks (TORCH_LOGS" in text
        line = next(n for n, text in enumerate(_SOURCE, 1) if "return self._eagerly(" in text)
        assert f"{__file__}:{line}" in partly.broken_at
        assert not any("sharded_class" in place for place in partly.broken_at)
        assert f"\n  at {__file__}:{line}" in text


def test_a_model_that_is_not_sharded() -> None:
    with pytest.raises(ValueError, match="not sharded"):
        fcdp_compile.explain(nn.Linear(2, 2))
