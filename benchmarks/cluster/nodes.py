"""Nodes, their cards, and the switch between them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from benchmarks.cluster.errors import ClusterError
from benchmarks.cluster.processes import (
    NAMESPACES,
    end_processes,
    is_alive,
    processes_of,
    started_at,
)
from benchmarks.cluster.rates import token_bucket

CARD = "eth0"
"""The name of the card inside of every node."""
MOST_NODES = 254
_NAME = re.compile(r"fcdp-(\d+)-(\d+)-[0-9a-f]+-(?:node\d+|switch)")


class CardBytes(NamedTuple):
    """The bytes that a node's card has sent to the switch and received from it, with headers."""

    sent_bytes: int
    received_bytes: int


def why_not() -> str | None:
    """Try to make one node; return in one sentence why this machine cannot have nodes, or None if it can."""
    try:
        with Nodes(1, bits_per_s=10**9):
            return None
    except ClusterError as error:
        return str(error)


class Nodes:
    """Nodes joined by a switch; a context manager that always removes everything that it made.

    bits_per_s: each card's limit for sending, and for receiving; None is no limit.

    Raises: ClusterError on entry if the machine cannot have nodes.
    """

    def __init__(self, count: int, *, bits_per_s: int | None = None) -> None:
        # The names contain this process's id, so that a later launcher can tell leftovers of a crash.
        prefix = f"fcdp-{os.getpid()}-{started_at(os.getpid())}-{secrets.token_hex(2)}"
        self._switch = f"{prefix}-switch"
        self._names = [f"{prefix}-node{i}" for i in range(count)]
        self._bits_per_s = bits_per_s

    def __enter__(self) -> Nodes:
        if os.geteuid() != 0:
            raise ClusterError("making network namespaces needs root")
        if missing := [tool for tool in ("ip", "tc") if not shutil.which(tool)]:
            raise ClusterError(f"{' and '.join(missing)} not found; install iproute2")
        remove_leftovers()
        try:
            _call("ip", "netns", "add", self._switch)
            self._ip(self._switch, "link", "add", "br0", "type", "bridge")
            self._ip(self._switch, "link", "set", "br0", "up")
            for node in range(len(self._names)):
                self._plug_in(node)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._names)

    def address(self, node: int) -> str:
        """The IPv4 address of a node."""
        return f"10.0.0.{node + 1}"

    def start(self, node: int, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a command on a node; options are those of Popen.

        The environment names the card: in CLUSTER_IFNAME for the command, and in variables of the libraries.
        """
        own = dict.fromkeys(("CLUSTER_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), CARD)
        environment = {**options.pop("env", os.environ), **own}
        inside = ["ip", "netns", "exec", self._names[node], *command]
        return subprocess.Popen(inside, env=environment, **options)

    def processes(self, node: int) -> list[int]:
        """The ids of the processes that run on a node."""
        return processes_of(self._names[node])

    def limit(self, node: int, bits_per_s: int | None) -> None:
        """Limit the rate at which a node's card sends and receives, from now on."""
        for place in self._ends(node):
            _limit(*place, bits_per_s)

    def cut(self, node: int) -> None:
        """Pull out a node's cable; packets are lost without an error."""
        self._ip(self._switch, "link", "set", _port(node), "down")

    def join(self, node: int) -> None:
        """Put a node's cable back."""
        self._ip(self._switch, "link", "set", _port(node), "up")

    def traffic(self, node: int) -> CardBytes:
        """Return the bytes that have crossed a node's card so far."""
        text = self._ip(self._names[node], "-s", "-j", "link", "show", CARD)
        counted = json.loads(text)[0]["stats64"]
        return CardBytes(counted["tx"]["bytes"], counted["rx"]["bytes"])

    def end_processes(self) -> None:
        """End all processes on the nodes."""
        end_processes(self._names)

    def close(self) -> None:
        """End the nodes' processes; remove the nodes with their cards and limits, and the switch."""
        with _signals_wait():
            self.end_processes()
            _remove([*self._names, self._switch])

    def _plug_in(self, node: int) -> None:
        name, port = self._names[node], _port(node)
        _call("ip", "netns", "add", name)
        pair = ["type", "veth", "peer", "name", CARD, "netns", name]
        self._ip(self._switch, "link", "add", port, *pair)
        self._ip(name, "link", "set", CARD, "addrgenmode", "none")  # IPv4 alone
        self._ip(name, "address", "add", f"{self.address(node)}/24", "dev", CARD)
        if self._bits_per_s is not None:
            self.limit(node, self._bits_per_s)
        self._ip(self._switch, "link", "set", port, "master", "br0", "up")
        self._ip(name, "link", "set", "lo", "up")
        self._ip(name, "link", "set", CARD, "up")

    def _ends(self, node: int) -> list[tuple[str, str]]:
        """Return namespace and card at both ends of a cable: the node sends by one, receives by the other."""
        return [(self._names[node], CARD), (self._switch, _port(node))]

    def _ip(self, namespace: str, *arguments: str) -> str:
        return _call("ip", "-n", namespace, *arguments)


def remove_leftovers() -> None:
    """Remove the nodes of launchers that were killed before they could remove them."""
    if not NAMESPACES.is_dir():
        return
    left = []
    for entry in NAMESPACES.iterdir():
        made = _NAME.fullmatch(entry.name)
        if made and not is_alive(int(made[1]), int(made[2])):
            left.append(entry.name)
    if left:
        with _signals_wait():
            end_processes(left)
            _remove(left)


def _remove(namespaces: Sequence[str]) -> None:
    for name in namespaces:
        # A namespace that was never made, or that another launcher has just removed, is no error.
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _port(node: int) -> str:
    return f"port{node}"


def _limit(namespace: str, device: str, bits_per_s: int | None) -> None:
    where = ["tc", "-n", namespace, "qdisc"]
    root = ["dev", device, "root"]
    if bits_per_s is None:
        _call(*where, "replace", *root, "noqueue")
        return
    try:
        _call(*where, "replace", *root, *token_bucket(bits_per_s))
    except ClusterError as error:
        if "unknown" not in str(error) and "No such file" not in str(error):
            raise
        raise ClusterError(
            "this kernel has no token bucket filter, so links cannot be limited; "
            "load it with `modprobe sch_tbf`, or leave --bandwidth and --slow away"
        ) from None


def _call(*command: str) -> str:
    """Run a tool and return its output; a Ctrl-C at the terminal does not reach the tool.

    Raises: ClusterError with the tool's own message.
    """
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, start_new_session=True
    )
    if done.returncode:
        why = " ".join(done.stderr.split()) or f"exit {done.returncode}"
        raise ClusterError(f"`{' '.join(command)}` failed: {why}")
    return done.stdout


@contextlib.contextmanager
def _signals_wait() -> Iterator[None]:
    """Block signals that would end this process until the block is done, so that nothing is left behind."""
    ending = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ending)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
