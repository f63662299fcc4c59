"""Clusters and schedules for simulations, by hand and by hypothesis; the only place to build one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import hypothesis.strategies as st

from builders_plan import LANE_OF, make_bucket
from fcdp_compile.cluster.profile import ClusterProfile
from fcdp_compile.plan import Bucket, Direction, Kind, Lane, Schedule, Step, Variant
from fcdp_compile.plan.cost import Link, Machine

INTER, INTRA, BUS = 1e9, 8e9, 4e9  # bytes/s
FLOPS, MEMORY = 1e12, 100e9


def make_profile(
    *,
    ranks_per_host_link: int = 1,
    intra_over_host_link: bool = False,
    inter: float = INTER,
    intra: float = INTRA,
    h2d: float = BUS,
    d2h: float = BUS,
    latency_s: float = 0.0,
) -> ClusterProfile:
    """A cluster with round figures; every link has the same latency."""
    return ClusterProfile(
        name="by hand",
        device_type="cuda",
        nodes=None,
        ranks_per_node=64,
        device_memory_bytes=2**36,
        host_memory_bytes=2**40,
        ranks_per_host_link=ranks_per_host_link,
        intra_over_host_link=intra_over_host_link,
        machine=Machine(
            inter=Link(latency_s=latency_s, bytes_per_s=inter),
            intra=Link(latency_s=latency_s, bytes_per_s=intra),
            h2d=Link(latency_s=latency_s, bytes_per_s=h2d),
            d2h=Link(latency_s=latency_s, bytes_per_s=d2h),
            flops_per_s=FLOPS,
            memory_bytes_per_s=MEMORY,
        ),
        source="by hand",
    )


@dataclass(slots=True)
class Program:
    """Adds steps one by one; each call returns the step's index."""

    steps: list[Step] = field(default_factory=list)

    def add(
        self, kind: Kind, *waits: int, bytes: int = 0, accessed_bytes: int = 0, bucket: int = 0
    ) -> int:
        return self._add(kind, bucket, waits, bytes=bytes, accessed_bytes=accessed_bytes)

    def compute(self, seconds: float, *waits: int, inner_bytes: int = 0) -> int:
        flops = round(seconds * FLOPS)
        return self._add(Kind.COMPUTE, None, waits, flops=flops, inner_bytes=inner_bytes)

    def wait(self, *waits: int) -> int:
        return self._add(Kind.WAIT, 0, waits)

    def _add(self, kind: Kind, bucket: int | None, waits: Sequence[int], **work: int) -> int:
        index, lane = len(self.steps), LANE_OF[kind]
        work = {"bytes": 0, **work}
        self.steps.append(
            Step(index=index, kind=kind, lane=lane, bucket=bucket, waits=tuple(waits), **work)
        )
        return index

    @property
    def schedule(self) -> Schedule:
        return make_schedule(self.steps)


def make_schedule(steps: Sequence[Step]) -> Schedule:
    return Schedule(direction=Direction.FORWARD, variant=Variant.COLD, steps=tuple(steps))


def buckets_for(nodes: int, ranks_per_node: int) -> dict[int, Bucket]:
    """A bucket 0 that is sharded over N x g ranks."""
    return {0: make_bucket(0, [("w", (8, 8))], nodes=nodes, ranks_per_node=ranks_per_node)}


@st.composite
def schedules(
    draw: st.DrawFn,
    *,
    without: Sequence[Kind] = (),
    max_size: int = 14,
    parts: int = 1,
    inner_bytes: int = 10**6,
) -> Schedule:
    """Steps of any kind, each about a millisecond long on `make_profile`, that wait for any earlier steps.

    parts: the bytes of a step divide into this many equal parts.  inner_bytes: of some of the compute steps.
    """
    kinds = st.sampled_from([k for k in Kind if k not in without])
    steps: list[Step] = []
    for i, kind in enumerate(draw(st.lists(kinds, max_size=max_size))):
        moves = LANE_OF[kind] is not Lane.COMPUTE
        waits = draw(st.lists(st.integers(0, i - 1), max_size=2, unique=True)) if i else []
        size = draw(st.sampled_from([0, 1, 999_999, 2_000_000, 5_000_000]))
        assembled = kind is Kind.INTRA_REST_ALL_GATHER
        is_compute = kind is Kind.COMPUTE
        steps.append(
            Step(
                index=i,
                kind=kind,
                lane=LANE_OF[kind],
                bucket=None if is_compute else 0,
                bytes=size * parts if moves else 0,
                waits=tuple(waits),
                flops=draw(st.sampled_from([0, 10**8, 3 * 10**9])) if is_compute else 0,
                accessed_bytes=draw(st.sampled_from([0, 10**8])) if assembled or is_compute else 0,
                kernel_bytes=draw(st.sampled_from([0, 10**8])) if is_compute else 0,
                inner_bytes=draw(st.sampled_from([0, inner_bytes])) if is_compute else 0,
            )
        )
    return make_schedule(steps)
