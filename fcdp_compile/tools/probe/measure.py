"""Measure the cluster that this process is a rank of: `fcdp probe`, under torchrun or alone.

    torchrun's environment -> mesh -> times (`timings`) -> links (`link_fit`) -> profile (`cluster`)

Every rank runs the probe; the first rank writes the profile.
"""

from __future__ import annotations

import datetime
import math
import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from fcdp_compile.cluster.free_memory import total_bytes
from fcdp_compile.cluster.link_fit import Timed, fit_link
from fcdp_compile.cluster.profile import ClusterProfile, Measured, Sample, write_profile
from fcdp_compile.cluster.requests import LEAST_BYTES, ProbeOutcome, ProbeRequest
from fcdp_compile.core.params.mesh import Topology, make_mesh, topology_of
from fcdp_compile.devices import Device, StreamDevice, current_device
from fcdp_compile.errors import FcdpError
from fcdp_compile.plan import Kind
from fcdp_compile.plan.cost import Link, Machine, assumed_machine
from fcdp_compile.runtime.collectives.collectives import Collectives
from fcdp_compile.tools.probe.timings import Arithmetic, Probing, ranks_on_machine

_GROWTH = 4  # from one size to the next
_SHARES = {
    Measured.INTER_ALL_GATHER: 0.4,
    Measured.INTRA_ALL_GATHER: 0.2,
    Measured.H2D: 0.1,
    Measured.D2H: 0.1,
    Measured.COPY: 0.05,
    Measured.MATMUL: 0.1,
}
"""Shares of the time; the rest is for loads of one rank alone."""
_ALONE = 1.0 - sum(_SHARES.values())
_SLOWER = 1.25
"""A gather within a node that loads slow down by more than this factor shares a link with them."""


def probe(request: ProbeRequest) -> ProbeOutcome:
    """Measure, and write the profile; every rank of the job must call it with the same request.

    Refusals happen on all ranks, before anything is measured if possible.

    Raises: OSError on the first rank if the file cannot be written at the end.
    """
    had_groups = dist.is_initialized()
    try:
        mesh = make_mesh(request.nodes)
    except ValueError as error:
        rank = dist.get_rank() if had_groups else int(os.environ.get("RANK", "0"))
        return ProbeOutcome(is_first=rank == 0, refusal=str(error))
    outcome = _probe(topology_of(mesh), request)
    if dist.is_initialized() and not had_groups:
        dist.destroy_process_group()
    if outcome.is_first and outcome.profile is not None and request.output is not None:
        write_profile(request.output, outcome.profile)
    return outcome


def _probe(topology: Topology, request: ProbeRequest) -> ProbeOutcome:
    is_first = topology.position.rank == 0
    # Without torchrun there is no mesh to tell the device type.
    device = current_device(None if topology.ranks == 1 else topology.device_type)
    probing = Probing(topology, device)
    if refusal := _refusal(topology, request, probing.collectives):
        return ProbeOutcome(is_first=is_first, refusal=refusal)
    try:
        findings = _measure(probing, topology, device, request)
    except FcdpError as error:  # the same on all ranks
        return ProbeOutcome(is_first=is_first, refusal=str(error))
    return ProbeOutcome(is_first=is_first, profile=profile_of(findings, request))


def _refusal(topology: Topology, request: ProbeRequest, collectives: Collectives) -> str:
    """The reason why nothing can be measured, or ""; the same on every rank."""
    asked = (request.inter_bytes_per_s, request.max_bytes, request.seconds)
    if len(set(collectives.exchange_texts(repr(asked)))) > 1:
        return (
            "ranks were started with different --inter, --max-size or --seconds, so they would measure "
            "different things; start fcdp probe with the same options on every node"
        )
    if topology.nodes == 1 and request.inter_bytes_per_s is None:
        return (
            "the network between nodes cannot be measured on one node; start fcdp probe on several with "
            "torchrun, split this machine with --nodes, or state the bandwidth with --inter, such as "
            "--inter 10G"
        )
    is_first = topology.position.rank == 0
    mine = _why_not_writable(request.output) if is_first else ""
    if total_bytes() is None:
        mine = mine or (
            "neither /proc/meminfo nor a control group gives this machine's memory, which a profile needs"
        )
    return next(filter(None, collectives.exchange_texts(mine)), "")


def _why_not_writable(path: Path | None) -> str:
    if path is None:
        return ""
    if path.is_dir():
        return f"{path}: is a folder; give the name of a file in --output"
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}."):
            return ""
    except OSError as error:
        return f"{path}: {error.strerror}; give a file in --output that can be written"


# --- measuring --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """The measurements, the same on all ranks.

    Bytes are of one rank, but in `inter` of one node.  inter, intra: empty if there is nothing to measure.
    load_alone_s: the time of a load as large as the last of `h2d` while only one rank of each node loads.
    gather_slowdown: the factor by which `intra` takes longer while all ranks load.  Both are None with one
    rank on a node, or on a CPU.  ranks_on_machine: as torchrun started them.
    """

    device_type: str
    device_name: str
    backend: str
    nodes: int
    ranks_per_node: int
    ranks_on_machine: int
    device_memory_bytes: int
    host_memory_bytes: int
    shares_memory: bool
    inter: Sequence[Timed]
    intra: Sequence[Timed]
    h2d: Sequence[Timed]
    d2h: Sequence[Timed]
    copy: Timed
    matmul: Arithmetic
    load_alone_s: float | None
    gather_slowdown: float | None


def sizes_up_to(max_bytes: int) -> list[int]:
    """The sizes that are measured, ascending; the largest is the last one."""
    count = math.ceil(math.log(max(max_bytes / LEAST_BYTES, 1), _GROWTH))
    return [*(LEAST_BYTES * _GROWTH**i for i in range(count)), max(max_bytes, LEAST_BYTES)]


def _measure(
    probing: Probing, topology: Topology, device: Device, request: ProbeRequest
) -> Findings:
    sizes = sizes_up_to(min(request.max_bytes, probing.room_bytes()))
    g, seconds = topology.ranks_per_node, request.seconds
    budget_s = {of: share * seconds for of, share in _SHARES.items()}
    # On a CPU, loads only measure memory and cores.
    has_links = isinstance(device, StreamDevice) and g > 1
    h2d = probing.loads(sizes, budget_s=budget_s[Measured.H2D])
    d2h = probing.stores(sizes, budget_s=budget_s[Measured.D2H])
    alone_s = None
    if has_links:
        alone_s = probing.load_alone_s(h2d[-1].bytes, budget_s=_ALONE * seconds)
    intra, slowdown = list[Timed](), None
    if g > 1:
        kind, of = Kind.INTRA_ALL_GATHER, Measured.INTRA_ALL_GATHER
        intra = probing.gathers(kind, sizes, budget_s=budget_s[of])
    if has_links:
        slowdown = probing.gather_slowdown(intra[-1], h2d[-1])
    inter = list[Timed]()
    if request.inter_bytes_per_s is None:
        kind, of = Kind.INTER_ALL_GATHER, Measured.INTER_ALL_GATHER
        inter = probing.gathers(kind, sizes, budget_s=budget_s[of])
    rows = probing.collectives.agree(list(_memory_bytes(topology, probing)))
    device_memory, host_memory = (min(column) for column in zip(*rows, strict=True))
    return Findings(
        device_type=device.torch.type,
        device_name=device.name(),
        backend="" if topology.intra is None else dist.get_backend(topology.intra),
        nodes=topology.nodes,
        ranks_per_node=g,
        ranks_on_machine=ranks_on_machine(topology),
        device_memory_bytes=device_memory,
        host_memory_bytes=host_memory,
        shares_memory=device.shares_memory,
        inter=[Timed(g * t.bytes, t.seconds) for t in inter],
        intra=intra,
        h2d=h2d,
        d2h=d2h,
        copy=probing.copy(sizes[-1], budget_s=budget_s[Measured.COPY]),
        matmul=probing.matmul(budget_s=budget_s[Measured.MATMUL]),
        load_alone_s=alone_s,
        gather_slowdown=slowdown,
    )


def _memory_bytes(topology: Topology, probing: Probing) -> tuple[int, int]:
    """The memory of one rank's device, and of one node's host."""
    machine = total_bytes()
    assert machine is not None, "a machine that does not say is refused"
    of_rank = machine // ranks_on_machine(topology)
    host = of_rank * topology.ranks_per_node
    total = probing.device.total_bytes()
    if total is None:  # the device is the host, and ranks share it
        return of_rank, host
    return total // probing.ranks_on_device, host


# --- the profile ------------------------------------------------------------------------------------------


def profile_of(found: Findings, request: ProbeRequest) -> ClusterProfile:
    """The profile of a cluster with these measurements."""
    sharing = _ranks_per_host_link(found)
    known = assumed_machine(found.device_type)
    inter = replace(known.inter, bytes_per_s=request.inter_bytes_per_s or known.inter.bytes_per_s)
    slug = re.sub(r"[^a-z0-9]+", "-", found.device_name.lower()).strip("-")
    return ClusterProfile(
        name=request.name or f"{found.nodes}x{found.ranks_per_node}-{slug}",
        device_type=found.device_type,
        nodes=found.nodes,
        ranks_per_node=found.ranks_per_node,
        device_memory_bytes=found.device_memory_bytes,
        host_memory_bytes=found.host_memory_bytes,
        shares_memory=found.shares_memory,
        ranks_per_host_link=sharing,
        intra_over_host_link=(found.gather_slowdown or 1.0) > _SLOWER,
        machine=Machine(
            inter=fit_link(found.inter) if found.inter else inter,
            intra=fit_link(found.intra) if found.intra else known.intra,
            h2d=_shared(fit_link(found.h2d), sharing),
            d2h=_shared(fit_link(found.d2h), sharing),
            flops_per_s=found.matmul.flops / found.matmul.seconds,
            memory_bytes_per_s=found.copy.bytes / found.copy.seconds,
        ),
        source=_source(found, inter),
        samples=_samples(found),
    )


def _ranks_per_host_link(found: Findings) -> int:
    """How many ranks share a host link: the factor by which a load takes longer when all ranks load.

    The result is the nearest divisor of the number of ranks of a node.
    """
    if found.load_alone_s is None:
        return 1
    ratio = found.h2d[-1].seconds / found.load_alone_s
    g = found.ranks_per_node
    divisors = [d for d in range(1, g + 1) if g % d == 0]
    return min(divisors, key=lambda d: abs(math.log(d / ratio)))


def _shared(link: Link, ranks: int) -> Link:
    """The whole link, given the share that each of its ranks got while all used it at once."""
    return replace(link, bytes_per_s=ranks * link.bytes_per_s)


def _samples(found: Findings) -> tuple[Sample, ...]:
    times = {
        Measured.INTER_ALL_GATHER: found.inter,
        Measured.INTRA_ALL_GATHER: found.intra,
        Measured.H2D: found.h2d,
        Measured.D2H: found.d2h,
        Measured.COPY: [found.copy],
    }
    moved = [
        Sample(of=of, bytes=t.bytes, flops=0, seconds=t.seconds)
        for of, ts in times.items()
        for t in ts
    ]
    flops, seconds = found.matmul
    return (*moved, Sample(of=Measured.MATMUL, bytes=0, flops=flops, seconds=seconds))


def _source(found: Findings, inter: Link) -> str:
    today = datetime.datetime.now(datetime.UTC).date()
    group = f", {found.backend}" if found.backend else ""
    said = [f"measured on {today} by fcdp probe, torch {torch.__version__}{group}"]
    if not found.inter:
        latency_us = 1e6 * inter.latency_s
        said.append(f"between nodes as stated, with an assumed latency of {latency_us:.0f} us")
    elif found.nodes > 1 and found.ranks_on_machine > found.ranks_per_node:
        said.append("nodes are parts of one machine, so the link between them is not a network")
    if found.ranks_per_node > found.ranks_on_machine:
        said.append("a node is several machines, so the link within it is a network")
    if not found.intra:
        said.append("one rank on a node, so the speed between a node's ranks is assumed")
    if found.device_type == "cpu":
        said.append("a CPU has no pinned memory, so H2D and D2H are copies of plain memory")
    return "; ".join(said)
