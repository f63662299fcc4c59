"""Nodes on one machine: the bytes on their links, troubles, and that nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.cluster.__main__ import main
from benchmarks.cluster.arguments import parse
from benchmarks.cluster.nodes import Nodes, why_not
from benchmarks.cluster.processes import NAMESPACES
from benchmarks.cluster.rates import read_rate, write_rate
from benchmarks.cluster.report import Cable, Report
from benchmarks.cluster.trouble import Straggler, Timetable
from tests.cluster.simulated import ROOT, command, environment, needs_nodes, run_on_nodes

_SIZE = 2**20
_BURST = 2 * 128 * 2**10  # a burst at both ends of a cable
_MBIT = 10**6 / 8  # bytes/s
_PATIENCE_S = 60.0


def _on_nodes(test: Callable[..., None]) -> Callable[..., None]:
    for mark in needs_nodes:
        test = mark(test)
    return test


_SINK = """
import socket
with socket.create_server(("0.0.0.0", 4000)) as server:
    while True:
        with server.accept()[0] as peer:
            while peer.recv(65536): pass
            peer.sendall(b"!")
"""
_SEND = f"""
import socket, sys, time
while True:
    try:
        peer = socket.create_connection((sys.argv[1], 4000))
        break
    except ConnectionRefusedError:
        time.sleep(0.02)
began = time.monotonic()
peer.sendall(bytes({_SIZE}))
peer.shutdown(socket.SHUT_WR)
peer.recv(1)
print(time.monotonic() - began)
"""


def _wait_for(what: Callable[[], bool]) -> None:
    until = time.monotonic() + _PATIENCE_S
    while not what():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"  # a zombie has ended


@_on_nodes
def test_links_count_limit_and_break() -> None:
    """No transfer is faster than its link; no byte crosses a cut one; a mended one goes on."""
    with Nodes(2, bits_per_s=40 * 10**6) as nodes:
        nodes.start(1, [sys.executable, "-c", _SINK])

        def start() -> subprocess.Popen[str]:
            send = [sys.executable, "-c", _SEND, nodes.address(1)]
            sender: subprocess.Popen[str] = nodes.start(0, send, stdout=subprocess.PIPE, text=True)
            return sender

        def seconds(sender: subprocess.Popen[str]) -> float:
            return float(sender.communicate(timeout=_PATIENCE_S)[0])

        assert seconds(start()) >= (_SIZE - _BURST) / (40 * _MBIT)
        there, here = nodes.traffic(1), nodes.traffic(0)
        assert _SIZE < here.sent_bytes < 1.2 * _SIZE
        assert _SIZE < there.received_bytes < 1.2 * _SIZE
        assert there.sent_bytes < 0.2 * _SIZE, "acknowledgements"

        nodes.limit(1, 16 * 10**6)
        assert seconds(start()) >= (_SIZE - _BURST) / (16 * _MBIT)

        before = nodes.traffic(1).received_bytes
        sender = start()
        _wait_for(lambda: nodes.traffic(1).received_bytes > before + 2**17)
        nodes.cut(1)
        cut = nodes.traffic(1).received_bytes
        time.sleep(0.5)  # without the limit all bytes could cross in this time
        assert nodes.traffic(1).received_bytes == cut
        assert sender.poll() is None
        nodes.join(1)
        seconds(sender)
        assert nodes.traffic(1).received_bytes - before > _SIZE


@_on_nodes
def test_a_straggler_runs_for_its_fraction_of_the_time() -> None:
    with Nodes(1) as nodes:
        busy = nodes.start(0, [sys.executable, "-c", "while True: pass"])
        timetable = Timetable(nodes, stragglers=[Straggler(node=0, fraction=0.3)])

        def busy_s() -> float:
            fields = Path(f"/proc/{busy.pid}/stat").read_text().rpartition(")")[2].split()
            return int(fields[11]) / os.sysconf("SC_CLK_TCK")

        began_s, before_s = time.monotonic(), busy_s()
        while time.monotonic() < began_s + 1:
            time.sleep(timetable.advance(None))
        assert 0 < busy_s() - before_s < 0.7 * (time.monotonic() - began_s)
    assert busy.wait(_PATIENCE_S) == -signal.SIGTERM, "also where it was stopped"


_CUT_OFF = """
import os, socket
place = (os.environ["MASTER_ADDR"], 4000)
print("card", os.environ["CLUSTER_IFNAME"])
socket.setdefaulttimeout(10)
if os.environ["RANK"] == "0":
    peer = socket.create_server(place).accept()[0]
else:
    peer = None
while peer is None:
    try:
        peer = socket.create_connection(place)
    except ConnectionRefusedError:
        pass
peer.settimeout(1)
while True:
    peer.recv(65536) if os.environ["RANK"] == "0" else peer.sendall(bytes(65536))
"""


@_on_nodes
def test_a_cut_link_ends_the_job_with_an_error(tmp_path: Path) -> None:
    """Yet the report is printed, alone on stdout, and the end of the failed rank's log on stderr."""
    script = tmp_path / "worker.py"
    script.write_text(_CUT_OFF)
    job = ["--bandwidth", "20mbit", "--cut", "1@2", "--slow", "0=10mbit@1", "--timeout", 120]
    done = run_on_nodes([*job, "--format", "json", "--log-dir", tmp_path / "logs", "--", script])
    report = json.loads(done.stdout)
    assert done.returncode == report["exit_code"] == 1, done.stderr
    assert [link["exit_code"] for link in report["links"]] == [1, 1]
    sent = report["links"][1]["sent_bytes"]
    assert 0 < sent < 60 * 20 * _MBIT
    assert "card eth0" in done.stderr, "the first rank's output"
    assert "TimeoutError: timed out" in done.stderr


@_on_nodes
@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM"])
def test_nothing_is_left_behind(number: str, tmp_path: Path) -> None:
    """Neither by a launcher that is asked to end, nor by an earlier launcher that was killed outright."""
    crash = """
import os, subprocess
from benchmarks.cluster.nodes import Nodes
nodes = Nodes(2).__enter__()
nowhere = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
print(nodes.start(1, ["sleep", "1000"], **nowhere).pid, *nodes._names, flush=True)
os.kill(os.getpid(), 9)
"""
    killed = subprocess.run(
        [sys.executable, "-c", crash],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    orphan, *namespaces = killed.stdout.split()
    assert len(namespaces) == 2, killed.stderr

    script = tmp_path / "worker.py"
    script.write_text("import os, time\nopen(f'{os.getpid()}.rank', 'w').close()\ntime.sleep(1000)")
    launcher = subprocess.Popen(
        command("--ranks-per-node", 2, "--", script),
        env={**environment(), "TMPDIR": str(tmp_path)},
        cwd=tmp_path,
        stderr=subprocess.DEVNULL,
    )
    own = f"fcdp-{launcher.pid}-"
    ranks: list[int] = []
    if number == "SIGTERM":
        _wait_for(lambda: len(list(tmp_path.glob("*.rank"))) == 4)
        ranks = [int(path.stem) for path in tmp_path.glob("*.rank")]
    else:
        _wait_for(lambda: any(p.name.startswith(own) for p in NAMESPACES.iterdir()))
    launcher.send_signal(getattr(signal, number))
    assert launcher.wait(_PATIENCE_S) == 128 + getattr(signal, number)
    names = [path.name for path in NAMESPACES.iterdir()]
    assert not [name for name in names if name.startswith(own) or name in namespaces]
    assert not [pid for pid in (int(orphan), *ranks) if _runs(pid)]
    assert not list(tmp_path.glob("fcdp-cluster-*")), "logs that nobody asked for"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([], "no script; write it and its arguments after --"),
        (["--nodes", "0", "x"], "--nodes is between 1 and 254, not 0"),
        (["--ranks-per-node", "0", "x"], "--ranks-per-node is at least 1, not 0"),
        (["--timeout", "0", "x"], "--timeout is above 0 seconds, not 0"),
        (["--grace=-1", "x"], "--grace is 0 seconds or more, not -1"),
        (["--bandwidth", "1gb", "x"], "'1gb' is no rate; write 100mbit, 1gbit, 2.5gbit, or none"),
        (["--bandwidth", "5bit", "x"], "a card cannot be limited to 5bit; the least is 10kbit"),
        (["--cut", "1", "x"], "'1' has no '@'; write NODE@SECONDS, such as 1@20"),
        (["--cut", "2@1", "x"], "there is no node 2; --nodes 2 makes nodes 0 to 1"),
        (["--cut", "one@1", "x"], "'one' is no number of a node; nodes are counted from 0"),
        (["--cut", "1@soon", "x"], "'soon' is no number"),
        (["--cut", "1@-1", "x"], "'-1' is no time; write seconds, 0 or more"),
        (["--slow", "1", "x"], "'1' has no '='; write NODE=RATE, such as 1=100mbit"),
        (["--slow", "1=fast", "x"], "'fast' is no rate"),
        (["--straggler", "1=2", "x"], "a straggler's fraction is above 0 and below 1, not 2"),
        (["--straggler", "1=.5", "--straggler", "1=.6", "x"], "--straggler names a node twice"),
    ],
)
def test_nonsense_is_refused_in_one_line(
    arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(arguments)
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert why in error
    assert error.count("\n") == 1


def test_a_machine_that_cannot_have_nodes_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert why_not() == "making network namespaces needs root"
    assert main(["--", "x"]) == 2
    assert capsys.readouterr().err.endswith("cluster: making network namespaces needs root\n")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "ip").write_text("#!/bin/sh\n")
    (tmp_path / "ip").chmod(0o755)
    assert why_not() == "tc not found; install iproute2"
    (tmp_path / "tc").write_text(
        "#!/bin/sh\necho 'Error: Specified qdisc kind is unknown.' >&2\nexit 2\n"
    )
    (tmp_path / "tc").chmod(0o755)
    assert str(why_not()).startswith("this kernel has no token bucket filter, so links cannot be")
    (tmp_path / "tc").write_text("#!/bin/sh\n")
    (tmp_path / "ip").write_text("#!/bin/sh\necho 'Operation not permitted' >&2\nexit 1\n")
    assert "ip netns add" in str(why_not())
    assert str(why_not()).endswith("failed: Operation not permitted")


def test_rates_and_reports_as_text() -> None:
    assert read_rate("none") is None
    for text in ("10kbit", "100mbit", "2.5gbit", "12gbit"):
        assert write_rate(read_rate(text)) == text
    links = [
        Cable(
            node=i, address=f"10.0.0.{i + 1}", exit_code=i, sent_bytes=3 * 2**19, received_bytes=0
        )
        for i in range(2)
    ]
    report = Report(
        nodes=2, ranks_per_node=4, bits_per_s=10**9, seconds=1.23, exit_code=1, links=links
    )
    assert report.to_table() == (
        "2 x 4 ranks, bandwidth 1gbit, 1.2 s\n"
        "node   address  sent [MiB]  received [MiB]  exit\n"
        "   0  10.0.0.1       1.500           0.000     0\n"
        "   1  10.0.0.2       1.500           0.000     1\n"
        " all                 3.000           0.000     1"
    )


def test_the_launcher_imports_no_torch() -> None:
    code = "import sys, benchmarks.cluster.__main__, benchmarks.launch; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
