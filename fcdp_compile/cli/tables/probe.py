"""A cluster profile for reading: links, the paper's table III, and the conclusion for strategies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fcdp_compile.cluster.link_fit import Timed, worst_deviation
from fcdp_compile.cluster.profile import ClusterProfile, Measured, Sample
from fcdp_compile.models.files.json_records import one_line
from fcdp_compile.plan.cost import Link
from fcdp_compile.tools.view.table import table

_TABLE_BYTES = 16 * 10**9
"""The bytes that table III of FCDP (Park et al.) moves over each link."""

_NAMES = {
    Measured.INTER_ALL_GATHER: "network, of a node",
    Measured.INTRA_ALL_GATHER: "within a node, of a rank",
    Measured.H2D: "host to device, of a rank",
    Measured.D2H: "device to host, of a rank",
    Measured.COPY: "copy on the device",
    Measured.MATMUL: "matrix product",
}
_MIB, _GIB, _G = 2**20, 2**30, 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class TableThree:
    """Seconds for 16 GB over each link of a cluster.

    network_s, within_s: an all-gather of 16 GB between nodes and within a node; (N-1)/N of the bytes cross
    each node's card, for all its ranks together, and (g-1)/g leave each rank of a node.  h2d_s, d2h_s: 16 GB
    over a rank's share of a host link.
    """

    network_s: float
    within_s: float
    h2d_s: float
    d2h_s: float

    @property
    def host_is_faster(self) -> float:
        """How many times as fast as the network one rank's host link moves 16 GB."""
        return self.network_s / self.h2d_s


def table_three(profile: ClusterProfile) -> TableThree:
    """Return the paper's table III for a cluster; for two nodes if the profile has no number of nodes."""
    machine = profile.rank_machine
    n, g = _nodes(profile), profile.ranks_per_node
    return TableThree(
        network_s=machine.inter.time_s(_TABLE_BYTES * (n - 1) / n),
        within_s=machine.intra.time_s(_TABLE_BYTES * (g - 1) / g),
        h2d_s=machine.h2d.time_s(_TABLE_BYTES),
        d2h_s=machine.d2h.time_s(_TABLE_BYTES),
    )


def verdict(profile: ClusterProfile) -> str:
    """Say in two lines whether the host is faster than the network, and what follows for strategies."""
    three, g = table_three(profile), profile.ranks_per_node
    once, node = three.host_is_faster, g * three.host_is_faster
    times = (
        f"a rank loads 16 GB from host memory in {three.h2d_s:.4g} s, and {_nodes(profile)} nodes gather "
        f"16 GB over the network in {three.network_s:.4g} s"
    )
    answer = (
        f"Yes, {once:.3g} times" if once > 1 else f"No, the network is {1 / once:.3g} times as fast"
    )
    times_as_long = f"1/{node:.3g} of the time" if node > 1 else f"{1 / node:.3g} times the time"
    has = f"a node loads 16 GB from host memory in {times_as_long}"
    together = (
        f"The {g} ranks of a node load at once, each its part, but share one network card, so {has}"
        if g > 1
        else f"So {has}"
    )
    advice = (
        "fcdp gains: it loads the parameters that other strategies gather again."
        if node > 1
        else "fcdp gains nothing if it loads parameters instead of gathering them again: zero3 needs no "
        "host memory, and "
        "zero++ keeps node shards on the GPU."
    )
    return f"Is the host faster than your network? {answer}: {times}.\n{together}: {advice}"


def format_profile(profile: ClusterProfile) -> str:
    """Return everything about a profile as text."""
    nodes = "" if profile.nodes is None else f"{profile.nodes} x "
    title = (
        f"{one_line(profile.name)}: {nodes}{profile.ranks_per_node} ranks, {profile.device_type}; "
        f"{one_line(profile.source)}"
    )
    sections = [
        title,
        _samples(profile.samples),
        _links(profile),
        _devices(profile),
        verdict(profile),
    ]
    return "\n\n".join(section for section in sections if section)


def _nodes(profile: ClusterProfile) -> int:
    return max(2, profile.nodes or 2)


def _links(profile: ClusterProfile) -> str:
    machine, three = profile.rank_machine, table_three(profile)
    rows = [
        _link_row(profile, of, link, seconds)
        for of, link, seconds in (
            (Measured.INTER_ALL_GATHER, machine.inter, three.network_s),
            (Measured.INTRA_ALL_GATHER, machine.intra, three.within_s),
            (Measured.H2D, machine.h2d, three.h2d_s),
            (Measured.D2H, machine.d2h, three.d2h_s),
        )
    ]
    headers = ("link", "latency us", "GB/s", "16 GB in s", "from")
    return table(headers, rows, ("left", "right", "right", "right", "left"))


def _link_row(profile: ClusterProfile, of: Measured, link: Link, seconds: float) -> tuple[str, ...]:
    figures = f"{1e6 * link.latency_s:.1f}", _short(link.bytes_per_s / _G)
    samples = [s for s in profile.samples if s.of is of]
    if not samples:
        return (_NAMES[of], *figures, _short(seconds) if seconds else "", "not measured")
    largest = max(s.bytes for s in samples)
    off = worst_deviation([Timed(s.bytes, s.seconds) for s in samples], link)
    how = "measured in" if largest >= _TABLE_BYTES else "extrapolated from"
    text = f"{how} {len(samples)} sizes up to {largest / _MIB:.3f} MiB, at most {off:.0%} off"
    if link.latency_s > largest / link.bytes_per_s:
        # The time that bytes add is then small beside the scatter of the measurements.
        text += "; mostly latency, so GB/s is a guess: use more --seconds"
    return (_NAMES[of], *figures, _short(seconds), text)


def _devices(profile: ClusterProfile) -> str:
    machine = profile.machine
    rows = [
        ("matrix products of a rank", "TFLOP/s", _short(machine.flops_per_s / 1e12)),
        ("device memory of a rank", "GB/s", _short(machine.memory_bytes_per_s / _G)),
        ("device memory of a rank", "GiB", f"{profile.device_memory_bytes / _GIB:.1f}"),
        ("host memory of a node", "GiB", f"{profile.host_memory_bytes / _GIB:.1f}"),
        ("ranks that share a link to the host", "", str(profile.ranks_per_host_link)),
        (
            "traffic between ranks of a node uses this link",
            "",
            "yes" if profile.intra_over_host_link else "no",
        ),
    ]
    return table(("of this cluster", "unit", "found"), rows, ("left", "left", "right"))


def _samples(samples: Sequence[Sample]) -> str:
    if not samples:
        return ""
    rows = [
        (
            _NAMES[s.of],
            f"{s.bytes / _MIB:.3f}",
            f"{1e3 * s.seconds:.3f}",
            _short(s.bytes / s.seconds / _G),
        )
        for s in samples
        if s.of is not Measured.MATMUL
    ]
    headers = ("all at once", "MiB", "ms", "GB/s")
    return table(headers, rows, ("left", "right", "right", "right"))


def _short(number: float) -> str:
    return f"{number:.4g}"
