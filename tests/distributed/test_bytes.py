"""The counters, the plan and the formulas are exactly equal."""

from __future__ import annotations

import tempfile
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import fcdp_compile
from fcdp_compile.plan import Direction, Kind, Lane, Plan, Tier, Variant
from fcdp_compile.plan.json import read_plan
from tests import formulas
from tests.distributed.beside import Beside
from tests.distributed.models import CASES
from tests.distributed.ranks import run

pytestmark = pytest.mark.distributed

STRATEGIES = tuple(formulas.POINTS)
MICRO_BATCHES = 4
MOVING = {k.value for k in Kind if k not in (Kind.COMPUTE, Kind.WAIT, Kind.FREE)}
_TOGETHER, _ALONE = 25.0, 0.1 / 2**20
"""bucket_mb: all parameters of a kind in one bucket, or each in a bucket of its own."""

# The parameters that the backward of `Odd` reads again, by hand: the factors of the products that it
# differentiates.  Biases are not among them, except the norm's: the partitioner recomputes the norm's result
# instead of saving it.  With adapters, parameters before the first adapter are not needed either.
_BACKWARD = {
    "odd": {
        "embedding.weight",
        "first.weight",
        "second.weight",
        "norm.weight",
        "norm.bias",
        "scale",
    },
    "odd-lora": {
        "embedding.weight",
        "second.base_layer.weight",
        "second.lora_A.default.weight",
        "second.lora_B.default.weight",
        "first.lora_B.default.weight",
        "norm.weight",
        "norm.bias",
        "scale",
    },
}


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One rank's counts in the first three steps, and numbers from its plan.

    accumulated: counts of a fourth step, of
    MICRO_BATCHES with `no_sync`.
    """

    steps: tuple[formulas.Moved, ...]
    agreed: tuple[int, ...]
    accumulated: formulas.Moved
    planned_first: formulas.Moved
    planned_steady: formulas.Moved
    planned_accumulated: formulas.Moved
    plan: Plan | None
    texts: dict[str, str]


def _base(strategy: str) -> str:
    return strategy if strategy in formulas.POINTS else strategy.partition("+")[0]


def formula_model(case: str, *, together: bool) -> formulas.Model:
    model = CASES[case].model()
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
    trainable = frozenset(n for n, p in model.named_parameters() if p.requires_grad)
    frozen = tuple(n for n in shapes if n not in trainable)
    shared = [tuple(n for n in shapes if n in trainable), *([frozen] if frozen else [])]
    prefix = "base_model.model." if case.endswith("lora") else ""
    return formulas.Model(
        shapes=shapes,
        trainable=trainable,
        backward=frozenset(prefix + n for n in _BACKWARD[case]),
        buckets=shared if together else [(n,) for n in shapes],
    )


def _counted(pair: Beside, before: tuple[dict[str, int], dict[str, int]]) -> formulas.Moved:
    sent, calls = (
        {k: n - old.get(k, 0) for k, n in now.items() if k in MOVING and n != old.get(k, 0)}
        for now, old in zip((pair.counters.sent, pair.counters.calls), before, strict=True)
    )
    return formulas.Moved(bytes=sent, calls=calls)


def _planned(plan: Plan, *variants: tuple[Direction, Variant], refresh: bool) -> formulas.Moved:
    sent: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for schedule in plan.schedules:
        if (schedule.direction, schedule.variant) in variants:
            sent.update({k.value: n for k, n in schedule.bytes_by_kind().items()})
            calls.update(s.kind.value for s in schedule.steps if s.kind.value in MOVING)
    for bucket, tier in ((plan.bucket(i), plan.placement(i).tier) for i in plan.refresh if refresh):
        if bucket.nodes > 1:
            sent["inter_all_gather"] += (bucket.nodes - 1) * bucket.wire_bytes
            calls["inter_all_gather"] += 1
        sent["store"] += bucket.host_bytes if tier is Tier.HOST else 0
        calls["store"] += 1
        if tier is Tier.GPU_FULL and bucket.ranks_per_node > 1:
            sent["intra_all_gather"] += (bucket.ranks_per_node - 1) * bucket.node_bytes
            calls["intra_all_gather"] += 1
    return formulas.Moved(bytes={k: n for k, n in sent.items() if n}, calls=dict(calls))


def _measure(mesh: DeviceMesh, case: str, strategy: str, bucket_mb: float, **more: Any) -> Measured:
    folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folders)
    options = {"bucket_mb": bucket_mb, "dump": folders[0], **more}
    pair = Beside(mesh, CASES[case], strategy=strategy, options=options, caches_on_host=True)
    trained = [p for p in pair.model.parameters() if p.requires_grad]
    hooks = [p.register_hook(partial(_check_layout, p)) for p in trained]
    steps, agreed = [], []
    for step in range(3):
        before = dict(pair.counters.sent), dict(pair.counters.calls)
        pair.case.loss(pair.net, pair.data(step)).backward()
        steps.append(_counted(pair, before))
        agreed.append(pair.counters.sent.get("agree", 0) - before[0].get("agree", 0))
        pair.optimizer.step()
        pair.optimizer.zero_grad()
    for hook in hooks:
        hook.remove()
    _check_traffic(pair, steps[-1])
    before = dict(pair.counters.sent), dict(pair.counters.calls)
    for i in range(MICRO_BATCHES):
        with fcdp_compile.no_sync(pair.net) if i < MICRO_BATCHES - 1 else nullcontext():
            pair.case.loss(pair.net, pair.data(i)).backward()
    accumulated = _counted(pair, before)
    dist.barrier()
    (path,) = Path(folders[0]).glob("*.plan.json")
    plan = read_plan(path)
    # Only the warm forward exists if no bucket that changes has a place in the cache.
    forwards = [s.variant for s in plan.schedules if s.direction is Direction.FORWARD]
    variants = (Direction.FORWARD, forwards[0]), (Direction.BACKWARD, Variant.COLD)
    first = _planned(plan, *variants, refresh=True)
    steady = _planned(plan, *variants, refresh=False)
    has_more = any(s.variant is Variant.ACCUMULATE for s in plan.schedules)
    forward, backward = Direction.FORWARD, Direction.BACKWARD
    waiting = (forward, forwards[-1]), (backward, Variant.ACCUMULATE if has_more else Variant.COLD)
    later = (forward, forwards[-1]), (backward, Variant.COLLECT if has_more else Variant.COLD)
    parts = [_planned(plan, (forward, forwards[0]), waiting[1], refresh=False)]
    parts += [_planned(plan, *waiting, refresh=False)] * (MICRO_BATCHES - 2)
    parts += [_planned(plan, *later, refresh=False)]
    texts = {p.name: p.read_text() for p in Path(folders[0]).glob("*.txt")}
    return Measured(
        steps=tuple(steps),
        agreed=tuple(agreed),
        accumulated=accumulated,
        planned_first=first,
        planned_steady=steady,
        planned_accumulated=_sum(parts),
        plan=plan if dist.get_rank() == 0 else None,
        texts=texts if dist.get_rank() == 0 else {},
    )


def _check_layout(parameter: Any, grad: Any) -> None:
    """A gradient with another layout would be copied, and some versions of torch gather it for the copy."""
    assert (grad.placements, grad.stride()) == (parameter.placements, parameter.stride())


def _sum(parts: list[formulas.Moved]) -> formulas.Moved:
    sent: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for part in parts:
        sent.update(part.bytes)
        calls.update(part.calls)
    return formulas.Moved(bytes=dict(sent), calls=dict(calls))


def _check_traffic(pair: Beside, last: formulas.Moved) -> None:
    """The traffic that users see agrees with the counters."""
    shown = fcdp_compile.traffic(pair.net)
    assert shown.steps == 3
    links = [("inter", "all_gather"), ("inter", "reduce_scatter")]
    links += [("intra", "all_gather"), ("intra", "reduce_scatter")]
    for link, kind in links:
        assert shown.last_step.bytes(link, kind) == last.bytes.get(f"{link}_{kind}", 0)
    assert shown.last_step.bytes("d2h", "store") == last.bytes.get("store", 0)
    assert shown.last_step.bytes("h2d", "load") == last.bytes.get("load", 0)
    title, _, headers, _, *rows = str(shown).splitlines()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    assert title.endswith(f" by rank {rank} of {ranks} alone:")
    assert headers.endswith("what")
    moved = [row for row in shown.total.rows if row[2]]
    assert [row.split()[:2] for row in rows] == [[link, kind] for link, kind, _ in moved]
    assert len(moved) < len(shown.total.rows)
    assert "ranks agree on a plan" in str(shown)


Key = tuple[str, str, bool]


def _measure_all(mesh: DeviceMesh, keys: list[Key]) -> dict[Key, Measured]:
    torch._dynamo.config.recompile_limit = 64
    return {
        (case, strategy, together): _measure(
            mesh, case, strategy, _TOGETHER if together else _ALONE
        )
        for case, strategy, together in keys
    }


_CASES = ("odd", "odd-lora")
_EACH: list[Key] = [(_CASES[i % 2], strategy, i % 3 == 0) for i, strategy in enumerate(STRATEGIES)]
"""Every strategy, with one of the models and one bucket size."""
_ALL: list[Key] = [(case, "fcdp", together) for case in _CASES for together in (True, False)]
_QUANTISED: list[Key] = [
    ("odd", "fcdp+w8+g4", True),
    ("odd-lora", "fcdp+c4", True),
    ("odd-lora", "fcdp+c4+c8+g8", True),
    ("odd", "zero3+w8+g8", False),
]
_ALGORITHMS: list[Key] = [
    ("odd-lora", "zero3+w8+ho_ring", False),
    ("odd-lora", "fcdp+ho_ring", True),
    ("odd", "zero3+ho_ring", False),
]
_FEW: list[Key] = [
    ("odd", "ddp", True),
    ("odd-lora", "mics", True),
    ("odd-lora", "zero1", True),
    ("odd", "fcdp", False),
]
_QUICK: list[Key] = [
    _ALL[2],
    *(key for key in _EACH if key[1] == "mics"),
    *_QUANTISED[:2],
    *_ALGORITHMS[:1],
]
_REST = [key for key in dict.fromkeys(_ALL + _EACH + _QUANTISED + _ALGORITHMS) if key not in _QUICK]
# Sizes other than 2 x 2 lack one kind of group and have nothing else new, so one bucket size is enough.
_MEASURED: dict[str, tuple[int, int, list[Key]]] = {
    "2x2": (2, 2, list(dict.fromkeys(_QUICK))),
    "1x2": (
        1,
        2,
        [
            ("odd", "zero3", False),
            ("odd-lora", "fcdp", True),
            ("odd-lora", "fcdp", False),
            ("odd-lora", "zero2", True),
        ],
    ),
    "2x2, all others": (2, 2, _REST),
    "4x1": (4, 1, _FEW),
    "2x3": (2, 3, [*_FEW[1:3], ("odd", "zero3+ho_ring", True)]),
    "1x3": (1, 3, [("odd", "zero++", True), ("odd-lora", "ddp", False), ("odd", "zero1", True)]),
}


def _row(name: str) -> Any:
    if name == "2x2":
        return name
    return pytest.param(name, marks=pytest.mark.slow if name == "1x2" else pytest.mark.rare)


@pytest.fixture(scope="module", params=[_row(name) for name in _MEASURED])
def measured(request: pytest.FixtureRequest) -> tuple[int, int, list[dict[Key, Measured]]]:
    nodes, ranks_per_node, keys = _MEASURED[request.param]
    results = run(_measure_all, keys, nodes=nodes, ranks_per_node=ranks_per_node)
    return nodes, ranks_per_node, results


def test_counters_plan_and_formula_agree(
    measured: tuple[int, int, list[dict[Key, Measured]]],
) -> None:
    """Bytes and numbers of messages, in the first step and in later steps, on every rank."""
    nodes, g, results = measured
    for ranks in results:
        for (case, strategy, together), found in ranks.items():
            model = formula_model(case, together=together)
            for number, step in enumerate(found.steps):
                expected = formulas.training_step(model, strategy, nodes, g, first=number == 0)
                planned = found.planned_steady if number else found.planned_first
                where = f"{case}, {strategy}, together={together}, step {number}"
                assert step.bytes == planned.bytes == expected.bytes, where
                assert step.calls == planned.calls == expected.calls, where
            expected = formulas.training_step(
                model,
                strategy,
                nodes,
                g,
                first=False,
                micro_batches=MICRO_BATCHES,
            )
            where = f"{case}, {strategy}, together={together}, {MICRO_BATCHES} micro-batches"
            accumulated = found.accumulated, found.planned_accumulated, expected
            assert [m.bytes for m in accumulated] == [expected.bytes] * 3, where
            assert [m.calls for m in accumulated] == [expected.calls] * 3, where
            cached = formulas.caches(_base(strategy), nodes, g)
            assert set(found.agreed) == {formulas.agreement_bytes(nodes, g, cached=cached)}


def test_no_backward_gathers_between_nodes_what_is_cached(
    measured: tuple[int, int, list[dict[Key, Measured]]],
) -> None:
    """Asserted on the plan and on the printed graph; the control is zero3, whose backward gathers."""
    nodes, _, results = measured
    for (_, strategy, _), found in results[0].items():
        assert found.plan is not None
        backward = next(s for s in found.plan.schedules if s.direction is Direction.BACKWARD)
        crossing = {Kind.INTER_ALL_GATHER}
        gathers = [s for s in backward.steps if s.kind in crossing]
        (text,) = (t for name, t in found.texts.items() if ".backward.cold" in name)
        point = formulas.POINTS[_base(strategy)]
        has_gathers = nodes > 1 and point.home == "g" and not point.keeps
        assert bool(gathers) == has_gathers
        assert any(kind.value in text for kind in crossing) == has_gathers
        inter = {s.kind for s in backward.steps if s.lane is Lane.INTER} - crossing
        reduces = Kind.INTER_REDUCE_SCATTER if point.home == "g" else Kind.INTER_ALL_REDUCE
        assert inter == ({reduces} if nodes > 1 else set())


def test_a_frozen_bucket_that_stays_has_no_step_between_nodes(
    measured: tuple[int, int, list[dict[Key, Measured]]],
) -> None:
    nodes, _, results = measured
    for (case, strategy, _), found in results[0].items():
        assert found.plan is not None
        frozen = {b.id for b in found.plan.buckets if b.frozen}
        assert bool(frozen) == (case == "odd-lora")
        steps = [s for schedule in found.plan.schedules for s in schedule.steps]
        inter = [s for s in steps if s.lane is Lane.INTER and s.bucket in frozen]
        point = formulas.POINTS[_base(strategy)]
        is_resident = point.resident
        has_inter = nodes > 1 and bool(frozen) and not is_resident and point.home == "g"
        assert bool(inter) == has_inter
        if is_resident and nodes > 1:
            assert frozen == set(found.plan.refresh)


def test_adapters_travel_in_one_gather_and_one_reduction(
    measured: tuple[int, int, list[dict[Key, Measured]]],
) -> None:
    """One per level, however many adapters there are: each small message costs a latency."""
    nodes, _, results = measured
    key = ("odd-lora", "fcdp", True)
    if nodes == 1 or key not in results[0]:
        pytest.skip("these jobs send no adapters between nodes")
    for found in (ranks[key] for ranks in results):
        for step in found.steps[1:]:
            assert step.calls["inter_all_gather"] == 1
            assert step.calls["inter_reduce_scatter"] == 1
            assert step.calls["intra_reduce_scatter"] == 1
            assert step == found.planned_steady
        assert found.steps[0] == found.planned_first


_BUDGETS: dict[str, int] = {"odd": 300, "odd-lora": 750}
"""Bytes per rank that hold about half of the buckets, if every parameter has a bucket of its own."""

_LINEAR = ["weight", "bias"]
_LORA = [f"base_layer.{n}" for n in _LINEAR] + ["lora_A.default.weight", "lora_B.default.weight"]
_ORDERS = {
    case: [
        "embedding.weight",
        *[f"{layer}.{name}" for layer in ("first", "second") for name in names],
        *["scale", "norm.weight", "norm.bias", "nothing"],
    ]
    for case, names in (("odd", _LINEAR), ("odd-lora", _LORA))
}
"""The order in which the forward of `Odd` reads its parameters, by hand."""


def _measure_budgets(mesh: DeviceMesh) -> dict[tuple[str, bool], Measured]:
    torch._dynamo.config.recompile_limit = 64
    return {
        (case, together): _measure(
            mesh,
            case,
            "fcdp",
            _TOGETHER if together else _ALONE,
            host_memory=0 if together else 2 * _BUDGETS[case],
        )
        for case in _BUDGETS
        for together in (True, False)
    }


@pytest.mark.rare
def test_counters_plan_and_formula_agree_where_host_memory_is_short() -> None:
    """Two nodes of two; a bucket that does not fit is gathered as in zero3."""
    for ranks in run(_measure_budgets, nodes=2, ranks_per_node=2):
        for (case, together), found in ranks.items():
            model = formula_model(case, together=together)
            left = 0 if together else _BUDGETS[case]
            prefix = "base_model.model." if case == "odd-lora" else ""
            alone = [(prefix + name,) for name in _ORDERS[case]]
            assert sorted(alone) == sorted((name,) for name in model.shapes)
            left_out = []
            for names in model.buckets if together else alone:
                size = formulas.node_bytes(model, names, 2, 2)
                if size > left:
                    left_out.append(names)
                left -= size if size <= left else 0
            assert together or 1 < len(left_out) < len(model.buckets) - 1, "control: some fit"
            if found.plan is not None:
                planned = [
                    sorted(p.name for p in b.params)
                    for b, at in found.plan.placed
                    if "does not fit" in at.why
                ]
                assert sorted(planned) == sorted(sorted(names) for names in left_out)
            for number, step in enumerate(found.steps):
                expected = formulas.training_step(
                    model, "fcdp", 2, 2, first=number == 0, left_out=left_out
                )
                planned_step = found.planned_steady if number else found.planned_first
                assert step.bytes == planned_step.bytes == expected.bytes, (case, number)
                assert step.calls == planned_step.calls == expected.calls, (case, number)
            assert set(found.agreed) == {formulas.agreement_bytes(2, 2, cached=False)}
