"""Train a model of the zoo sharded and replicated, and measure how far they are apart.

Compares losses, gradients and parameters as `parity`'s [Note: tolerances] says.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import fcdp_compile
from tests.distributed.beside import Beside
from tests.distributed.parity import (
    BUCKET_MB,
    GRADIENT_FLOOR,
    PARAMETER_FLOOR,
    Difference,
    adamw_of,
    gradients,
    values,
    worst,
)
from tests.zoo.adapters import Act
from tests.zoo.cases import ZOO, ZooCase


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of a case on one rank.

    difference: the largest relative difference of all losses, gradients and parameters; where: its tensor.
    graphs: number of compiled graphs that use a parameter.  breaks: Dynamo's reasons, with counts;
    broken_at: the lines.  uncovered: number of parameters that no graph has.  error: empty if it worked.
    """

    difference: float = math.inf
    where: str = ""
    graphs: int = 0
    breaks: tuple[tuple[str, int], ...] = ()
    broken_at: tuple[str, ...] = ()
    uncovered: int = 0
    error: str = ""
    seconds: float = 0.0


def train_all(mesh: DeviceMesh, names: list[str]) -> dict[str, Outcome]:
    """Train several cases on the same ranks: starting ranks takes longer than most cases."""
    torch._dynamo.config.recompile_limit = 64
    outcomes = {}
    for name in names:
        try:
            outcomes[name] = train(mesh, name)
        except Exception as error:  # the case's outcome, as it is every rank's; the next case runs
            outcomes[name] = Outcome(error=f"{type(error).__name__}: {error}")
            if ZOO[name].refused is None and not isinstance(error, AssertionError):
                raise
        dist.barrier()
    return outcomes


def train(mesh: DeviceMesh | None, name: str) -> Outcome:
    """Train a case of the zoo on these ranks."""
    torch._dynamo.utils.counters.clear()
    torch._dynamo.utils.clear_compilation_metrics()
    begin = time.perf_counter()
    case = ZOO[name]
    # Inductor would compile these graphs for minutes; other tests compare its results.
    options = {"compute": "eager", "bucket_mb": BUCKET_MB}
    pair = Beside(mesh, case.built(), optimizer=adamw_of, options=options)
    found = [d for step in range(case.steps) for d in _step(pair, case, step)]
    found.append(worst(name, values(pair.model), values(pair.plain), floor=PARAMETER_FLOOR))
    largest = max(found, key=lambda d: math.inf if math.isnan(d.relative) else d.relative)
    explained = fcdp_compile.explain(pair.model)
    return Outcome(
        difference=largest.relative,
        where=largest.name,
        graphs=len({p.graph for p in explained.passes}),
        breaks=explained.graph_breaks,
        broken_at=explained.broken_at,
        uncovered=len(explained.uncovered),
        seconds=time.perf_counter() - begin,
    )


def _step(pair: Beside, case: ZooCase, step: int) -> list[Difference]:
    if (act := case.between.get(step)) is not None:
        _act(pair, act)
    about = f"step {step}"
    loss = pair.case.loss(pair.net, pair.data(step))
    with torch.no_grad():
        expected = pair.case.loss(pair.plain, pair.data(step))
    found = [worst(about, {"loss": loss.detach()}, {"loss": expected}, floor=GRADIENT_FLOOR)]
    if step not in case.evaluated:
        loss.backward()
        pair.plain_backward(step)
        mine, plain = gradients(pair.model), gradients(pair.plain)
        assert any(g.any() for g in plain.values()), f"{about} trains nothing"
        found.append(worst(about, mine, plain, floor=GRADIENT_FLOOR))
        for model in pair.both if case.at_step is not None else ():
            case.at_step(model, step)
        pair.optimize()
    return [d._replace(name=f"{d.name}, {about}") for d in found]


def _act(pair: Beside, act: Act) -> None:
    """Do `act` to both models, and go on with new optimizers of the parameters that are trained now."""
    replaced = [act(model) for model in pair.both]
    if None not in replaced:
        pair.model, pair.plain = replaced
        pair.net = pair.compiled(pair.model)
    pair.use(adamw_of)
