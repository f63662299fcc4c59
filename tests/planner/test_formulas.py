"""Bytes counted in plans equal the closed forms of strategies, exactly, in whole numbers."""

from __future__ import annotations

from functools import cache

import pytest
import sympy
import torch
from torch import Tensor, nn

from builders_planner import make_job, make_profile
from fcdp_compile.cluster.requests import PACKED_FORMATS, PackedFormat
from fcdp_compile.plan import Bucket, Kind, Placement, Tier
from fcdp_compile.strategy import PRESETS, Scope, Strategy
from fcdp_compile.strategy.formats import Format
from fcdp_compile.strategy.formulas import Costs, F, N, T, a, b, costs, g, s
from fcdp_compile.tools.planner import Estimate, TracedModel, estimate, trace
from fcdp_compile.tools.planner.source import PackedLinear
from fcdp_compile.tools.planner.traced import Inputs
from tests.marks import quick

SIZES = [(2, 2), (4, 8), (3, 5)]
EVEN = 480 * 256  # whole quantisation blocks on every rank, for all sizes
UNEVEN = 1009
ITEMSIZE = 4
_MORE = [
    "fcdp+w8+g4",
    "fcdp+c8+g8",
    "fcdp+c4",
    "fcdp+c4+c8",
    "zero3+w8+g8",
    "fcdp+ho_ring",
    "zero+++w8",
    "fcdp+offload",
    "fcdp+c4+offload",
    "zero3+offload",
    "zero+++offload",
    "zero1+offload",
    "mics+offload",
]


class Squares(nn.Module):
    """Vectors that both the forward and the backward read; all but the first and the last may be frozen."""

    def __init__(self, size: int, *, is_frozen: bool) -> None:
        super().__init__()
        self.first, self.last = (nn.Parameter(torch.ones(size)) for _ in range(2))
        self.others = nn.ParameterList(
            nn.Parameter(torch.ones(size), requires_grad=not is_frozen) for _ in range(3)
        )

    def forward(self, values: Tensor) -> Tensor:
        # Dynamo of torch 2.12 cannot unpack a ParameterList, but can loop over it.
        for vector in [self.first, *list(self.others), self.last]:
            values = (values * vector * vector).sin()
        return values.sum()


@cache
def squares(size: int, is_frozen: bool) -> TracedModel:
    def build(batch: int, seq: int) -> tuple[nn.Module, Inputs]:
        return Squares(size, is_frozen=is_frozen), (torch.zeros(batch, size),)

    return trace(build, seq=1, param_dtype=None)


def _planned(
    name: str | Strategy,
    nodes: int,
    ranks_per_node: int,
    micro_batches: int,
    *,
    size: int,
    is_frozen: bool,
) -> Estimate:
    """Plan for devices so small that everything that may be on the host is there."""
    job = make_job(
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        accumulate=micro_batches,
        profile=make_profile(device_memory_bytes=1),
    )
    return estimate(squares(size, is_frozen), Strategy.parse(name), job)


def _expected(found: Estimate, of: str | None = None) -> Costs:
    """The closed forms with numbers for symbols; F and T include padding.  of: another strategy's."""
    full = {
        frozen: sum(x.full_bytes for x, _ in _placed(found) if x.frozen is frozen)
        for frozen in (True, False)
    }
    job = found.job
    values = {
        N: job.nodes,
        g: job.ranks_per_node,
        s: job.accumulate,
        a: 1 if job.accumulate > 1 else 0,  # gradients accumulate in fp32, the parameters' dtype
        b: ITEMSIZE,
        F: full[True],
        T: full[False],
    }
    forms = costs(found.strategy if of is None else Strategy.parse(of))
    return Costs(**{name: getattr(forms, name).subs(values) for name in Costs.__slots__})


def _placed(found: Estimate) -> list[tuple[Bucket, Placement]]:
    (plan,) = found.plans
    return plan.placed


def _kept_bytes(bucket: Bucket, placement: Placement) -> int:
    """Bytes on the device between uses: the home shard, unless the host has it, and the cached shard."""
    on_host = placement.tier is Tier.HOST and bucket.frozen and bucket.wire is Format.FULL
    leaves = (on_host and bucket.strategy.is_resident) or bucket.strategy.offloads
    cached = {Tier.GPU: bucket.node_bytes, Tier.GPU_FULL: bucket.full_bytes}
    return (0 if leaves else bucket.slot_bytes) + cached.get(placement.tier, 0)


def _check(found: Estimate, of: str | None = None) -> None:
    expected, job = _expected(found, of), found.job
    trained = [pair for pair in _placed(found) if not pair[0].frozen]
    waiting = sum(x.waiting_gradient_bytes for x, at in trained if at.gradient_tier is Tier.GPU)
    shards = sum(x.slot_bytes for x, _ in trained)
    states, strategy = 0, found.strategy
    if strategy.offloads:
        states = 2 * job.ranks_per_node * shards  # Adam's, which closed forms do not count
        kinds = [Kind.LOAD_HOME, Kind.STORE_GRADS]
        moved = sum(part.bytes_by_kind().get(kind, 0) for part in found.parts for kind in kinds)
        plain = _expected(found, strategy.name.removesuffix("+offload"))
        assert moved == expected.bus - plain.bus
        shards = 0
    assert found.simulate().bytes_sent_by_node == expected.inter
    assert found.host_bytes_per_node == expected.host + states
    assert sum(_kept_bytes(*pair) for pair in _placed(found)) == expected.gpu
    assert shards + (waiting if job.accumulate > 1 else 0) == expected.gradients


@pytest.mark.parametrize("name", quick([*PRESETS, *_MORE], *PRESETS))
@pytest.mark.parametrize(("nodes", "ranks_per_node"), SIZES)
@pytest.mark.parametrize("micro_batches", quick([1, 4], 4))
def test_bytes_are_those_of_the_closed_forms(
    name: str, nodes: int, ranks_per_node: int, micro_batches: int
) -> None:
    _check(_planned(name, nodes, ranks_per_node, micro_batches, size=EVEN, is_frozen=True))


@pytest.mark.parametrize(("name", "on"), [("fcdp", "gpu"), ("zero1", "host"), ("paro-nig", "host")])
def test_gradients_wait_where_they_are_asked_to(name: str, on: str) -> None:
    strategy = Strategy.parse(name).with_gradients_on(on)
    _check(_planned(strategy, 2, 2, 4, size=EVEN, is_frozen=True))


@pytest.mark.parametrize("name", ["fcdp", "zero1", "zero++", "zero3", "fcdp+c8"])
def test_offloaded_shards_of_nodes_with_one_rank(name: str) -> None:
    """What is gathered between nodes is stored and is the full bucket."""
    _check(_planned(f"{name}+offload", 3, 1, 1, size=EVEN, is_frozen=True))


def test_host_memory_for_offloaded_shards_is_not_given_to_the_cache() -> None:
    traced = squares(EVEN, is_frozen=False)
    everything = make_job(profile=make_profile(device_memory_bytes=1))
    needs = {
        name: estimate(traced, Strategy.parse(name), everything).host_bytes_per_node
        for name in ("fcdp+offload", "zero3+offload")
    }
    less = (needs["fcdp+offload"] + needs["zero3+offload"]) // 2
    job = make_job(profile=make_profile(device_memory_bytes=1, host_memory_bytes=less))
    found = estimate(traced, Strategy.parse("fcdp+offload"), job)
    room = job.host_bytes_per_rank * job.ranks_per_node
    assert needs["zero3+offload"] <= found.host_bytes_per_node <= room < needs["fcdp+offload"]


class Packed(nn.Module):
    """Quantised products between vectors that are trained; the backward dequantises again."""

    def __init__(self, packing: PackedFormat) -> None:
        super().__init__()
        self.vectors = nn.ParameterList(nn.Parameter(torch.ones(SIDE)) for _ in range(3))
        linear = nn.Linear(SIDE, SIDE, bias=False).requires_grad_(False)
        self.layers = nn.ModuleList(PackedLinear(linear, packing) for _ in range(2))

    def forward(self, values: Tensor) -> Tensor:
        for vector, layer in zip(self.vectors, [*self.layers, nn.Identity()], strict=True):
            values = layer(values * vector * vector).sin()
        return values.sum()


SIDE = 240
_SCALES = {"nf4": SIDE**2 // 64, "fp4": SIDE**2 // 64, "int8": SIDE}


@cache
def packed(packing: str) -> TracedModel:
    def build(batch: int, seq: int) -> tuple[nn.Module, Inputs]:
        return Packed(PACKED_FORMATS[packing]), (torch.zeros(batch, SIDE),)

    return trace(build, seq=1, param_dtype=None)


@pytest.mark.parametrize("name", ["fcdp", "fcdp+c4", "zero3", "zero2", "mics"])
@pytest.mark.parametrize("packing", quick(PACKED_FORMATS, "nf4"))
def test_quantised_weights(name: str, packing: str) -> None:
    """Packed bytes are sent and kept as they are, and their kernels' bytes are counted."""
    job = make_job(accumulate=2, profile=make_profile(device_memory_bytes=1))
    found = estimate(packed(packing), Strategy.parse(name), job)
    _check(found, of=name.removesuffix("+c4"))
    values = SIDE**2 * PACKED_FORMATS[packing].bits // 8
    frozen = values + 4 * _SCALES[packing]
    assert sum(x.full_bytes for x, _ in _placed(found) if x.frozen) == 2 * frozen
    kernels = sum(s.kernel_bytes for part in found.parts for s in part.steps)
    uses = 2 * 2 * 2  # layers, forward and backward, micro-batches
    assert kernels == uses * (frozen + SIDE**2 * ITEMSIZE)


@pytest.mark.parametrize("name", [n for n, x in PRESETS.items() if x.home is Scope.GLOBAL])
@pytest.mark.parametrize("is_frozen", [False, True])
def test_with_padding(name: str, is_frozen: bool) -> None:
    """Slots count as full even if they are not."""
    found = _planned(name, 3, 5, 4, size=UNEVEN, is_frozen=is_frozen)
    _check(found)
    parameters = 5 * UNEVEN * ITEMSIZE
    assert sum(x.full_bytes for x, _ in _placed(found)) > parameters, "control: there is padding"


def test_the_model_is_what_the_closed_forms_are_of() -> None:
    """Control: zero3 gathers everything twice, and frozen parameters are a large part."""
    found = _planned("zero3", 2, 2, 1, size=EVEN, is_frozen=True)
    frozen, trained = 3 * EVEN * ITEMSIZE, 2 * EVEN * ITEMSIZE
    sent = found.simulate().bytes_sent_by_node
    assert sent == (2 * frozen + 3 * trained) // 2
    assert sympy.Integer(sent) == _expected(found).inter
