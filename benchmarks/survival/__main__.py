"""Train on simulated nodes, break something again and again, and say what each fault has cost.

    python -m benchmarks.survival                          60 faults of all kinds on 3 nodes
    python -m benchmarks.survival --faults 10 --kinds node,cut
    python -m benchmarks.survival --system disk            the same job from checkpoints on disk

A rendezvous store on a machine of its own outlives all nodes.  Losses are compared with those of a job that
nothing disturbs: to the bit where the number of nodes is the same, to 1e-5 elsewhere.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tabulate import tabulate

from benchmarks.cluster.nodes import Nodes
from benchmarks.cluster.rates import read_rate

KINDS = ("rank", "launcher", "node", "gone", "cut", "stop")
"""A rank is killed; a launcher; a node, replaced at once; a node, replaced later; a cable is out, or a rank
stops, for longer than ranks wait for each other."""
_UNDISTURBED = 600
"""Steps of the job that nothing disturbs."""
_LONG_S = 60
_RENDEZVOUS = (
    "is_host=0,last_call_timeout=3,read_timeout=10,keep_alive_interval=1,keep_alive_max_attempt=3"
)
_PARTS = ("imported", "grouped", "sharded", "restored", "step")
_STORE = """
import signal, torch.distributed as d
store = d.TCPStore("0.0.0.0", 29400, is_master=True, wait_for_workers=False)
signal.pause()
"""


def main() -> int:
    """Run the job, and print a table."""
    parser = argparse.ArgumentParser(description="What faults cost.")
    add = parser.add_argument
    add("--nodes", type=int, default=3, help="(%(default)s)")
    add("--ranks-per-node", type=int, default=1, help="(%(default)s)")
    add("--faults", type=int, default=60, help="(%(default)s)")
    add("--kinds", default=",".join(KINDS), help="(%(default)s)")
    add("--bandwidth", type=read_rate, default=read_rate("1gbit"), help="of a node (1gbit)")
    add("--system", choices=("survive", "disk"), default="survive")
    add("--width", type=int, default=128, help="of the model (%(default)s)")
    add("--layers", type=int, default=4, help="(%(default)s)")
    add("--pace", type=float, default=0.3, help="seconds that each step waits (%(default)s)")
    add("--seed", type=int, default=0)
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryDirectory(dir="/dev/shm") as memory,
        Nodes(args.nodes + 1, bits_per_s=args.bandwidth) as nodes,
    ):
        faults = DisturbedJob(args, nodes, Path(folder), Path(memory)).run()
    for fault in faults:
        print(json.dumps(fault.__dict__))
    headers = ("fault", "trials", "most lost steps", "seconds", *_NAMES, "sent [MB]")
    print(tabulate(_table(faults), headers=headers, floatfmt=".2f"))
    return 0


_NAMES = ("detect, restart", "imports", "groups", "model", "refill", "first step")


@dataclass
class FaultCost:
    """One fault, and what it cost.

    lost: steps that were finished and are done again.  seconds: until the next step was finished, and its
    parts.  sent: bytes that crossed the nodes' cards until then.
    """

    kind: str
    node: int
    ranks: int = 0
    lost: int = 0
    seconds: float = 0.0
    parts: list[float] = field(default_factory=list)
    sent: int = 0


class DisturbedJob:
    """The job, its nodes, and what they note."""

    def __init__(self, args: argparse.Namespace, nodes: Nodes, folder: Path, memory: Path) -> None:
        self._args, self._nodes, self._folder, self.memory = args, nodes, folder, memory
        self._random = random.Random(args.seed)
        self._agents: dict[int, subprocess.Popen[Any]] = {}
        self._members = range(args.nodes)
        for name in ("undisturbed", "disturbed"):
            (folder / name).mkdir()

    def run(self) -> list[FaultCost]:
        """Train undisturbed, and then with faults."""
        self._make_base()
        self._nodes.start(self._args.nodes, [sys.executable, "-c", _STORE])
        for node in self._members:
            self._start(node, "undisturbed", pace=0.0, steps=_UNDISTURBED)
        for agent in self._agents.values():
            agent.wait()
        for node in self._members:
            self._start(node)
        self._await_steps(3)
        faults, kinds = [], self._args.kinds.split(",")
        for number in range(self._args.faults):
            faults.append(self._break(kinds[number % len(kinds)]))
            print(f"{number + 1}: {faults[-1]}", file=sys.stderr, flush=True)
        _compare(self._steps("undisturbed"), self._steps())
        return faults

    def _make_base(self) -> None:
        from transformers import AutoModelForCausalLM, LlamaConfig  # noqa: PLC0415 - an extra

        width = self._args.width
        config = LlamaConfig(
            vocab_size=256,
            hidden_size=width,
            intermediate_size=width * 8 // 3,
            num_hidden_layers=self._args.layers,
            num_attention_heads=4,
            num_key_value_heads=4,
        )
        AutoModelForCausalLM.from_config(config).save_pretrained(self._folder / "base")

    def _start(
        self, node: int, job: str = "disturbed", *, pace: float | None = None, steps: int = 10**6
    ) -> None:
        memory = self.memory / f"node{node}"
        memory.mkdir(exist_ok=True)
        args, folder = self._args, self._folder
        command = [
            *(sys.executable, "-m", "torch.distributed.run"),
            *(f"--nnodes=1:{args.nodes}", f"--nproc-per-node={args.ranks_per_node}"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint={self._nodes.address(args.nodes)}:29400"),
            *(f"--rdzv-id={job}", f"--local-addr={self._nodes.address(node)}"),
            f"--rdzv-conf={_RENDEZVOUS}",
            *("--max-restarts=1000", "--monitor-interval=0.2"),
            *("-m", "benchmarks.survival.worker", f"--base={folder / 'base'}"),
            *(f"--notes={folder / job}", f"--steps={steps}"),
            f"--pace={args.pace if pace is None else pace}",
        ]
        if args.system == "disk":
            command.append(f"--checkpoint={folder / f'{job}-checkpoint'}")
        environment = {**os.environ, "FCDP_NODE_MEMORY": str(memory), "OMP_NUM_THREADS": "1"}
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = (
            "1"  # else a launcher that joins later waits in vain
        )
        output = (folder / f"node{node}.log").open("a")
        self._agents[node] = self._nodes.start(
            node, command, env=environment, stdout=output, stderr=output, start_new_session=True
        )

    # --- faults ---------------------------------------------------------------------------------------------

    def _break(self, kind: str) -> FaultCost:
        fault = FaultCost(kind=kind, node=self._random.choice(self._members))
        time.sleep(self._random.uniform(0.0, 1.0))
        sent = self._sent()
        begun_s = time.time()
        getattr(self, f"_{kind}")(fault.node)
        life = self._recovered(begun_s, fault)
        fault.ranks = life["grouped"]["ranks"]
        ended_s = life["begun"]["at"]
        done = max(line["step"] for line in self._steps() if line["at"] < ended_s)
        fault.lost = done - life["restored"]["step"]
        times = [begun_s, *(life[part]["at"] for part in ("begun", *_PARTS))]
        fault.parts = [round(b - a, 2) for a, b in itertools.pairwise(times)]
        fault.seconds = round(times[-1] - begun_s, 2)
        fault.sent = self._sent() - sent
        if kind == "gone":
            self._start(fault.node)
            self._recovered(time.time(), fault)
        self._await_steps(3)
        return fault

    def _supervise(self) -> None:
        """Start launchers again that have given up, as a service manager would."""
        for node, agent in list(self._agents.items()):
            if agent.poll() is not None:
                print(f"the launcher of node {node} has ended", file=sys.stderr, flush=True)
                self._start(node)

    def _rank(self, node: int) -> None:
        os.kill(self._random.choice(self._workers(node)), signal.SIGKILL)

    def _launcher(self, node: int) -> None:
        self._agents[node].kill()
        self._agents[node].wait()
        self._start(node)

    def _node(self, node: int) -> None:
        self._gone(node)
        self._start(node)

    def _gone(self, node: int) -> None:
        for pid in self._nodes.processes(node):
            os.kill(pid, signal.SIGKILL)
        self._agents[node].wait()
        del self._agents[node]
        shutil.rmtree(self.memory / f"node{node}")

    def _cut(self, node: int) -> None:
        self._nodes.cut(node)
        time.sleep(_LONG_S)
        self._nodes.join(node)

    def _stop(self, node: int) -> None:
        pid = self._random.choice(self._workers(node))
        os.kill(pid, signal.SIGSTOP)
        time.sleep(_LONG_S)
        if Path(f"/proc/{pid}").exists():
            os.kill(pid, signal.SIGCONT)

    def _workers(self, node: int) -> list[int]:
        found = []
        for pid in self._nodes.processes(node):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"benchmarks.survival.worker" in words and b"torch.distributed.run" not in words:
                found.append(pid)
        return found

    # --- notes ----------------------------------------------------------------------------------------------

    def _lives(self, job: str = "disturbed") -> list[dict[str, Any]]:
        """Each process of the job: its last event of each kind but steps, of which the first."""
        lives = []
        for path in (self._folder / job).iterdir():
            life: dict[str, Any] = {"steps": []}
            for line in _lines(path):
                if line["what"] == "step":
                    life["steps"].append(line)
                    life.setdefault("step", line)
                else:
                    life[line["what"]] = line
            lives.append(life)
        return lives

    def _steps(self, job: str = "disturbed") -> list[dict[str, Any]]:
        return [
            {**line, "ranks": life["grouped"]["ranks"]}
            for life in self._lives(job)
            for line in life["steps"]
        ]

    def _recovered(self, since_s: float, fault: FaultCost) -> dict[str, Any]:
        """The last rank's life that has begun since then and finished a step."""
        while True:
            self._supervise()
            lives = [
                x
                for x in self._lives()
                if "begun" in x and x["begun"]["at"] > since_s and "step" in x
            ]
            if lives:
                ranks = lives[0]["grouped"]["ranks"]
                if len(lives) >= ranks:
                    return max(lives, key=lambda life: life["step"]["at"])
            if time.time() > since_s + 240:
                logs = [(self._folder / f"node{n}.log").read_text()[-3000:] for n in self._members]
                raise RuntimeError("\n----\n".join([f"no step after {fault}", *logs]))
            time.sleep(0.1)

    def _await_steps(self, count: int) -> None:
        begun_s = time.time()
        while sum(1 for line in self._steps() if line["at"] > begun_s) < count * self._args.nodes:
            time.sleep(0.2)
            self._supervise()
            if time.time() > begun_s + 240:
                raise RuntimeError((self._folder / "node0.log").read_text()[-6000:])

    def _sent(self) -> int:
        return sum(self._nodes.traffic(node).sent_bytes for node in self._members)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text().split("\n")[:-1]:
        yield json.loads(line)


def _compare(undisturbed: Sequence[dict[str, Any]], steps: Sequence[dict[str, Any]]) -> None:
    """Compare losses: of the same number of nodes to the bit, until the number has changed."""
    expected = {line["step"]: line["loss"] for line in undisturbed}
    ranks = max(line["ranks"] for line in steps)
    changed = min((line["step"] for line in steps if line["ranks"] != ranks), default=10**6)
    known = [line for line in steps if line["step"] in expected]
    others = [x for x in known if x["step"] < changed and x["loss"] != expected[x["step"]]]
    apart = [abs(x["loss"] / expected[x["step"]] - 1) for x in known]
    print(
        f"{len(known)} losses; of {sum(x['step'] < changed for x in known)} before the number of nodes "
        f"changed, {len(others)} are not those of the undisturbed job; at most {max(apart):.1e} apart"
    )


def _table(faults: Sequence[FaultCost]) -> Iterator[Sequence[object]]:
    for kind in dict.fromkeys(fault.kind for fault in faults):
        of_kind = [fault for fault in faults if fault.kind == kind]
        parts = [
            statistics.median(values) for values in zip(*(f.parts for f in of_kind), strict=True)
        ]
        most = max(fault.lost for fault in of_kind)
        seconds, sent = (
            statistics.median(getattr(f, name) for f in of_kind) for name in ("seconds", "sent")
        )
        yield kind, len(of_kind), most, seconds, *parts, sent / 1e6


if __name__ == "__main__":
    sys.exit(main())
