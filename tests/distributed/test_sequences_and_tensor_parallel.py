"""Ranks of a node share sequences and parameters at once ("cp" and "tp"): 2 nodes x (2 x 2) ranks.

Models of the zoo train as in one process, which has whole sequences and all parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fcdp_compile
from fcdp_compile.core.params.inner_cut import local_part
from fcdp_compile.core.sharding.shard import state_of
from fcdp_compile.plan import Direction, Plan, Variant
from tests import formulas
from tests.distributed import cut_models, test_bytes, test_context
from tests.distributed.models import batch
from tests.distributed.parity import (
    GRADIENT_FLOOR,
    RELATIVE,
    Difference,
    fresh,
    gradients,
    values,
    worst,
)
from tests.distributed.ranks import run
from tests.zoo.cases import ZOO, ZooCase

pytestmark = [pytest.mark.distributed, pytest.mark.rare, pytest.mark.timeout(2400)]

NODES, SHARING = 2, 2
"""Nodes, and how many ranks share a sequence, and how many of these places share each parameter."""
STEPS = 3
PARAMETERS = 2e-5
"""The largest difference of a parameter after AdamW's steps of 1e-2, absolute."""
LATER = 1e-4
"""The largest relative difference of gradients after the first step, when parameters are not the same bits.

AdamW divides by gradients down to eps = 1e-5.  Measured in one process: noise of 1e-7 of each gradient's
largest element makes later gradients differ by 7e-5.
"""

CASES: dict[str, tuple[str, bool]] = {
    "llama": ("llama-full", False),
    "qwen2": ("qwen2-full", False),
    "mistral": ("mistral-full", False),
    "mixtral": ("mixtral-full", False),
    "mixtral, whole experts": ("mixtral-full", True),
    "llama, LoRA": ("llama-lora", False),
    "mixtral, LoRA": ("mixtral-lora", False),
}
"""The case of the zoo, and whether each rank has whole experts."""

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One rank's comparison with one process.

    losses, norms: found and expected, of each step.  gradients: the largest difference of each step, before
    clipping.  parameter: the largest difference after the last step, absolute.  parts: shapes of this rank's
    parts.  digests: of the plans.  counted, planned, expected: bytes sent to other nodes in the last step.
    """

    losses: list[tuple[float, float]]
    norms: list[tuple[float, float]]
    gradients: list[Difference]
    parameter: float
    breaks: tuple[tuple[str, int], ...]
    parts: Shapes
    digests: tuple[str, ...]
    counted: int
    planned: int
    expected: int


class Pair:
    """A case's model on the ranks, compiled, and a copy in this process alone."""

    def __init__(self, case: ZooCase, mesh: DeviceMesh, *, experts: bool) -> None:
        self.mesh, self.case = mesh, case.built()
        self.model, self.plain = self._made(), self._made()
        fcdp_compile.tensor_parallel(self.model, mesh, experts=experts)
        self.parts = {n: tuple(local_part(p).shape) for n, p in self.model.named_parameters()}
        fcdp_compile.shard(fcdp_compile.context_parallel(self.model, mesh), mesh)
        self.net: Any = torch.compile(self.model, backend="fcdp", options={"compute": "eager"})
        self.optimizers = [cut_models.adamw(m) for m in (self.model, self.plain)]

    def _made(self) -> nn.Module:
        torch.manual_seed(0)
        return self.case.model()

    def backward(self, step: int) -> tuple[float, float]:
        """Both backwards; returns the mean loss of the ranks, and of one process.

        Lengths, and so the numbers of targets, differ between nodes and steps; "cp" does not divide all.
        """
        found = [
            batch(self.case, step=step, rank=n, length=16 + 3 * step + n) for n in range(NODES)
        ]
        batches = [{"input_ids": ids, "labels": ids} for ids in found]
        expected = test_context._whole_loss(self.plain, batches)
        expected.backward()
        mine = batches[self.mesh.get_local_rank("inter")]
        loss = self.net(**fcdp_compile.sequence_part(mine, self.mesh)).loss
        loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return float(mean) / dist.get_world_size(), expected.item()

    def clip(self) -> tuple[float, float]:
        norm: Any = nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        return float(norm.full_tensor()), float(
            nn.utils.clip_grad_norm_(self.plain.parameters(), 0.5)
        )

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def bytes_expected(self) -> int:
        """What this rank sends to other nodes in a step: its parts, as weights and as gradients."""
        trained = frozenset(n for n, p in self.plain.named_parameters() if p.requires_grad)
        model = formulas.Model(
            shapes=self.parts,
            trainable=trained,
            backward=frozenset(),  # nothing that is cached is gathered again
            buckets=[(n,) for n in self.parts],
        )
        moved = formulas.training_step(model, "fcdp", NODES, SHARING, first=False)
        return _between(moved.bytes)


def _between(sent: Mapping[str, int]) -> int:
    return sum(n for kind, n in sent.items() if kind.startswith("inter"))


def _planned(plan: Plan) -> int:
    forward = next(s.variant for s in plan.schedules if s.direction is Direction.FORWARD)
    variants = (Direction.FORWARD, forward), (Direction.BACKWARD, Variant.COLD)
    return _between(test_bytes._planned(plan, *variants, refresh=False).bytes)


def _train(case: str, mesh: DeviceMesh) -> Outcome:
    name, experts = CASES[case]
    fresh()
    torch._dynamo.utils.counters.clear()
    pair = Pair(ZOO[name], mesh, experts=experts)
    losses, norms, apart = [], [], []
    for step in range(STEPS):
        losses.append(pair.backward(step))
        mine, plain = gradients(pair.model), gradients(pair.plain)
        apart.append(worst(f"{case}, step {step}", mine, plain, floor=GRADIENT_FLOOR))
        norms.append(pair.clip())
        pair.step()
    own, other = values(pair.model), values(pair.plain)
    moved = fcdp_compile.traffic(pair.net).last_step
    plans = [plan for _, plan in sorted(state_of(pair.model).plans.items())]
    return Outcome(
        losses=losses,
        norms=norms,
        gradients=apart,
        parameter=max(float((own[n] - value).abs().max()) for n, value in other.items()),
        breaks=fcdp_compile.explain(pair.net).graph_breaks,
        parts=pair.parts,
        digests=tuple(plan.digest() for plan in plans),
        counted=moved.bytes("inter") - moved.bytes("inter", "agree"),
        planned=_planned(plans[-1]),
        expected=pair.bytes_expected(),
    )


def _summary(case: str, found: Outcome) -> str:
    apart = ", ".join(f"{d.relative:.1e}" for d in found.gradients)
    losses, norms = (max(abs(a - b) / b for a, b in pairs) for pairs in (found.losses, found.norms))
    return (
        f"{case}: losses differ by {losses:.1e}, norms by {norms:.1e}, gradients by {apart}, parameters by "
        f"{found.parameter:.1e}; {found.counted} bytes to other nodes"
    )


def _train_all(_mesh: DeviceMesh, cases: list[str]) -> dict[str, Outcome]:
    """Train several cases on the same ranks: starting ranks takes longer than a case."""
    mesh = fcdp_compile.make_mesh(NODES, cp=SHARING, tp=SHARING)
    assert mesh is not None
    return {case: _train(case, mesh) for case in cases}


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> list[dict[str, Outcome]]:
    """Each rank's outcomes of the chosen cases."""
    items = [i for i in request.session.items if isinstance(i, pytest.Function)]
    chosen = [i.callspec.params["case"] for i in items if i.path == request.path]
    return run(_train_all, chosen, nodes=NODES, ranks_per_node=SHARING**2, timeout_s=2300)


@pytest.mark.parametrize("case", CASES)
def test_models_train_as_in_one_process(case: str, outcomes: list[dict[str, Outcome]]) -> None:
    found = [of_rank[case] for of_rank in outcomes]
    for rank, outcome in enumerate(found):
        about = f"{case}, rank {rank}: {outcome}"
        for pairs in (outcome.losses, outcome.norms):
            for mine, expected in pairs:
                assert mine == pytest.approx(expected, rel=RELATIVE), about
        assert outcome.gradients[0].relative <= RELATIVE, about
        assert max(outcome.gradients).relative <= LATER, about
        assert outcome.parameter <= PARAMETERS, about
        assert not outcome.breaks, about
        assert outcome.counted == outcome.planned == outcome.expected > 0, about
    print(_summary(case, found[0]))  # noqa: T201
    by_parts: dict[str, set[tuple[str, ...]]] = {}
    for outcome in found:
        by_parts.setdefault(str(outcome.parts), set()).add(outcome.digests)
    assert all(len(digests) == 1 for digests in by_parts.values()), f"{case}: plans differ"
    assert len(by_parts) <= SHARING, "ranks with equal places in their groups have equal parts"
