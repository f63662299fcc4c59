"""The networks between the nodes: their names and speeds, and how a running node changes its network.

`benchmarks.cluster` limits links for a whole job.  Here a job starts uncapped and changes the cap between
steps, so that one set of processes is measured on every network in turn: there is no second start and no
second compilation, and other load on the machine slows all networks alike.  With two nodes, each receives
what the other sends, so capping the senders caps both ways.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cluster.rates import token_bucket


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """A speed between nodes; bits_per_s: None for no cap."""

    name: str
    bits_per_s: int | None

    def transfer_s(self, sent_bytes: float) -> float:
        """Return the least time that a node needs to send these bytes."""
        return 0.0 if self.bits_per_s is None else 8 * sent_bytes / self.bits_per_s


NETWORKS = {
    network.name: network
    for network in (
        Network(name="unlimited", bits_per_s=None),
        Network(name="1gbit", bits_per_s=10**9),
        Network(name="100mbit", bits_per_s=10**8),
    )
}


def card() -> str:
    """Return the name of this node's network card.

    Raises: RuntimeError on a machine that is no node of `benchmarks.cluster`.
    """
    name = os.environ.get("CLUSTER_IFNAME")
    if not name:
        raise RuntimeError(
            "CLUSTER_IFNAME is not set; start the worker with `python -m benchmarks.cluster`"
        )
    return name


def sent_bytes() -> int:
    """Return the bytes that this node has sent to other nodes so far, as its card counts them."""
    return int(Path(f"/sys/class/net/{card()}/statistics/tx_bytes").read_text())


def cap(network: Network) -> None:
    """Cap the rate at which this node sends; to be called by one rank of each node."""
    device = ["dev", card(), "root"]
    # `del` fails if nothing is capped, which is fine.
    subprocess.run(["tc", "qdisc", "del", *device], capture_output=True, check=False)
    if network.bits_per_s is not None:
        limit = token_bucket(network.bits_per_s)
        subprocess.run(["tc", "qdisc", "add", *device, *limit], check=True)
