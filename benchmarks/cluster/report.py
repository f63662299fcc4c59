"""The report of a job: its exit codes, and the bytes that crossed each link, as a table or as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from benchmarks.cluster.rates import write_rate

_MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Cable:
    """One node, and the bytes that crossed its cable: headers count, dropped packets do not.

    exit_code: of the node's torchrun.
    """

    node: int
    address: str
    exit_code: int
    sent_bytes: int
    received_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One job.  exit_code: of the node that failed first, or 124 if time ran out."""

    nodes: int
    ranks_per_node: int
    bits_per_s: int | None
    seconds: float
    exit_code: int
    links: list[Cable]

    def to_json(self) -> str:
        """Return the report as JSON."""
        return json.dumps(asdict(self))

    def to_table(self) -> str:
        """Return a table with a row for each node and a row for all nodes."""
        sent = sum(link.sent_bytes for link in self.links)
        received = sum(link.received_bytes for link in self.links)
        rows = [("node", "address", "sent [MiB]", "received [MiB]", "exit")]
        rows += [
            (str(k.node), k.address, _mib(k.sent_bytes), _mib(k.received_bytes), str(k.exit_code))
            for k in self.links
        ]
        rows.append(("all", "", _mib(sent), _mib(received), str(self.exit_code)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        speed = write_rate(self.bits_per_s)
        title = (
            f"{self.nodes} x {self.ranks_per_node} ranks, bandwidth {speed}, {self.seconds:.1f} s"
        )
        lines = ("  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in rows)
        return "\n".join([title, *lines])


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / _MIB:.3f}"
