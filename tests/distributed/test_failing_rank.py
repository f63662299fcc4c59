"""A rank that fails while its lanes wait for others ends with its own exit code, and soon."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time

import pytest

SCRIPT = """
import sys, time
from types import SimpleNamespace

import torch
import torch.distributed as dist

from fcdp_compile.devices import Cpu
from fcdp_compile.plan import Kind, Lane
from fcdp_compile.runtime.collectives.collectives import Collectives
from fcdp_compile.runtime.collectives.counters import Counters
from fcdp_compile.runtime.lanes.lanes import Lanes

rank, port, leaves = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
lanes = Lanes(Cpu(), is_blocking=True)
group = dist.new_group([0, 1], backend="gloo")  # nobody else holds it
world = SimpleNamespace(inter=group, control=group, intra=None, nodes=2, ranks_per_node=1, ranks=2)
collectives = Collectives(world, Counters(), lanes)
print("here", flush=True)
if rank == 1:
    time.sleep(120)  # it never comes to the collective
gather = collectives.all_gather(Kind.INTER_ALL_GATHER, torch.ones(4), "gather")
lanes.start(Lane.D2H, lambda: None, out=torch.ones(1), reads=[gather], name="store")
time.sleep(1.0)  # the gather is under way, and has looked around more than once
assert not lanes.exiting.is_set()

print("leaving", flush=True)
del group, world
if leaves == "is interrupted":
    collectives.agree([0])
if leaves == "destroys the group":
    dist.destroy_process_group()
    sys.exit(3)
raise SystemExit(3) if leaves == "exits" else ValueError("the user's")
"""


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("leaves", "code", "peer_lives"),
    [
        pytest.param("exits", 3, True, marks=pytest.mark.slow),
        pytest.param("raises", 1, True, marks=pytest.mark.slow),
        pytest.param("raises", 1, False, marks=pytest.mark.rare),
        pytest.param("destroys the group", 3, True, marks=pytest.mark.rare),
        pytest.param("destroys the group", 3, False, marks=pytest.mark.slow),
        # torch prints uncaught errors itself, KeyboardInterrupt too
        pytest.param("is interrupted", 1, True, marks=pytest.mark.rare),
    ],
)
def test_it_ends_with_its_own_exit_code(leaves: str, code: int, peer_lives: bool) -> None:
    """While its peer lives, and also if the peer ends at that moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])

    def start(rank: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(rank), port, leaves]
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
        )

    peer, failing = start(1), start(0)
    try:
        assert failing.stdout is not None
        assert failing.stdout.readline() == "here\n"
        assert failing.stdout.readline() == "leaving\n"
        if leaves == "is interrupted":
            time.sleep(1.0)
            failing.send_signal(signal.SIGINT)
        if not peer_lives:
            peer.kill()
        _, errors = failing.communicate(timeout=60)
        assert not peer_lives or peer.poll() is None
        assert failing.returncode == code, errors
        assert "terminate called" not in errors
    finally:
        for process in (peer, failing):
            process.kill()
            process.communicate()
