"""`fcdp probe` finds the speed that was set between simulated nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from fcdp_compile.cluster.profile import Measured, find_profile
from tests.cluster.simulated import needs_nodes, run_on_nodes

pytestmark = needs_nodes

_LIMIT_BYTES_PER_S = 200e6 / 8


@pytest.mark.rare
def test_a_limited_card_is_found(tmp_path: Path) -> None:
    """The token bucket is the upper limit; headers, and messages that peers wait for, take up to a tenth."""
    path = tmp_path / "cluster.json"
    job = ["--nodes", 2, "--ranks-per-node", 2, "--bandwidth", "200mbit", "--timeout", 200, "--"]
    job += ["-m", "fcdp_compile.cli", "probe", "--output", path]
    job += ["--max-size", "1MiB", "--seconds", "25", "--name", "limited"]
    done = run_on_nodes(job)
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)  # noqa: T201
    profile = find_profile(str(path))
    assert (profile.nodes, profile.ranks_per_node) == (2, 2)
    inter = [s for s in profile.samples if s.of is Measured.INTER_ALL_GATHER]
    assert inter[-1].bytes == 2 * 2**20, "the control: there was time for more than the burst"
    assert 0.8 * _LIMIT_BYTES_PER_S < profile.machine.inter.bytes_per_s < 1.2 * _LIMIT_BYTES_PER_S
    assert profile.machine.intra.bytes_per_s > 2 * _LIMIT_BYTES_PER_S, "nothing limits a node"
    assert "limited: 2 x 2 ranks, cpu; measured on " in done.stdout
    assert "Is the host faster than your network? Yes, " in done.stdout
